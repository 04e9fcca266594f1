"""sharding.layouts, and parquet files: data sets laid out by hand as their owners unpack them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from sslpipe.data.decode import decode
from sslpipe.errors import DataError
from sslpipe.sharding import SOURCES
from sslpipe.sharding.sources import Images, SourceOptions


def picture(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((3, 2), level, np.uint8)).save(path, format="PNG")


def seen(images: Images) -> list[tuple[int, str]]:
    """(gray level, class name) of each image: the level tells which file was read."""
    levels = [int(decode(images.read(i), 64)[0, 0, 0]) for i in range(len(images))]
    return sorted(zip(levels, [images.classes[k] for k in images.labels], strict=True))


def read(kind: str, root: Path, **options: object) -> dict[str, list[tuple[int, str]]]:
    splits = SOURCES[kind](SourceOptions(root=root, **options))  # type: ignore[arg-type]
    assert len({images.classes for images in splits.values()}) == 1  # labels mean the same
    return {split: seen(images) for split, images in splits.items()}


def cells(kind: str, root: Path, **options: object) -> dict[str, dict[str, list[object]]]:
    """What else is known of the images, by split."""
    splits = SOURCES[kind](SourceOptions(root=root, **options))  # type: ignore[arg-type]
    return {
        split: {name: list(values) for name, values in images.cells.items()}
        for split, images in splits.items()
    }


def test_cub_splits_by_class(tmp_path: Path) -> None:
    names = {1: "001.Auk", 2: "002.Jay", 10: "010.Tern", 11: "011.Wren"}  # 10 and 11 sort by number
    (tmp_path / "classes.txt").write_text("".join(f"{k} {name}\n" for k, name in names.items()))
    rows = [(1, 1), (2, 2), (3, 10), (4, 11)]  # image, class
    for image, label in rows:
        picture(tmp_path / "images" / names[label] / f"{image}.jpg", image)
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
def test_cars_are_read_in_both_layouts(tmp_path: Path, layout: str) -> None:
    names = np.array(CAR_NAMES, dtype=object)
    for level, (name, _, test) in enumerate(CARS):
        folder = "car_ims" if layout == "one folder" else f"cars_{('train', 'test')[test]}"
        picture(tmp_path / folder / name, level)
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


def test_products_come_class_disjoint(tmp_path: Path) -> None:
    for split, level, label in (("train", 1, 7), ("test", 2, 11319)):
        picture(tmp_path / "bicycle_final" / f"{level}_0.JPG", level)
        row = f"{level} {label} 1 bicycle_final/{level}_0.JPG\n"
        text = "image_id class_id super_class_id path\n" + row
        (tmp_path / f"Ebay_{split}.txt").write_text(text)
    assert read("products", tmp_path) == {"train": [(1, "7")], "test": [(2, "11319")]}
    assert cells("products", tmp_path)["test"] == {"kind": ["bicycle"]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cub", r"cannot read .*classes\.txt"),
        ("cars", r"cannot read .*cars_meta\.mat"),
        ("products", r"cannot read .*Ebay_train\.txt"),
    ],
)
def test_another_layout_is_one_clear_error(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SOURCES[kind](SourceOptions(root=tmp_path))


def test_market_has_persons_and_cameras_and_junk_without_a_label(tmp_path: Path) -> None:
    names = {
        "bounding_box_train": ["0002_c1s1_000451_03.jpg"],
        "query": ["0005_c2s1_000001_00.jpg"],
        "bounding_box_test": ["-1_c1s1_000401_00.jpg", "0000_c3s2_000002_01.jpg"],
    }
    names["bounding_box_test"].append("0005_c4s3_000003_00.jpg")
    for folder, files in names.items():
        for level, file in enumerate(files):
            picture(tmp_path / folder / file, level)
    gallery = SOURCES["market"](SourceOptions(root=tmp_path))["gallery"]
    assert gallery.labels.tolist() == [-1, -1, gallery.classes.index("0005")]
    found = cells("market", tmp_path)
    assert found["gallery"] == {
        "person": ["", "", "0005"],
        "camera": ["1", "3", "4"],
        "sequence": ["1", "2", "3"],
    }
    assert found["query"]["camera"] == ["2"]
    picture(tmp_path / "query" / "other.jpg", 1)
    with pytest.raises(DataError, match=r"other.jpg is not named as in 0002_c1s1_000451_03.jpg"):
        read("market", tmp_path)


def test_inshop_has_three_splits_and_views(tmp_path: Path) -> None:
    rows = [
        ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
        ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "query"),
        ("img/MEN/Denim/id_00000080/01_3_back.jpg", "id_00000080", "gallery"),
    ]
    for level, (path, _, _) in enumerate(rows):
        picture(tmp_path / path, level)
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
