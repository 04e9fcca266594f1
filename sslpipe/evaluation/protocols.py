"""What the suite measures of each set of features, and on which of the classes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.arguments import Progress
from sslpipe.data.subsets import has_a_partner
from sslpipe.errors import DataError, counted, listed
from sslpipe.evaluation.comparison import KNN, LINEAR, PER_QUERY
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.flatten import choose_power
from sslpipe.evaluation.knn import DINO_K, knn_results, protocol_id
from sslpipe.evaluation.linear_probe import linear_probe
from sslpipe.evaluation.result import Measured, Result
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.verification import FOLDS, draw_pairs, verification
from sslpipe.evaluation.whiten import whiten

Pair = tuple[Embeddings, Embeddings]  # train, test
Columns = list[tuple[str | None, Result]]  # a number, and its column of the table if it has one
SEED = 0  # of the labels that are drawn, the hold-out and the pairs
LABELS_PER_CLASS = (100, 10)  # columns of the table
FEWER_LABELS = (5, 1)  # measured, too
MOST_NAMED = 5  # classes in a sentence
FEWER_NEIGHBOURS = (1, 5)  # beside DINO's k
# k is measured up to this, and beyond it up to so many times the rows of the largest train class
CLOSE_K = 20
FAR_K = 10
# rows x features x classes, above which linear probes are not part of a suite: some 15 minutes a
# set on two CPU cores; ImageNet on a GPU is below
PROBE_WORK = 2**36
GPU_PROBE_WORK = 2**42
# of more classes with fewer rows each, too
SPARSE_CLASSES = 1000
SPARSE_ROWS = 10


class Part(NamedTuple):
    """A measurement; `linear` probes are of plain features, where they are not too many."""

    title: str
    score: Callable[[Embeddings, Embeddings], Columns]
    linear: bool = False


class Protocols:
    """What is measured of each set: the same for all, by what the first one's samples allow.

    kNN with all, 100, 10, 5 and 1 labels per class (where classes have so many), retrieval and
    verification inside test, plain and flattened, and a linear probe, of plain features only.
    The table has kNN with k = 20, or as many as there are labels per class where those are fewer,
    and the linear probe; Recall@1 and MAP@R where train has not the classes of most test samples.

    `classes` are names by label, where known; `left_out` gets a sentence for each number that
    cannot be measured.
    """

    def __init__(self, first: Pair, classes: Sequence[str], left_out: list[str]) -> None:
        self._first = first
        self._names = classes
        self.left_out = left_out
        labels, counts = np.unique(first[0].labels.cpu().numpy(), return_counts=True)
        self._counts = dict(zip(labels.tolist(), counts.tolist(), strict=True))  # of train
        self._test_labels = first[1].labels.cpu().numpy()

        # share of the test samples whose class train has
        known = float(np.isin(self._test_labels, labels).mean())
        total = len(self._test_labels)
        self.known_classes = known >= 0.5
        if not known:
            left_out.append("kNN and linear probes: no test class occurs in train")
        elif not self.known_classes:
            left_out.append(
                "kNN and linear probes in the table: train has the classes of only "
                f"{round(known * total):,} of {total:,} test samples"
            )
        elif known < 1:
            left_out.append(
                f"kNN of {round((1 - known) * total):,} of {total:,} test samples, whose class "
                "train lacks: it counts them as wrong, as linear probes do"
            )
        self._parts: list[Part] = []
        if known:
            self._parts.append(self._knn())
            for n in (*LABELS_PER_CLASS, *FEWER_LABELS):
                if self._measurable(n, f"kNN, {counted(n, 'label')} per class"):
                    self._parts.append(self._few_shot(n))
        self._parts += _inside_test(first[1], left_out)
        if known:
            self._parts += self._linear()

    def _knn(self) -> Part:
        """KNN with all labels; the table's has k = 20 where there are so many.

        What k is far beyond the largest class is said in `left_out`.
        """
        rows = sum(self._counts.values())
        largest = max(self._counts.values())
        far = [k for k in DINO_K if CLOSE_K < k <= rows and k > largest * FAR_K]
        if far:
            self.left_out.append(
                f"kNN with k = {' and '.join(map(str, far))}: the largest train class has "
                f"{largest} samples, so nearly all neighbours are of other classes"
            )
        usual = [k for k in DINO_K if k <= rows and k not in far] or [rows]
        ks = [*(k for k in FEWER_NEIGHBOURS if k <= rows), *usual]
        in_table = protocol_id(CLOSE_K if CLOSE_K in usual else usual[0], 0.07, "weighted")

        def score(bank: Embeddings, queries: Embeddings) -> Columns:
            results = knn_results(bank, queries, k=ks, vote="both")
            return [(KNN if result.protocol == in_table else None, result) for result in results]

        return Part(KNN, score)

    def columns(self) -> list[str]:
        """Return the headings of the table; they begin with what decides."""
        titles = [part.title for part in self._parts]
        if not self.known_classes:
            return list(PER_QUERY) if "retrieval" in titles else []
        few = [few_column(n) for n in LABELS_PER_CLASS]
        return [KNN, *(column for column in few if column in titles), LINEAR]

    def scored_ids(self) -> dict[str, NDArray[np.int64]]:
        """Return each column's (q,) ids of the test samples that it scores."""
        ids = self._first[1].ids.cpu().numpy()
        needed = {KNN: 0, LINEAR: 0, **{few_column(n): n for n in LABELS_PER_CLASS}}
        return dict.fromkeys(PER_QUERY, ids[has_a_partner(self._test_labels)]) | {
            column: self._rows(*self._first, n)[1].ids.cpu().numpy() for column, n in needed.items()
        }

    def measure(
        self,
        name: str,
        plain: Pair,
        progress: Progress,
        *,
        title: str,
        use_up: bool,
    ) -> list[Measured]:
        """Measure a set, plain and flattened, by the power that `choose_power` finds on train.

        `title` is what `progress` calls it. With `use_up` the plain features are not needed later:
        they are flattened in place.
        """
        columns = self.columns()
        results: list[Measured] = []
        flattened = [part for part in self._parts if not part.linear]
        parts = self._parts if self._can_probe(name, plain) else flattened

        def measure(part: Part, train: Embeddings, test: Embeddings, power: float | None) -> None:
            for column, result in part.score(train, test):
                shown = column if column in columns else None
                results.append(Measured(name, power, shown, result))

        with progress(f"evaluate {title}", len(parts) + len(flattened)) as advance:
            train, test = plain
            for part in parts:
                measure(part, train, test, None)
                advance(1)
            power = choose_power(train, seed=SEED).power
            train, test = whiten(train, test, power=power, in_place=use_up)
            for part in flattened:
                measure(part, train, test, power)
                advance(1)
        return results

    def _can_probe(self, name: str, plain: Pair) -> bool:
        """Whether linear probes are run; says in `left_out` where they would take hours."""
        rows, width = plain[0].features.shape
        classes = len(self._counts)
        most = PROBE_WORK if plain[0].features.device.type == "cpu" else GPU_PROBE_WORK
        if not any(part.linear for part in self._parts):
            return False
        if classes > SPARSE_CLASSES and rows < SPARSE_ROWS * classes:
            self.left_out.append(
                f"linear probes: {classes:,} classes have fewer than {SPARSE_ROWS} images in train "
                "on average; kNN and Recall@1 say more"
            )
            return False
        if rows * min(rows, width) * classes > most:
            self.left_out.append(
                f"{name}, linear probes: {rows:,} rows x {width:,} features x {classes:,} classes "
                f"are above {most:.1e}, which takes hours; `sslpipe evaluate linear` measures them"
            )
            return False
        return True

    # of a number that needs some rows of each class in train: the classes that have them

    def _few_shot(self, n: int) -> Part:
        in_table = n in LABELS_PER_CLASS and self._most_have(n)

        def score(bank: Embeddings, queries: Embeddings) -> Columns:
            bank, queries = self._rows(bank, queries, n)
            k = [min(20, n)]
            results = few_shot_knn(bank, queries, labels_per_class=n, k=k, seed=SEED)
            return self._in_column(few_column(n) if in_table else None, results, n)

        return Part(few_column(n), score)

    def _linear(self) -> list[Part]:
        """Return the linear probe, of all classes; says in `left_out` why none can be fitted."""
        if len(self._counts) < 2:
            self.left_out.append("linear probes: train has one class")
            return []
        if max(self._counts.values()) < 2:
            self.left_out.append(
                "linear probes: no train class has two samples, to choose C by one"
            )
            return []

        def score(train: Embeddings, test: Embeddings) -> Columns:
            return [(LINEAR, one) for one in linear_probe(train, test, seed=SEED)]

        return [Part(LINEAR, score, linear=True)]

    def _in_column(self, column: str | None, results: list[Result], count: int) -> Columns:
        """Put results into a column; protocols say which classes they are of."""
        kept = len(self._kept(count))
        total = len(self._counts)
        some = f" classes={kept}/{total}" if kept < total else ""
        return [(column, replace(one, protocol=one.protocol + some)) for one in results]

    def _kept(self, count: int) -> list[int]:
        return [label for label, rows in self._counts.items() if rows >= count]

    def _most_have(self, count: int) -> bool:
        return 2 * len(self._kept(count)) >= len(self._counts)

    def _rows(self, bank: Embeddings, queries: Embeddings, count: int) -> Pair:
        """Rows of both sides whose class has at least `count` rows in the bank."""
        if len(self._kept(count)) == len(self._counts):
            return bank, queries
        kept = torch.tensor(self._kept(count), device=bank.labels.device)
        some = [torch.nonzero(torch.isin(rows.labels, kept))[:, 0] for rows in (bank, queries)]
        return bank.rows(some[0]), queries.rows(some[1])

    def _measurable(self, count: int, what: str) -> bool:
        """Whether two classes or more have so many rows; what is missing is said in `left_out`."""
        kept = self._kept(count)
        counts = self._counts
        tested = bool(np.isin(self._test_labels, kept).any())
        why = ""
        if not kept:
            why = f": the largest train class has {max(counts.values())} samples"
        elif len(kept) < 2:
            why = f": only one train class has {count} samples or more"
        elif not tested:
            enough = f" with {count} samples or more" if count > 1 else ""
            why = f": no test class occurs in train{enough}"
        elif len(kept) < len(counts):
            smaller = sorted(set(counts) - set(kept), key=lambda label: counts[label])
            named = listed([f"{self._name(k)} ({counts[k]})" for k in smaller], MOST_NAMED)
            why = (
                f" for {len(smaller)} of {len(counts)} classes, which have fewer than {count} rows "
                f"in the bank: {named}; its numbers are of the other {len(kept)}"
            ) + ("" if self._most_have(count) else ", too few for the table")
        if why:
            self.left_out.append(what + why)
        return len(kept) >= 2 and tested

    def _name(self, label: int) -> str:
        return str(self._names[label]) if 0 <= label < len(self._names) else f"class {label}"


def _inside_test(test: Embeddings, left_out: list[str]) -> list[Part]:
    """Retrieval and verification with the options that these samples allow."""
    try:
        same = draw_pairs(test, FOLDS, SEED).same
    except DataError as error:
        left_out.append(f"retrieval and verification: {error}")
        return []

    def retrieved(_: Embeddings, rows: Embeddings) -> Columns:
        results = retrieval(rows, rows, exclude_same_id=True)
        return [(each.metric if each.metric in PER_QUERY else None, each) for each in results]

    chosen = [Part("retrieval", retrieved)]
    if min(same.sum(), (~same).sum()) < FOLDS:
        left_out.append(
            f"verification: {int(same.sum())} pairs of one label in test, below {FOLDS}"
        )
        return chosen

    def verified(_: Embeddings, rows: Embeddings) -> Columns:
        return [(None, one) for one in verification(rows, rows, seed=SEED)]

    return [*chosen, Part("verification", verified)]


def few_column(labels_per_class: int) -> str:
    """Name the table's column of so many labels per class."""
    return f"{KNN}, {labels_per_class}/class"
