"""Choose the images of a split that are worth a label first.

The same features, labels and seed give the same rows, in an order of which any beginning is a
choice of its own.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.curate.clusters import cluster
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest

TYPICAL_NEIGHBOURS = 20  # TypiClust's K


class Choice(NamedTuple):
    """A row to label, and why."""

    row: int
    reason: str  # for people
    value: float  # how many rows its cluster has


def one_of_each(groups: NDArray[np.int64], labelled: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Say which rows to choose among: of copies one, and none of what has a label.

    groups: (N,), whose members are one picture, -1 for none; labelled: (N,), these stay -> (N,).
    """
    kept = labelled | (groups < 0)
    waiting = np.flatnonzero(~kept & ~np.isin(groups, groups[labelled]))
    kept[waiting[np.unique(groups[waiting], return_index=True)[1]]] = True
    return kept


def by_coverage(
    rows: Embeddings, count: int, *, labelled: NDArray[np.bool_] | None = None, seed: int = 0
) -> list[Choice]:
    """Choose one typical row of each cluster that has no label yet, of the largest cluster first.

    There are as many clusters as there will be labels; the typical row has the largest mean
    similarity to its TYPICAL_NEIGHBOURS nearest in the cluster. k-centre greedy (Sener and Savarese
    2018, arXiv:1708.00489) takes the farthest, with few labels outliers.

    Args:
        rows: Features of one split.
        count: How many to choose.
        labelled: (N,) which rows have a label and are not chosen.
        seed: Of the clusters.

    Raises:
        DataError: Fewer rows are left than `count`, or fewer distinct ones than clusters.

    Source:
        TypiClust: Hacohen, Dekel and Weinshall 2022, arXiv:2202.02794, algorithm 1.
    """
    known = np.zeros(len(rows.ids), bool) if labelled is None else labelled
    left = int((~known).sum())
    if not 1 <= count <= left:
        raise DataError(
            f"{count} samples to label were asked for, and {left} of {len(known)} have no label; "
            "ask for fewer"
        )
    found = cluster(rows, count + int(known.sum()), seed=seed)
    covered = np.zeros(len(found.sizes), bool)
    covered[found.of_row[known]] = True
    chosen = []
    for number in np.flatnonzero(~covered)[:count].tolist():
        row, size = _most_typical(rows, found.members(number)), int(found.sizes[number])
        chosen.append(Choice(row, f"typical of {size} samples", float(size)))
    return chosen


def _most_typical(rows: Embeddings, members: NDArray[np.int64]) -> int:
    """The member with the largest mean similarity to its nearest; of equal ones, the first id."""
    members = members[np.argsort(rows.ids.cpu().numpy()[members], kind="stable")]
    neighbours = min(TYPICAL_NEIGHBOURS, len(members) - 1)
    if not neighbours:
        return int(members[0])
    own = rows.rows(torch.from_numpy(members).to(rows.ids.device))
    near = nearest(own.features, own.features, neighbours, hidden=(own.ids, own.ids))
    return int(members[int(near.similarities.double().mean(dim=1).argmax())])
