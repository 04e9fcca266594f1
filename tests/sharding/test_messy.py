"""Folders as they come from phones, browsers, Macs and NAS: every file is a sample or is named."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sslpipe.data.index import load_index
from sslpipe.sharding import members, writer
from tests.helpers.shards import error_of, grey_png, jpeg, report_of, run

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 99


def encoded(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(4).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


MESS = {
    # samples
    "fox/1.jpg": jpeg(1),
    "fox/2.JPEG": jpeg(2),
    "fox/3.jfif": jpeg(3),
    "fox/line\nbreak.jpg": jpeg(4),
    "fox/\N{FOX FACE}.png": grey_png(5),
    "fox/e\u0301.png": grey_png(6),
    "fox/\u00e9.png": grey_png(7),
    "fox/8.bmp": encoded("BMP"),
    "fox /blank .png": grey_png(9),
    "owl/1.gif": encoded("GIF"),
    # skipped, by name or by content
    "owl/empty.jpg": b"",
    "owl/cut.jpg": encoded("JPEG")[:300],
    "owl/page.jpg": b"<!DOCTYPE html>",
    "owl/phone.jpg": HEIC,
    "owl/film.mov": b"\0",
    "owl/.DS_Store": b"\0",
    "owl/._1.jpg": b"\0",
    "owl/Thumbs.db": b"\0",
    "owl/more.zip": b"PK\x03\x04",
    "owl/saved.jpg?w=300": jpeg(8),
    "owl/named.jpg ": jpeg(9),
    "owl/unnamed": jpeg(10),
    "notes.txt": b"as they came",
}


@pytest.fixture
def mess(tmp_path: Path) -> Path:
    for name, raw in MESS.items():
        (tmp_path / "mess" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mess" / name).write_bytes(raw)
    return tmp_path / "mess"


@pytest.mark.promise(17)
def test_every_file_of_a_messy_folder_is_a_sample_or_is_counted(mess, tmp_path, capsys):
    os.symlink("circle", mess / "owl" / "circle")
    os.symlink("..", mess / "owl" / "up")
    assert run("build", tmp_path / "out", "--root", mess, "--skip-bad") == 0
    said = capsys.readouterr()
    samples = len(load_index(tmp_path / "out").split("train"))
    groups = report_of(tmp_path / "out").left_out
    assert samples == 10
    assert samples + sum(group.count for group in groups) == len(MESS) + 2
    assert "phone.jpg: not a readable image: it looks like a HEIC" in said.err
    hidden = next(line for line in said.out.splitlines() if "first bytes" in line)
    assert ": 3, such as" in hidden
    assert "rename" in hidden


@pytest.mark.parametrize(
    ("raw", "end"),
    [
        (bytes(128) + b"DICM", ".dcm"),  # as hospitals export them
        (encoded("TIFF")[:128] + b"DICM", ".dcm"),
        (encoded("TIFF"), ".tif"),  # slides are such
        (encoded("WEBP"), ".webp"),
    ],
)
def test_an_image_of_another_name_is_told_the_end_that_it_needs(tmp_path, capsys, raw, end):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "IM000001").write_bytes(raw)
    said = error_of(capsys, "build", tmp_path / "out", "--root", tmp_path / "in")
    assert said.endswith(f"rename them to end in {end}")


def test_the_list_of_a_dicom_disk_is_not_told_to_be_an_image(tmp_path, capsys):
    (tmp_path / "in" / "fox").mkdir(parents=True)
    (tmp_path / "in" / "fox" / "1.png").write_bytes(grey_png(1))
    (tmp_path / "in" / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    assert run("build", tmp_path / "out", "--root", tmp_path / "in") == 0
    assert "rename them" not in capsys.readouterr().out
    assert sum(group.count for group in report_of(tmp_path / "out").left_out) == 1


def test_a_class_whose_disk_is_not_mounted_is_named(tmp_path, capsys):
    for name in ("fox", "owl"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "1.png").write_bytes(grey_png(1))
    os.symlink(tmp_path / "disk" / "elk", tmp_path / "in" / "elk")
    assert run("build", tmp_path / "out", "--root", tmp_path / "in") == 0
    (said,) = [
        x for x in capsys.readouterr().out.splitlines() if x.startswith("look at") and "elk" in x
    ]
    assert "mount" in said


@pytest.mark.parametrize(
    ("name", "raw", "remedy"),
    [
        pytest.param(
            *("1.heic", HEIC, "pillow-heif"),
            marks=pytest.mark.skipif(members.READS_HEIC, reason="it is read"),
        ),
        ("1.jxl", b"\xff\x0a", "convert"),
        ("1.MP4", b"\0\0\0\x18ftypisom", "ffmpeg -i"),
        ("1.zip", b"PK\x03\x04", "unpack"),
        ("1", jpeg(1), "rename"),
        ("1.jpg!large", encoded("GIF"), "rename"),
    ],
)
def test_a_folder_of_other_files_alone_is_refused_with_the_remedy(
    name, raw, remedy, tmp_path, capsys
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(raw)
    (tmp_path / "in" / "README").write_text("not an image")
    assert remedy in error_of(capsys, "build", tmp_path / "out", "--root", tmp_path / "in")


@pytest.mark.skipif(not members.READS_AVIF, reason="this Pillow reads no AVIF")
def test_an_avif_is_stored_as_a_png_of_its_pixels(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.avif").write_bytes(encoded("AVIF", quality=100, subsampling="4:4:4"))
    assert run("build", tmp_path / "out", "--root", tmp_path / "in") == 0
    kind, raw = members.to_member((tmp_path / "in" / "1.avif").read_bytes())
    assert kind == "png"
    expected = np.asarray(Image.open(tmp_path / "in" / "1.avif").convert("RGB"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(raw))), expected)
    assert len(load_index(tmp_path / "out").split("train")) == 1


def test_a_count_of_one_reads_as_one(tmp_path, capsys):
    (tmp_path / "in" / "fox").mkdir(parents=True)
    (tmp_path / "in" / "fox" / "1.png").write_bytes(grey_png(1))
    (tmp_path / "in" / "fox" / "1.xyz").write_bytes(b"")
    assert run("build", tmp_path / "out", "--root", tmp_path / "in") == 0
    for line in capsys.readouterr().out.splitlines():
        assert not any(f" 1 {word}s" in f" {line}" for word in ("file", "image", "shard", "classe"))


def test_large_images_that_become_pngs_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "LARGE_PNG", 1000)
    (tmp_path / "in").mkdir()
    for suffix in ("bmp", "jpg"):
        kind = {"bmp": "BMP", "jpg": "JPEG"}[suffix]
        (tmp_path / "in" / f"1.{suffix}").write_bytes(encoded(kind))
    assert run("build", tmp_path / "out", "--root", tmp_path / "in") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "--resize-px" in line]
    assert [line.endswith("1 of 2, such as 1.bmp") for line in said] == [True]


def test_a_split_without_a_readable_image_says_what_is_wrong_with_one(tmp_path, capsys):
    """As where all downloads failed in the same way."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(b"<!DOCTYPE html>")
    words = ["build", tmp_path / "out", "--root", tmp_path / "in", "--skip-bad"]
    message = error_of(capsys, *words)
    assert "no image that can be decoded" in message
    assert ".jpg: not a readable image: it looks like HTML" in message
