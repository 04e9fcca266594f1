"""Which test samples have a near-duplicate in train: what makes a test easier than it looks."""

from collections.abc import Callable
from math import isqrt

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from sslpipe.arguments import Progress, silent
from sslpipe.curate.duplicate_files import COLUMN
from sslpipe.curate.duplicates import LEAST_SCORE, compare
from sslpipe.curate.image_scan import Samples, scan
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import fixed_point_units, nearest
from sslpipe.evaluation.table import Leaks

Pair = tuple[Embeddings, Embeddings]
Integers = NDArray[np.int64]

PIXELS_PX = 14  # side to which pixels are reduced: as many duplicates are nearest as at 28
EDGE = 1  # px of these, all around, that do not count: a border, or a small text
# least correlation of these with which samples are compared; crops are near by features
ALIKE = 0.95


def find_leaks(
    splits: tuple[Split, Split],
    rows: Pair,
    pixels: Callable[[], Pair],
    *,
    num_workers: int = 2,
    progress: Progress = silent,
) -> Leaks:
    """Find the test samples that are in train, too.

    Where both splits have the column duplicate_group, it says so. Else the pixels of each test
    sample are compared with those of the train sample that is nearest by features and, where they
    are alike on a coarse grid, by pixels, mirrored or not.

    Args:
        splits: Train and test.
        rows: Their features, on the CPU.
        pixels: Makes their pixels as features, see `features.pixel_features`; on the CPU, too.
        num_workers: Threads that decode.
        progress: Makes the progress bar of the samples that are read.

    Raises:
        DataError: A shard cannot be read.
    """
    if all(split.has_values(COLUMN) for split in splits):
        train, test = splits
        return Leaks(_by_column(train, test), f"by the column {COLUMN}")
    wanted = _near(rows, pixels(), len(splits[0].image_type.channels))
    ids = [np.unique(side) for side in wanted.T]
    count = sum(map(len, ids))
    with progress("leakage", count) as advance:
        samples = scan(
            splits,
            ids=ids,
            num_workers=num_workers,
            on_bad=lambda bad: None,  # reported where features were made
            progress=advance,
        )
    pairs = _rows_of(samples, wanted)
    hashes = samples.pixels_sha256
    same = (hashes[pairs[:, 0]] == hashes[pairs[:, 1]]).all(1)
    same |= compare(samples, pairs) >= LEAST_SCORE
    return Leaks(np.unique(samples.ids[pairs[same, 1]]), "by pixels")


def _near(rows: Pair, pixels: Pair, channels: int) -> Integers:
    """Pair train ids with test ids, (P, 2): nearest by features, and alike by pixels."""
    (train, test), (of_train, of_test) = ([each.ids.numpy() for each in p] for p in (rows, pixels))
    by_features = nearest(rows[0].features, rows[1].features, 1).indices[:, 0].numpy()
    pairs = [np.stack([train[by_features], test], 1)]
    bank, queries = (small_pictures(each.features, channels) for each in pixels)  # (N, C, S, S)
    units = _units(bank)
    for pictures in (queries, queries.flip(3)):
        near = nearest(units, _units(pictures), 1, units=True)
        alike = np.flatnonzero(near.similarities[:, 0].numpy() >= ALIKE)
        pairs.append(np.stack([of_train[near.indices[alike, 0].numpy()], of_test[alike]], 1))
    return np.unique(np.concatenate(pairs), axis=0)


def small_pictures(pixels: Tensor, channels: int = 3) -> Tensor:
    """Make pictures of rows of `features.pixel_features`, at most PIXELS_PX wide.

    (N, C S S), or (N, S S) of grey RGB -> (N, C or 1, side, side).
    """
    width = pixels.shape[1]
    if channels == 3 and isqrt(width) ** 2 == width:  # three times a square is not a square
        channels = 1
    side = isqrt(width // channels)
    pictures = pixels.view(-1, channels, side, side)
    return adaptive_avg_pool2d(pictures, min(side, PIXELS_PX))


def _units(pictures: Tensor) -> Tensor:
    """Rows of which products are correlations, without the edge where something is left."""
    side = pictures.shape[3]
    edge = EDGE if side > 4 * EDGE else 0
    rows = pictures[:, :, edge : side - edge, edge : side - edge].flatten(1)
    return fixed_point_units(rows - rows.mean(1, keepdim=True))


def _rows_of(samples: Samples, wanted: Integers) -> Integers:
    """Rows of pairs of train and test ids, (P, 2), that could both be read."""
    known = [
        {sample: row for row, sample in enumerate(samples.ids.tolist()) if samples.split[row] == k}
        for k in (0, 1)
    ]
    pairs = [(known[0].get(train), known[1].get(test)) for train, test in wanted.tolist()]
    return np.array([pair for pair in pairs if None not in pair], np.int64).reshape(-1, 2)


def _by_column(train: Split, test: Split) -> Integers:
    """Test samples whose group has a train sample; numbers are the same in all splits."""
    groups = test.column(COLUMN).groups
    shared = groups.shared_with(train.column(COLUMN).groups)
    codes = groups.code_of(np.arange(len(test)))
    leaked: Integers = np.flatnonzero((codes >= 0) & np.append(shared, False)[codes])
    return leaked
