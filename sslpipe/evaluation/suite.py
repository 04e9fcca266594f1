"""Every evaluation for several sets of features, by the same protocols: the table of a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.evaluation.against import (
    KNN,
    LINEAR,
    Scores,
    compare_all,
    queries_with_a_match,
    whitening_helps,
)
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.geometry import geometry
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.knn import DINO_K, check_pair, few_shot_knn, knn_results, protocol_id
from sslpipe.evaluation.leakage import LeakRows
from sslpipe.evaluation.linear_probe import linear_probe, ridge_probe
from sslpipe.evaluation.neighbours import Search
from sslpipe.evaluation.nuisance import nuisance_rows
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.suite_file import SCHEMA_VERSION, content_sha256
from sslpipe.evaluation.verdict import BASELINES, comparisons, verdict
from sslpipe.evaluation.verification import pairs_of, verification
from sslpipe.evaluation.whiten import whiten

LABELS_PER_CLASS = (100, 10)  # columns of the table
FEWER_LABELS = (5, 1)  # measured, too
MOST_NAMED = 5  # classes in a sentence
FEWER_NEIGHBOURS = (1, 5)  # beside DINO's k
FARS, FOLDS = (1e-1, 1e-2, 1e-3), 10
RETRIEVAL_K = (1, 5, 10)
_NOTHING_TO_COMPARE = (
    "Not compared with {}: train has not the classes of most test samples, and inside test there "
    "are no pairs of one class and of two."
)


def run_suite(
    sets: Mapping[str, tuple[Embeddings, Embeddings]],
    facts: dict[str, Any],
    *,
    against: Sequence[str] = (),
    start: str | None = None,
    not_compared: Sequence[str] = (),
    columns: Sequence[GroupCodes] = (),
    not_measured: Sequence[str] = (),
    leaked: NDArray[np.int64] | None = None,
    leaked_by: str = "",
    search: Search = "torch",
    draws: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Run every evaluation on each set of features.

    kNN with all, 100, 10, 5 and 1 labels a class (of the classes that have so many), retrieval and
    verification inside test, plain and whitened, two linear probes and the geometry. The table's
    kNN has k = 20, or as many as there are labels a class where those are fewer; nothing is chosen
    on test. The linear probes standardise, so they are run on plain features only. Verification and
    retrieval take pairs of test samples, each sample against all others.

    Args:
        sets: Name -> (train, test), all of the same samples.
        facts: Where the features come from, plain values.
        against: Those of the sets that are other networks', to compare with; see `against`.
        start: Which of those the run started from.
        not_compared: Sentences on networks that could not be.
        columns: Columns of the data set that a probe reads from each set, by sample id of the whole
            splits; see `nuisance.choose_columns`.
        not_measured: Sentences on what else could have been.
        leaked: (L,) ids of test samples that have a near-duplicate in train: each number of the
            table is given without them, too. None: nobody has looked for them.
        leaked_by: How they were found.
        search: "torch" or "faiss"; both find the same neighbours.
        draws: Of a few labels a class.
        seed: Of all that is drawn.
        say: Called with what comes next.
        advance: Called with 1 when a set is done, plain or whitened.

    Returns:
        What eval.json holds; see `suite_file`.

    Raises:
        DataError: The sets are not of the same samples, or these have no labels.
    """
    # what these samples allow
    left_out = [*not_measured]
    sets = {name: _labelled(pair, left_out) for name, pair in sets.items()}
    _check_same_samples(sets)
    train, test = next(iter(sets.values()))
    enough = _ClassesWithEnough(train, test, facts.get("classes") or (), left_out)
    few = [n for n in LABELS_PER_CLASS if enough.few(n)]
    fewer = [n for n in FEWER_LABELS if enough.few(n)]
    linear = enough.linear()
    inside = _inside_test(test, seed, left_out)
    drawn: dict[str, Any] = {"draws": draws, "seed": seed, "search": search}

    # every set, plain and whitened
    rows: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    needed = {KNN: 0, LINEAR: 2, **{few_column(n): n for n in few}}  # labels a class
    leaks = LeakRows(
        leaked,
        leaked_by,
        {column: enough.rows(train, test, n)[1].ids.cpu().numpy() for column, n in needed.items()},
    )
    scores = Scores({}, {}, queries_with_a_match(test.labels.cpu().numpy()))
    for name, plain in sets.items():
        for whitened in (False, True):
            bank, queries = whiten(*plain) if whitened else plain
            say(f"{name}{', whitened' if whitened else ''}: kNN, retrieval, verification")
            results = _knn_rows(bank, queries, search=search)
            for n in [*few, *fewer]:
                column = few_column(n) if n in few and enough.most(n) else None
                pair = enough.rows(bank, queries, n)
                for result in few_shot_knn(*pair, labels_per_class=n, k=[min(20, n)], **drawn):
                    results.append((column, enough.named(result, n)))
            results += [(None, result) for evaluate in inside for result in evaluate(queries)]
            if not whitened and linear:
                say(f"{name}: linear probes")
                results += _probe_rows(*enough.rows(bank, queries, 2), enough, seed)
            rows += [_row(name, whitened, column, result) for column, result in results]
            scores.take(name, whitened, results)
            leaks.take(name, whitened, results)
            if inside:  # there are pairs of one label
                shapes += [
                    _row(name, whitened, None, result)
                    for result in geometry(bank, queries, seed=seed)
                ]
            advance(1)

    # what else the features know
    if columns:
        say(f"probes of columns: {', '.join(codes.name for codes in columns)}")
    known_of = [
        _row(name, False, result.details["column"], result)
        for name, result in nuisance_rows(sets, columns, left_out, seed=seed)
    ]

    # the answers
    known = enough.known_classes()
    others = [*against, *(() if known else (name for name in BASELINES if name in sets))]
    ours = [name for name in sets if name not in (*against, *BASELINES)]
    forms = {name: whitening_helps(sets[name][0], seed) for name in [*ours, *others] if others}
    compared = compare_all(ours, others, start, scores, forms, known_classes=known)
    met = {each["against"] for each in compared}
    unmet = [BASELINES.get(name, name) for name in others if ours and name not in met]
    if unmet:
        not_compared = [*not_compared, _NOTHING_TO_COMPARE.format(" and ".join(unmet))]
    report = {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        "columns": [KNN, *(few_column(n) for n in few), LINEAR],
        "rows": rows,
        "geometry": shapes,
        "nuisance": known_of,
        "left_out": list(dict.fromkeys(left_out)),
        "comparisons": comparisons(rows, scores.top1, without=against) if known else [],
        "against": compared,
        "not_compared": list(not_compared),
    }
    if leaked is not None:
        report["leakage"] = leaks.report(len(test.ids))
    report["verdict"] = verdict(report)
    return {**report, "sha256": content_sha256(report)}


class _ClassesWithEnough:
    """Which classes have enough labelled rows, on both sides, for a number that needs some.

    Args:
        train: The bank.
        test: The queries; those of a class that is left out are not scored.
        names: Of the classes by label, where known.
        left_out: Gets a sentence for each number that goes without some classes, or altogether.
    """

    def __init__(
        self, train: Embeddings, test: Embeddings, names: Sequence[str], left_out: list[str]
    ) -> None:
        self.labels, counts = np.unique(train.labels.cpu().numpy(), return_counts=True)
        self.counts = dict(zip(self.labels.tolist(), counts.tolist(), strict=True))
        self.test_labels = test.labels.cpu().numpy()
        self.names, self.left_out = names, left_out

    def few(self, count: int) -> bool:
        """Say whether kNN with so many labels a class can be measured on two classes or more."""
        return self._measurable(count, f"kNN with {count} labels a class")

    def most(self, count: int) -> bool:
        """Say whether at least half of the classes have so many: numbers of fewer are no column."""
        return 2 * len(self._kept(count)) >= len(self.counts)

    def linear(self) -> bool:
        """Say whether linear probes can be: each class needs a row to fit and one to check."""
        return self._measurable(2, "linear probes")

    def known_classes(self) -> bool:
        """Say whether the bank has the classes of at least half of the test samples."""
        return bool(np.isin(self.test_labels, self.labels).mean() >= 0.5)

    def rows(
        self, bank: Embeddings, queries: Embeddings, count: int
    ) -> tuple[Embeddings, Embeddings]:
        """Return the rows of both sides whose class has at least `count` rows in the bank."""
        if len(self._kept(count)) == len(self.counts):
            return bank, queries
        kept = torch.tensor(self._kept(count), device=bank.labels.device)
        return tuple(  # type: ignore[return-value]
            side.rows(torch.nonzero(torch.isin(side.labels, kept)).flatten())
            for side in (bank, queries)
        )

    def named(self, result: Result, count: int) -> Result:
        """Say in a result's protocol that it is of some classes only."""
        kept = len(self._kept(count))
        if kept == len(self.counts):
            return result
        protocol = f"{result.protocol} classes={kept}/{len(self.counts)}"
        return replace(result, protocol=protocol)

    def _kept(self, count: int) -> list[int]:
        return [label for label, rows in self.counts.items() if rows >= count]

    def _measurable(self, count: int, what: str) -> bool:
        kept, total = self._kept(count), len(self.counts)
        most = max(self.counts.values())
        if len(kept) < 2 or not np.isin(self.test_labels, kept).any():
            self.left_out.append(f"{what}: the largest class of the bank has {most} rows")
        elif len(kept) < total:
            smaller = sorted(set(self.counts) - set(kept), key=lambda label: self.counts[label])
            named = ", ".join(f"{self._name(k)} ({self.counts[k]})" for k in smaller[:MOST_NAMED])
            more = f" and {len(smaller) - MOST_NAMED} more" if len(smaller) > MOST_NAMED else ""
            self.left_out.append(
                f"{what} for {len(smaller)} of {total} classes, which have fewer than {count} rows "
                f"in the bank: {named}{more}; its numbers are of the other {len(kept)}"
                + ("" if self.most(count) else ", too few for the table")
            )
        return len(kept) >= 2 and bool(np.isin(self.test_labels, kept).any())

    def _name(self, label: int) -> str:
        return str(self.names[label]) if 0 <= label < len(self.names) else f"class {label}"


def check_labelled(split: str, labels: NDArray[np.int64]) -> None:
    """Raise DataError where no sample of a split has a label; before it is embedded, too."""
    if (labels < 0).all():
        raise DataError(
            f"none of the {len(labels)} samples of {split} has a label: kNN, linear probes, "
            "retrieval and verification need the class of some; build shards with class folders or "
            "a CSV file"
        )


def _labelled(
    pair: tuple[Embeddings, Embeddings], left_out: list[str]
) -> tuple[Embeddings, Embeddings]:
    """Return the rows of both sides that have a label; the others are counted in `left_out`."""
    sides = []
    for side, rows in zip(("train", "test"), pair, strict=True):
        check_labelled(side, rows.labels.cpu().numpy())
        unlabelled, total = int((rows.labels < 0).sum()), len(rows.ids)
        if unlabelled:
            left_out.append(f"{unlabelled} of {total} {side} samples, which have no label")
            rows = rows.rows(torch.nonzero(rows.labels >= 0).flatten())
        sides.append(rows)
    return sides[0], sides[1]


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
    bank: Embeddings, queries: Embeddings, *, search: Search
) -> list[tuple[str | None, Result]]:
    """KNN with all labels, each with its column; the table's has k = 20 where there are so many."""
    ks = [k for k in DINO_K if k <= len(bank.ids)] or [len(bank.ids)]
    in_table = protocol_id(20 if 20 in ks else ks[0], 0.07, "weighted")
    more = [k for k in FEWER_NEIGHBOURS if k <= len(bank.ids)]
    results = knn_results(bank, queries, k=[*more, *ks], vote="both", search=search)
    return [(KNN if result.protocol == in_table else None, result) for result in results]


def _row(name: str, whitened: bool, column: str | None, result: Result) -> dict[str, Any]:
    return {"features": name, "whitened": whitened, "column": column, **result.to_json()}


def _probe_rows(
    bank: Embeddings, queries: Embeddings, enough: "_ClassesWithEnough", seed: int
) -> list[tuple[str | None, Result]]:
    """Linear probes, each with its column."""
    ridge, logistic = ridge_probe(bank, queries, seed=seed), linear_probe(bank, queries, seed=seed)
    columns = [*((None, result) for result in ridge), *((LINEAR, result) for result in logistic)]
    return [(column, enough.named(result, 2)) for column, result in columns]


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
