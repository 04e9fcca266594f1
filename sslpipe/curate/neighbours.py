"""Positives without labels: samples that are each other's nearest neighbours in a feature space."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sslpipe.curate.groups import NEAR, Groups, Integers, Pairs, group
from sslpipe.data.columns import MISSING_INTEGER
from sslpipe.data.index import NEIGHBOUR_COLUMN, Split
from sslpipe.evaluation.difference import Interval, wilson95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest
from sslpipe.sharding.columns import ColumnValues, add_columns


class Precision(NamedTuple):
    """Pairs of samples in one group, both labelled, that share the label."""

    right: int
    pairs: int
    interval95: Interval  # Wilson's, of right / pairs
    chance: float  # the same share of pairs drawn from all labelled samples


def mutual_groups(rows: Embeddings, k: int = 1) -> Groups:
    """Group samples with their mutual neighbours: each is among the k nearest of the other.

    With k = 1 these are pairs. With more, the sample with the most mutual neighbours and these are
    a group, then the same of the rest: each member is a mutual neighbour of its group's centre, and
    no chain joins two groups.

    Args:
        rows: Features of one split.
        k: How many neighbours count.

    Raises:
        DataError: There are no k other samples.

    Source:
        Qin et al. 2011, "Hello neighbor": k-reciprocal nearest neighbours.
    """
    count = len(rows.ids)
    found = nearest(rows.features, rows.features, k, hidden=(rows.ids, rows.ids))
    first = np.repeat(np.arange(count), k)
    second, score = (part.cpu().numpy().ravel() for part in found)
    mutual = np.isin(first * count + second, second * count + first) & (first < second)
    first, second, score = first[mutual], second[mutual], score[mutual].astype(np.float32)
    return group(Pairs(first, second, np.full(len(first), NEAR), score), count)


def estimate_precision(group_of: Integers, labels: Integers) -> Precision | None:
    """Compare the labels within groups; None where no group has two labelled samples.

    Args:
        group_of: (N,), -1 without a group.
        labels: (N,), -1 without a label.
    """
    known = labels >= 0
    sizes = np.bincount(group_of[known & (group_of >= 0)])
    pairs = _pairs(sizes)
    if not pairs:
        return None
    both = np.stack([group_of, labels])[:, known & (group_of >= 0)]
    right = _pairs(np.unique(both, axis=1, return_counts=True)[1])
    chance = _pairs(np.bincount(labels[known])) / _pairs(np.array([known.sum()]))
    return Precision(right, pairs, wilson95(right, pairs), chance)


def _pairs(sizes: Integers) -> int:
    """Count the pairs within sets of these sizes."""
    return int((sizes * (sizes - 1) // 2).sum())


def write_neighbours(folder: str, split: Split, ids: Integers, group_of: Integers) -> None:
    """Write the column `neighbour_group` of a split beside its data set; shards stay.

    Args:
        folder: Of dataset.json.
        split: Of the samples; other splits keep their column.
        ids: (N,), the samples.
        group_of: (N,), their groups; -1: none, and no value.
    """
    values = np.full(len(split), MISSING_INTEGER, np.int64)
    values[ids[group_of >= 0]] = group_of[group_of >= 0]
    add_columns(Path(folder), {split.name: {NEIGHBOUR_COLUMN: ColumnValues("integer", values)}})
