"""Clusters: does k-means, which sees no label, find the classes? NMI and AMI."""

import warnings
from importlib import import_module

import numpy as np
import torch.nn.functional as F

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.result import Result

STARTS = 5


def clusters(bank: Embeddings, queries: Embeddings, *, seed: int = 0) -> list[Result]:
    """Compare k-means clusters of the queries, as many as they have labels, with these labels.

    Rows have length 1; the bank takes no part. For comparison with papers of metric learning:
    Musgrave et al. 2020 advise against NMI, which rises with the number of clusters whatever they
    hold; AMI is adjusted for chance, and MAP@R (`retrieval`) tells more than both.

    Args:
        bank: Checked only.
        queries: Labelled rows.
        seed: Of the first centres; STARTS of them are drawn.

    Returns:
        nmi, ami: scikit-learn's normalized and adjusted mutual information (arithmetic means), the
        mean over the starts of k-means; the interval is over starts.

    Raises:
        DataError: The queries have one label, or fewer distinct rows than labels.

    Source:
        Musgrave et al. 2020, arXiv:2003.08505 (a metric learning reality check), section 4.2.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    check_pair(bank, queries)
    order = np.argsort(queries.ids.cpu().numpy(), kind="stable")  # the rows' order decides nothing
    labels = queries.labels.cpu().numpy()[order]
    units = F.normalize(queries.features.cpu().float(), dim=1).numpy()[order]
    count = len(np.unique(labels))
    if count < 2:
        raise DataError("all queries have one label; give a split with two classes or more")
    fits = []
    threads = import_module("threadpoolctl")  # scikit-learn brings it; it has no types
    with threads.threadpool_limits(limits=1), warnings.catch_warnings():  # one thread: equal sums
        warnings.simplefilter("ignore", ConvergenceWarning)  # too few distinct rows: reported below
        for start in range(STARTS):
            k_means = KMeans(count, n_init=1, random_state=seed + start, max_iter=100)
            fits.append(k_means.fit_predict(units))
    if len(np.unique(fits[0])) < count:
        raise DataError(
            f"{count} clusters, one a label, need as many distinct rows, and there are "
            f"{len(np.unique(fits[0]))}; embed with a model that tells images apart"
        )
    protocol = f"clusters k-means k={count} starts={STARTS} seed={seed}"
    scores = {"nmi": normalized_mutual_info_score, "ami": adjusted_mutual_info_score}
    results = []
    for metric, score in scores.items():
        values = [float(score(labels, one)) for one in fits]
        value = float(np.mean(values))
        half = 1.96 * float(np.std(values, ddof=1)) / STARTS**0.5
        ends = (value - half, value + half)
        results.append(
            Result(
                protocol=protocol,
                metric=metric,
                value=value,
                interval95=ends,
                queries=len(labels),
                bank=0,
                details={"starts": values},
            )
        )
    return results
