"""DeepFashion's In-shop Clothes Retrieval: train, query and gallery; a class is a product.

Source: Liu et al. 2016, DeepFashion, and Eval/README.

    python -m tools.datasets.inshop In-shop inshop.csv
"""

from collections.abc import Iterator
from pathlib import Path

from tools.datasets.table import words_of, write_table

COLUMNS = ("path", "label", "split", "kind", "view")  # of clothes; such as front


def rows(root: Path) -> Iterator[tuple[str, ...]]:
    """Read list_eval_partition.txt: image, item and split, below a count and the names."""
    eval_file = root / "Eval" / "list_eval_partition.txt"
    path = eval_file if eval_file.is_file() else root / eval_file.name
    for image, item, split in words_of(path)[2:]:
        *_, kind, _, file = image.split("/")
        yield image, item, split, kind, Path(file).stem.split("_", 2)[-1]  # 02_1_front.jpg


if __name__ == "__main__":
    write_table(__doc__, COLUMNS, rows)
