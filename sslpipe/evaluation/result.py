"""What every evaluation returns, and the 95 % interval beside each number."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
MOST_KEPT = 2**22  # numbers of resamples that are drawn once, 32 MB

Interval = tuple[float, float]


@dataclass(frozen=True)
class Result:
    """One number and what is needed to compare it with another.

    Args:
        protocol: Names everything that decides the number but the features and the data, as in
            "knn-weighted k=20 T=0.07 cosine"; two results compare only where it is the same.
        metric: "top1", "auc", ...
        value: In [0, 1] where unit is "share".
        interval95: Over test samples (and draws of labels, where there are any); of retrieval, over
            classes where the protocol says so.
        queries: Test samples scored, each counted once.
        bank: Labelled train samples used.
        details: Chosen C, per-class accuracy, confusion matrix, spread over draws: plain JSON
            values.
        unit: "share" or "number".
        scores: (queries,) what each scored, `value` their mean: bool, which were right, or float64;
            None for some draws, and where a query has no score of its own. Not in the JSON.
        draw_hits: (draws, queries) bool, of a mean over draws. Not in the JSON.
    """

    protocol: str
    metric: str
    value: float
    interval95: Interval
    queries: int
    bank: int
    details: dict[str, Any] = field(default_factory=dict)
    unit: Literal["share", "number"] = "share"
    scores: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    draw_hits: NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        low, high = self.interval95
        bank = f", bank of {self.bank}" if self.bank else ""
        return (
            f"{self.protocol}: {self.metric} {self.value:.4g} [{low:.4g}, {high:.4g}], "
            f"{self.queries} queries{bank}"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values, all fields but those of queries by their names."""
        tree = asdict(replace(self, scores=None, draw_hits=None))
        del tree["scores"], tree["draw_hits"]
        return tree


def caveats(details: Mapping[str, Any]) -> list[str]:
    """List what a reader should know of how a number was fitted; mostly nothing."""
    sentences = [
        f"{name} = {details[name]:g} is at the edge of its grid, which may be too narrow"
        for name in ("C", "penalty", "rate")
        if details.get(f"{name}_at_edge")
    ]
    return sentences if details.get("converged", True) else [*sentences, "the fit did not converge"]


def measured_columns(evaluation: Mapping[str, Any]) -> list[str]:
    """List the columns of eval.json's table that have a number, in order."""
    filled = {row["column"] for row in evaluation["rows"]}
    return [column for column in evaluation["columns"] if column in filled]


def accuracy(
    protocol: str,
    predicted: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    bank: int,
    **details: Any,
) -> Result:
    """Count right predictions, with Wilson's interval. predicted, labels: (Q,) int64."""
    hits = predicted == labels
    right, total = int(hits.sum()), len(labels)
    interval = wilson95(right, total)
    return Result(protocol, "top1", right / total, interval, total, bank, details, scores=hits)


def wilson95(right: float, total: int, z: float = Z95) -> Interval:
    """Compute Wilson's score interval of a share; within [0, 1] also at 0 % and 100 %.

    Args:
        right: Of `total`.
        total: Samples.
        z: The normal distribution's quantile; another one gives another level than 95 %.

    Source:
        Wilson 1927, JASA 22(158), as in Brown, Cai and DasGupta 2001, eq. 4.
    """
    share, z2 = right / total, z**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = z / (1 + z2 / total) * np.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def bootstrap95(right: NDArray[np.bool_], *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Compute a percentile interval of the mean over draws and queries, both resampled.

    Args:
        right: (draws, queries), whether each query was predicted right in each draw.
        resamples: How many.
        seed: Of the resamples.
    """
    draws, queries = right.shape
    means = np.empty(resamples)
    hits = right.astype(np.float64)  # BLAS multiplies floats only; whole numbers stay exact
    resample = _resampled_once if resamples * queries <= MOST_KEPT else _resampled
    for number, (weights, times) in enumerate(resample(draws, queries, resamples, seed)):
        means[number] = weights @ (hits @ times) / queries
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


Resample = tuple[NDArray[np.float64], NDArray[np.float64]]


def _resampled(draws: int, queries: int, resamples: int, seed: int) -> Iterator[Resample]:
    """Weights of the draws, and how often each query is taken, one resample at a time."""
    generator = np.random.default_rng(seed)
    per_draw = generator.multinomial(draws, np.full(draws, 1 / draws), size=resamples) / draws
    for weights in per_draw:
        times = np.bincount(generator.integers(queries, size=queries), minlength=queries)
        yield weights, times.astype(np.float64)


@lru_cache(maxsize=2)
def _resampled_once(draws: int, queries: int, resamples: int, seed: int) -> list[Resample]:
    """`_resampled`, kept: a suite's results are all of the same queries."""
    return list(_resampled(draws, queries, resamples, seed))


def bootstrap_means95(
    values: NDArray[np.float64], *, resamples: int = 1000, seed: int = 0
) -> list[Interval]:
    """Compute percentile intervals of the columns' means over resampled rows (rows, columns)."""
    generator = np.random.default_rng(seed)
    rows = len(values)
    means = np.empty((resamples, values.shape[1]))
    for resample in range(resamples):
        times = np.bincount(generator.integers(rows, size=rows), minlength=rows)
        means[resample] = times @ values / rows
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
