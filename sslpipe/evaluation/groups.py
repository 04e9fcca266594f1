"""Numbers by a column of the data set: who may not find whom, and how the worst value fares.

A missing value knows nothing: it equals no other, so it excludes no row, and it is no group.
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import is_missing
from sslpipe.data.index import Split
from sslpipe.errors import DataError
from sslpipe.evaluation.difference import wilson95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import Hidden
from sslpipe.evaluation.result import Result

LEAST_QUERIES = 20  # of a value that is scored by itself: below, an interval spans most of [0, 1]

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

    Raises:
        DataError: There is no such column, or it holds floats.
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
) -> Hidden:
    """Number the rows, (N,) and (Q,), so that a query finds none of its own number.

    That is the row of its own id with `same_id`, and all rows of its value of `same`.
    """
    if same is None:
        return (bank.ids, queries.ids) if same_id else None
    same.check(bank, queries)
    sides = []
    for side, (rows, codes) in enumerate(((bank, same.bank), (queries, same.queries))):
        numbers = torch.from_numpy(codes).to(rows.ids.device)
        # without a value: nothing is excluded (two numbers), or the row itself (its id's number)
        own = -2 - rows.ids if same_id else torch.full_like(numbers, -1 - side)
        sides.append(torch.where(numbers < 0, own, numbers))
    return sides[0], sides[1]


def by_value(results: Sequence[Result], by: GroupCodes | None) -> list[Result]:
    """Put the worst value of a column beside each accuracy; see `worst_value`."""
    pairs = ((one, None if by is None else worst_value(one, by)) for one in results)
    return [one for pair in pairs for one in pair if one is not None]


def worst_value(result: Result, by: GroupCodes) -> Result:
    """Find the value of a column at which a score is lowest, among those of enough queries.

    The lowest of several measured accuracies was selected, so it is mostly below the lowest true
    one. The interval is therefore simultaneous: each of the G values has one of level 1 - 0.05 / G
    (Bonferroni), and the lowest true accuracy lies between the lowest of their lower and of their
    upper ends. `result` is a mean over queries whose `scores` are 0 to 1.

    Returns:
        details: "worst", the value; "values", each with mean, queries and its own 95 % interval
        (Wilson's), the worst first; "too_few", values with fewer than LEAST_QUERIES; "missing",
        queries without a value.

    Raises:
        DataError: No value has LEAST_QUERIES.
    """
    assert result.scores is not None, f"{result.protocol}: queries have no scores of their own"
    if len(result.scores) != len(by.queries):
        raise DataError(
            f"column {by.name!r} has codes of {len(by.queries)} queries, and "
            f"{len(result.scores)} were scored"
        )
    counts = np.bincount(by.queries[by.queries >= 0], minlength=len(by.values))
    counted = np.flatnonzero(counts >= LEAST_QUERIES)
    if not len(counted):
        raise DataError(
            f"no value of column {by.name!r} has {LEAST_QUERIES} queries, so that none can be "
            f"scored by itself; the most frequent has {counts.max(initial=0)}"
        )
    joint = NormalDist().inv_cdf(1 - 0.025 / len(counted))
    values: dict[str, dict[str, Any]] = {}
    lows, highs = [], []
    for code in counted.tolist():
        hits = result.scores[by.queries == code]  # (q,)
        right, total = float(hits.sum()), len(hits)
        low, high = wilson95(right, total, joint)
        lows.append(low)
        highs.append(high)
        each = {"value": float(hits.mean()), "interval95": wilson95(right, total), "queries": total}
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
            "least_queries": LEAST_QUERIES,
            "too_few": int(((counts > 0) & (counts < LEAST_QUERIES)).sum()),
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
