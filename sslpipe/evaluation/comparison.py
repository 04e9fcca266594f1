"""Are features better than those of weights that one could have used instead: the numbers.

The answer stands on one measure, fixed before test is looked at: kNN top-1 with all labels (k = 20,
as in the table), or Recall@1 inside test where train has not the classes of most test samples. Both
networks are taken in the same form, as they are or whitened: the one in which the two together
score more, which favours neither. Neither wins by scale, which `sslpipe whiten` corrects without
training: the answer must also be clear where the network that is behind is taken in its other form,
and the difference of both in the other form must not be of the other sign. All must hold, so the
largest p-value counts. Other measures have intervals and no answer.

The answers of one call hold together, by Holm's method at 5 %, and are never "better" or "worse"
beside an interval that touches 0.0 as it is printed. They are about new test samples, not about
other trainings. Other networks are compared in one call, the baselines in another: `verdict` says
the answers in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.evaluation.difference import excludes_zero, holm, paired_means, paired_top1
from sslpipe.evaluation.result import Measured
from sslpipe.files import Tree

BASELINES = {"random": "random weights", "pixels": "raw pixels"}  # nothing that one would use
KNN = "kNN"
LINEAR = "linear"
RECALL = "Recall@1"
MAP = "MAP@R"
PER_QUERY = (RECALL, MAP)  # metrics of retrieval that are compared
LEVEL = 0.05


@dataclass(frozen=True)
class Scores:
    """What each test sample scored.

    Attributes:
        of: (features, whitened, measure) -> (Q,) bool of "kNN" and "linear", (q,) float64 of
            "Recall@1" and "MAP@R".
        classes: (q,) labels of the retrieval's queries.
        powers: Of each features' flattened form.
    """

    of: dict[tuple[str, bool, str], NDArray[Any]]
    classes: NDArray[np.int64]
    powers: dict[str, float] = field(default_factory=dict)

    def take(self, measured: Measured) -> None:
        """Take a number if it is one that is compared."""
        result = measured.result
        measure = result.metric if result.metric in PER_QUERY else measured.column
        if result.scores is not None and measure is not None:
            self.of[measured.features, measured.whitened, measure] = result.scores
        if measured.power is not None:
            self.powers[measured.features] = measured.power


def compare_all(
    ours: Sequence[str],
    theirs: Sequence[str],
    start: str | None,
    scores: Scores,
    *,
    known_classes: bool,
) -> list[Tree]:
    """Compare each of our features with each of theirs, on every measure there is.

    `start` is the network that the run started from; `known_classes`: train has the classes of most
    test samples. Rows are those of `suite_file`; of a pair the one that decides is first.
    """
    compared: list[Tree] = []
    joint_p: list[float] = []  # of the deciding rows
    measures = (KNN, LINEAR, RECALL, MAP) if known_classes else (RECALL, MAP)
    for pair in product(ours, theirs):
        rows = []
        for measure, form in product(measures, (False, True)):
            row = _compare(scores, pair, (form, form), measure)
            if row is not None:
                rows.append(row)
        if not rows:
            continue
        deciding, p = _decide(scores, [row for row in rows if row["measure"] == rows[0]["measure"]])
        joint_p.append(p)
        rows.sort(key=lambda row: row is not deciding)
        compared += [row | {"start": pair[1] == start, "primary": row is deciding} for row in rows]
    _answer([row for row in compared if row["primary"]], joint_p)
    return compared


def _answer(deciding: Sequence[Tree], p_values: Sequence[float]) -> None:
    """Add to the rows that decide what they answer, all together."""
    for row, p in zip(deciding, holm(p_values), strict=True):
        clear = p <= LEVEL and excludes_zero(row["interval95"])
        ahead = "better" if row["difference"] > 0 else "worse"
        row["p_holm"] = p
        row["of"] = len(deciding)
        row["answer"] = ahead if clear else "no clear difference"


def _decide(scores: Scores, forms: Sequence[Tree]) -> tuple[Tree, float]:
    """Choose the form that decides, and the p-value of an answer that scale does not make."""
    # the form in which both together score more: it stays the same if the two change places
    deciding, other = sorted(forms, key=lambda row: -row["value"] - row["against_value"])
    ahead = deciding["difference"] > 0
    # whoever is behind may be taken in the other form, too
    features_form, against_form = (deciding, other) if ahead else (other, deciding)
    pair = (deciding["features"], deciding["against"])
    whitened = (features_form["whitened"], against_form["whitened"])
    crossed = _compare(scores, pair, whitened, deciding["measure"])
    assert crossed is not None
    deciding["other_form_value"] = crossed["against_value" if ahead else "value"]
    deciding["other_form_difference"] = other["difference"]
    signs = {np.sign(row["difference"]) for row in (deciding, crossed, other)} - {0}
    return deciding, max(deciding["p"], crossed["p"]) if len(signs) < 2 else 1.0


def _compare(
    scores: Scores, pair: tuple[str, str], forms: tuple[bool, bool], measure: str
) -> Tree | None:
    """Both values and their difference; None where one was not measured, or is of one class."""
    values, against_values = (
        scores.of.get((name, form, measure)) for name, form in zip(pair, forms, strict=True)
    )
    if values is None or against_values is None:
        return None
    if measure in PER_QUERY and len(np.unique(scores.classes)) < 2:
        return None  # the interval is over classes
    if measure in PER_QUERY:
        difference = paired_means(values, against_values, scores.classes)
    else:
        difference = paired_top1(values, against_values)
    features, against = pair
    whitened, against_whitened = forms
    return {
        "features": features,
        "against": against,
        "measure": measure,
        "whitened": whitened,
        "against_whitened": against_whitened,
        "power": scores.powers.get(features),
        "against_power": scores.powers.get(against),
        "value": float(values.mean()),
        "against_value": float(against_values.mean()),
        "difference": difference.value,
        "interval95": list(difference.interval95),
        "p": difference.p,
        "unit": difference.unit,
        "count": difference.number,
    }
