"""CUB-200-2011 for retrieval: the first half of the classes is train, the rest test.

The split: Oh Song et al. 2016, arXiv:1511.06452.

    python -m tools.datasets.cub CUB_200_2011 cub.csv
"""

from collections.abc import Iterator
from pathlib import Path

from tools.datasets.table import words_of, write_table

COLUMNS = ("path", "label", "split")


def rows(root: Path) -> Iterator[tuple[str, ...]]:
    """Read images.txt, image_class_labels.txt and classes.txt."""
    names = {number: name for number, name in words_of(root / "classes.txt")}
    label = {image: number for image, number in words_of(root / "image_class_labels.txt")}
    ranked = sorted(names, key=int)
    train = ranked[: len(ranked) // 2]
    for image, path in words_of(root / "images.txt"):
        number = label[image]
        yield f"images/{path}", names[number], "train" if number in train else "test"


if __name__ == "__main__":
    write_table(__doc__, COLUMNS, rows)
