"""Are features better than those of weights that one could have used instead?

The answer stands on one measure, fixed before test is looked at: kNN top-1 with all labels (k = 20,
as in the table), or Recall@1 inside test where train has not the classes of most test samples. Both
networks are taken in the same form, as they are or whitened: the one in which the two together
score more, which favours neither. Neither wins by scale, which `sslpipe whiten` corrects without
training: the answer must also be clear where the network that is behind is taken in its other form,
and the difference of both in the other form must not be of the other sign. All must hold, so the
largest p-value counts. Other measures have intervals and no answer.

The words are for all comparisons of an eval.json together, by Holm's method at 5 %, and never
beside an interval that touches 0.0 as it is printed. They are about new test samples, not about
other trainings.
Baselines, random weights and pixels, are compared sample by sample as well.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.evaluation.difference import (
    excludes_zero,
    holm,
    paired_means,
    paired_top1,
)
from sslpipe.evaluation.label_free import concentration_text
from sslpipe.evaluation.result import Measured
from sslpipe.evaluation.suite_file import form_name

Tree = dict[str, Any]  # a row of eval.json: a Result with features, whitened and column

BASELINES = {"random": "random weights", "pixels": "raw pixels"}
_NO_BRACKETS = str.maketrans("", "", "()")
KNN = "kNN"
LINEAR = "linear"
RECALL = "Recall@1"
MAP = "MAP@R"
PER_QUERY = (RECALL, MAP)  # metrics of retrieval that are compared
LEVEL = 0.05
_COMPARED = ((KNN, False), (LINEAR, False), (KNN, True))  # column, whitened

Hits = Mapping[tuple[str, bool, str], NDArray[Any]]  # (features, whitened, column) -> (Q,)


class Scores(NamedTuple):
    """What each test sample scored.

    `of` maps (features, whitened, measure) to (Q,) bool of "kNN" and "linear", to (q,) float64 of
    "Recall@1" and "MAP@R"; `classes` are the (q,) labels of the retrieval's queries.
    """

    of: dict[tuple[str, bool, str], NDArray[Any]]
    classes: NDArray[np.int64]

    def take(self, measured: Measured) -> None:
        """Take a number if it is one that is compared."""
        result = measured.result
        measure = result.metric if result.metric in PER_QUERY else measured.column
        if result.scores is not None and measure is not None:
            self.of[measured.features, measured.whitened, measure] = result.scores


def compare_all(
    names: Sequence[str],
    others: Sequence[str],
    start: str | None,
    scores: Scores,
    *,
    known_classes: bool,
) -> list[Tree]:
    """Compare each of our features with each other network's, on every measure there is.

    `start` is the network that the run started from; `known_classes`: train has the classes of most
    test samples. Rows are those of `suite_file`; of two networks the one that decides is first.
    """
    compared: list[Tree] = []
    joint_p: list[float] = []  # of the deciding rows
    measures = (KNN, LINEAR, RECALL, MAP) if known_classes else (RECALL, MAP)
    for pair in product(names, others):
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
    primary = [row for row in compared if row["primary"]]
    for row, p in zip(primary, holm(joint_p), strict=True):
        answer = "better" if row["difference"] > 0 else "worse"
        row["p_holm"] = p
        row["of"] = len(primary)
        clear = p <= LEVEL and excludes_zero(row["interval95"])
        row["answer"] = answer if clear else "no clear difference"
    return compared


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
    value, interval, p, unit, count = (
        paired_means(values, against_values, scores.classes)
        if measure in PER_QUERY
        else paired_top1(values, against_values)
    )
    row: Tree = {"features": pair[0], "against": pair[1], "measure": measure}
    row |= {"whitened": forms[0], "against_whitened": forms[1]}
    row |= {"value": float(values.mean()), "against_value": float(against_values.mean())}
    row |= {"difference": value, "interval95": list(interval), "p": p}
    return row | {"unit": unit, "count": count}


def unfinished(facts: Tree, steps: Any = None) -> str:
    """Warn of weights that are not of the end of training; else ''."""
    step = facts.get("step")
    steps = facts.get("steps") if steps is None else steps
    if not (isinstance(step, int) and isinstance(steps, int) and 0 <= step < steps):
        return ""
    if "checkpoint" in facts:  # somebody chose it
        reason = facts.get("checkpoint_reason")
        because = f", {reason}" if isinstance(reason, str) else ""
        return f"Evaluated at step {step:,} of {steps:,}{because}."
    return f"Evaluated at step {step:,} of {steps:,}, unfinished: the train command resumes it."


def comparisons(rows: Sequence[Tree], hits: Hits, *, without: Collection[str] = ()) -> list[Tree]:
    """Compare all features with each baseline by kNN, linear probe and flattened kNN.

    `rows` are those of eval.json; `hits` says which samples were right. Features `without` are
    those of other networks.
    """
    cells = {
        (row["features"], row["whitened"], row["column"]): row for row in rows if row["column"]
    }
    compared = []
    for features in dict.fromkeys(name for name, *_ in cells if name not in (*BASELINES, *without)):
        for baseline, (column, whitened) in product(BASELINES, _COMPARED):
            cell, baseline_cell = ((name, whitened, column) for name in (features, baseline))
            if cell not in cells or baseline_cell not in cells:
                continue
            difference, interval, p, *_ = paired_top1(hits[cell], hits[baseline_cell])
            row = {"features": features, "baseline": baseline, "column": column}
            row |= {"whitened": whitened, "value": cells[cell]["value"]}
            row |= {"baseline_value": cells[baseline_cell]["value"], "difference": difference}
            row |= {"interval95": list(interval), "p": p}
            power = {"power": cells[cell]["power"]} if "power" in cells[cell] else {}
            compared.append(row | power)
    return compared


def verdict(evaluation: Tree) -> str:
    """Judge in a sentence each other network, then the baselines."""
    sentences = [*against_sentences(evaluation), *evaluation.get("not_compared", ())]
    starts = {each["against"] for each in evaluation.get("against", ()) if each["start"]}
    if starts and evaluation.get("start_uniformity") is not None:
        (start,) = starts
        sentences.append(f"{start} on test: {concentration_text(evaluation['start_uniformity'])}.")
    names = {row["features"] for row in evaluation["rows"]}
    both = bool(names & BASELINES.keys()) and bool(names - BASELINES.keys())
    if not both or evaluation.get("comparisons") != []:
        sentences += _baseline_sentences(evaluation)  # else train has not the classes: all is said
    return " ".join(sentences)


def against_sentences(evaluation: Tree) -> list[str]:
    """Write each deciding comparison: "better", "no clear difference" or "worse"."""
    deciding = [each for each in evaluation.get("against", ()) if each["primary"]]
    named = len({each["features"] for each in deciding}) > 1
    sentences = []
    for each in deciding:
        other = BASELINES.get(each["against"], each["against"])
        start = ", which it started from" if each["start"] else ""
        answer = {
            "better": f"Better than {other}{start}",
            "worse": f"Worse than {other}{start}: use the model you have",
            "no clear difference": f"No clear difference from {other}{start}",
        }[each["answer"]]
        if each["against"] in BASELINES:
            answer = answer.partition(":")[0]
        text = f"{each['features']}: {answer[0].lower()}{answer[1:]}" if named else answer
        sentences.append(f"{text}: {value_text(each)} ({_points(each)}{held_back(each)}).")
    if len(deciding) > 1:
        sentences.append(f"These {len(deciding)} answers hold together at 5 % (Holm).")
    return sentences


def _points(each: Tree, first: bool = True) -> str:
    """Write a difference and its interval; what the numbers are is said at the first one."""
    points, interval = (" points", "95 % interval ") if first else ("", "")
    low, high = (100 * end for end in each["interval95"])
    return f"{100 * each['difference']:+.1f}{points}, {interval}{low:+.1f} to {high:+.1f}"


def held_back(each: Tree) -> str:
    """Return why a difference whose interval excludes 0 is not clear; '' for others."""
    if each["answer"] != "no clear difference" or not excludes_zero(each["interval95"]):
        return ""
    forms = form_names(each, other=True)
    if each["difference"] * each["other_form_difference"] < 0:
        form = forms[0] if forms[0] == forms[1] else "flattened"
        return f"; the other way round if both are taken {form}"
    ahead = max(each["value"], each["against_value"])
    behind, form = ("theirs", forms[1]) if each["difference"] > 0 else ("ours", forms[0])
    # in its own form it may be clear among all comparisons; then the other form is the reason
    value = each["other_form_value"]
    if value >= ahead or each["p"] * each["of"] <= LEVEL or each["of"] == 1:
        return f"; not clear where {behind} is taken {form}, {100 * value:.1f} %"
    return f"; not clear among {each['of']} comparisons"


def value_text(each: Tree) -> str:
    """Write what was compared: "flattened (power 1) kNN 71.0 against 68.2 %"."""
    value, against_value = (f"{100 * each[key]:.1f}" for key in ("value", "against_value"))
    first, second = form_names(each)
    if first == second:
        form = f"{first} " if each["whitened"] else ""
        return f"{form}{each['measure']} {value} against {against_value} %"
    first, second = (f"({form.translate(_NO_BRACKETS)})" for form in (first, second))
    return f"{each['measure']} {value} {first} against {against_value} % {second}"


def form_names(each: Tree, other: bool = False) -> tuple[str, str]:
    """Name the forms in which ours and theirs were taken, or the `other` ones."""
    ours = form_name(each["whitened"] != other, each.get("power"))
    return ours, form_name(each["against_whitened"] != other, each.get("against_power"))


def verdict_text(each: Tree) -> str:
    """Return what a comparison answers; only the one on the primary measure decides."""
    return str(each["answer"]) if each["primary"] else "does not decide"


def leakage_sentence(leakage: dict[str, Any]) -> str:
    """Return how many test samples are in train, what that does to the first number, what to do."""
    total = leakage["samples"]
    leaked = leakage["leaked"]
    percent = 100 * leaked / total
    share = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    share_text = f"{leaked:,} of {total:,} test samples ({share} %)"
    if not leaked:
        return f"None of {total:,} test samples has a near-duplicate in train ({leakage['how']})."
    text = f"{share_text} have a near-duplicate in train ({leakage['how']})"
    row = next((row for row in leakage["rows"] if row["clean_value"] is not None), None)
    if row is None:
        return f"{text}; without them nothing is left to score."
    whose = "" if row["features"] == "ssl" else f"{row['features']}, "
    listed = "; `sslpipe curate duplicates DATA --out DIR` lists the pairs"
    return (
        f"{text}: {whose}{row['column']} is {100 * row['value']:.1f} % on all {total:,}, "
        f"{100 * row['clean_value']:.1f} % on the other {row['clean_queries']:,}. The verdict is "
        f"on all of them{listed if leakage['how'] == 'by pixels' else ''}."
    )


def _baseline_sentences(evaluation: Tree) -> list[str]:
    if not any(row["column"] in (KNN, LINEAR, RECALL) for row in evaluation["rows"]):
        return ["No accuracy was measured, so nothing is known about how good the features are."]
    compared = evaluation.get("comparisons", ())
    names = list(dict.fromkeys(c["features"] for c in compared))
    sentences = [_sentence(compared, name, len(names) > 1) for name in names]
    if not any(c["baseline"] == "random" for c in compared):
        unknown = "Whether the features are better than random weights is not known"
        sentences = [f"{unknown}: that baseline was not measured.", *sentences]
    return sentences


def _sentence(compared: Sequence[Tree], features: str, named: bool) -> str:
    clauses: list[str] = []
    for baseline, words in BASELINES.items():
        beside = [c for c in compared if (c["features"], c["baseline"]) == (features, baseline)]
        if beside:
            numbers = ", ".join(
                f"{_name(c)} {100 * c['value']:.1f} against {100 * c['baseline_value']:.1f} % "
                f"({_points(c, first=not clauses and not place)})"
                for place, c in enumerate(beside)
            )
            clauses.append(f"{_relation(beside, words)}: {numbers}")
    text = "; ".join(clauses) + "."
    return f"{features}: {text}" if named else text[0].upper() + text[1:]


def clear_comparisons(comparisons: Sequence[Tree]) -> list[Tree]:
    """Return which of the comparisons with one baseline show a clear difference.

    One of several measures is soon clear by chance: unless all are, and in one direction, they
    count by Holm.
    """
    ones = [c for c in comparisons if excludes_zero(c["interval95"])]
    if len(ones) == len(comparisons) and len({c["interval95"][0] > 0 for c in ones}) == 1:
        return ones
    adjusted = holm([c["p"] for c in comparisons])
    return [c for c, p in zip(comparisons, adjusted, strict=True) if p <= LEVEL and c in ones]


def _relation(comparisons: Sequence[Tree], words: str) -> str:
    """Return "better than", "not clearly better than" or "worse than", and by what."""
    clear = clear_comparisons(comparisons)
    better = [_name(c) for c in clear if c["interval95"][0] > 0]
    worse = [_name(c) for c in clear if c["interval95"][1] < 0]
    if len(better) == len(comparisons):
        return f"better than {words}"
    if len(worse) == len(comparisons):
        return f"worse than {words}"
    below = f", worse by {' and '.join(worse)}" if worse else ""
    if better:
        return f"better than {words} only by {' and '.join(better)}{below}"
    return f"not clearly better than {words}{below}"


def _name(comparison: Tree) -> str:
    form = form_name(comparison["whitened"], comparison.get("power"))
    return (f"{form} " if comparison["whitened"] else "") + str(comparison["column"])
