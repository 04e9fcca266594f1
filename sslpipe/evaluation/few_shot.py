"""kNN with a few labels per class, averaged over draws of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation.difference import bootstrap95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import (
    INSTDISC_TEMPERATURE,
    Vote,
    check_pair,
    knn_predictions,
    protocol_id,
)
from sslpipe.evaluation.linear_probe import by_class
from sslpipe.evaluation.result import Result
from sslpipe.random import permutation


def few_shot_knn(
    bank: Embeddings,
    queries: Embeddings,
    *,
    labels_per_class: int,
    k: Sequence[int] = (10,),
    draws: int = 5,
    seed: int = 0,
    temperature: float = INSTDISC_TEMPERATURE,
    vote: Vote = "weighted",
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> list[Result]:
    """Average top-1 over banks of a few labels per class; one result for each k.

    Draw d takes labels_per_class rows of each class, chosen by hashes of seed, d and the row's
    place among the sorted ids: the same rows for every backbone.

    Args:
        bank: Labelled rows to draw from.
        queries: Labelled rows to score.
        labels_per_class: Rows of each class in a bank.
        k: Numbers of neighbours.
        draws: Banks, at least 2.
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
    if draws < 2:
        raise DataError(f"draws = {draws}: a spread needs at least 2")
    labels = queries.labels.cpu().numpy()
    options: dict[str, Any] = {"k": k, "temperature": temperature, "vote": vote}
    banks = (bank.rows(few_rows(bank, labels_per_class, seed, draw)) for draw in range(draws))
    predicted = [knn_predictions(few, queries, process=process, **options) for few in banks]
    results = []
    for each in predicted[0]:
        hits = np.stack([of_draw[each] == labels for of_draw in predicted])  # (draws, Q)
        accuracies = hits.mean(axis=1)
        results.append(
            Result(
                f"{protocol_id(each, temperature, vote)} "
                f"{labels_per_class}/class draws={draws} seed={seed}",
                "top1",
                float(accuracies.mean()),
                bootstrap95(hits),
                len(labels),
                labels_per_class * len(torch.unique(bank.labels)),
                {"draws": accuracies.tolist(), "spread": float(accuracies.std(ddof=1))},
                draw_hits=hits,
            )
        )
    return results


def few_rows(bank: Embeddings, labels_per_class: int, seed: int, draw: int) -> Tensor:
    """Choose the rows of one draw, sorted, (classes * labels_per_class,) int64."""
    order = torch.argsort(bank.ids).cpu().numpy()  # so that the rows' own order does not matter
    shuffled = order[permutation(len(order), seed, draw)]
    labels = bank.labels.cpu().numpy()
    members, places = by_class(shuffled, labels)
    chosen = members[places < labels_per_class]
    known, counts = np.unique(labels[chosen], return_counts=True)
    if (counts < labels_per_class).any():
        at = int(np.argmax(counts < labels_per_class))
        raise DataError(
            f"class {known[at]} has {counts[at]} rows in the bank, fewer than the "
            f"{labels_per_class} labels per class requested"
        )
    rows = np.sort(chosen)
    return torch.from_numpy(rows).to(bank.features.device)
