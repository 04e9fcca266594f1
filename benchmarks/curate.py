"""How many planted duplicates `sslpipe curate duplicates` finds, and how many pairs are wrong.

Pictures of three sources get duplicates of seven kinds; see `curate_plants.py`. Pairs that the
program finds among the pictures themselves, before anything is planted, are natural: they are
counted apart, their pictures are no sources of plants, and a plant is not wrong to be paired with
what its source is paired with. Pictures that are nearly constant, or nearly a ramp, are no sources
either: nothing can be found of them. Limits were chosen on the set "chosen" and are measured on
"measured", of other files (of photographs, of another folder). With `--readings other` plants are
made as other people may read the seven words, see `curate_readings.py`. Each part is kept in
the JSON and not done again.

    python -m benchmarks.curate --fashion-mnist DIR --drawings DIR --photographs DIR \
        --photographs-measured DIR --out docs/measured/curate.json
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.curate_plants import KINDS, Picture, drawings, fashion_mnist, photographs
from benchmarks.curate_readings import READINGS, Make
from sslpipe.curate.duplicates import find_duplicates
from sslpipe.curate.scan import scan_pictures
from sslpipe.curate.thumbnails import luminance
from sslpipe.evaluation.difference import wilson95
from sslpipe.portable import write_atomically

LEAST_DEVIATION = 12.0  # levels, see `detail`, of a source of plants
KINDS_AT_ONCE = 7  # planted into one set; of more kinds, every so many-th are


def pictures_of(source: str, folder: Path, count: int, measured: bool, px: int) -> list[Picture]:
    if source == "fashion_mnist":
        name, first = ("t10k", 5000) if measured else ("train", 0)
        return fashion_mnist(folder / f"{name}-images-idx3-ubyte.gz", first, count)
    if source == "drawings":
        return drawings(folder, count, measured, px, skipped=int(measured))
    return photographs(folder, count, None if measured else False, px)


def detail(picture: Picture) -> float:
    """Deviation of the brightness from a linear ramp, in levels."""
    levels = luminance(picture)
    axes = [np.linspace(-1, 1, side) for side in levels.shape]
    down, right = np.meshgrid(*axes, indexing="ij")
    levels = levels - levels.mean()
    for ramp in (down, right):
        levels = levels - ramp * (levels * ramp).sum() / (ramp**2).sum()
    return float(levels.std())


def found_pairs(pictures: list[Picture], workers: int) -> set[tuple[int, int]]:
    samples = scan_pictures(pictures)
    pairs = find_duplicates(samples, num_workers=workers).pairs
    samples.pictures.thumbs.close()
    return set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))


def measure(
    pictures: list[Picture], kinds: dict[str, Make], plants_each: int, seed: int, workers: int
) -> dict:
    start = time.process_time()
    natural = found_pairs(pictures, workers)
    known = {row for pair in natural for row in pair}
    fit = [
        row
        for row, picture in enumerate(pictures)
        if row not in known and detail(picture) >= LEAST_DEVIATION
    ]
    rng = np.random.default_rng(seed)
    sets, rows = -(-len(kinds) // KINDS_AT_ONCE), {}
    for first in range(sets):
        some = dict(list(kinds.items())[first::sets])
        everything, sources, made = list(pictures), list(range(len(pictures))), [""] * len(pictures)
        for kind, make in some.items():
            for row in rng.choice(fit, min(plants_each, len(fit)), replace=False).tolist():
                everything.append(make(pictures[row], rng))
                sources.append(row)
                made.append(kind)
        rows |= _counts(found_pairs(everything, workers), natural, sources, made, list(some))
    return {
        "pictures": len(pictures),
        "sources": len(fit),
        "natural_pairs": len(natural),
        "pictures_in_natural_pairs": len(known),
        "cpu_s": round(time.process_time() - start, 1),
        "kinds": {kind: rows[kind] for kind in kinds},
    }


def _counts(
    pairs: set[tuple[int, int]],
    natural: set[tuple[int, int]],
    sources: list[int],
    made: list[str],
    kinds: list[str],
) -> dict[str, dict]:
    """Count what was found of each kind.

    Args:
        pairs: As found.
        natural: Those that were found before.
        sources: Of each picture, what it was made of.
        made: Of each picture, its kind.
        kinds: All of them.
    """
    rows = {}
    for kind in kinds:
        planted = {row for row, each in enumerate(made) if each == kind}
        hits = {row for row in planted if (sources[row], row) in pairs}
        wrong = {
            pair
            for pair in pairs
            if planted & set(pair)
            and sources[pair[0]] != sources[pair[1]]
            and tuple(sorted((sources[pair[0]], sources[pair[1]]))) not in natural
        }
        total = len(hits) + len(wrong)
        rows[kind] = {
            "planted": len(planted),
            "found": len(hits),
            "recall": len(hits) / len(planted),
            "recall_interval95": wilson95(len(hits), len(planted)),
            "wrong": len(wrong),
            "precision": len(hits) / total if total else None,
            "precision_interval95": wilson95(len(hits), total) if total else None,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for source in ("fashion-mnist", "drawings", "photographs", "photographs-measured"):
        parser.add_argument(f"--{source}", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/measured/curate.json"))
    parser.add_argument("--pictures", type=int, default=1500)
    parser.add_argument("--plants", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--readings", choices=("ours", "other"), default="ours")
    parser.add_argument("--px", type=int, default=256, help="Of drawings and photographs.")
    parser.add_argument("--only", choices=("chosen", "measured"))
    options = parser.parse_args()
    tree = json.loads(options.out.read_text()) if options.out.exists() else {}
    for source in ("fashion_mnist", "drawings", "photographs"):
        folders = dict.fromkeys(("measured", "chosen"), getattr(options, source))
        if source == "photographs":
            folders["measured"] = options.photographs_measured
        for name, folder in folders.items():
            key = f"{source}, {name}"
            if folder is None or key in tree or options.only not in (None, name):
                continue
            measured = name == "measured"
            pictures = pictures_of(source, folder, options.pictures, measured, options.px)
            kinds = KINDS if options.readings == "ours" else READINGS
            tree[key] = measure(pictures, kinds, options.plants, int(measured), options.workers)
            write_atomically(options.out, json.dumps(tree, indent=1) + "\n")
            print(key, json.dumps(tree[key]["kinds"]), flush=True)


if __name__ == "__main__":
    main()
