"""Scripts of data sets: what they list of the folders as their owners unpack them."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.io import savemat

from sslpipe.data.decode import decode
from sslpipe.sharding.columns import parse_columns
from sslpipe.sharding.readers import SOURCES
from sslpipe.sharding.sources import Images, SourceOptions
from tests.helpers.shards import grey
from tools.datasets import cars, cub, inshop, market, products
from tools.datasets.table import write_table


def read_splits(script: ModuleType, root: Path) -> dict[str, Images]:
    """The images of a script's table, as `shards build --source csv` reads them."""
    table = root.parent / "table.csv"
    write_table(script.__doc__, script.COLUMNS, script.rows, [str(root), str(table)])
    more = script.COLUMNS[3:]
    columns = parse_columns(",".join(more)) if more else ()
    options = SourceOptions(csv=table, root=root, split_column="split", columns=columns)
    return SOURCES["csv"](options)


def read(script: ModuleType, root: Path) -> dict[str, list[tuple[int, str]]]:
    """(level, class name) of each image, by split: the level tells which file was read."""
    splits, found = read_splits(script, root), {}
    assert len({images.classes for images in splits.values()}) == 1  # labels mean the same
    for split, images in splits.items():
        levels = [int(decode(images.read(i), 64)[0, 0, 0]) for i in range(len(images))]
        names = [images.classes[label] for label in images.labels]
        found[split] = sorted(zip(levels, names, strict=True))
    return found


def cells(script: ModuleType, root: Path) -> dict[str, dict[str, list[object]]]:
    """What else is known of the images, by split."""
    splits = read_splits(script, root).items()
    return {
        split: {name: cells.to_pylist() for name, cells in images.cells.items()}
        for split, images in splits
    }


def test_cub_splits_by_class(tmp_path):
    names = {1: "001.Auk", 2: "002.Jay", 10: "010.Tern", 11: "011.Wren"}  # 10 and 11 sort by number
    (tmp_path / "classes.txt").write_text("".join(f"{k} {name}\n" for k, name in names.items()))
    rows = [(1, 1), (2, 2), (3, 10), (4, 11)]  # image, class
    for image, label in rows:
        grey(tmp_path / "images" / names[label] / f"{image}.jpg", image)
    paths = "".join(f"{i} {names[c]}/{i}.jpg\n" for i, c in rows)
    (tmp_path / "images.txt").write_text(paths)
    (tmp_path / "image_class_labels.txt").write_text("".join(f"{i} {c}\n" for i, c in rows))
    assert read(cub, tmp_path) == {
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
    assert read(cars, tmp_path) == {"train": expected[:2], "test": expected[2:]}


def test_products_come_class_disjoint(tmp_path):
    for split, level, label in (("train", 1, 7), ("test", 2, 11319)):
        grey(tmp_path / "bicycle_final" / f"{level}_0.JPG", level)
        row = f"{level} {label} 1 bicycle_final/{level}_0.JPG\n"
        text = "image_id class_id super_class_id path\n" + row
        (tmp_path / f"Ebay_{split}.txt").write_text(text)
    assert read(products, tmp_path) == {"train": [(1, "7")], "test": [(2, "11319")]}
    assert cells(products, tmp_path)["test"] == {"kind": ["bicycle"]}


def test_market_has_persons_cameras_and_distractors_but_no_junk(tmp_path):
    names = {
        "bounding_box_train": ["0002_c1s1_000451_03.jpg"],
        "query": ["0005_c2s1_000001_00.jpg"],
        "bounding_box_test": ["-1_c1s1_000401_00.jpg", "0000_c3s2_000002_01.jpg"],
    }
    names["bounding_box_test"].append("0005_c4s3_000003_00.jpg")
    for folder, files in names.items():
        for level, file in enumerate(files):
            grey(tmp_path / folder / file, level)
    # every row of the gallery has a label: `evaluate retrieval --cross camera` asks for that
    assert read(market, tmp_path)["gallery"] == [(1, "0000"), (2, "0005")]
    found = cells(market, tmp_path)
    assert found["gallery"] == {
        "person": ["0000", "0005"],
        "camera": ["3", "4"],
        "sequence": ["2", "3"],
    }
    assert found["query"]["camera"] == ["2"]
    grey(tmp_path / "query" / "other.jpg", 1)
    with pytest.raises(SystemExit, match=r"other.jpg is not named as in 0002_c1s1_000451_03.jpg"):
        read(market, tmp_path)


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
    assert read(inshop, tmp_path) == {
        "train": [(0, "id_00000002")],
        "query": [(1, "id_00000080")],
        "gallery": [(2, "id_00000080")],
    }
    assert cells(inshop, tmp_path)["gallery"] == {"kind": ["Denim"], "view": ["back"]}
