"""Say whether features are better than those of weights that one could have used instead.

The answer stands on one measure, fixed before test is looked at: kNN top-1 with all labels (k = 20,
as in the table), or Recall@1 inside test where train has not the classes of most test samples. Both
networks are taken in the same form, as they are or whitened: the one in which the two together
score more. That choice favours neither, as it would be the same if they changed places. Nobody wins
by scale, which `sslpipe whiten` corrects without training: the answer must also be clear where the
network that is behind is taken in its other form, and the difference of both in the other form must
not be of the other sign. All must hold, so the largest p-value counts and the forms need no further
correction. Other measures have intervals and no answer.

The words are for all comparisons of an eval.json together, by Holm's method at 5 %; each interval
is a 95 % one of its own comparison. They are about new test samples, not about other trainings.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.evaluation.difference import holm, paired_means, paired_top1
from sslpipe.evaluation.result import Result

Tree = dict[str, Any]

KNN, LINEAR, RECALL, MAP = "kNN", "linear", "Recall@1", "MAP@R"
PER_QUERY = {"Recall@1": RECALL, "map_at_r": MAP}  # metrics of retrieval that are compared
LEVEL = 0.05


class Scores(NamedTuple):
    """What each test sample scored.

    `of` maps (features, whitened, measure) to (Q,) bool of "kNN" and "linear", to (q,) float64 of
    "Recall@1" and "MAP@R"; `classes` are the (q,) labels of the retrieval's queries.
    """

    of: dict[tuple[str, bool, str], NDArray[Any]]
    classes: NDArray[np.int64]

    def take(self, features: str, whitened: bool, column: str | None, result: Result) -> None:
        """Take a result, with its column in the table, if it is one that is compared."""
        measure = PER_QUERY.get(result.metric, column)
        if result.scores is not None and measure is not None:
            self.of[features, whitened, measure] = result.scores


def has_a_match(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which rows retrieval inside a split scores: their class has two. (n,) -> (n,)."""
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    found: NDArray[np.bool_] = counts[places] > 1
    return found


def compare_all(
    names: Sequence[str],
    others: Sequence[str],
    start: str | None,
    scores: Scores,
    *,
    known_classes: bool,
) -> list[Tree]:
    """Compare each of our features with each other network's, on every measure there is.

    `start` is the network that the run started from; `known_classes` says whether train has the
    classes of most test samples. Rows are those of `suite_file`; of two networks the one that
    decides is first.
    """
    found: list[Tree] = []
    joint_p: list[float] = []  # of the deciding rows
    for pair in product(names, others):
        rows = [
            row
            for measure in [KNN, LINEAR] * known_classes + [RECALL, MAP]
            for form in (False, True)
            if (row := _compare(scores, pair, (form, form), measure)) is not None
        ]
        if not rows:
            continue
        deciding, p = _decide(scores, [row for row in rows if row["measure"] == rows[0]["measure"]])
        joint_p.append(p)
        rows.sort(key=lambda row: row is not deciding)
        found += [row | {"start": pair[1] == start, "primary": row is deciding} for row in rows]
    primary = [row for row in found if row["primary"]]
    for row, p in zip(primary, holm(joint_p), strict=True):
        answer = "better" if row["difference"] > 0 else "worse"
        row["p_holm"], row["of"] = p, len(primary)
        row["answer"] = answer if p <= LEVEL else "no clear difference"
    return found


def _decide(scores: Scores, forms: Sequence[Tree]) -> tuple[Tree, float]:
    """Choose the form that decides, and the p-value of an answer that scale does not make."""
    # the form in which both together score more: it stays the same if the two change places
    deciding = max(forms, key=lambda row: row["value"] + row["against_value"])
    p, ahead = deciding["p"], deciding["difference"] > 0
    for other in forms:
        if other is deciding:
            continue
        # whoever is behind may be taken in the other form, too
        mixed = (deciding, other) if ahead else (other, deciding)
        pair = (deciding["features"], deciding["against"])
        crossed = _compare(
            scores, pair, (mixed[0]["whitened"], mixed[1]["whitened"]), deciding["measure"]
        )
        assert crossed is not None
        signs = {np.sign(row["difference"]) for row in (deciding, crossed, other)} - {0}
        p = max(p, crossed["p"]) if len(signs) < 2 else 1.0
        deciding["other_form_value"] = crossed["against_value" if ahead else "value"]
        deciding["other_form_difference"] = other["difference"]
    return deciding, p


def _compare(
    scores: Scores, pair: tuple[str, str], forms: tuple[bool, bool], measure: str
) -> Tree | None:
    """Both values and their difference; None where one was not measured, or is of one class."""
    ours, theirs = (
        scores.of.get((name, form, measure)) for name, form in zip(pair, forms, strict=True)
    )
    if ours is None or theirs is None:
        return None
    if measure in PER_QUERY.values() and len(np.unique(scores.classes)) < 2:
        return None  # the interval is over classes
    value, interval, p, unit, count = (
        paired_means(ours, theirs, scores.classes)
        if measure in PER_QUERY.values()
        else paired_top1(ours, theirs)
    )
    row: Tree = {"features": pair[0], "against": pair[1], "measure": measure}
    row |= {"whitened": forms[0], "against_whitened": forms[1]}
    row |= {"value": float(ours.mean()), "against_value": float(theirs.mean())}
    row |= {"difference": value, "interval95": list(interval), "p": p}
    return row | {"unit": unit, "count": count}
