"""Stanford Online Products: train and test as published, without a shared class.

python -m tools.datasets.products Stanford_Online_Products products.csv
"""

from collections.abc import Iterator
from pathlib import Path

from tools.datasets.table import words_of, write_table

COLUMNS = ("path", "label", "split", "kind")  # a class is a product; kind: such as bicycle


def rows(root: Path) -> Iterator[tuple[str, ...]]:
    """Read Ebay_train.txt and Ebay_test.txt: id, class, superclass, path."""
    for split in ("train", "test"):
        for _, label, _, path in words_of(root / f"Ebay_{split}.txt")[1:]:  # the first: names
            yield path, label, split, path.partition("/")[0].removesuffix("_final")


if __name__ == "__main__":
    write_table(__doc__, COLUMNS, rows)
