"""Every evaluation for several sets of features under the same protocols: the table of a report.

eval.json, what `run_suite` returns and `tools.evaluate suite` writes:

    schema_version   1
    facts            where the features come from: plain values, whatever the caller gave
    columns          headings of the table, in order
    rows             one object a number:
        features     "ssl", "pixels", "random", ...
        whitened     whether PCA whitening, learned on train features, went before
        column       the heading this number stands under; null: not in the table
        protocol, metric, value, interval95, queries, bank, details      see result.Result
    left_out         sentences: what could not be measured, and why
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import DINO_K, check_pair, few_shot_knn, knn_results, protocol_id
from sslpipe.evaluation.linear_probe import linear_probe
from sslpipe.evaluation.neighbours import Search
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.whiten import whiten

SCHEMA_VERSION = 1
LABELS_PER_CLASS = (100, 10)
KNN, LINEAR = "kNN", "linear"


def run_suite(
    sets: Mapping[str, tuple[Embeddings, Embeddings]],
    facts: dict[str, Any],
    *,
    search: Search = "torch",
    draws: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """kNN with all, 100 and 10 labels a class, plain and whitened, and a linear probe, of each set.

    sets: name -> (train, test). The table's kNN has k = 20, or 10 where a class has 10 labels;
    nothing is chosen on test. The linear probe standardises, so it is run on plain features only.
    Raises: DataError where the sets are not of the same samples.
    """
    _check_same_samples(sets)
    train = next(iter(sets.values()))[0]
    smallest_class = int(np.unique(train.labels.cpu().numpy(), return_counts=True)[1].min())
    few = [n for n in LABELS_PER_CLASS if n <= smallest_class]
    left_out = [
        f"kNN with {n} labels a class: the smallest class of the bank has {smallest_class}"
        for n in LABELS_PER_CLASS
        if n not in few
    ]
    rows: list[dict[str, Any]] = []
    for name, plain in sets.items():
        for whitened in (False, True):
            bank, queries = whiten(*plain) if whitened else plain
            say(f"{name}{', whitened' if whitened else ''}: kNN")
            results = _knn_rows(bank, queries, few, search=search, draws=draws, seed=seed)
            if not whitened and smallest_class > 1:
                say(f"{name}: linear probe")
                results += [(LINEAR, result) for result in linear_probe(bank, queries, seed=seed)]
            rows += [
                {"features": name, "whitened": whitened, "column": column, **result.to_json()}
                for column, result in results
            ]
    if smallest_class < 2:
        left_out.append("linear probe: a class of the bank has a single row")
    return {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        "columns": [KNN, *(few_column(n) for n in few), LINEAR],
        "rows": rows,
        "left_out": left_out,
    }


def few_column(labels_per_class: int) -> str:
    return f"{KNN}, {labels_per_class}/class"


def _knn_rows(
    bank: Embeddings,
    queries: Embeddings,
    few: list[int],
    *,
    search: Search,
    draws: int,
    seed: int,
) -> list[tuple[str | None, Result]]:
    ks = [k for k in DINO_K if k <= len(bank.ids)] or [len(bank.ids)]
    in_table = protocol_id(20 if 20 in ks else ks[0], 0.07, "weighted")
    every = knn_results(bank, queries, k=ks, search=search)
    every += knn_results(bank, queries, k=ks, vote="majority", search=search)
    rows = [(KNN if result.protocol == in_table else None, result) for result in every]
    for n in few:
        results = few_shot_knn(
            bank, queries, labels_per_class=n, k=[min(20, n)], draws=draws, seed=seed, search=search
        )
        rows += [(few_column(n), result) for result in results]
    return rows


def _check_same_samples(sets: Mapping[str, tuple[Embeddings, Embeddings]]) -> None:
    if not sets:
        raise DataError("no set of features to evaluate")
    first_name, first = next(iter(sets.items()))
    for name, pair in sets.items():
        check_pair(*pair)
        for side, ours, theirs in zip(("train", "test"), pair, first, strict=True):
            same = torch.equal(ours.ids, theirs.ids) and torch.equal(ours.labels, theirs.labels)
            if not same:
                raise DataError(
                    f"{side} features of {name!r} and {first_name!r} are not of the same samples; "
                    "embed the same split with both"
                )
