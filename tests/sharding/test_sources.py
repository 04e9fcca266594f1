"""Sources of images against files laid out by hand as their owners do; faults by name."""

import gzip
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sslpipe.data.decode import decode
from sslpipe.errors import DataError
from sslpipe.sharding.idx import parse_idx
from sslpipe.sharding.readers import SOURCES
from sslpipe.sharding.sources import SourceOptions, read_file
from tests.helpers.shards import error_of, grey, grey_png, write_tar
from tools.datasets.scattered_idx import write_idx

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([3, 0, 1, 3, 2, 0], np.uint8)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", PIXELS)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", LABELS)
    return tmp_path


def refused(words: str, kind: str, **options: object) -> None:
    with pytest.raises(DataError, match=words):
        SOURCES[kind](SourceOptions(**options))


# --- idx


def test_idx_files_are_read_plain_and_compressed_with_their_splits(mnist):
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


def test_written_idx_files_have_no_time_and_read_back(tmp_path):
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


def test_idx_labels_must_match_images_and_class_names(mnist):
    (mnist / "classes.txt").write_text("a\nb\nc\n")
    refused("label 3, but only 3 class names", "idx", root=mnist)
    write_idx(mnist / "train-labels-idx1-ubyte.gz", LABELS[:5])
    refused(r"6 images, train-labels-idx1-ubyte\.gz 5 labels", "idx", root=mnist)
    (mnist / "train-labels-idx1-ubyte.gz").unlink()
    refused(r"cannot read .*train-labels", "idx", root=mnist)


# --- folder


def test_wrong_folders_are_named(tmp_path):
    refused(r"root=.*nowhere. is not a folder", "folder", root=tmp_path / "nowhere")
    refused("needs root", "folder")
    refused(r"has no images \(.*\.png.*sslpipe sensors build", "folder", root=tmp_path)
    refused(r"has no images \(\.dcm\)", "folder", root=tmp_path, suffixes=(".dcm",))
    grey(tmp_path / "ape" / "a.png", 1)
    grey(tmp_path / "bee" / "b.png", 1)
    grey(tmp_path / "cover.png", 1)
    refused(r"loose images \(cover\.png\)", "folder", root=tmp_path)


def test_a_split_folder_can_be_chosen(tmp_path):
    for split in ("train", "val"):
        grey(tmp_path / split / "ape" / "deep" / "a.png", 1)
    assert list(SOURCES["folder"](SourceOptions(root=tmp_path))) == ["train", "val"]
    assert list(SOURCES["folder"](SourceOptions(root=tmp_path, split="val"))) == ["val"]
    refused("no split 'vla'; did you mean 'val'", "folder", root=tmp_path, split="vla")


# --- torchvision


def test_torchvision_arrays_become_lossless_png(mnist, tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            packed = (mnist / f"train-{kind}-ubyte.gz").read_bytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(gzip.decompress(packed))
    splits = SOURCES["torchvision"](SourceOptions(root=tmp_path, name="FashionMNIST"))
    assert splits["train"].labels.tolist() == LABELS.tolist()
    assert len(splits["test"]) == 6
    assert splits["train"].classes[3] == "Dress"
    for i in range(6):
        np.testing.assert_array_equal(decode(splits["train"].read(i), 64)[0], PIXELS[i])


def test_torchvision_files_are_kept_as_they_are(tmp_path):
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
        ("STL10", None, "needs split"),
        ("FakeData", None, "no train or split argument"),
    ],
)
def test_torchvision_mistakes_are_named(tmp_path, name, split, message):
    refused(message, "torchvision", root=tmp_path, name=name, split=split)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_file_that_opens_and_cannot_be_read_is_named():
    with pytest.raises(DataError, match="cannot read /proc/self/mem: Input/output error"):
        read_file("/proc/self/mem")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("list.csv", ["build", "OUT", "--source", "csv", "--csv", "list.csv"]),
        ("train-images-idx3-ubyte", ["build", "OUT", "--source", "idx", "--root", "."]),
        ("train.parquet", ["build", "OUT", "--source", "parquet", "--root", "."]),
        ("train-000000.tar", ["index", "."]),
        ("names.txt", ["index", ".", "--classes", "names.txt"]),
        ("OUT/.build/train.jsonl", ["build", "OUT", "--root", "photos"]),
    ],
)
def test_a_fifo_instead_of_a_file_is_refused_at_once(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grey(tmp_path / "photos" / "x.png", 3)
    if name == "names.txt":
        write_tar(Path("train-000000.tar"), ("x.png", grey_png(3)))
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(name)
    message = error_of(capsys, *words)
    assert re.search(r"is a FIFO|holds train shards of other", message)
