"""Numbers by a column of the data set: who may not find whom, and how the worst value fares.

A `GroupCodes` says which value of one column each row of bank and queries has. A missing value
knows nothing: it equals no other, so it excludes no row, and it is no group of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sslpipe.data.columns import is_missing
from sslpipe.data.index import Split
from sslpipe.errors import DataError
from sslpipe.evaluation.difference import Interval, bootstrap95, wilson95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.result import Result, caveats

LEAST_QUERIES = 20  # of a value that is scored by itself: below, an interval spans most of [0, 1]
MOST_FITS = 64  # of a probe that is fitted again for each value
RESAMPLES = 500  # of a value's queries and draws
FIT_DETAILS = ("C", "penalty", "C_at_edge", "penalty_at_edge", "converged")

Integers = NDArray[np.int64]


class GroupCodes(NamedTuple):
    """The value of one column that each row has.

    `bank` (N,) and `queries` (Q,) are codes by row, -1 where the value is missing; `values` says
    what each code stands for.
    """

    name: str
    bank: Integers
    queries: Integers
    values: tuple[str, ...]

    def check(self, bank: Embeddings, queries: Embeddings) -> None:
        """Raise DataError where these are not the codes of such rows."""
        sizes = (len(self.bank), len(self.queries))
        if sizes != (len(bank.ids), len(queries.ids)):
            raise DataError(
                f"column {self.name!r} has codes of {sizes[0]} and {sizes[1]} rows, and there are "
                f"{len(bank.ids)} rows of the bank and {len(queries.ids)} queries"
            )

    def of_queries(self, rows: slice | NDArray[np.bool_]) -> "GroupCodes":
        """Keep some of the queries."""
        return self._replace(queries=self.queries[rows])


def group_codes(
    name: str, bank: tuple[Split, ArrayLike], queries: tuple[Split, ArrayLike]
) -> GroupCodes:
    """Look up a text, integer or time column for some ids of one or two splits of a data set.

    That there is no such column, or it holds floats, is a DataError.
    """
    column = bank[0].column(name)
    if column.kind == "float":
        raise DataError(
            f"column {name!r} holds floats, which make no groups; give a text, integer or time"
        )
    sides = [
        split.column(name).values_of(np.asarray(ids, np.int64)).astype(np.int64)
        for split, ids in (bank, queries)
    ]
    stored = np.concatenate(sides)
    there = ~is_missing(column.kind, stored)
    known, place = np.unique(stored[there], return_inverse=True)
    codes = np.full(len(stored), -1, np.int64)
    codes[there] = place
    first, second = np.split(codes, [len(sides[0])])
    return GroupCodes(name, first, second, tuple(map(column.show_value, known.tolist())))


def hidden_ids(
    bank: Embeddings, queries: Embeddings, *, same_id: bool, same: GroupCodes | None
) -> tuple[Tensor | None, Tensor | None]:
    """Number the rows, (N,) and (Q,) int64, so that a query finds none of its own number.

    That is the row of its own id with `same_id`, and all rows of its value of `same`; None and None
    where nothing is excluded.
    """
    if same is None:
        return (bank.ids, queries.ids) if same_id else (None, None)
    same.check(bank, queries)
    sides = []
    for side, (rows, codes) in enumerate(((bank, same.bank), (queries, same.queries))):
        numbers = torch.from_numpy(codes).to(rows.ids.device)
        # without a value: nothing is excluded (two numbers), or the row itself (its id's number)
        own = -2 - rows.ids if same_id else torch.full_like(numbers, -1 - side)
        sides.append(torch.where(numbers < 0, own, numbers))
    return sides[0], sides[1]


def check_room(k: int, same: GroupCodes | None) -> None:
    """Raise DataError where a query finds fewer than k rows without those of its own value."""
    if same is None:
        return
    sizes = np.bincount(same.bank[same.bank >= 0], minlength=len(same.values))
    sizes[~np.isin(np.arange(len(sizes)), same.queries)] = 0  # that no query excludes
    left = len(same.bank) - int(sizes.max(initial=0))
    if k > left:
        value = same.values[int(sizes.argmax())]
        raise DataError(
            f"k = {k}: without the rows of {same.name} = {value} its queries may find {left} of "
            f"{len(same.bank)} rows of the bank; "
            + (f"use k <= {left}" if left else "leave those queries out, or name another column")
        )


def by_value(results: Sequence[Result], by: GroupCodes | None) -> list[Result]:
    """Put the worst value of a column beside each accuracy; see `worst_value`."""
    pairs = ((one, None if by is None else worst_value(one, by)) for one in results)
    return [one for pair in pairs for one in pair if one is not None]


def worst_value(
    result: Result,
    by: GroupCodes,
    *,
    draws: NDArray[np.bool_] | None = None,
    least: int = LEAST_QUERIES,
) -> Result:
    """Find the value of a column at which a score is lowest, among those of enough queries.

    The lowest of several measured accuracies was selected, so it is mostly below the lowest true
    one. The interval is therefore simultaneous: each of the G values has one of level 1 - 0.05 / G
    (Bonferroni), and the lowest true accuracy lies between the lowest of their lower and of their
    upper ends. `result` is a mean over queries that score 0 to 1 each; `draws` (draws, queries)
    says which were right in each draw, else its `scores` do. No value with `least` queries is a
    DataError.

    Returns:
        details: "worst", the value; "values", each with mean, queries and its own 95 % interval
        (Wilson's; of several draws the wider of it and a bootstrap), the worst first; "too_few",
        values with fewer than `least` queries; "missing", queries without a value.
    """
    right = result.scores if draws is None else draws
    assert right is not None, f"{result.protocol}: it is not known which queries were right"
    right = np.atleast_2d(right)  # (draws, Q)
    if right.shape[1] != len(by.queries):
        raise DataError(
            f"column {by.name!r} has codes of {len(by.queries)} queries, and "
            f"{right.shape[1]} were scored"
        )
    counts = np.bincount(by.queries[by.queries >= 0], minlength=len(by.values))
    counted = np.flatnonzero(counts >= least)
    if not len(counted):
        raise DataError(
            f"no value of column {by.name!r} has {least} queries, so that none can be scored by "
            f"itself; the most frequent has {counts.max(initial=0)}"
        )
    joint = NormalDist().inv_cdf(1 - 0.025 / len(counted))
    values: dict[str, dict[str, Any]] = {}
    lows, highs = [], []
    for code in counted.tolist():
        hits = right[:, by.queries == code]  # (draws, q)
        own, (low, high) = _intervals(hits, joint)
        lows.append(low)
        highs.append(high)
        each = {"value": float(hits.mean()), "interval95": own, "queries": hits.shape[1]}
        values[by.values[code]] = each
    values = dict(sorted(values.items(), key=lambda named: named[1]["value"]))
    worst = next(iter(values))
    return Result(
        f"{result.protocol} by={by.name}",
        f"{result.metric} of the worst {by.name}",
        values[worst]["value"],
        (min(lows), min(highs)),
        int(counts[counted].sum()),
        result.bank,
        {
            "worst": worst,
            "values": values,
            "least_queries": least,
            "too_few": int(((counts > 0) & (counts < least)).sum()),
            "missing": int((by.queries < 0).sum()),
        },
    )


def worst_sentence(result: Result) -> str:
    """Say what `worst_value` compared, in a sentence."""
    details = result.details
    text = (
        f"{details['worst']} is the worst of {len(details['values'])} values of "
        f"{result.protocol.rpartition(' by=')[2]} with at least {details['least_queries']} "
        "queries; the interval allows for the choice"
    )
    others = {
        "values with fewer queries": details["too_few"],
        "queries without a value": details["missing"],
    }
    return text + "".join(f"; {what}: {number}" for what, number in others.items() if number)


def fit_unlike(
    probe: Callable[[Embeddings, Embeddings], list[Result]],
    train: Embeddings,
    test: Embeddings,
    unlike: GroupCodes,
) -> list[Result]:
    """Score a probe whose every prediction was learned from rows of other values than its own.

    One fit for each value that test has, MOST_FITS at most, on the train rows that do not have it;
    test rows without a value meet a fit on all of train. details["fits"] has each value's accuracy.
    """
    unlike.check(train, test)
    codes = np.unique(unlike.queries)
    if len(codes) > MOST_FITS:
        raise DataError(
            f"column {unlike.name!r} has {len(codes)} values in test, and a probe is fitted for "
            f"each; at most {MOST_FITS}: choose rows with --query, or use knn"
        )
    hits, fitted = np.zeros(len(test.ids), bool), list[Result]()
    fits: dict[str, dict[str, Any]] = {}
    for code in codes.tolist():
        kept = np.flatnonzero((unlike.bank != code) | (code < 0))
        rows = np.flatnonzero(unlike.queries == code)
        name = unlike.values[code] if code >= 0 else "missing"
        if not len(kept):
            raise DataError(f"all of train has {unlike.name} = {name}; nothing is left to fit on")
        (one,) = probe(_rows(train, kept), _rows(test, rows))
        assert one.scores is not None
        hits[rows] = one.scores
        fits[name] = {k: getattr(one, k) for k in ("value", "interval95", "queries", "bank")}
        fitted.append(one)
    doubtful = next((one.details for one in fitted if caveats(one.details)), {})
    kept_details = {key: doubtful[key] for key in doubtful if key in FIT_DETAILS}
    right = int(hits.sum())
    return [
        replace(
            fitted[0],
            protocol=f"{fitted[0].protocol} not-same={unlike.name}",
            value=right / len(hits),
            interval95=wilson95(right, len(hits)),
            queries=len(hits),
            bank=len(train.ids),
            details={**kept_details, "fits": fits},
            scores=hits,
        )
    ]


def _intervals(hits: NDArray[Any], z: float) -> tuple[Interval, Interval]:
    """The 95 % interval of a mean over (draws, queries), and one of z standard deviations."""
    draws, total = hits.shape
    right = float(hits.sum()) / draws  # the mean of a query's draws varies less than one draw
    own, wider = wilson95(right, total), wilson95(right, total, z)
    if draws == 1:
        return own, wider
    drawn, mean = bootstrap95(hits, resamples=RESAMPLES), right / total
    scale = z / NormalDist().inv_cdf(0.975)
    stretched = (mean - scale * (mean - drawn[0]), mean + scale * (drawn[1] - mean))
    return _hull(own, drawn), _hull(wider, stretched)


def _hull(one: Interval, other: Interval) -> Interval:
    return max(0.0, min(one[0], other[0])), min(1.0, max(one[1], other[1]))


def _rows(of: Embeddings, numbers: Integers) -> Embeddings:
    return of.rows(torch.from_numpy(numbers).to(of.ids.device))
