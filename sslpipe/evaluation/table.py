"""Every evaluation for several sets of features, by the same protocols: the table of a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.arguments import Progress, silent
from sslpipe.data.subsets import has_a_partner
from sslpipe.errors import DataError, one_line
from sslpipe.evaluation.comparison import BASELINES, KNN, PER_QUERY, Scores, compare_all
from sslpipe.evaluation.intervals import bootstrap95, means95, wilson95
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.label_free import uniformity
from sslpipe.evaluation.protocols import Pair, Protocols
from sslpipe.evaluation.result import Measured, Result
from sslpipe.evaluation.suite_file import SCHEMA_VERSION, content_sha256
from sslpipe.evaluation.verdict import verdict

MOST_SPREAD = 2048  # rows, about, of which a uniformity is taken
FAILURES = (ValueError, OSError, RuntimeError, MemoryError)  # of a set: the others are measured
_NOTHING_TO_COMPARE = (
    "Not compared with {}: train has not the classes of most test samples, and inside test there "
    "are no pairs of one class and of two."
)


class Leaks(NamedTuple):
    """Test samples that have a near-duplicate in train, (L,) ascending, and by what, in words."""

    ids: NDArray[np.int64]
    how: str


@dataclass(frozen=True)
class Others:
    """Other networks, to compare with; see `comparison`.

    Attributes:
        names: Those of the sets that are theirs.
        start: Which of these the run started from.
        missing: Sentences on networks that could not be loaded.
    """

    names: Sequence[str] = ()
    start: str | None = None
    missing: Sequence[str] = ()


def run_suite(
    sets: Mapping[str, Pair | Callable[[], Pair]],
    facts: dict[str, Any],
    others: Others = Others(),
    *,
    known_as: str | None = None,
    not_measured: Sequence[str] = (),
    leaks: Leaks | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run every evaluation on each set of features; returns an eval.json, see `suite_file`.

    What is measured says `Protocols`; nothing is chosen on test. After Ctrl-C (KeyboardInterrupt)
    it has the sets that are measured by then.

    Args:
        sets: Name -> (train, test), all of the same samples, in the order of the table; or what
            makes them when their turn comes, but for the first: one that fails is omitted; they
            are flattened in place.
        facts: Where the features come from, plain values.
        others: Which of the sets are other networks'.
        known_as: What `say` and `progress` call the first set; None: by its name.
        not_measured: Sentences on what else could have been; what makes a set may add some.
        leaks: Without these test samples each number of the table is given, too; None: not checked.
        device: Where the features are searched, if it has float64; they are moved there.
        say: Called with what is kept after Ctrl-C.
        progress: Makes a progress bar for each set.

    Raises:
        DataError: The sets are not of the same samples, or these have no labels.
    """
    # what these samples allow
    left_out: list[str] = []
    ready = {n: _labelled(s, left_out, device) for n, s in sets.items() if not callable(s)}
    _check_same_samples(ready)
    pair = next(iter(ready.values()))
    protocols = Protocols(pair, facts.get("classes") or (), left_out)

    # the numbers of every set
    measured = _measure_sets(
        sets,
        ready,
        protocols,
        start=others.start,
        known_as=known_as,
        device=device,
        say=say,
        progress=progress,
    )
    failed = [name for name in others.names if name in measured.incomplete]
    left_out += [f"{n}: {why}" for n, why in measured.incomplete.items() if n not in failed]
    rows = [each.to_json() for each in measured.numbers]
    labels = pair[1].labels.cpu().numpy()
    scores = Scores({}, labels[has_a_partner(labels)])
    for each in measured.numbers:
        scores.take(each)

    # the answers
    compared = _compare(measured, scores, others, known_classes=protocols.known_classes)
    not_embedded = [f"Not compared with {name}: {measured.incomplete[name]}." for name in failed]
    report = {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        "columns": protocols.columns(),
        "rows": rows,
        "left_out": list(dict.fromkeys([*not_measured, *left_out])),
        "against": compared.networks,
        "baselines": compared.baselines,
        "not_compared": [*others.missing, *not_embedded, *compared.unmet],
    }
    if measured.incomplete:
        report["incomplete"] = measured.incomplete
    if measured.start_uniformity is not None:
        report["start_uniformity"] = measured.start_uniformity
    if leaks is not None:
        report["leakage"] = leakage_of(
            measured.numbers, leaks, protocols.scored_ids(), classes=scores.classes
        )
    report["verdict"] = verdict(report)
    return {**report, "sha256": content_sha256(report)}


@dataclass
class _MeasuredSets:
    """What was measured of the sets, in their order.

    Attributes:
        by_set: The numbers of each set that is measured, by its name.
        incomplete: Why the others are missing, by their names.
        start_uniformity: Of the start's test features.
    """

    by_set: dict[str, list[Measured]] = field(default_factory=dict)
    incomplete: dict[str, str] = field(default_factory=dict)
    start_uniformity: float | None = None

    @property
    def numbers(self) -> list[Measured]:
        """Those of all sets, in their order."""
        return [each for of_set in self.by_set.values() for each in of_set]


def _measure_sets(
    sets: Mapping[str, Pair | Callable[[], Pair]],
    ready: Mapping[str, Pair],
    protocols: Protocols,
    *,
    start: str | None,
    known_as: str | None,
    device: torch.device | str,
    say: Callable[[str], None],
    progress: Progress,
) -> _MeasuredSets:
    """Measure the sets in their order; one that fails is missing, but the first one must succeed.

    After Ctrl-C those that are left are missing. `ready` has the sets that need not be made, of
    labelled samples only; the other arguments are as in `run_suite`.
    """
    first = next(iter(ready))
    titles = {name: name for name in sets} | {first: known_as or first}
    measured = _MeasuredSets()

    def measure(name: str, source: Pair | Callable[[], Pair]) -> list[Measured]:
        """Measure a set; the features that it makes are freed before the next one's are made."""
        if callable(source):
            pair = _labelled(source(), protocols.left_out, device)
            _check_same_samples({first: ready[first], name: pair})
        else:
            pair = ready[name]
        protocols.left_out.extend(_without_direction(name, pair))
        if name == start:
            rows = pair[1].features
            measured.start_uniformity = uniformity(rows[:: 1 + len(rows) // MOST_SPREAD])
        return protocols.measure(name, pair, progress, title=titles[name], use_up=callable(source))

    try:
        for name, source in sets.items():
            try:
                measured.by_set[name] = measure(name, source)
            except FAILURES as error:
                if name == first:
                    raise
                measured.incomplete[name] = one_line(str(error) or type(error).__name__)
    except KeyboardInterrupt:  # what was measured is kept; a second one ends it
        if not measured.by_set:
            raise
        missed = (name for name in sets if name not in {*measured.by_set, *measured.incomplete})
        measured.incomplete |= dict.fromkeys(missed, "interrupted")
        say(f"interrupted; kept: {', '.join(titles[name] for name in measured.by_set)}")
    return measured


class _Compared(NamedTuple):
    """Ours against others, as rows of `compare_all`.

    Attributes:
        networks: Against other networks.
        baselines: Against random weights and pixels.
        unmet: A sentence where some cannot be compared.
    """

    networks: list[dict[str, Any]]
    baselines: list[dict[str, Any]]
    unmet: list[str]


def _compare(
    measured: _MeasuredSets, scores: Scores, others: Others, *, known_classes: bool
) -> _Compared:
    """Compare ours with other networks, and with baselines: two questions, answered apart."""
    ours = [name for name in measured.by_set if name not in (*others.names, *BASELINES)]
    networks = [name for name in others.names if name in measured.by_set]
    baselines = [name for name in BASELINES if name in measured.by_set]

    def compare() -> list[list[dict[str, Any]]]:
        return [
            compare_all(ours, theirs, others.start, scores, known_classes=known_classes)
            for theirs in (networks, baselines)
        ]

    try:
        against_networks, against_baselines = compare()
    except KeyboardInterrupt:  # all is measured, and this takes seconds; a second one ends it
        against_networks, against_baselines = compare()
    met = {row["against"] for row in (*against_networks, *against_baselines)}
    unmet = [name for name in (*networks, *baselines) if ours and name not in met]
    named = " and ".join(BASELINES.get(name, name) for name in unmet)
    return _Compared(
        networks=against_networks,
        baselines=against_baselines,
        unmet=[_NOTHING_TO_COMPARE.format(named)] if unmet else [],
    )


def check_labelled(split: str, labels: NDArray[np.int64]) -> None:
    """Raise DataError where no sample of a split has a label; before it is embedded, too."""
    if (labels < 0).all():
        raise DataError(
            f"none of the {len(labels)} samples of {split} has a label: kNN, linear probes, "
            "retrieval and verification need the class of some; build shards with class folders or "
            "a CSV file"
        )


def _labelled(pair: Pair, left_out: list[str], device: torch.device | str) -> Pair:
    """Move the rows of both sides that have a label; the others are counted in `left_out`."""
    sides = []
    for side, rows in zip(("train", "test"), pair, strict=True):
        check_labelled(side, rows.labels.cpu().numpy())
        unlabelled = int((rows.labels < 0).sum())
        total = len(rows.ids)
        if unlabelled:
            left_out.append(f"{unlabelled} of {total} {side} samples, which have no label")
            rows = rows.rows(torch.nonzero(rows.labels >= 0).flatten())
        sides.append(rows.to(device))
    return sides[0], sides[1]


def _without_direction(name: str, pair: Pair) -> list[str]:
    """Return sentences on features that are all zeros: every cosine with them is 0."""
    counts = [int((rows.features == 0).all(dim=1).sum()) for rows in pair]
    return [
        f"the direction of {count:,} of {len(rows.ids):,} {side} samples by {name}, whose features "
        "are all zeros: the order of ids decides what is nearest"
        for side, rows, count in zip(("train", "test"), pair, counts, strict=True)
        if count
    ]


def _check_same_samples(sets: Mapping[str, Pair]) -> None:
    if not sets:
        raise DataError("no set of features to evaluate")
    first_name, first = next(iter(sets.items()))
    for name, pair in sets.items():
        train, test = pair
        check_pair(train, test)
        for side, rows, first_rows in zip(("train", "test"), pair, first, strict=True):
            same_ids = torch.equal(rows.ids, first_rows.ids)
            if not (same_ids and torch.equal(rows.labels, first_rows.labels)):
                raise DataError(
                    f"{side} features of {name!r} and {first_name!r} are not of the same samples; "
                    "embed the same split with both"
                )


def leakage_of(
    measured: Iterable[Measured],
    leaks: Leaks,
    scored: Mapping[str, NDArray[np.int64]],
    classes: NDArray[np.int64],
) -> dict[str, Any]:
    """Return what eval.json has of leaks: the table's numbers without the leaked samples, too.

    `scored` maps a column to the (Q,) ids of the test samples that it scores; `classes` are the
    (q,) labels of those that retrieval inside test scores.
    """
    clean = {column: ~np.isin(ids, leaks.ids) for column, ids in scored.items()}
    rows = []
    for each in measured:
        if each.column is None:
            continue
        result = each.result
        kept = clean[each.column]
        of_classes = classes if result.metric in PER_QUERY else None
        value, interval = _restricted(result, kept, of_classes)
        row = {
            "features": each.features,
            "whitened": each.whitened,
            "column": each.column,
            "protocol": result.protocol,
            "value": result.value,
            "queries": result.queries,
            "interval95": list(result.interval95),
            "clean_interval95": interval,
            "clean_value": value,
            "clean_queries": int(kept.sum()),
        }
        if each.whitened:
            row["power"] = each.power
        rows.append(row)
    leaked_here = int((~clean[KNN]).sum())
    return {"samples": len(clean[KNN]), "leaked": leaked_here, "how": leaks.how, "rows": rows}


def _restricted(
    result: Result, kept: NDArray[np.bool_], classes: NDArray[np.int64] | None
) -> tuple[float | None, list[float] | None]:
    """The number over some of its queries, and its interval as in `result`."""
    if not kept.any():
        return None, None
    assert result.scores is not None
    scores = result.scores[..., kept]
    if scores.ndim > 1:  # of several draws
        return float(scores.mean(axis=1).mean()), list(bootstrap95(scores))
    if classes is not None:  # of retrieval
        (interval,), _ = means95(scores[:, None], classes[kept])
        return float(scores.mean()), list(interval)
    right = int(scores.sum())
    total = len(scores)
    return right / total, list(wilson95(right, total))
