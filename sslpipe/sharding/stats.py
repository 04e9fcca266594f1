"""Describe a data set in numbers, as `sslpipe shards stats` does: samples, classes, sizes, columns.

`channel_rows` is for `sslpipe shards show`.
"""

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import show_cells
from sslpipe.data.decode import BadSample, decode, header_size
from sslpipe.data.index import DatasetIndex
from sslpipe.data.reader import Reader
from sslpipe.errors import counted
from sslpipe.random import permutation

SAMPLED = 1000  # samples whose sizes are read for the statistics of a split
BARS = "▁▂▃▄▅▆▇█"
BINS = 24
_ORDER = "(min / median / max)"


def split_rows(index: DatasetIndex, split_name: str) -> list[tuple[str, str]]:
    """Describe a split as (name, text) pairs; at most SAMPLED headers are read for sizes."""
    # counts and bytes
    split = index.split(split_name)
    labels = split.labels
    offsets = map(split.offsets, range(len(split.shards)))
    in_tar = np.concatenate([rows[:, 1] - rows[:, 0] for rows in offsets])
    shards = f"{counted(len(split.shards), 'shard')}, {in_tar.sum() / 1e6:,.1f} MB"
    rows = [
        ("samples", f"{len(split):,} in {shards}"),
        ("bytes a sample", f"{_spread(in_tar)} (in the tar)"),
        ("unlabelled", f"{int((labels < 0).sum()):,}"),
    ]
    # classes
    if (labels >= 0).any():
        present, counts = np.unique(labels[labels >= 0], return_counts=True)
        largest, smallest = (
            f"{split.class_name(int(present[place]))} {counts[place]:,}"
            for place in (counts.argmax(), counts.argmin())
        )
        named = len(index.manifest.classes) or len(present)
        rows += [
            ("classes", f"{len(present):,} with samples, of {named:,}"),
            ("samples per class", _spread(counts)),
            ("largest, smallest", f"{largest}, {smallest}"),
        ]
    # image sizes
    reader = Reader(split)
    sizes = list[tuple[int, int]]()
    bad = 0
    for sample_id in np.sort(permutation(len(split), (0,))[:SAMPLED]).tolist():
        try:
            sizes.append(header_size(reader.one(sample_id).image))
        except BadSample:
            bad += 1
    if sizes:
        sides = np.array(sizes)  # (n, 2), width and height
        sides = np.column_stack([sides, sides.min(axis=1)])
        for name, px in zip(("width", "height", "shorter side"), sides.T, strict=True):
            rows.append((f"{name} px", f"{_spread(px)} (of {len(sizes):,} sampled)"))
    return [*rows, ("headers not read", f"{bad:,} of {len(sizes) + bad:,}")]


def column_rows(index: DatasetIndex, split_name: str) -> list[tuple[str, str]]:
    """Describe a split's columns as (name, text) pairs: kind, missing, distinct, group sizes."""
    split = index.split(split_name)
    rows = []
    for name in index.manifest.columns:
        column = split.column(name)
        missing = column.cells.null_count
        parts = [column.kind, f"{missing:,} missing"]
        if missing < len(column) and column.kind == "float":
            low, middle, high = np.nanpercentile(column.values, [0, 50, 100])
            distinct = len(np.unique(column.values)) - (missing > 0)
            parts += [f"{distinct:,} distinct", f"{low:g} / {middle:g} / {high:g} {_ORDER}"]
        elif missing < len(column):
            groups = column.groups
            parts += [f"{len(groups):,} distinct", f"samples a value {_spread(groups.sizes())}"]
            if column.kind != "text":
                first, last = show_cells(groups.values.take([0, len(groups) - 1]))
                parts.append(f"{first} to {last}")
        rows.append((f"column {name}", "; ".join(parts)))
    return rows


def channel_rows(
    index: DatasetIndex, split_name: str, ids: NDArray[np.int64]
) -> list[tuple[str, str]]:
    """Describe the channels of images that are not 8-bit RGB, with a histogram of the range."""
    kind = index.stored_type
    manifest = index.manifest
    if kind.is_rgb8:
        return []
    reader = Reader(index.split(split_name))
    counts = np.zeros((len(kind.channels), BINS), np.int64)
    for raw in map(reader.one, ids.tolist()):
        try:
            units = decode(raw.image, 2**16, image_type=kind)
        except BadSample:
            continue
        for channel, channel_units in enumerate(units):
            places = np.clip(channel_units.ravel() * (BINS / 256), 0, BINS - 1).astype(np.int64)
            counts[channel] += np.bincount(places, minlength=BINS)
    rows = [("images", f"{counted(len(kind.channels), 'channel')} of {kind.dtype}; {kind.caption}")]
    for k, name in enumerate(kind.channels):
        bars = np.ceil(counts[k] / max(1, counts[k].max()) * len(BARS)).astype(int)
        drawn = "".join(BARS[bar - 1] if bar else " " for bar in bars.tolist())
        spread = f"mean {manifest.mean[k]:.3f} std {manifest.std[k]:.3f}"
        rows.append((name, f"{kind.low[k]:g} to {kind.high[k]:g}  {spread}  |{drawn}|"))
    return rows


def _spread(values: np.ndarray) -> str:
    low, middle, high = np.percentile(values, [0, 50, 100])
    return f"{low:,.0f} / {middle:,.0f} / {high:,.0f} {_ORDER}"
