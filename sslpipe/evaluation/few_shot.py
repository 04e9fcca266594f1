"""Banks of a few labels a class, drawn the same way for every backbone."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.errors import DataError, check_count
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.intervals import bootstrap95
from sslpipe.evaluation.knn import INSTDISC_TEMPERATURE, Vote, check_pair, knn_results
from sslpipe.evaluation.neighbours import usual_k
from sslpipe.evaluation.result import Result
from sslpipe.random import permutation

DRAWS = 5  # banks of a number


def few_shot_knn(
    bank: Embeddings,
    queries: Embeddings,
    *,
    labels_per_class: int,
    k: Sequence[int] | None = None,
    seed: int = 0,
    temperature: float = INSTDISC_TEMPERATURE,
    vote: Vote = "weighted",
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> list[Result]:
    """Average top-1 over DRAWS banks of a few labels per class; one result for each k.

    Draw d takes labels_per_class rows of each class, chosen by hashes of seed, d and the row's
    place among the sorted ids: the same rows for every backbone.

    Args:
        bank: Labelled rows to draw from.
        queries: Labelled rows to score.
        labels_per_class: Rows of each class in a bank.
        k: Numbers of neighbours. Default: 10, or all rows where a bank has fewer.
        seed: Of the draws.
        temperature: T > 0 of the weighted vote.
        vote: "weighted" or "majority".
        process: This process; see `knn_results`.

    Returns:
        details["draws"]: the accuracy of each; details["spread"]: their standard deviation (n - 1).
        The interval is over queries and draws.

    Raises:
        DataError: A class has fewer rows.
    """
    check_pair(bank, queries)
    check_count(labels_per_class, "labels_per_class")
    of_draws = []
    for draw in range(DRAWS):
        few = bank.rows(few_rows(bank, labels_per_class, seed, draw))
        if k is None:
            k = usual_k((10,), len(few.ids))
        of_draws.append(
            knn_results(few, queries, k=k, temperature=temperature, vote=vote, process=process)
        )
    results = []
    for number in range(len(of_draws[0])):
        of_k = [each[number] for each in of_draws]
        hits = np.stack([np.asarray(result.scores) for result in of_k])  # (draws, Q)
        accuracies = hits.mean(axis=1)
        result = Result(
            protocol=f"{of_k[0].protocol} {labels_per_class}/class draws={DRAWS} seed={seed}",
            metric="top1",
            value=float(accuracies.mean()),
            interval95=bootstrap95(hits),
            queries=hits.shape[1],
            bank=of_k[0].bank,
            details={"draws": accuracies.tolist(), "spread": float(accuracies.std(ddof=1))},
            scores=hits,
        )
        results.append(result)
    return results


def few_rows(bank: Embeddings, labels_per_class: int, seed: int, draw: int) -> Tensor:
    """Choose the rows of one draw, sorted, (classes * labels_per_class,) int64."""
    labels = bank.labels.cpu().numpy()
    members, places = by_class(shuffled(bank, (seed, draw)), labels)
    chosen = members[places < labels_per_class]
    known, counts = np.unique(labels[chosen], return_counts=True)
    if (lacking := np.flatnonzero(counts < labels_per_class)).size:
        row = int(bank.ids[int(np.argmax(labels == known[lacking[0]]))])
        raise DataError(
            f"the class of row {row} has {counts[lacking[0]]} rows in the bank, fewer than "
            f"labels_per_class = {labels_per_class}; ask for fewer (--labels-per-class)"
        )
    return torch.from_numpy(np.sort(chosen)).to(bank.features.device)


def shuffled(rows: Embeddings, words: Sequence[int]) -> NDArray[np.int64]:
    """Number the rows in an order of hashes of `words` and of their places among the sorted ids."""
    order = torch.argsort(rows.ids).cpu().numpy()  # so that the rows' own order does not matter
    return order[permutation(len(order), words)]


def by_class(
    rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort row numbers by their labels, in each class as they come; with each one's place there."""
    members = rows[np.argsort(labels[rows], kind="stable")]
    sorted_labels = labels[members]
    return members, np.arange(len(members)) - np.searchsorted(sorted_labels, sorted_labels)
