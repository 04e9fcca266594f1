"""Say first whether features are better than others': of other weights, random weights, pixels."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

from numpy.typing import NDArray

from sslpipe.evaluation.against import KNN, LEVEL, LINEAR, RECALL
from sslpipe.evaluation.difference import holm, paired_top1, unpaired_difference95
from sslpipe.evaluation.label_free import concentration_text
from sslpipe.evaluation.suite_file import form_name

Tree = dict[str, Any]  # a row of eval.json: a Result with features, whitened and column

BASELINES = {"random": "random weights", "pixels": "raw pixels"}
_NO_BRACKETS = str.maketrans("", "", "()")
_COMPARED = ((KNN, False), (LINEAR, False), (KNN, True))  # column, whitened

Hits = Mapping[tuple[str, bool, str], NDArray[Any]]  # (features, whitened, column) -> (Q,)


def unfinished(facts: Tree, steps: Any = None) -> str:
    """Say that the weights are not of the end of training, or not the trained ones; else ''."""
    step, steps = facts.get("step"), facts.get("steps") if steps is None else steps
    averaged = "the averaged weights (optim.ema)" if facts.get("weights") == "ema" else ""
    if not (isinstance(step, int) and isinstance(steps, int) and 0 <= step < steps):
        return f"Evaluated are {averaged}." if averaged else ""
    if "checkpoint" in facts or averaged:  # somebody chose it
        reason = facts.get("checkpoint_reason")
        said = [averaged] * bool(averaged) + ([reason] if isinstance(reason, str) else [])
        return f"Evaluated at step {', '.join([f'{step:,} of {steps:,}', *said])}."
    return f"Evaluated at step {step:,} of {steps:,}, unfinished: the train command resumes it."


def comparisons(
    rows: Sequence[Tree], hits: Hits | None = None, *, without: Collection[str] = ()
) -> list[Tree]:
    """Compare all features with each baseline by kNN, linear probe and flattened kNN.

    `rows` are those of eval.json; `hits` says which samples were right, where known: the interval
    is then a paired one. Features `without` are those of other networks.
    """
    hits = hits or {}
    cells = {
        (row["features"], row["whitened"], row["column"]): row for row in rows if row["column"]
    }
    found = []
    for features in dict.fromkeys(name for name, *_ in cells if name not in (*BASELINES, *without)):
        for baseline, (column, whitened) in product(BASELINES, _COMPARED):
            ours, theirs = ((name, whitened, column) for name in (features, baseline))
            if ours not in cells or theirs not in cells:
                continue
            paired, p = ours in hits and theirs in hits, None
            if paired:
                difference, interval, p, *_ = paired_top1(hits[ours], hits[theirs])
            else:
                difference, interval = unpaired_difference95(cells[ours], cells[theirs])
            row = {"features": features, "baseline": baseline, "column": column}
            row |= {"whitened": whitened, "value": cells[ours]["value"]}
            row |= {"baseline_value": cells[theirs]["value"], "difference": difference}
            row |= {"interval95": list(interval), "p": p, "paired": paired}
            power = {"power": cells[ours]["power"]} if "power" in cells[ours] else {}
            found.append(row | power)
    return found


def verdict(evaluation: Tree) -> str:
    """Say in a sentence for each other network, then for the baselines, which is better.

    The `comparisons` of an eval.json are used where it has them.
    """
    said = [*against_sentences(evaluation), *evaluation.get("not_compared", ())]
    starts = {each["against"] for each in evaluation.get("against", ()) if each["start"]}
    if starts and evaluation.get("start_uniformity") is not None:
        (start,) = starts
        said.append(f"{start} on test: {concentration_text(evaluation['start_uniformity'])}.")
    names = {row["features"] for row in evaluation["rows"]}
    both = bool(names & BASELINES.keys()) and bool(names - BASELINES.keys())
    if not both or evaluation.get("comparisons") != []:
        said += _baseline_sentences(evaluation)  # else train has not the classes: all is said
    return " ".join(said)


def against_sentences(evaluation: Tree) -> list[str]:
    """Say for each deciding comparison "better", "no clear difference" or "worse"."""
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
        sentences.append(f"{text}: {value_text(each)} ({_points(each)}{_held_back(each)}).")
    if len(deciding) > 1:
        sentences.append(f"These {len(deciding)} answers hold together at 5 % (Holm).")
    if any(each["whitened"] != each["against_whitened"] for each in deciding):
        sentences.append(
            "An earlier version compared each network in its own better form, which favours one by "
            "chance; run `sslpipe evaluate suite` again."
        )
    return sentences


def _points(each: Tree, first: bool = True) -> str:
    """Write a difference and its interval; what the numbers are is said at the first one."""
    points, interval = (" points", "95 % interval ") if first else ("", "")
    low, high = (100 * end for end in each["interval95"])
    return f"{100 * each['difference']:+.1f}{points}, {interval}{low:+.1f} to {high:+.1f}"


def _held_back(each: Tree) -> str:
    """Say why a difference whose interval excludes 0 is not clear; '' for others."""
    low, high = each["interval95"]
    if each["answer"] != "no clear difference" or low <= 0 <= high:
        return ""
    forms, value = form_names(each, other=True), each.get("other_form_value")
    if value is not None:
        if each["difference"] * each["other_form_difference"] < 0:
            form = forms[0] if forms[0] == forms[1] else "flattened"
            return f"; the other way round if both are taken {form}"
        ahead = max(each["value"], each["against_value"])
        behind, form = ("theirs", forms[1]) if each["difference"] > 0 else ("ours", forms[0])
        if each["of"] == 1 or value >= ahead:
            return f"; not clear where {behind} is taken {form}, {100 * value:.1f} %"
    return f"; not clear among {each['of']} comparisons"


def value_text(each: Tree) -> str:
    """Write what was compared: "whitened kNN 71.0 against 68.2 %"."""
    ours, theirs = (f"{100 * each[key]:.1f}" for key in ("value", "against_value"))
    first, second = form_names(each)
    if first == second:
        form = f"{first} " if each["whitened"] else ""
        return f"{form}{each['measure']} {ours} against {theirs} %"
    first, second = (f"({form.translate(_NO_BRACKETS)})" for form in (first, second))
    return f"{each['measure']} {ours} {first} against {theirs} % {second}"


def form_names(each: Tree, other: bool = False) -> tuple[str, str]:
    """Name the forms in which ours and theirs were taken, or the `other` ones."""
    ours = form_name(each["whitened"] != other, each.get("power"))
    return ours, form_name(each["against_whitened"] != other, each.get("against_power"))


def answer_text(each: Tree) -> str:
    """Say what a comparison answers; only the one on the primary measure decides."""
    return str(each["answer"]) if each["primary"] else "does not decide"


def _baseline_sentences(evaluation: Tree) -> list[str]:
    if not any(row["column"] in (KNN, LINEAR, RECALL) for row in evaluation["rows"]):
        return ["No accuracy was measured, so nothing is known about how good the features are."]
    others = [other["name"] for other in evaluation.get("facts", {}).get("against", ())]
    compared = evaluation.get("comparisons") or comparisons(evaluation["rows"], without=others)
    names = list(dict.fromkeys(c["features"] for c in compared))
    sentences = [_sentence(compared, name, len(names) > 1) for name in names]
    if not any(c["baseline"] == "random" for c in compared):
        unknown = "Whether the features are better than random weights is not known"
        sentences = [f"{unknown}: that baseline was not measured.", *sentences]
    return sentences


def _sentence(compared: Sequence[Tree], features: str, named: bool) -> str:
    clauses: list[str] = []
    for baseline, words in BASELINES.items():
        own = [c for c in compared if (c["features"], c["baseline"]) == (features, baseline)]
        if own:
            numbers = ", ".join(
                f"{_name(c)} {100 * c['value']:.1f} against {100 * c['baseline_value']:.1f} % "
                f"({_points(c, first=not clauses and not place)})"
                for place, c in enumerate(own)
            )
            clauses.append(f"{_relation(own, words)}: {numbers}")
    text = "; ".join(clauses) + "."
    return f"{features}: {text}" if named else text[0].upper() + text[1:]


def _relation(own: Sequence[Tree], words: str) -> str:
    """Say "better than", "not clearly better than" or "worse than", and by what if not by all."""
    if all(c["interval95"][0] > 0 for c in own):
        return f"better than {words}"
    if all(c["interval95"][1] < 0 for c in own):
        return f"worse than {words}"
    # one of several measures is soon clear by chance: Holm, where the p-values are known
    p_values = [c["p"] for c in own if c.get("p") is not None]
    adjusted = holm(p_values) if len(p_values) == len(own) else [0.0] * len(own)
    clear = [c for c, p in zip(own, adjusted, strict=True) if p <= LEVEL]
    better = [_name(c) for c in clear if c["interval95"][0] > 0]
    worse = [_name(c) for c in clear if c["interval95"][1] < 0]
    below = f", worse by {' and '.join(worse)}" if worse else ""
    if better:
        return f"better than {words} only by {' and '.join(better)}{below}"
    return f"not clearly better than {words}{below}"


def _name(comparison: Tree) -> str:
    form = form_name(comparison["whitened"], comparison.get("power"))
    return (f"{form} " if comparison["whitened"] else "") + str(comparison["column"])
