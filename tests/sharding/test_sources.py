"""sharding.sources and sharding.idx: readers against files written by hand, faults by name."""

import gzip
import io
import os
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sslpipe.data.decode import decode
from sslpipe.errors import DataError
from sslpipe.sharding import SOURCES
from sslpipe.sharding.idx import parse_idx, write_idx
from sslpipe.sharding.members import to_member
from sslpipe.sharding.sources import SourceOptions
from tests.sharding.test_shards import error_of

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([3, 0, 1, 3, 2, 0], np.uint8)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", PIXELS)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", LABELS)
    return tmp_path


def png(path: Path, level: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((3, 2), level, np.uint8)).save(path)
    return path


# --- idx


def test_idx_files_are_read_plain_and_compressed_with_their_splits(mnist: Path) -> None:
    header = b"\0\0\x08\x03" + struct.pack(">3I", 2, 5, 4)
    (mnist / "t10k-images-idx3-ubyte").write_bytes(header + PIXELS[:2].tobytes())
    (mnist / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x02\x03\x01")
    splits = SOURCES["idx"](SourceOptions(root=mnist))
    assert list(splits) == ["test", "train"]
    assert splits["test"].labels.tolist() == [3, 1]
    assert splits["train"].classes == ("0", "1", "2", "3")
    for split, count in (("train", 6), ("test", 2)):
        for i in range(count):
            raw = splits[split].read(i)
            np.testing.assert_array_equal(decode(raw, 64)[0], PIXELS[i])
            assert len(raw) == splits[split].sizes[i]
    assert list(SOURCES["idx"](SourceOptions(root=mnist, split="train"))) == ["train"]


def test_written_idx_files_have_no_time_and_read_back(tmp_path: Path) -> None:
    write_idx(tmp_path / "a.gz", PIXELS)
    raw = (tmp_path / "a.gz").read_bytes()
    assert raw[:8] == b"\x1f\x8b\x08\0\0\0\0\0"  # no name, mtime 0
    assert gzip.decompress(raw) == b"\0\0\x08\x03" + struct.pack(">3I", 6, 5, 4) + PIXELS.tobytes()
    np.testing.assert_array_equal(parse_idx(tmp_path / "a.gz", 3), PIXELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"\0\0\x0d\x03" + raw[4:], "magic is 00000d03, not 00000803"),
        (lambda raw: b"\0\0\x08\x01" + raw[4:], "magic is 00000801"),
        (lambda raw: raw[:-1], r"135 bytes, but sizes \(6, 5, 4\) need 136"),
        (lambda raw: raw + b"\0", "137 bytes"),
        (lambda raw: raw[:10], "truncated in its header"),
        (lambda raw: gzip.compress(raw)[:-20], "damaged gzip"),
        (lambda raw: b"", "magic"),
    ],
)
def test_a_wrong_idx_file_is_refused_by_name(tmp_path, change, message):
    raw = b"\0\0\x08\x03" + struct.pack(">3I", 6, 5, 4) + PIXELS.tobytes()
    (tmp_path / "images").write_bytes(change(raw))
    with pytest.raises(DataError, match=rf"images: .*{message}"):
        parse_idx(tmp_path / "images", 3)


def test_idx_labels_must_match_images_and_class_names(mnist: Path) -> None:
    (mnist / "classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(DataError, match="label 3, but only 3 class names"):
        SOURCES["idx"](SourceOptions(root=mnist))
    write_idx(mnist / "train-labels-idx1-ubyte.gz", LABELS[:5])
    with pytest.raises(DataError, match=r"6 images, train-labels-idx1-ubyte\.gz 5 labels"):
        SOURCES["idx"](SourceOptions(root=mnist))
    (mnist / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"cannot read .*train-labels"):
        SOURCES["idx"](SourceOptions(root=mnist))


# --- folder


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--root .*nowhere is not a folder"):
        SOURCES["folder"](SourceOptions(root=tmp_path / "nowhere"))
    with pytest.raises(DataError, match="needs --root"):
        SOURCES["folder"](SourceOptions())
    for sensors, suffix in ((False, ".png"), (True, ".dcm")):
        with pytest.raises(DataError, match=rf"has no images \(.*\{suffix}"):
            SOURCES["folder"](SourceOptions(root=tmp_path, is_sensors=sensors))
    png(tmp_path / "ape" / "a.png", 1)
    (tmp_path / "bee").mkdir()
    with pytest.raises(DataError, match=r"class folder .*bee has no images"):
        SOURCES["folder"](SourceOptions(root=tmp_path))
    png(tmp_path / "bee" / "b.png", 1)
    png(tmp_path / "cover.png", 1)
    with pytest.raises(DataError, match=r"loose images \(cover\.png\)"):
        SOURCES["folder"](SourceOptions(root=tmp_path))
    (tmp_path / "cover.png").unlink()
    png(tmp_path / "train" / "b.png", 1)
    with pytest.raises(DataError, match="both splits and 'ape'"):
        SOURCES["folder"](SourceOptions(root=tmp_path))


def test_a_split_folder_can_be_chosen(tmp_path: Path) -> None:
    for split in ("train", "val"):
        png(tmp_path / split / "ape" / "deep" / "a.png", 1)
    assert list(SOURCES["folder"](SourceOptions(root=tmp_path))) == ["train", "val"]
    assert list(SOURCES["folder"](SourceOptions(root=tmp_path, split="val"))) == ["val"]
    with pytest.raises(DataError, match="no split 'vla'; did you mean 'val'"):
        SOURCES["folder"](SourceOptions(root=tmp_path, split="vla"))


# --- torchvision


def test_torchvision_arrays_become_lossless_png(mnist: Path, tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        for kind, values in (("images-idx3", PIXELS[:count]), ("labels-idx1", LABELS[:count])):
            write_idx(tmp_path / "x.gz", values)
            packed = (tmp_path / "x.gz").read_bytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(gzip.decompress(packed))
    splits = SOURCES["torchvision"](SourceOptions(root=tmp_path, name="FashionMNIST"))
    assert splits["train"].labels.tolist() == LABELS.tolist()
    assert len(splits["test"]) == 3
    assert splits["train"].classes[3] == "Dress"
    for i in range(6):
        np.testing.assert_array_equal(decode(splits["train"].read(i), 64)[0], PIXELS[i])


def test_torchvision_files_are_kept_as_they_are(tmp_path: Path) -> None:
    for k, wnid in enumerate(("n01440764", "n02102040")):
        folder = tmp_path / "imagenette2" / "val" / wnid
        folder.mkdir(parents=True)
        Image.fromarray(PIXELS[k]).save(folder / "a.JPEG")
    options = SourceOptions(root=tmp_path, name="Imagenette", split="val")
    images = SOURCES["torchvision"](options)["val"]
    assert images.read(1) == (folder / "a.JPEG").read_bytes()
    assert images.labels.tolist() == [0, 1]
    assert images.classes[0] == "tench"


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("CIFAR01", None, "did you mean 'CIFAR10"),
        (None, None, "not a dataset"),
        ("CIFAR10", None, "CIFAR10: Dataset not found"),
        ("CIFAR10", "val", "no split 'val'"),
        ("STL10", None, "needs --split"),
        ("FakeData", None, "no train or split argument"),
    ],
)
def test_torchvision_mistakes_are_named(tmp_path, name, split, message):
    with pytest.raises(DataError, match=message):
        SOURCES["torchvision"](SourceOptions(root=tmp_path, name=name, split=split))


# --- other formats


@pytest.mark.parametrize("form", ["BMP", "PPM", "TIFF", "GIF"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_other_formats_become_the_same_pixels_in_png(form: str, mode: str) -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, form)
    kind, raw = to_member(buffer.getvalue())
    assert kind == "png"
    buffer.seek(0)
    expected = np.asarray(Image.open(buffer).convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(raw, 64), expected)


def test_a_sixteen_bit_tiff_keeps_its_high_byte() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (4, 5)).astype(np.uint16)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "TIFF")
    np.testing.assert_array_equal(decode(to_member(buffer.getvalue())[1], 64)[0], values >> 8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("list.csv", ["build", "OUT", "--source", "csv", "--csv", "list.csv"]),
        ("train-images-idx3-ubyte", ["build", "OUT", "--source", "idx", "--root", "."]),
        ("train.parquet", ["build", "OUT", "--source", "parquet", "--root", "."]),
        ("train-000000.tar", ["index", "."]),
        ("names.txt", ["index", ".", "--classes", "names.txt"]),
        ("OUT/.build/train.jsonl", ["build", "OUT", "--root", "photos"]),
        ("OUT/.build/part-1-of-2/part.json", ["merge", "OUT"]),
    ],
)
def test_a_fifo_instead_of_a_file_is_refused_at_once(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    png(tmp_path / "photos" / "x.png", 3)
    if name == "names.txt":
        with tarfile.open("train-000000.tar", "w") as tar:
            tar.add("photos/x.png", "x.png")
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(name)
    message = error_of(capsys, *words)
    assert re.search(r"is a FIFO|part.json cannot be read|holds train shards of other", message)
