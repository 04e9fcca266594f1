"""Market-1501: train, query and gallery; a class is a person.

Person 0000 of the gallery, whom no query shows, are its distractors; -1 is junk, which the protocol
leaves out. Source: Zheng et al. 2015, Scalable person re-identification: a benchmark, and its
readme.

    python -m tools.datasets.market Market-1501-v15.09.15 market.csv
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tools.datasets.table import write_table

COLUMNS = ("path", "label", "split", "person", "camera", "sequence")
FOLDERS = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}


def rows(root: Path) -> Iterator[tuple[str, ...]]:
    """Read the names of the images, such as 0002_c1s1_000451_03.jpg."""
    for split, folder in FOLDERS.items():
        for path in sorted((root / folder).glob("*.jpg")):
            match = re.match(r"(-?\d+)_c(\d+)s(\d+)_", path.name)
            if match is None:
                raise SystemExit(f"{path} is not named as in 0002_c1s1_000451_03.jpg")
            person = match[1]
            if person != "-1":
                yield f"{folder}/{path.name}", person, split, person, match[2], match[3]


if __name__ == "__main__":
    write_table(__doc__, COLUMNS, rows)
