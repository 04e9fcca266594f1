"""What the suite measures of each set of features, and on which of the classes."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe import __version__
from sslpipe.errors import DataError
from sslpipe.evaluation.against import KNN, LINEAR, PER_QUERY, has_a_match
from sslpipe.evaluation.choose import choose_power
from sslpipe.evaluation.embed import UNREADABLE, Embeddings, content_sha256
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
from sslpipe.portable import make_folder, open_regular, replacing

Pair = tuple[Embeddings, Embeddings]  # train, test
Columns = list[tuple[str | None, Result]]  # a number, and its column of the table if it has one
ARRAYS = ("scores", "draw_hits")  # of a result, not in its JSON
LABELS_PER_CLASS = (100, 10)  # columns of the table
FEWER_LABELS = (5, 1)  # measured, too
MOST_NAMED = 5  # classes in a sentence
FEWER_NEIGHBOURS = (1, 5)  # beside DINO's k
FARS, FOLDS = (1e-1, 1e-2, 1e-3), 10
RETRIEVAL_K = (1, 5, 10)
LEAST_LEFT_S = 5.0  # a shorter time to go is not shown
# rows x features x classes, above which linear probes are not part of a suite: some 15 minutes a
# set on two CPU cores; ImageNet on a GPU is below
PROBE_WORK, GPU_PROBE_WORK = 2**36, 2**42
_FORMS = (False, True)  # whitened
SPARSE_CLASSES, SPARSE_ROWS = 1000, 10  # of more classes with fewer rows each, too


class Part(NamedTuple):
    """A measurement; `linear` probes are of plain features, where they are not too many."""

    title: str
    score: Callable[[Embeddings, Embeddings], Columns]
    linear: bool = False
    shape: bool = False


class KeptResults:
    """Measurements of a suite that was stopped: the same command reads them instead of measuring.

    One file in `folder` each, named by a hash of the features and of the settings.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.read = folder, 0

    def identity(self, pair: Pair, settings: dict[str, Any]) -> str:
        """Hash the features of train and test, and all else that decides what is measured."""
        text = json.dumps({**settings, "version": __version__}, sort_keys=True)
        return "-".join(content_sha256(rows._asdict(), text).hex() for rows in pair)

    def measured(self, identity: str, part: str, measure: Callable[[], Columns]) -> Columns:
        """Return what was measured before, or measure it and keep it."""
        name = hashlib.sha256(f"{identity} {part}".encode()).hexdigest()
        file = self.folder / f"{name}.npz"
        try:
            columns = _read(file)
        except UNREADABLE:  # absent, or damaged
            columns = measure()
            with suppress(OSError):  # a full disk or a planted link: measured, not kept
                _write(file, columns)
        else:
            self.read += 1
        return columns


class FormResults(NamedTuple):
    """What was measured of a set, flattened by a power or plain; geometry is no accuracy."""

    power: float | None
    results: Columns
    geometry: list[Result]


class TimeToGo:
    """Estimate the rest of a suite from what each part of the sets so far has taken."""

    def __init__(self, sets: int) -> None:
        self._sets_left, self._seconds = sets, dict[str, float]()
        self._rest: set[str] = set()

    def next_set(self) -> None:
        """Begin a set."""
        self._sets_left -= 1
        self._rest = {*self._seconds}

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Time a part of the set."""
        start = time.monotonic()
        yield
        self._seconds[title] = time.monotonic() - start
        self._rest.discard(title)

    def text(self) -> str:
        """Return ", about 2:34 left"; nothing before a set is measured, or for a few seconds."""
        whole = self._sets_left * sum(self._seconds.values())
        left = round(whole + sum(self._seconds[title] for title in self._rest))
        if not self._rest or left < LEAST_LEFT_S:
            return ""
        return f", about {left // 60}:{left % 60:02d} left"


class Protocols:
    """What is measured of each set: the same for all, by what the first one's samples allow.

    `classes` are the classes' names by label, where known. `left_out` gets a sentence for each
    number that cannot be measured. `search`, `draws` and `seed` as in `run_suite`.
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
        self._first, self._names, self.left_out, self.seed = first, classes, left_out, seed
        labels, counts = np.unique(first[0].labels.cpu().numpy(), return_counts=True)
        self._counts = dict(zip(labels.tolist(), counts.tolist(), strict=True))  # of train
        self._test_labels = first[1].labels.cpu().numpy()
        self._drawn: dict[str, Any] = {"draws": draws, "seed": seed, "search": search}

        # share of the test samples whose class train has
        known, total = float(np.isin(self._test_labels, labels).mean()), len(self._test_labels)
        self.known_classes = known >= 0.5
        if not known:
            left_out.append("kNN and linear probes: no test class occurs in train")
        elif not self.known_classes:
            left_out.append(
                "kNN and linear probes in the table: train has the classes of only "
                f"{round(known * total):,} of {total:,} test samples"
            )
        self._parts = [Part(KNN, partial(_knn_rows, search=search))] if known else []
        for n in (*LABELS_PER_CLASS, *FEWER_LABELS) if known else ():
            if self._measurable(n, f"kNN, {n} label{'s' * (n > 1)} per class"):
                self._parts.append(Part(few_column(n), partial(self._few_shot, n)))
        inside = _inside_test(first[1], seed, left_out)
        self._parts += inside
        if known and self._measurable(2, "linear probes"):  # a row to fit and one to check
            self._parts += [
                Part("ridge", partial(self._probe, "ridge"), linear=True),
                Part("linear", partial(self._probe, LINEAR), linear=True),
            ]
        if inside:  # it takes pairs of one label, too
            score = lambda *pair: _plain(geometry(*pair, seed=seed))  # noqa: E731
            self._parts.append(Part("geometry", score, shape=True))

    def columns(self) -> list[str]:
        """Return the headings of the table; they begin with what decides."""
        titles = [part.title for part in self._parts]
        if not self.known_classes:
            return list(PER_QUERY.values()) if "retrieval" in titles else []
        few = [few_column(n) for n in LABELS_PER_CLASS]
        return [KNN, *(column for column in few if column in titles), LINEAR]

    def scored_ids(self) -> dict[str, NDArray[np.int64]]:
        """Return each column's (q,) ids of the test samples that it scores."""
        ids = self._first[1].ids.cpu().numpy()
        needed = {KNN: 0, LINEAR: 2, **{few_column(n): n for n in LABELS_PER_CLASS}}
        return dict.fromkeys(PER_QUERY.values(), ids[has_a_match(self._test_labels)]) | {
            column: self._rows(*self._first, n)[1].ids.cpu().numpy() for column, n in needed.items()
        }

    def measure(
        self,
        name: str,
        plain: Pair,
        say: Callable[[str], None],
        progress: Progress | None,
        kept: KeptResults | None,
        clock: TimeToGo,
        *,
        use_up: bool,
    ) -> list[FormResults]:
        """Measure a set, plain and flattened, by the power that `choose_power` finds on train.

        `kept` has what was measured before an interruption, and gets what is measured; `clock` is
        shown with what comes next. With `use_up` nobody needs the plain features later: they are
        flattened in place.
        """
        columns, found = self.columns(), list[FormResults]()
        linear = self._can_probe(name, plain)
        forms = {w: [p for p in self._parts if not p.linear or (linear and not w)] for w in _FORMS}
        total = sum(map(len, forms.values()))
        with nullcontext() if progress is None else progress(f"evaluate {name}", total) as advance:
            identity = "" if kept is None else kept.identity(plain, self._drawn)
            for whitened, parts in forms.items():
                pair, power, title = plain, None, name
                if whitened:
                    with clock.part("flattening"):
                        power, why, _ = choose_power(plain[0], seed=self.seed)
                        title = f"{name}, flattened"
                        say(f"{title}: {why}")
                        train, test = whiten(*plain, power=power, in_place=use_up, say=say)
                        pair = train, test
                say(f"{title}: kNN, retrieval, verification{clock.text()}")
                form = FormResults(power, [], [])
                for part in parts:
                    if part.title == "ridge":
                        say(f"{name}: linear probes{clock.text()}")
                    with clock.part(f"{part.title} {whitened}"):
                        score, key = partial(part.score, *pair), f"{part.title} {power}"
                        results = score() if kept is None else kept.measured(identity, key, score)
                    if part.shape:
                        form.geometry.extend(result for _, result in results)
                    else:
                        form.results.extend((c if c in columns else None, r) for c, r in results)
                    if advance is not None:
                        advance(1)
                found.append(form)
        return found

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

    def _few_shot(self, labels: int, bank: Embeddings, queries: Embeddings) -> Columns:
        """KNN with few labels per class; a column of the table where most classes have so many."""
        results = few_shot_knn(
            *self._rows(bank, queries, labels),
            labels_per_class=labels,
            k=[min(20, labels)],
            **self._drawn,
        )
        in_table = labels in LABELS_PER_CLASS and self._most_have(labels)
        column = few_column(labels) if in_table else None
        return [(column, self._named(result, labels)) for result in results]

    def _probe(self, title: str, bank: Embeddings, queries: Embeddings) -> Columns:
        """Run a linear probe on the classes with enough rows."""
        probe = linear_probe if title == LINEAR else ridge_probe
        results = probe(*self._rows(bank, queries, 2), seed=self.seed)
        column = LINEAR if title == LINEAR else None
        return [(column, self._named(result, 2)) for result in results]

    # of a number that needs some rows of each class in train: the classes that have them

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

    def _named(self, result: Result, count: int) -> Result:
        """Say in a result's protocol that it is of some classes only."""
        kept, total = len(self._kept(count)), len(self._counts)
        if kept == total:
            return result
        return replace(result, protocol=f"{result.protocol} classes={kept}/{total}")

    def _measurable(self, count: int, what: str) -> bool:
        """Whether two classes or more have so many rows; what is missing is said in `left_out`."""
        kept, counts = self._kept(count), self._counts
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
            named = ", ".join(f"{self._name(k)} ({counts[k]})" for k in smaller[:MOST_NAMED])
            more = f" and {len(smaller) - MOST_NAMED} more" if len(smaller) > MOST_NAMED else ""
            why = (
                f" for {len(smaller)} of {len(counts)} classes, which have fewer than {count} rows "
                f"in the bank: {named}{more}; its numbers are of the other {len(kept)}"
            ) + ("" if self._most_have(count) else ", too few for the table")
        if why:
            self.left_out.append(what + why)
        return len(kept) >= 2 and tested

    def _name(self, label: int) -> str:
        return str(self._names[label]) if 0 <= label < len(self._names) else f"class {label}"


def _inside_test(test: Embeddings, seed: int, left_out: list[str]) -> list[Part]:
    """Retrieval and verification with the options that these samples allow."""
    try:
        same = draw_pairs(test, FOLDS, seed).same
        different = int((~draw_pairs(test, round(1 / min(FARS)), seed).same).sum())
    except DataError as error:
        left_out.append(f"retrieval, verification and geometry: {error}")
        return []
    ks = [k for k in RETRIEVAL_K if k <= len(test.ids)]

    def found(_: Embeddings, rows: Embeddings) -> Columns:
        results = retrieval(rows, rows, k=ks, exclude_same_id=True)
        return [(PER_QUERY.get(result.metric), result) for result in results]

    chosen = [Part("retrieval", found)]
    if min(same.sum(), (~same).sum()) < FOLDS:
        left_out.append(
            f"verification: {int(same.sum())} pairs of one label in test, below {FOLDS}"
        )
        return chosen
    fars = [far for far in FARS if far * different >= 1]

    def verified(_: Embeddings, rows: Embeddings) -> Columns:
        return _plain(verification(rows, rows, far=fars, folds=FOLDS, seed=seed))

    return [*chosen, Part("verification", verified)]


def _plain(results: Sequence[Result]) -> Columns:
    """Results without a column."""
    return [(None, result) for result in results]


def few_column(labels_per_class: int) -> str:
    """Name the table's column of so many labels per class."""
    return f"{KNN}, {labels_per_class}/class"


def _knn_rows(bank: Embeddings, queries: Embeddings, *, search: Search) -> Columns:
    """KNN with all labels, each with its column; the table's has k = 20 where there are so many."""
    ks = [k for k in DINO_K if k <= len(bank.ids)] or [len(bank.ids)]
    in_table = protocol_id(20 if 20 in ks else ks[0], 0.07, "weighted")
    more = [k for k in FEWER_NEIGHBOURS if k <= len(bank.ids)]
    results = knn_results(bank, queries, k=[*more, *ks], vote="both", search=search)
    return [(KNN if result.protocol == in_table else None, result) for result in results]


def _write(file: Path, columns: Columns) -> None:
    make_folder(file.parent.parent, file.parent.name)
    arrays = {
        f"{name} {at}": array
        for at, (_, result) in enumerate(columns)
        for name in ARRAYS
        if (array := getattr(result, name)) is not None
    }
    text = json.dumps([(column, result.to_json()) for column, result in columns])
    with replacing(file) as temporary, temporary.open("wb") as opened:
        np.savez(opened, allow_pickle=False, columns=np.array(text), **arrays)


def _read(file: Path) -> Columns:
    with open_regular(file) as raw, np.load(raw, allow_pickle=False) as arrays:
        columns = []
        for at, (column, tree) in enumerate(json.loads(str(arrays["columns"]))):
            own = {name: arrays[f"{name} {at}"] for name in ARRAYS if f"{name} {at}" in arrays}
            result = replace(Result(**tree), interval95=tuple(tree["interval95"]), **own)
            columns.append((column, result))
    return columns
