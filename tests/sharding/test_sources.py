"""Sources of images against files laid out by hand as their owners do; faults by name."""

import gzip
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from sslpipe.data.decode import decode
from sslpipe.errors import DataError
from sslpipe.sharding import SOURCES
from sslpipe.sharding.layouts import parse_idx, write_idx
from sslpipe.sharding.sources import SourceOptions, read_file
from tests.helpers.shards import error_of, grey, grey_png, write_tar

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
    refused(r"--root .*nowhere is not a folder", "folder", root=tmp_path / "nowhere")
    refused("needs --root", "folder")
    for sensors, suffix in ((False, ".png"), (True, ".dcm")):
        refused(rf"has no images \(.*\{suffix}", "folder", root=tmp_path, is_sensors=sensors)
    grey(tmp_path / "ape" / "a.png", 1)
    (tmp_path / "bee").mkdir()
    refused(r"class folder .*bee has no images", "folder", root=tmp_path)
    grey(tmp_path / "bee" / "b.png", 1)
    grey(tmp_path / "cover.png", 1)
    refused(r"loose images \(cover\.png\)", "folder", root=tmp_path)
    (tmp_path / "cover.png").unlink()
    grey(tmp_path / "train" / "b.png", 1)
    refused("both splits and 'ape'", "folder", root=tmp_path)


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
        ("STL10", None, "needs --split"),
        ("FakeData", None, "no train or split argument"),
    ],
)
def test_torchvision_mistakes_are_named(tmp_path, name, split, message):
    refused(message, "torchvision", root=tmp_path, name=name, split=split)


# --- data sets as their owners unpack them


def read(kind: str, root: Path) -> dict[str, list[tuple[int, str]]]:
    """(level, class name) of each image, by split: the level tells which file was read."""
    splits, found = SOURCES[kind](SourceOptions(root=root)), {}
    assert len({images.classes for images in splits.values()}) == 1  # labels mean the same
    for split, images in splits.items():
        levels = [int(decode(images.read(i), 64)[0, 0, 0]) for i in range(len(images))]
        names = [images.classes[label] for label in images.labels]
        found[split] = sorted(zip(levels, names, strict=True))
    return found


def cells(kind: str, root: Path) -> dict[str, dict[str, list[object]]]:
    """What else is known of the images, by split."""
    splits = SOURCES[kind](SourceOptions(root=root))
    return {split: images.cells for split, images in splits.items()}


def test_cub_splits_by_class(tmp_path):
    names = {1: "001.Auk", 2: "002.Jay", 10: "010.Tern", 11: "011.Wren"}  # 10 and 11 sort by number
    (tmp_path / "classes.txt").write_text("".join(f"{k} {name}\n" for k, name in names.items()))
    rows = [(1, 1), (2, 2), (3, 10), (4, 11)]  # image, class
    for image, label in rows:
        grey(tmp_path / "images" / names[label] / f"{image}.jpg", image)
    paths = "".join(f"{i} {names[c]}/{i}.jpg\n" for i, c in rows)
    (tmp_path / "images.txt").write_text(paths)
    (tmp_path / "image_class_labels.txt").write_text("".join(f"{i} {c}\n" for i, c in rows))
    assert read("cub", tmp_path) == {
        "train": [(1, "001.Auk"), (2, "002.Jay")],
        "test": [(3, "010.Tern"), (4, "011.Wren")],
    }


CARS = [("a.jpg", 1, 0), ("b.jpg", 2, 1), ("c.jpg", 3, 0), ("d.jpg", 4, 1)]  # file, class, test
CAR_NAMES = ["AM General", "Acura", "BMW", "Volvo"]


def records(rows: list[tuple[str, int, int]], file: str) -> np.ndarray:
    kinds = [(file, object), ("class", object), ("test", object)]
    return np.array([(name, label, test) for name, label, test in rows], dtype=kinds)


@pytest.mark.parametrize("layout", ["one folder", "two folders"])
def test_cars_are_read_in_both_layouts(tmp_path, layout):
    names = np.array(CAR_NAMES, dtype=object)
    for level, (name, _, test) in enumerate(CARS):
        folder = "car_ims" if layout == "one folder" else f"cars_{('train', 'test')[test]}"
        grey(tmp_path / folder / name, level)
    if layout == "one folder":
        rows = [(f"car_ims/{name}", label, test) for name, label, test in CARS]
        content = {"annotations": records(rows, "relative_im_path"), "class_names": names}
        savemat(tmp_path / "cars_annos.mat", content)
    else:
        (tmp_path / "devkit").mkdir()
        savemat(tmp_path / "devkit" / "cars_meta.mat", {"class_names": names})
        for test, place in ((0, "devkit/cars_train_annos"), (1, "cars_test_annos_withlabels")):
            rows = [row for row in CARS if row[2] == test]
            savemat(tmp_path / f"{place}.mat", {"annotations": records(rows, "fname")})
    expected = [(k, name) for k, name in enumerate(CAR_NAMES)]
    assert read("cars", tmp_path) == {"train": expected[:2], "test": expected[2:]}


def test_products_come_class_disjoint(tmp_path):
    for split, level, label in (("train", 1, 7), ("test", 2, 11319)):
        grey(tmp_path / "bicycle_final" / f"{level}_0.JPG", level)
        row = f"{level} {label} 1 bicycle_final/{level}_0.JPG\n"
        text = "image_id class_id super_class_id path\n" + row
        (tmp_path / f"Ebay_{split}.txt").write_text(text)
    assert read("products", tmp_path) == {"train": [(1, "7")], "test": [(2, "11319")]}
    assert cells("products", tmp_path)["test"] == {"kind": ["bicycle"]}


def test_another_layout_is_one_clear_error(tmp_path):
    refused(r"cannot read .*classes\.txt", "cub", root=tmp_path)
    refused(r"cannot read .*cars_meta\.mat", "cars", root=tmp_path)
    refused(r"cannot read .*Ebay_train\.txt", "products", root=tmp_path)


def test_market_has_persons_and_cameras_and_junk_without_a_label(tmp_path):
    names = {
        "bounding_box_train": ["0002_c1s1_000451_03.jpg"],
        "query": ["0005_c2s1_000001_00.jpg"],
        "bounding_box_test": ["-1_c1s1_000401_00.jpg", "0000_c3s2_000002_01.jpg"],
    }
    names["bounding_box_test"].append("0005_c4s3_000003_00.jpg")
    for folder, files in names.items():
        for level, file in enumerate(files):
            grey(tmp_path / folder / file, level)
    gallery = SOURCES["market"](SourceOptions(root=tmp_path))["gallery"]
    assert gallery.labels.tolist() == [-1, -1, gallery.classes.index("0005")]
    found = cells("market", tmp_path)
    assert found["gallery"] == {
        "person": ["", "", "0005"],
        "camera": ["1", "3", "4"],
        "sequence": ["1", "2", "3"],
    }
    assert found["query"]["camera"] == ["2"]
    grey(tmp_path / "query" / "other.jpg", 1)
    with pytest.raises(DataError, match=r"other.jpg is not named as in 0002_c1s1_000451_03.jpg"):
        read("market", tmp_path)


def test_inshop_has_three_splits_and_views(tmp_path):
    rows = [
        ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
        ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "query"),
        ("img/MEN/Denim/id_00000080/01_3_back.jpg", "id_00000080", "gallery"),
    ]
    for level, (path, _, _) in enumerate(rows):
        grey(tmp_path / path, level)
    lines = ["3", "image_name item_id evaluation_status", *(" ".join(row) for row in rows)]
    (tmp_path / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    assert read("inshop", tmp_path) == {
        "train": [(0, "id_00000002")],
        "query": [(1, "id_00000080")],
        "gallery": [(2, "id_00000080")],
    }
    assert cells("inshop", tmp_path)["gallery"] == {"kind": ["Denim"], "view": ["back"]}
    (tmp_path / "list_eval_partition.txt").write_text("1\nhead\nimg/a.jpg id_1 probe\n")
    with pytest.raises(DataError, match=r"list_eval_partition.txt, line 3: .* is not image, item"):
        read("inshop", tmp_path)


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
        ("OUT/.build/part-1-of-2/part.json", ["merge", "OUT"]),
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
    assert re.search(r"is a FIFO|part.json cannot be read|holds train shards of other", message)
