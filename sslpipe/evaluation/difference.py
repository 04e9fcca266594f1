"""The difference of two networks, with an interval of 95 % and a p-value: is one better?

Test images that answer one by one: `paired_top1`. Those of a class stand or fall together:
`paired_means` leaves out whole classes. `holm` holds several comparisons together.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sslpipe.evaluation.intervals import Z95, Floats, Hits, Integers, Interval, jackknife


class Difference(NamedTuple):
    """Ours minus theirs, of two means.

    `interval95` lies in [-1, 1]; `p` is two-sided, below 0.05 just where the interval excludes 0;
    `unit` is what the interval is over: "images", "classes" or "seeds", and `number` how many.
    """

    value: float
    interval95: Interval
    p: float
    unit: str
    number: int


def excludes_zero(interval: Sequence[float]) -> bool:
    """Return whether an interval of shares excludes 0 as it is printed: in points, one decimal.

    So that "better" never stands beside "+0.0 to +1.2".
    """
    low, high = (round(100 * end, 1) for end in interval)
    return low > 0 or high < 0


def paired_top1(one: Hits, other: Hits) -> Difference:
    """Compare two accuracies on the same images, of each of which (Q,) says whether it is right.

    Source:
        Agresti and Min 2005, Statistics in Medicine 24:729, section 2.2: the Wald interval after
        half a sample is added to each cell of the 2 x 2 table.
    """
    only_one = int((one & ~other).sum())
    only_other = int((other & ~one).sum())
    total = len(one) + 2
    more = only_one - only_other
    either = only_one + only_other + 1
    error = math.sqrt(max(0.0, either - more**2 / total)) / total
    interval = _within(more / total, Z95 * error)
    p = math.erfc(abs(more) / total / error / math.sqrt(2))
    return Difference(
        value=more / len(one), interval95=interval, p=p, unit="images", number=len(one)
    )


def paired_means(one: Floats, other: Floats, classes: Integers) -> Difference:
    """Compare two means over the same queries by leaving out a class at a time: see `jackknife`.

    `one` and `other` are (Q,) in [0, 1]; `classes` (Q,) labels, of two classes or more.
    """
    from scipy.special import stdtr  # here: the import takes 0.15 s

    mean = jackknife(one - other, classes)
    interval = _within(mean.value, mean.half95)
    p = float(mean.value == 0)
    if mean.error != 0:  # else the same difference everywhere
        p = float(2 * stdtr(mean.groups - 1, -abs(mean.value) / mean.error))
    return Difference(
        value=mean.value, interval95=interval, p=p, unit="classes", number=mean.groups
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of several comparisons: those up to 0.05 hold together at 5 %.

    Source:
        Holm 1979, Scandinavian Journal of Statistics 6:65.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def _within(centre: float, half: float) -> Interval:
    return max(-1.0, centre - half), min(1.0, centre + half)
