"""Tars written again: the same bytes in the same order, whatever the tar looked like."""

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sslpipe.data.index import load_index
from tests.sharding.test_shards import add, error_of, jpeg, read_all, run, tree

COUNT = 7


def tar_of(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, raw in members:
            add(tar, name, raw)
    return path


def repacked(source: Path, *words: object) -> list[tuple[str, bytes, int]]:
    """Key, image and label of each sample in "out" beside a tar's folder."""
    out = source.parent / "out"
    assert run("repack", source, out, *words) == 0
    return read_all(out, "train")


def samples(prefix: str = "") -> list[tuple[str, bytes, bytes]]:
    """Key, image, label; keys in an order of their own."""
    return [(f"{prefix}{(5 * i) % COUNT:04d}", jpeg(i), b" %d\n" % (i % 3)) for i in range(COUNT)]


def apart(prefix: str = "") -> list[tuple[str, bytes]]:
    """All images, then all labels, backwards."""
    rows = samples(prefix)
    return [(f"{k}.jpg", x) for k, x, _ in rows] + [(f"{k}.cls", y) for k, _, y in rows[::-1]]


PACKS = {"tgz": gzip.compress, "tar.gz": gzip.compress, "tar.bz2": bz2.compress}
PACKS["tar.xz"] = lzma.compress


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "photos/2020.01/cats/"])
def test_images_labels_and_order_stay_and_the_result_is_indexed(tmp_path, prefix, form):
    tar, out = tar_of(tmp_path / "in" / "train-00.tar", apart(prefix), form), tmp_path / "out"
    expected = [(key, image, int(label)) for key, image, label in samples(prefix)]
    # by webdataset's own reader, in order
    assert repacked(tmp_path / "in", "--samples-per-shard", 3) == expected
    assert [s.samples for s in load_index(out).manifest.splits["train"]] == [3, 3, 1]
    assert load_index(out).split("train").labels.tolist() == [row[2] for row in expected]
    # the index command of its own accepts it, and says the same
    before = tree(out)
    (out / "dataset.json").unlink()
    assert run("index", out) == 0
    assert tree(out) == before
    assert run("verify", out) == 0
    # a tar instead of its folder, packed and elsewhere: the same bytes
    for suffix, pack in PACKS.items():
        packed = tmp_path / suffix / f"train-00.{suffix}"
        packed.parent.mkdir()
        packed.write_bytes(pack(tar.read_bytes()))
        assert repacked(packed, "--samples-per-shard", 3) == expected
        assert tree(packed.parent / "out") == before
        assert not [p for p in packed.parent.rglob(".*") if p.is_file()]


def test_folders_become_classes_where_that_is_asked_for(tmp_path, capsys):
    members = [(f"photos/{name}/{i}.jpg", jpeg(i)) for i in range(3) for name in ("cat", "ape")]
    tar = tar_of(tmp_path / "photos.tar", members)
    packed = tar.rename(tmp_path / "photos.tar.gz")
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    rows = repacked(packed, "--split", "train", "--folder-labels")
    assert load_index(tmp_path / "out").manifest.classes == ("ape", "cat")
    assert [row[1:] for row in rows] == [
        (raw, k) for (_, raw), k in zip(members, [1, 0] * 3, strict=True)
    ]
    # labels of its own, or no folder
    tar_of(tmp_path / "own" / "t.tar", [("a/0.jpg", jpeg(0)), ("a/0.cls", b"4")])
    tar_of(tmp_path / "flat" / "t.tar", [("0.jpg", jpeg(0))])
    for name, why in (("own", "has a label of its own"), ("flat", "is in no folder")):
        message = error_of(capsys, "repack", tmp_path / name, tmp_path / "x", "--folder-labels")
        assert why in message


def test_dots_in_names_and_all_that_belongs_to_a_sample(tmp_path, capsys):
    tar = tmp_path / "in" / "00.tar"
    members = [
        ("IMG.2020.01.jpg", jpeg(0)),
        ("IMG.2020.02.jpg", jpeg(1)),
        ("IMG.2020.02.cls", b"1"),
        ("a.jpg", jpeg(2)),
        ("a.seg.png", b"mask"),
        ("a.json", b"{}"),
        ("notes.txt", b"no image"),
    ]
    tar_of(tar, members)
    with tarfile.open(tar, "a") as more:
        add(more, "link.jpg", b"", tarfile.SYMTYPE)
    assert run("repack", tmp_path / "in", tmp_path / "out") == 0
    assert "2 members of no image" in capsys.readouterr().err
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as result:
        written = {m.name: result.extractfile(m).read() for m in result}  # type: ignore[union-attr]
    assert list(written) == [
        "IMG_2020_01.jpg", "IMG_2020_02.jpg", "IMG_2020_02.cls", "a.jpg", "a.seg.png", "a.json",
    ]  # fmt: skip
    assert list(written.values()) == [raw for _, raw in members[:6]]


def test_hostile_names_lead_nowhere_and_stay_apart(tmp_path: Path) -> None:
    names = [
        "../../evil", "/etc/evil", "a/../../b", "a/b", "b", "c\\..\\d", "e\nf", "ü" * 150,
        "/", "//", "x/../b",
    ]  # fmt: skip
    tar_of(tmp_path / "in" / "0.tar", [(f"{name}.jpg", jpeg(i)) for i, name in enumerate(names)])
    rows = repacked(tmp_path / "in")
    keys = [row[0] for row in rows]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert not key.startswith("/")
        assert not {"..", ".", ""} & set(key.split("/"))
        assert "\\" not in key
        assert key.isprintable()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert [row[1] for row in rows] == [jpeg(i) for i in range(len(names))]


def test_a_file_with_holes_is_written_whole(tmp_path: Path) -> None:
    """A sparse member of GNU tar 1.0: its map in the data, described by pax headers."""
    image = jpeg(3)
    stored = b"1\n512\n%d\n" % len(image)
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("GNUSparseFile.0/a.jpg")
        data = stored.ljust(512, b"\0") + image
        member.size = len(data)
        member.pax_headers = {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.jpg",
            "GNU.sparse.realsize": str(512 + len(image)),
        }  # fmt: skip
        tar.addfile(member, io.BytesIO(data))
        add(tar, "b.jpg", jpeg(4))
    assert run("index", tmp_path) == 2
    assert run("repack", tmp_path / "0.tar", tmp_path / "out") == 0
    assert [row[1] for row in read_all(tmp_path / "out", "train")] == [bytes(512) + image, jpeg(4)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: raw[:-2000], "truncated"),
        (lambda raw: gzip.compress(raw)[:-30], "cannot unpack the gzip"),
        (lambda raw: b"BZh9" + raw[4:], "cannot unpack the bzip2"),
        (lambda raw: b"\x28\xb5\x2f\xfd" + raw[4:], "zstd, which is not read; unpack it first"),
        (lambda raw: b"", "truncated or no tar"),
        (lambda raw: raw * 2, "several tars"),
    ],
)
def test_a_damaged_tar_is_named_and_leaves_no_index(tmp_path, capsys, damage, reason):
    tar = tar_of(tmp_path / "in" / "train-1.tar", apart())
    tar.write_bytes(damage(tar.read_bytes()))  # type: ignore[operator]
    message = error_of(capsys, "repack", tmp_path / "in", tmp_path / "out")
    assert reason in message
    assert "train-1.tar" in message
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("command", ["index", "repack"])
@pytest.mark.parametrize("size", [2**63, 2**62, -512, -1024])
def test_a_header_with_an_impossible_size_is_refused(tmp_path, capsys, command, size):
    tar = tar_of(tmp_path / "in" / "0.tar", apart())
    raw = bytearray(tar.read_bytes())
    with tarfile.open(tar) as opened:
        at = opened.getmembers()[2].offset
    field = (b"\x80" if size >= 0 else b"\xff") + (size % 256**11).to_bytes(11, "big")
    raw[at + 124 : at + 136] = field
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    tar.write_bytes(raw)
    words = [tmp_path / "out"] if command == "repack" else []
    assert "0.tar" in error_of(capsys, command, tmp_path / "in", *words)


def test_a_huge_pax_header_is_refused_unread(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 2**31
    with open(folder / "0.tar", "wb") as file:
        file.write(header.tobuf())
        file.truncate(2**31 + 4096)  # with holes: it takes no room
    assert "a header of" in error_of(capsys, "index", folder)


def test_memory_is_bounded_and_images_are_copied_in_pieces(tmp_path: Path) -> None:
    from sslpipe.sharding.repack import repack

    big = jpeg(0) + np.random.default_rng(0).bytes(24 * 2**20)
    tar = tar_of(tmp_path / "0.tar", [("a.jpg", big), ("b.jpg", big), ("a.cls", b"1")])
    packed = tmp_path / "0.tar.gz"
    packed.write_bytes(gzip.compress(tar.read_bytes(), 1))
    tar.unlink()
    tracemalloc.start()
    repack(packed, tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert [row[1] == big for row in read_all(tmp_path / "out", "train")] == [True, True]


def test_what_is_there_is_not_overwritten_unasked(tmp_path, capsys):
    tar = tar_of(tmp_path / "in" / "train-0.tar", apart())
    out = tmp_path / "out"
    assert run("repack", tar, out) == 0
    before = tree(out)
    assert "already holds shards of train" in error_of(capsys, "repack", tar, out)
    assert run("repack", tar, out, "--overwrite") == 0
    assert tree(out) == before
    message = error_of(capsys, "repack", tmp_path / "in", tmp_path / "in")
    assert "holds the tars themselves" in message
    (tmp_path / "empty").mkdir()
    assert "has no tar" in error_of(capsys, "repack", tmp_path / "empty", out)
    tar_of(tmp_path / "text" / "0.tar", [("a.txt", b"x")])
    assert "has no image" in error_of(capsys, "repack", tmp_path / "text", tmp_path / "y")


def test_the_errors_of_index_name_the_command(tmp_path, capsys):
    tar = tar_of(tmp_path / "in" / "0.tar", apart())
    assert "sslpipe shards repack" in error_of(capsys, "index", tmp_path / "in")
    (tmp_path / "in" / "0.tar").rename(tmp_path / "in" / "0.tar.gz")
    assert f"sslpipe shards repack {tmp_path / 'in'} OUT" in error_of(capsys, "index", tar.parent)
