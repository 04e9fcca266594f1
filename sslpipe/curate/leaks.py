"""Which test samples have a near-duplicate in train: what makes a test easier than it looks."""

from contextlib import closing, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.duplicates import Limits, accepted_pairs, compare_all, others_rests
from sslpipe.curate.results import COLUMN
from sslpipe.curate.scan import Samples, scan
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.features import Progress
from sslpipe.evaluation.neighbours import nearest

NEIGHBOURS = 3  # train samples compared with each test sample


class Leaks(NamedTuple):
    """What was found.

    Args:
        ids: (L,) int64, test samples that have a near-duplicate in train, ascending.
        how: By what, for people.
    """

    ids: NDArray[np.int64]
    how: str


def find_leaks(
    splits: tuple[Split, Split],
    rows: tuple[Embeddings, Embeddings],
    *,
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Leaks:
    """Find the test samples that are in train, too.

    Where both splits have the column duplicate_group, it says so. Else the pixels of each test
    sample are compared with those of its nearest train samples by features.

    Args:
        splits: Train and test.
        rows: Their features, on the CPU.
        num_workers: Threads that decode and compare.
        progress: Makes the progress bar of the samples that are read.

    Raises:
        DataError: A shard cannot be read, or fewer train samples than neighbours have features.
    """
    if all(COLUMN in split.columns and _has_values(split) for split in splits):
        return Leaks(_by_column(*splits), f"by the column {COLUMN}")
    train, test = rows
    k = min(NEIGHBOURS, len(train.ids))
    near = train.ids[nearest(train.features, test.features, k).indices]  # (Q, k)
    wanted = [np.unique(near.numpy()), np.sort(test.ids.numpy())]
    bar = nullcontext() if progress is None else progress("leakage", sum(map(len, wanted)))
    with bar as advance:
        samples = scan(
            splits, ids=wanted, num_workers=num_workers, on_bad=lambda bad: None, progress=advance
        )
    with closing(samples.pictures.thumbs):
        pairs = _rows_of(samples, near.numpy(), test.ids.numpy())
        verdicts = compare_all(samples, pairs, num_workers=num_workers)
    others = others_rests(pairs, verdicts, len(samples), Limits(), k)
    same = accepted_pairs(pairs, verdicts, others, Limits())
    hashes = samples.pixels_sha256
    same |= (hashes[pairs[:, 0]] == hashes[pairs[:, 1]]).all(1)
    return Leaks(np.unique(samples.ids[pairs[same, 1]]), "by pixels")


def _rows_of(
    samples: Samples, near: NDArray[np.int64], ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Rows of train and test samples that are near to each other and could be read, (P, 2).

    Args:
        samples: Of both splits, train first.
        near: (Q, k) ids of train samples.
        ids: (Q,) ids of test samples.
    """
    sides = []
    for number, wanted in enumerate((near.ravel(), np.repeat(ids, near.shape[1]))):
        rows = np.flatnonzero(samples.split == number)
        place = np.searchsorted(samples.ids[rows], wanted)
        found = np.append(rows, -1)[place]  # the last: beyond all
        known = (found >= 0) & (samples.ids[found] == wanted)
        sides.append(np.where(known, found, -1))
    pairs = np.stack(sides, 1)
    return pairs[(pairs >= 0).all(1)]


def _has_values(split: Split) -> bool:
    return split.name in split.columns[COLUMN].splits


def _by_column(train: Split, test: Split) -> NDArray[np.int64]:
    """Test samples whose group has a train sample; numbers are the same in all splits."""
    shared = np.isin(test.column(COLUMN).groups.values, train.column(COLUMN).groups.values)
    codes = test.column(COLUMN).groups.code_of(np.arange(len(test)))
    leaked: NDArray[np.int64] = np.flatnonzero((codes >= 0) & np.append(shared, False)[codes])
    return leaked
