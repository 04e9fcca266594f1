"""Cluster features by k-means: what kinds of pictures there are, and which to label first."""

import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sslpipe.curate.image_scan import one_thread_an_operation
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest

TYPICAL_NEIGHBOURS = 20  # TypiClust's K


class Clusters(NamedTuple):
    """K clusters of N rows, the largest first."""

    of_row: NDArray[np.int64]  # (N,), 0 to K - 1
    sizes: NDArray[np.int64]  # (K,), not increasing
    central: NDArray[np.int64]  # (K,), the row nearest to each centre
    distances: NDArray[np.float64]  # (N,), of rows of length 1 to the centre of their cluster

    def __repr__(self) -> str:
        count = len(self.sizes)
        range_ = f"{self.sizes.min():,} to {self.sizes.max():,} each"
        return f"Clusters({len(self.of_row):,} rows in {count:,}, {range_})"

    def members(self, cluster: int) -> NDArray[np.int64]:
        """List the rows of a cluster, ascending."""
        return np.flatnonzero(self.of_row == cluster)


def cluster(rows: Embeddings, count: int, *, seed: int = 0, tries: int = 1) -> Clusters:
    """Find `count` clusters of rows of length 1, by Lloyd's algorithm from k-means++.

    On one thread, where the order of sums, and so the clusters, is the same each time. The rows'
    own order decides ties only: they are taken by id.

    Args:
        rows: Features, any scale.
        count: K, 1 to the number of distinct rows.
        seed: Of the first centres.
        tries: The one with the least sum of squared distances is taken.

    Raises:
        DataError: There are fewer distinct rows than clusters.

    Source:
        Lloyd 1982, IEEE Trans. Inf. Theory 28(2); Arthur and Vassilvitskii 2007, SODA; both by
        scikit-learn.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if not 1 <= count <= len(rows.ids):
        raise DataError(f"{count} clusters of {len(rows.ids)} rows; use 1 to {len(rows.ids)}")
    order = np.argsort(rows.ids.cpu().numpy(), kind="stable")
    units = F.normalize(rows.features.cpu().float(), dim=1).numpy()[order]
    with one_thread_an_operation(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # too few distinct rows: reported below
        fitted = KMeans(count, n_init=tries, random_state=seed, max_iter=100).fit(units)
    labels = fitted.labels_.astype(np.int64)
    centres = fitted.cluster_centers_
    distinct = np.unique(labels)
    if len(distinct) < count:
        raise DataError(
            f"{count} clusters were asked for, and the features hold {len(distinct)} distinct "
            "rows; ask for fewer"
        )
    # the largest first, of equal ones the one with the lowest id
    sizes = np.bincount(labels)
    first = np.unique(labels, return_index=True)[1]
    ranked = np.lexsort((first, -sizes))
    labels = np.argsort(ranked)[labels]
    centres = centres[ranked]
    sizes = sizes[ranked]
    distances = np.linalg.norm(units - centres[labels], axis=1).astype(np.float64)
    near = np.lexsort((distances, labels))  # by cluster, then by distance, then by id
    central = near[np.concatenate([[0], np.cumsum(sizes)[:-1]])]
    # back to the order of the rows
    of_row = np.empty_like(labels)
    of_row[order] = labels
    distance_of_row = np.empty_like(distances)
    distance_of_row[order] = distances
    return Clusters(of_row, sizes, order[central], distance_of_row)


class Chosen(NamedTuple):
    """A sample to label, and why."""

    id: int
    reason: str  # for people
    value: float  # how many rows its cluster has


def one_of_each(groups: NDArray[np.int64], labelled: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows to choose among: of copies one, and none of what has a label.

    groups: (N,), whose members are one picture, -1 for none; labelled: (N,), these stay -> (N,).
    """
    kept = labelled | (groups < 0)
    waiting = np.flatnonzero(~kept & ~np.isin(groups, groups[labelled]))
    kept[waiting[np.unique(groups[waiting], return_index=True)[1]]] = True
    return kept


def by_coverage(
    rows: Embeddings, count: int, *, labelled: NDArray[np.bool_] | None = None
) -> list[Chosen]:
    """Choose one typical row of each cluster that has no label yet, of the largest cluster first.

    There are as many clusters as there will be labels; the typical row has the largest mean
    similarity to its TYPICAL_NEIGHBOURS nearest in the cluster. k-centre greedy (Sener and Savarese
    2018, arXiv:1708.00489) takes the farthest, with few labels outliers.

    Args:
        rows: Features of one split.
        count: How many to choose.
        labelled: (N,) which rows have a label and are not chosen.

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
    clusters = cluster(rows, count + int(known.sum()))
    covered = np.zeros(len(clusters.sizes), bool)
    covered[clusters.of_row[known]] = True
    chosen = []
    for number in np.flatnonzero(~covered)[:count].tolist():
        sample_id = int(rows.ids[_most_typical(rows, clusters.members(number))])
        size = int(clusters.sizes[number])
        chosen.append(Chosen(sample_id, f"typical of {size} samples", float(size)))
    return chosen


def _most_typical(rows: Embeddings, members: NDArray[np.int64]) -> int:
    """The member with the largest mean similarity to its nearest; of equal ones, the first id."""
    members = members[np.argsort(rows.ids.cpu().numpy()[members], kind="stable")]
    neighbours = min(TYPICAL_NEIGHBOURS, len(members) - 1)
    if not neighbours:
        return int(members[0])
    inside = rows.rows(torch.from_numpy(members).to(rows.ids.device))
    near = nearest(inside.features, inside.features, neighbours, hidden=(inside.ids, inside.ids))
    return int(members[int(near.similarities.double().mean(dim=1).argmax())])
