"""What every evaluation returns."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import counted, did_you_mean
from sslpipe.evaluation.intervals import Interval, wilson95

GUESSED_ACCURACY = 0.55  # of one answer for all pairs: from here on it is said beside the accuracy


@dataclass(frozen=True, repr=False)
class Result:
    """One number and what is needed to compare it with another.

    Args:
        protocol: Names everything that decides the number but the features and the data, as in
            "knn-weighted k=20 T=0.07 cosine"; two results compare only where it is the same.
        metric: "top1", "auc", ...
        value: In [0, 1] where unit is "share".
        interval95: Over test samples and draws of labels, or classes where the protocol says so.
        queries: Test samples scored, each counted once.
        bank: Labelled train samples used.
        details: Chosen C, confusion matrix, spread over draws and so on: plain JSON values.
        unit: "share" or "number".
        scores: (queries,) what each scored, bool or float64, or (draws, queries) of a mean over
            draws; `value` is their mean. None where a query has no score of its own. Not in the
            JSON.
    """

    protocol: str
    metric: str
    value: float
    interval95: Interval
    queries: int
    bank: int
    details: dict[str, Any] = field(default_factory=dict)
    unit: Literal["share", "number"] = "share"
    scores: NDArray[Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return the number in a line, with what it was measured by."""
        low, high = self.interval95
        bank = f", bank of {self.bank}" if self.bank else ""
        return (
            f"{self.protocol}: {self.metric} {self.value:.4g} [{low:.4g}, {high:.4g}], "
            f"{self.queries} queries{bank}"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values, all fields but those of queries by their names."""
        tree = asdict(replace(self, scores=None))
        del tree["scores"]
        return tree


class Results(dict[str, Result]):
    """Results of one protocol by their metrics; shown as the protocol, and a line each."""

    def __repr__(self) -> str:
        lines = [
            f"{metric} {each.value:.4g} [{each.interval95[0]:.4g}, {each.interval95[1]:.4g}]"
            for metric, each in self.items()
        ]
        for first in list(self.values())[:1]:
            bank = f", bank of {first.bank}" if first.bank else ""
            lines.insert(0, f"{first.protocol}: {first.queries} queries{bank}")
        return "\n".join(lines)

    def __missing__(self, metric: str) -> Result:
        """Raise KeyError with the nearest metric, and all."""
        near = did_you_mean(str(metric), self)
        raise KeyError(f"no metric {metric!r}{near}; there are: {', '.join(self)}")


class Measured(NamedTuple):
    """A number of the suite: of which features, in which form, and where it stands."""

    features: str
    power: float | None  # that flattens them; None: plain
    column: str | None  # of the table; None: not in it
    result: Result

    @property
    def whitened(self) -> bool:
        """Whether the features were flattened."""
        return self.power is not None

    def to_json(self) -> dict[str, Any]:
        """Convert to a row of eval.json."""
        form = {"whitened": True, "power": self.power} if self.whitened else {"whitened": False}
        return {"features": self.features, **form, "column": self.column, **self.result.to_json()}


def caveats(details: Mapping[str, Any]) -> list[str]:
    """List what a reader should know of how a number was made; mostly nothing."""
    sentences = []
    if details.get("C_at_edge"):
        sentences.append(
            f"C = {details['C']:g} is at the edge of its grid, which may be too narrow"
        )
    if not details.get("converged", True):
        sentences.append("the fit did not converge")
    if alone := details.get("classes_of_one"):
        sentences.append(f"{counted(alone, 'class')} of one train row had no part in choosing C")
    if "folds" in details:
        kinds = (details["same_pairs"], details["different_pairs"])
        answer = "yes" if kinds[0] > kinds[1] else "no"
        guessed = max(kinds) / sum(kinds)
        if guessed > GUESSED_ACCURACY:
            sentences.append(
                f'of {kinds[0]:,} pairs of one label and {kinds[1]:,} of two, "{answer}" for all '
                f"has an accuracy of {100 * guessed:.1f} %: read auc and tar instead"
            )
    return sentences


def measured_columns(evaluation: Mapping[str, Any]) -> list[str]:
    """List the columns of eval.json's table that have a number, in order."""
    filled = {row["column"] for row in evaluation["rows"]}
    return [column for column in evaluation["columns"] if column in filled]


def query_counts(evaluation: Mapping[str, Any], noun: str) -> str:
    """Return of how many test samples the table is: "407 NOUN (linear: 337)" where columns differ.

    A number that needs some rows of a class in train leaves out the queries of smaller classes.
    """
    counts = {row["column"]: row["queries"] for row in evaluation["rows"]}
    columns = measured_columns(evaluation)
    first = counts[columns[0]] if columns else 0
    others = [f"{each}: {counts[each]:,}" for each in columns if counts[each] != first]
    return f"{first:,} {noun}" + (f" ({', '.join(others)})" if others else "")


def accuracy(
    protocol: str,
    predicted: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    bank: int,
    details: Mapping[str, Any] = MappingProxyType({}),
) -> Result:
    """Count right predictions, with Wilson's interval. predicted, labels: (Q,) int64."""
    hits = predicted == labels
    right = int(hits.sum())
    total = len(labels)
    interval = wilson95(right, total)
    return Result(
        protocol=protocol,
        metric="top1",
        value=right / total,
        interval95=interval,
        queries=total,
        bank=bank,
        details=dict(details),
        scores=hits,
    )
