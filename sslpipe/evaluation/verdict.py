"""Are features better than others: what `comparison` found, in words."""

from collections.abc import Sequence
from typing import Any

from sslpipe.evaluation.comparison import BASELINES, KNN, LEVEL, LINEAR, RECALL
from sslpipe.evaluation.difference import excludes_zero
from sslpipe.evaluation.label_free import concentration_text
from sslpipe.evaluation.suite_file import form_name
from sslpipe.files import Tree

_NO_BRACKETS = str.maketrans("", "", "()")


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


def verdict(evaluation: Tree) -> str:
    """Judge in a sentence each other network, then each baseline."""
    sentences = [*against_sentences(evaluation), *evaluation.get("not_compared", ())]
    starts = {each["against"] for each in evaluation.get("against", ()) if each["start"]}
    if starts and evaluation.get("start_uniformity") is not None:
        (start,) = starts
        sentences.append(f"{start} on test: {concentration_text(evaluation['start_uniformity'])}.")
    rows = evaluation["rows"]
    if not any(row["column"] in (KNN, LINEAR, RECALL) for row in rows):
        unknown = "No accuracy was measured, so nothing is known about how good the features are."
        return " ".join([*sentences, unknown])
    if "random" not in {row["features"] for row in rows}:
        unknown = "Whether the features are better than random weights is not known"
        sentences.append(f"{unknown}: that baseline was not measured.")
    sentences += _answers(evaluation.get("baselines", ()))
    return " ".join(sentences)


def against_sentences(evaluation: Tree) -> list[str]:
    """Write the answer for each other network: "better", "no clear difference" or "worse"."""
    sentences = _answers(evaluation.get("against", ()))
    if len(sentences) > 1:
        sentences.append(f"These {len(sentences)} answers hold together at 5 % (Holm).")
    return sentences


def _answers(compared: Sequence[Tree]) -> list[str]:
    """Write each of the comparisons that decide."""
    deciding = [each for each in compared if each["primary"]]
    named = len({each["features"] for each in deciding}) > 1
    sentences = []
    for each in deciding:
        answer = _answer(each)
        text = f"{each['features']}: {answer[0].lower()}{answer[1:]}" if named else answer
        sentences.append(f"{text}: {value_text(each)} ({_points(each)}{held_back(each)}).")
    return sentences


def _answer(each: Tree) -> str:
    is_baseline = each["against"] in BASELINES  # which nobody would use
    remedy = ": use the model you have" if each["answer"] == "worse" and not is_baseline else ""
    return relation(each) + remedy


def relation(each: Tree) -> str:
    """Return the answer with the other side: "Better than lite0, which it started from"."""
    is_baseline = each["against"] in BASELINES  # to be as good as these is worth nothing
    unclear = "Not clearly better than" if is_baseline else "No clear difference from"
    words = {"better": "Better than", "worse": "Worse than", "no clear difference": unclear}
    start = ", which it started from" if each["start"] else ""
    return f"{words[each['answer']]} {against_name(each)}{start}"


def against_name(each: Tree) -> str:
    """Return what people read for the other side of a comparison."""
    return BASELINES.get(each["against"], str(each["against"]))


def _points(each: Tree) -> str:
    """Write a difference and its interval."""
    low, high = (100 * end for end in each["interval95"])
    return f"{100 * each['difference']:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f}"


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
