"""Cluster features of a split by k-means: what kinds of pictures there are, how many of each."""

import warnings
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray

from sslpipe.curate.scan import one_thread_an_operation
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings


class Clusters(NamedTuple):
    """K clusters of N rows, the largest first."""

    of_row: NDArray[np.int64]  # (N,), 0 to K - 1
    sizes: NDArray[np.int64]  # (K,), not increasing
    central: NDArray[np.int64]  # (K,), the row nearest to each centre
    distances: NDArray[np.float64]  # (N,), of rows of length 1 to the centre of their cluster

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
        warnings.simplefilter("ignore", ConvergenceWarning)  # too few distinct rows: told below
        fitted = KMeans(count, n_init=tries, random_state=seed, max_iter=100).fit(units)
    labels, centres = fitted.labels_.astype(np.int64), fitted.cluster_centers_
    found = np.unique(labels)
    if len(found) < count:
        raise DataError(
            f"{count} clusters were asked for, and the features hold {len(found)} distinct rows; "
            "ask for fewer"
        )
    # the largest first, of equal ones the one with the lowest id
    sizes, first = np.bincount(labels), np.unique(labels, return_index=True)[1]
    ranked = np.lexsort((first, -sizes))
    labels, centres, sizes = np.argsort(ranked)[labels], centres[ranked], sizes[ranked]
    distances = np.linalg.norm(units - centres[labels], axis=1).astype(np.float64)
    near = np.lexsort((distances, labels))  # by cluster, then by distance, then by id
    central = near[np.concatenate([[0], np.cumsum(sizes)[:-1]])]
    # back to the order of the rows
    of_row, own = np.empty_like(labels), np.empty_like(distances)
    of_row[order], own[order] = labels, distances
    return Clusters(of_row, sizes, order[central], own)
