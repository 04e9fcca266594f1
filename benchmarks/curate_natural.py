"""Count what `sslpipe curate duplicates` found in a data set, and draw some pairs at random.

    sslpipe curate duplicates DATA --no-column --out FOUND
    python -m benchmarks.curate_natural DATA/dataset.json FOUND/groups.csv \
        --picture docs/curate_natural.png --out docs/measured/curate_natural.json

Each pair is a member of a group and the one that it is most like; what share of them is one picture
is for people to say, who look at the drawn ones.
"""

import argparse
import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from sslpipe.curate.images import raw_samples
from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.portable import write_atomically

CELL_PX, GAP_PX = 56, 10

Name = tuple[str, int]  # split, id


def read_groups(path: Path) -> tuple[dict[str, list[Name]], list[tuple[Name, Name]]]:
    """Read the members of each group, and each member with the one it is most like, once."""
    groups: dict[str, list[Name]] = {}
    pairs = set()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            one = row["split"], int(row["id"])
            split, number = row["nearest"].rsplit(":", 1)
            groups.setdefault(row["group"], []).append(one)
            pairs.add(tuple(sorted((one, (split, int(number))))))
    return groups, sorted(pairs)  # type: ignore[arg-type]


def draw(index: DatasetIndex, pairs: list[tuple[Name, Name]], columns: int) -> Image.Image:
    """Draw pairs side by side, in rows."""
    thumbs: dict[Name, Image.Image] = {}
    for split in {name for pair in pairs for name, _ in pair}:
        ids = [number for pair in pairs for name, number in pair if name == split]
        for number, raw in raw_samples(index.split(split), ids):
            if isinstance(raw.image, BadSample):
                raise raw.image
            pixels = np.ascontiguousarray(decode(raw.image, 4 * CELL_PX).transpose(1, 2, 0))
            thumb = Image.fromarray(pixels)
            scale = CELL_PX / max(thumb.size)
            size = tuple(max(1, round(side * scale)) for side in thumb.size)
            thumbs[split, number] = thumb.resize(size, Image.Resampling.LANCZOS)
    step_x, step_y = 2 * CELL_PX + GAP_PX, CELL_PX + GAP_PX
    rows = -(-len(pairs) // columns)
    size = columns * step_x - GAP_PX, rows * step_y - GAP_PX
    sheet = Image.new("RGB", size, (250, 250, 248))
    for place, pair in enumerate(pairs):
        left, top = place % columns * step_x, place // columns * step_y
        for side, name in enumerate(pair):
            sheet.paste(thumbs[name], (left + side * CELL_PX, top))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("groups", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--pairs", type=int, default=60, help="of the picture")
    parser.add_argument("--columns", type=int, default=10, help="of the picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/measured/curate_natural.json"))
    options = parser.parse_args()

    index = load_index(options.data)
    groups, pairs = read_groups(options.groups)
    sizes = Counter(map(len, groups.values()))
    tree = json.loads(options.out.read_text()) if options.out.exists() else {}
    tree[index.manifest.name] = {
        "samples": {name: len(index.split(name)) for name in index.manifest.splits},
        "groups": len(groups),
        "members": sum(map(len, groups.values())),
        "groups_across_splits": sum(len({s for s, _ in each}) > 1 for each in groups.values()),
        "test_samples_in_train": sum(
            split == "test" and any(other == "train" for other, _ in each)
            for each in groups.values()
            for split, _ in each
        ),
        "group_sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "pairs": len(pairs),
    }
    write_atomically(options.out, json.dumps(tree, indent=1) + "\n")
    print(json.dumps(tree[index.manifest.name], indent=1))
    if options.picture is not None:
        chosen = np.random.default_rng(options.seed).permutation(len(pairs))[: options.pairs]
        sheet = draw(index, [pairs[k] for k in sorted(chosen.tolist())], options.columns)
        sheet.quantize(64).save(options.picture, optimize=True)


if __name__ == "__main__":
    main()
