"""What the suite measures of each set of features, and on which of the classes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.evaluation.against import KNN, LINEAR, PER_QUERY, has_a_match
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.features import Progress
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.geometry import geometry
from sslpipe.evaluation.knn import DINO_K, knn_results, protocol_id
from sslpipe.evaluation.linear_probe import linear_probe, ridge_probe
from sslpipe.evaluation.neighbours import Search
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.verification import draw_pairs, verification
from sslpipe.evaluation.whiten import whiten

Pair = tuple[Embeddings, Embeddings]  # train, test
Columns = list[tuple[str | None, Result]]  # a number, and its column of the table if it has one
LABELS_PER_CLASS = (100, 10)  # columns of the table
FEWER_LABELS = (5, 1)  # measured, too
MOST_NAMED = 5  # classes in a sentence
FEWER_NEIGHBOURS = (1, 5)  # beside DINO's k
FARS, FOLDS = (1e-1, 1e-2, 1e-3), 10
RETRIEVAL_K = (1, 5, 10)


class FormResults(NamedTuple):
    """What was measured of a set in one of its two forms.

    Args:
        whitened: The form: whitened, or plain.
        results: Each with its column.
        geometry: Results that are no accuracies.
    """

    whitened: bool
    results: Columns
    geometry: list[Result]


class Protocols:
    """What is measured of each set: the same for all, by what the first one's samples allow.

    Args:
        first: Train and test.
        classes: Their names by label, where known.
        left_out: Gets a sentence for each number that cannot be measured.
        search: As in `run_suite`, and so are draws and seed.
        draws: Of a few labels a class.
        seed: Of all that is drawn.
    """

    def __init__(
        self,
        first: Pair,
        classes: Sequence[str],
        left_out: list[str],
        search: Search,
        draws: int,
        seed: int,
    ) -> None:
        self._first, self._search = first, search
        self.left_out, self.seed = left_out, seed
        self.enough = ClassesWithEnough(*first, classes, left_out)
        known = self.enough.known()
        if not known:
            left_out.append("kNN and linear probes: no test class occurs in train")
        elif known < 0.5:
            total = len(first[1].ids)
            left_out.append(
                "kNN and linear probes in the table: train has the classes of only "
                f"{round(known * total):,} of {total:,} test samples"
            )
        self._few = [n for n in LABELS_PER_CLASS if known and self.enough.few(n)]
        self._fewer = [n for n in FEWER_LABELS if known and self.enough.few(n)]
        self._linear = known > 0 and self.enough.linear()
        self._inside = _inside_test(first[1], seed, left_out)
        self._drawn: dict[str, Any] = {"draws": draws, "seed": seed, "search": search}

    def columns(self) -> list[str]:
        """Return the headings of the table; they begin with what decides."""
        if not self.enough.known_classes():
            return list(PER_QUERY.values()) if self._inside else []
        return [KNN, *(few_column(n) for n in self._few), LINEAR]

    def scored_ids(self) -> dict[str, NDArray[np.int64]]:
        """Return each column's (q,) ids of the test samples that it scores."""
        needed = {KNN: 0, LINEAR: 2, **{few_column(n): n for n in self._few}}  # labels a class
        test = self._first[1]
        matched = test.ids.cpu().numpy()[has_a_match(test.labels.cpu().numpy())]
        return dict.fromkeys(PER_QUERY.values(), matched) | {
            column: self.enough.rows(*self._first, n)[1].ids.cpu().numpy()
            for column, n in needed.items()
        }

    def measure(
        self, name: str, plain: Pair, say: Callable[[str], None], progress: Progress | None
    ) -> list[FormResults]:
        """Measure a set, plain and whitened."""
        found = []
        bar = nullcontext() if progress is None else progress(f"evaluate {name}", 2)
        with bar as advance:
            for whitened in (False, True):
                bank, queries = whiten(*plain) if whitened else plain
                say(f"{name}{', whitened' if whitened else ''}: kNN, retrieval, verification")
                results: Columns = []
                if self.enough.known():
                    results += _knn_rows(bank, queries, search=self._search)
                for n in [*self._few, *self._fewer]:
                    column = few_column(n) if n in self._few and self.enough.most(n) else None
                    pair = self.enough.rows(bank, queries, n)
                    k = [min(20, n)]
                    for result in few_shot_knn(*pair, labels_per_class=n, k=k, **self._drawn):
                        results.append((column, self.enough.named(result, n)))
                results += [
                    (PER_QUERY.get(result.metric), result)
                    for score in self._inside
                    for result in score(queries)
                ]
                if not whitened and self._linear:
                    say(f"{name}: linear probes")
                    pair = self.enough.rows(bank, queries, 2)
                    results += _probe_rows(*pair, self.enough, self.seed)
                # geometry takes pairs of one label
                shapes = geometry(bank, queries, seed=self.seed) if self._inside else []
                columns = self.columns()
                results = [
                    (column if column in columns else None, result) for column, result in results
                ]
                found.append(FormResults(whitened, results, shapes))
                if advance is not None:
                    advance(1)
        return found


class ClassesWithEnough:
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

    def known(self) -> float:
        """Return the share of the test samples whose class the bank has."""
        return float(np.isin(self.test_labels, self.labels).mean())

    def known_classes(self) -> bool:
        """Say whether the bank has the classes of at least half of the test samples."""
        return self.known() >= 0.5

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
        if not kept:
            self.left_out.append(f"{what}: the largest class of the bank has {most} rows")
        elif len(kept) < 2:
            self.left_out.append(f"{what}: only one class of the bank has so many rows")
        elif not np.isin(self.test_labels, kept).any():
            self.left_out.append(
                f"{what}: no test sample is of a class that has so many in the bank"
            )
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


def _inside_test(
    test: Embeddings, seed: int, left_out: list[str]
) -> list[Callable[[Embeddings], list[Result]]]:
    """Retrieval and verification with the options that these samples allow."""
    try:
        same = draw_pairs(test, FOLDS, seed).same
        different = int((~draw_pairs(test, round(1 / min(FARS)), seed).same).sum())
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


def _probe_rows(
    bank: Embeddings, queries: Embeddings, enough: ClassesWithEnough, seed: int
) -> list[tuple[str | None, Result]]:
    """Linear probes, each with its column."""
    ridge, logistic = ridge_probe(bank, queries, seed=seed), linear_probe(bank, queries, seed=seed)
    columns = [*((None, result) for result in ridge), *((LINEAR, result) for result in logistic)]
    return [(column, enough.named(result, 2)) for column, result in columns]
