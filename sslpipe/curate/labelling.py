"""Choose the images of a split that are worth a label first.

`by_coverage` with few labels or none, `hard` once there are labels of all classes. The same
features, labels and seed give the same rows, in an order of which any beginning is a choice of its
own.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.curate.clusters import cluster
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.linear_probe import FINAL_TOLERANCE, standardisation
from sslpipe.evaluation.logistic import fit_logistic
from sslpipe.evaluation.neighbours import nearest

TYPICAL_NEIGHBOURS = 20  # TypiClust's K
PROBE_C = 0.01  # of logistic regression: few labels leave none to choose it by


class Choice(NamedTuple):
    """A row to label, and why."""

    row: int
    reason: str  # for people
    value: float  # what the order is by; see each way of choosing


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
    2018, arXiv:1708.00489) takes the farthest, with few labels outliers: `benchmarks/selection.py`.

    Args:
        rows: Features of one split.
        count: How many to choose.
        labelled: (N,) which rows have a label and are not chosen.
        seed: Of the clusters.

    Returns:
        value: how many rows the cluster has.

    Raises:
        DataError: Fewer rows are left than `count`, or fewer distinct ones than clusters.

    Source:
        TypiClust: Hacohen, Dekel and Weinshall 2022, arXiv:2202.02794, algorithm 1.
    """
    known = _check(rows, count, labelled)
    found = cluster(rows, count + int(known.sum()), seed=seed)
    covered = np.zeros(len(found.sizes), bool)
    covered[found.of_row[known]] = True
    chosen = []
    for number in np.flatnonzero(~covered)[:count].tolist():
        row, size = _most_typical(rows, found.members(number)), int(found.sizes[number])
        chosen.append(Choice(row, f"typical of {size} samples", float(size)))
    return chosen


def hard(rows: Embeddings, count: int, *, labels: NDArray[np.int64]) -> list[Choice]:
    """Choose the rows for which a probe's two most probable classes are closest.

    The probe is logistic regression at C = PROBE_C on the labelled rows, of features standardised
    over all rows.

    Args:
        rows: Features of one split; their own labels are not read.
        count: How many to choose.
        labels: (N,) -1 for those that have none and may be chosen.

    Returns:
        value: the margin, the difference of the two probabilities, smallest first.

    Raises:
        DataError: Fewer rows are left than `count`, or there are labels of fewer than two classes.

    Source:
        Scheffer, Decomain and Wrobel 2001, Active Hidden Markov Models, IDA (margin sampling).
    """
    known = _check(rows, count, labels >= 0)
    classes, codes = np.unique(labels[known], return_inverse=True)
    if len(classes) < 2:
        raise DataError(
            f"the labels name {len(classes)} classes, and a probe needs two; choose by coverage "
            "first, and label those"
        )
    index = torch.from_numpy(known).to(rows.features.device)
    mean, scale = standardisation(rows.features)
    x = (rows.features - mean) / scale
    targets = torch.from_numpy(codes).to(x.device)
    (fitted,) = fit_logistic(x[index], targets, [PROBE_C], len(classes), tolerance=FINAL_TOLERANCE)
    scores = x[~index].double() @ fitted.weight + fitted.bias  # (n, C)
    two = scores.softmax(dim=1).topk(2, dim=1).values.cpu().numpy()  # (n, 2)
    margins = two[:, 0] - two[:, 1]
    candidates = np.flatnonzero(~known)
    first = np.lexsort((rows.ids.cpu().numpy()[candidates], margins))[:count]
    return [
        Choice(int(candidates[k]), f"margin {margins[k]:.3f} of two classes", float(margins[k]))
        for k in first.tolist()
    ]


def _check(rows: Embeddings, count: int, labelled: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Which rows have a label, (N,). Raises: DataError where too few have none."""
    known = np.zeros(len(rows.ids), bool) if labelled is None else labelled
    left = int((~known).sum())
    if not 1 <= count <= left:
        raise DataError(
            f"{count} samples to label were asked for, and {left} of {len(known)} have no label; "
            "ask for fewer"
        )
    return known


def _most_typical(rows: Embeddings, members: NDArray[np.int64]) -> int:
    """The member with the largest mean similarity to its nearest; of equal ones, the first id."""
    members = members[np.argsort(rows.ids.cpu().numpy()[members], kind="stable")]
    neighbours = min(TYPICAL_NEIGHBOURS, len(members) - 1)
    if not neighbours:
        return int(members[0])
    own = rows.rows(torch.from_numpy(members).to(rows.ids.device))
    near = nearest(own.features, own.features, neighbours, bank_ids=own.ids, query_ids=own.ids)
    return int(members[int(near.similarities.double().mean(dim=1).argmax())])
