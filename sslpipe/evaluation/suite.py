"""Every evaluation for several sets of features, by the same protocols: the table of a report.

The layout of eval.json, what `run_suite` returns and `sslpipe evaluate suite` writes:

    schema_version   1
    facts            where the features come from: plain values, whatever the caller gave
    columns          headings of the table, in order
    rows             one object a number:
        features     "ssl", "pixels", "random", ...
        whitened     whether PCA whitening, learned on train features, went before
        column       the heading this number stands under; null: not in the table
        protocol, metric, value, interval95, queries, bank, details, unit    see result.Result
    geometry         the same objects for numbers that are no accuracies: alignment and so on
    left_out         sentences: what could not be measured, and why
    sha256           of the rest, as JSON with sorted keys; absent in files of earlier versions
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.geometry import geometry
from sslpipe.evaluation.knn import DINO_K, check_pair, few_shot_knn, knn_results, protocol_id
from sslpipe.evaluation.linear_probe import linear_probe, ridge_probe
from sslpipe.evaluation.neighbours import Search
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.verification import pairs_of, verification
from sslpipe.evaluation.whiten import whiten

SCHEMA_VERSION = 1
LABELS_PER_CLASS = (100, 10)  # columns of the table
FEWER_LABELS = (5, 1)  # measured, too
KNN, LINEAR = "kNN", "linear"
FEWER_NEIGHBOURS = (1, 5)  # beside DINO's k
FARS, FOLDS = (1e-1, 1e-2, 1e-3), 10
RETRIEVAL_K = (1, 5, 10)


def run_suite(
    sets: Mapping[str, tuple[Embeddings, Embeddings]],
    facts: dict[str, Any],
    *,
    search: Search = "torch",
    draws: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run every evaluation on each set of features.

    kNN with all, 100, 10, 5 and 1 labels a class, retrieval and verification inside test, plain
    and whitened, two linear probes and the geometry. The table's kNN has k = 20, or as many as
    there are labels a class where those are fewer; nothing is chosen on test. The linear probes
    standardise, so they are run on plain features only. Verification and retrieval take pairs of
    test samples, each sample against all others.

    Args:
        sets: Name -> (train, test), all of the same samples.
        facts: Where the features come from, plain values.
        search: "torch" or "faiss"; both find the same neighbours.
        draws: Of a few labels a class.
        seed: Of all that is drawn.
        say: Called with what comes next.

    Returns:
        What eval.json holds.

    Raises:
        DataError: The sets are not of the same samples.
    """
    # what these samples allow
    _check_same_samples(sets)
    train = next(iter(sets.values()))[0]
    smallest_class = int(np.unique(train.labels.cpu().numpy(), return_counts=True)[1].min())
    few = [n for n in LABELS_PER_CLASS if n <= smallest_class]
    fewer = [n for n in FEWER_LABELS if n <= smallest_class]
    left_out = [
        f"kNN with {n} labels a class: the smallest class of the bank has {smallest_class}"
        for n in LABELS_PER_CLASS
        if n not in few
    ]
    inside = _inside_test(next(iter(sets.values()))[1], seed, left_out)

    # every set, plain and whitened
    rows: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    for name, plain in sets.items():
        for whitened in (False, True):
            bank, queries = whiten(*plain) if whitened else plain
            say(f"{name}{', whitened' if whitened else ''}: kNN, retrieval, verification")
            results = _knn_rows(bank, queries, few, fewer, search=search, draws=draws, seed=seed)
            results += [(None, result) for evaluate in inside for result in evaluate(queries)]
            if not whitened and smallest_class > 1:
                say(f"{name}: linear probes")
                results += [(None, result) for result in ridge_probe(bank, queries, seed=seed)]
                results += [(LINEAR, result) for result in linear_probe(bank, queries, seed=seed)]
            rows += [
                {"features": name, "whitened": whitened, "column": column, **result.to_json()}
                for column, result in results
            ]
            if inside:  # there are pairs of one label
                shapes += [
                    {"features": name, "whitened": whitened, "column": None, **result.to_json()}
                    for result in geometry(bank, queries, seed=seed)
                ]
    if smallest_class < 2:
        left_out.append("linear probe: a class of the bank has a single row")
    report = {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        "columns": [KNN, *(few_column(n) for n in few), LINEAR],
        "rows": rows,
        "geometry": shapes,
        "left_out": left_out,
    }
    return {**report, "sha256": _sha256(report)}


class _Row(BaseModel):
    """What a row must have to be shown; see `result.Result`."""

    features: str
    whitened: bool
    column: str | None
    protocol: str
    metric: str
    value: Annotated[float, Field(allow_inf_nan=False)]
    interval95: tuple[float, float]
    queries: int
    bank: int
    details: dict[str, Any] = {}


class _Report(BaseModel):
    """What an eval.json must have to be shown."""

    facts: dict[str, Any]
    columns: list[str]
    rows: Annotated[list[_Row], Field(min_length=1)]
    geometry: list[_Row] = []
    left_out: list[str]


def check_report(report: dict[str, Any]) -> None:
    """Check that what was read is what `run_suite` returned.

    Args:
        report: Plain values, as JSON gives them.

    Raises:
        ValueError: It is not, in one line.
    """
    if report.get("sha256", _sha256(report)) != _sha256(report):
        raise ValueError("its sha256 is another one")
    try:
        _Report.model_validate(report)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}") from None


def _sha256(report: dict[str, Any]) -> str:
    rest = {key: value for key, value in report.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _inside_test(
    test: Embeddings, seed: int, left_out: list[str]
) -> list[Callable[[Embeddings], list[Result]]]:
    """Retrieval and verification with the options that these samples allow."""
    try:
        same = pairs_of(test, FOLDS, seed).same
        different = int((~pairs_of(test, round(1 / min(FARS)), seed).same).sum())
    except DataError as error:
        left_out.append(f"retrieval, verification and geometry: {error}")
        return []
    ks = [k for k in RETRIEVAL_K if k <= len(test.ids)]
    chosen: list[Callable[[Embeddings], list[Result]]] = [
        lambda rows: retrieval(rows, rows, k=ks, exclude_same_id=True)
    ]
    if min(same.sum(), (~same).sum()) < FOLDS:
        left_out.append(
            f"verification: {int(same.sum())} pairs of one label in test, below {FOLDS}"
        )
        return chosen
    fars = [far for far in FARS if far * different >= 1]
    return [*chosen, lambda rows: verification(rows, rows, far=fars, folds=FOLDS, seed=seed)]


def few_column(labels_per_class: int) -> str:
    """Name the table's column of so many labels a class."""
    return f"{KNN}, {labels_per_class}/class"


def _knn_rows(
    bank: Embeddings,
    queries: Embeddings,
    few: list[int],
    fewer: list[int],
    *,
    search: Search,
    draws: int,
    seed: int,
) -> list[tuple[str | None, Result]]:
    ks = [k for k in DINO_K if k <= len(bank.ids)] or [len(bank.ids)]
    in_table = protocol_id(20 if 20 in ks else ks[0], 0.07, "weighted")
    more = [k for k in FEWER_NEIGHBOURS if k <= len(bank.ids)]
    results = knn_results(bank, queries, k=[*more, *ks], vote="both", search=search)
    rows = [(KNN if result.protocol == in_table else None, result) for result in results]
    for n in [*few, *fewer]:
        few_results = few_shot_knn(
            bank, queries, labels_per_class=n, k=[min(20, n)], draws=draws, seed=seed, search=search
        )
        rows += [(few_column(n) if n in few else None, result) for result in few_results]
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
