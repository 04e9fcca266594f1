"""Cars-196 for retrieval: the first half of the classes is train, the rest test.

Reads car_ims with cars_annos.mat, or cars_train and cars_test with the devkit and
cars_test_annos_withlabels.mat. The split: Oh Song et al. 2016, arXiv:1511.06452.

    python -m tools.datasets.cars stanford_cars cars.csv
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy.io import loadmat

from tools.datasets.table import write_table

COLUMNS = ("path", "label", "split")


def rows(root: Path) -> Iterator[tuple[str, ...]]:
    """Read either of the two ways in which it is published."""
    whole = root / "cars_annos.mat"
    names = _read(whole if whole.is_file() else root / "devkit" / "cars_meta.mat")["class_names"]
    for path, label in _labels(root):
        yield path, str(names[label - 1]), "test" if label > len(names) // 2 else "train"


def _labels(root: Path) -> Iterator[tuple[str, int]]:
    """List images with their labels, from 1."""
    if (root / "cars_annos.mat").is_file():
        for row in _read(root / "cars_annos.mat")["annotations"]:
            yield str(row.relative_im_path), int(getattr(row, "class"))
        return
    name = "cars_test_annos_withlabels.mat"  # its owner hands the labels out apart
    test = root / name if (root / name).is_file() else root / "devkit" / name
    files = {"cars_train": root / "devkit" / "cars_train_annos.mat", "cars_test": test}
    for folder, file in files.items():
        for row in _read(file)["annotations"]:
            yield f"{folder}/{row.fname}", int(getattr(row, "class"))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = loadmat(str(path), squeeze_me=True, struct_as_record=False)
    return content


if __name__ == "__main__":
    write_table(__doc__, COLUMNS, rows)
