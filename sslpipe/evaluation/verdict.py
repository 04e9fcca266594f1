"""Say first whether features are better than what costs nothing: random weights, raw pixels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.evaluation.result import Z95, Interval

Tree = dict[str, Any]  # a row of eval.json: a Result with features, whitened and column

BASELINES = {"random": "random weights", "pixels": "raw pixels"}
KNN, LINEAR = "kNN", "linear"  # columns of eval.json
_COMPARED = ((KNN, False), (LINEAR, False), (KNN, True))  # column, whitened

Hits = Mapping[tuple[str, bool, str], NDArray[np.bool_]]  # (features, whitened, column) -> (Q,)


def paired_difference95(
    ours: NDArray[np.bool_], theirs: NDArray[np.bool_]
) -> tuple[float, Interval]:
    """Compare two accuracies on the same samples: difference and its 95 % interval.

    Args:
        ours: (Q,) which samples are right.
        theirs: (Q,) the same for the other features.

    Source:
        Agresti and Min 2005, Statistics in Medicine 24:729, section 2.2: the Wald interval after
        half a sample is added to each cell of the 2 x 2 table.
    """
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    total, more = len(ours) + 2, only_ours - only_theirs
    either = only_ours + only_theirs + 1
    half = Z95 * math.sqrt(max(0.0, either - more**2 / total)) / total
    return more / len(ours), (max(-1.0, more / total - half), min(1.0, more / total + half))


def unpaired_difference95(ours: Tree, theirs: Tree) -> tuple[float, Interval]:
    """Compare two accuracies of which only the intervals are known, as if of different samples.

    Source:
        Newcombe 1998, Statistics in Medicine 17:873, method 10.
    """
    p, (low, high) = ours["value"], ours["interval95"]
    q, (their_low, their_high) = theirs["value"], theirs["interval95"]
    down, up = math.hypot(p - low, their_high - q), math.hypot(high - p, q - their_low)
    return p - q, (p - q - down, p - q + up)


def comparisons(rows: Sequence[Tree], hits: Hits | None = None) -> list[Tree]:
    """Compare all features with each baseline by kNN, linear probe and whitened kNN.

    Args:
        rows: Those of eval.json.
        hits: Which samples were right, where known: the interval is then a paired one.

    Returns:
        A plain value each: features, baseline, column, whitened, value, baseline_value, difference,
        interval95 (of the difference), paired.
    """
    hits = hits or {}
    cells = {
        (row["features"], row["whitened"], row["column"]): row for row in rows if row["column"]
    }
    found = []
    for features in dict.fromkeys(name for name, *_ in cells if name not in BASELINES):
        for baseline in BASELINES:
            for column, whitened in _COMPARED:
                ours = (features, whitened, column)
                theirs = (baseline, whitened, column)
                if ours not in cells or theirs not in cells:
                    continue
                paired = ours in hits and theirs in hits
                difference, interval = (
                    paired_difference95(hits[ours], hits[theirs])
                    if paired
                    else unpaired_difference95(cells[ours], cells[theirs])
                )
                found.append(
                    {
                        "features": features,
                        "baseline": baseline,
                        "column": column,
                        "whitened": whitened,
                        "value": cells[ours]["value"],
                        "baseline_value": cells[theirs]["value"],
                        "difference": difference,
                        "interval95": list(interval),
                        "paired": paired,
                    }
                )
    return found


def verdict(evaluation: Tree) -> str:
    """Say in a sentence for each kind of features whether it beats the baselines, and by how much.

    Args:
        evaluation: eval.json, or what becomes it; its own `comparisons` are used where it has them.
    """
    if not any(row["column"] in (KNN, LINEAR) for row in evaluation["rows"]):
        return "No accuracy was measured, so nothing is known about how good the features are."
    compared = evaluation.get("comparisons") or comparisons(evaluation["rows"])
    names = list(dict.fromkeys(c["features"] for c in compared))
    if not any(c["baseline"] == "random" for c in compared):
        unknown = (
            "Whether the features are better than random weights is not known: that baseline was "
            "not measured."
        )
        return " ".join([unknown, *(_sentence(compared, name, len(names) > 1) for name in names)])
    return " ".join(_sentence(compared, name, len(names) > 1) for name in names)


def _sentence(compared: Sequence[Tree], features: str, named: bool) -> str:
    clauses: list[str] = []
    for baseline, words in BASELINES.items():
        own = [c for c in compared if (c["features"], c["baseline"]) == (features, baseline)]
        if own:
            clauses.append(f"{_relation(own, words)}: {_numbers(own, first=not clauses)}")
    text = "; ".join(clauses) + "."
    return f"{features}: {text}" if named else text[0].upper() + text[1:]


def _relation(own: Sequence[Tree], words: str) -> str:
    """Say "better than", "no better than" or "worse than", and by what where that differs."""
    better = [_name(c) for c in own if c["interval95"][0] > 0]
    worse = [_name(c) for c in own if c["interval95"][1] < 0]
    if len(better) == len(own):
        return f"better than {words}"
    if len(worse) == len(own):
        return f"worse than {words}"
    below = f", worse by {' and '.join(worse)}" if worse else ""
    if better:
        return f"better than {words} only by {' and '.join(better)}{below}"
    return f"no better than {words}{below}"


def _numbers(own: Sequence[Tree], *, first: bool) -> str:
    said = []
    for place, c in enumerate(own):
        low, high = (100 * end for end in c["interval95"])
        points, interval = (" points", "95 % interval ") if first and not place else ("", "")
        said.append(
            f"{_name(c)} {100 * c['value']:.1f} against {100 * c['baseline_value']:.1f} % "
            f"({100 * c['difference']:+.1f}{points}, {interval}{low:+.1f} to {high:+.1f})"
        )
    return ", ".join(said)


def _name(comparison: Tree) -> str:
    return ("whitened " if comparison["whitened"] else "") + str(comparison["column"])
