"""What an eval.json answers, in one sentence with one number, and what to do next, in another."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sslpipe.errors import for_caller
from sslpipe.evaluation.difference import excludes_zero
from sslpipe.evaluation.verdict import (
    BASELINES,
    KNN,
    RECALL,
    clear_comparisons,
    held_back,
    unfinished,
)

ACCURACY = (KNN, "linear")  # measures that are accuracies; others have a name of their own
_FINISH = "finish the training: the same `sslpipe train` command resumes it"
_EXPORT = "`sslpipe export` writes the backbone"
_FLATTENED = (
    f"use it flattened: {_EXPORT}, and `sslpipe whiten EXPORT RUN/features/train.safetensors` "
    "flattens it"
)
NOT_CLEAR = "; not clear among {} measures"
MOST_TIMES = 10  # so many times the test data are worth asking for


class Alternative(NamedTuple):
    """The model that one would have used otherwise, and how ours differs from it."""

    name: str
    is_start: bool
    is_baseline: bool  # random weights or raw pixels: nothing that one would use
    answer: str  # "better", "no clear difference" or "worse"
    measure: str
    difference: float  # of shares in 0..1, ours - theirs
    interval95: tuple[float, float]
    unit: str  # what the interval is over: "images" or "classes"
    tested: int  # of these
    value: float  # theirs
    because: str = ""  # why a difference whose interval excludes 0 is not clear
    flattened: bool = False  # of both, the form that decided


class Advice(NamedTuple):
    """Two sentences."""

    answer: str
    next_step: str


def advise(evaluation: Mapping[str, Any]) -> Advice:
    """Compare the features with the best alternative that was measured; advise what to do."""
    best = best_alternative(evaluation)
    if best is None:
        return Advice(_alone(evaluation), _sentence(_next_alone(evaluation)))
    low, high = (100 * end for end in best.interval95)
    relation = {
        "better": "Better than",
        "worse": "Worse than",
        "no clear difference": "No clear difference from",
    }[best.answer]
    start = ", which it started from" if best.is_start else ""
    answer = (
        f"{relation} {best.name}{start}: {100 * best.difference:+.1f} points of {best.measure} "
        f"(95 % interval {low:+.1f} to {high:+.1f}{best.because})."
    )
    return Advice(answer, _sentence(_next(evaluation, best)))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def best_alternative(evaluation: Mapping[str, Any]) -> Alternative | None:
    """Return the best of the other networks, else of the baselines; None: nothing was compared."""
    deciding = [each for each in evaluation.get("against", ()) if each["primary"]]
    networks = [each for each in deciding if each["against"] not in BASELINES]
    if deciding:
        return _other_network(max(networks or deciding, key=lambda each: each["against_value"]))
    compared = evaluation.get("comparisons", ())
    if not compared:
        return None
    # kNN as the features are, or what there is
    same = [c for c in compared if (c["column"], c["whitened"]) == (KNN, False)] or compared[:1]
    return _baseline(max(same, key=lambda each: each["baseline_value"]), evaluation)


def _other_network(best: dict[str, Any]) -> Alternative:
    """Return a comparison that decides: with another network, or with a baseline."""
    form = ", flattened" if best["whitened"] else ""  # both are, each by its own power
    return Alternative(
        name=BASELINES.get(best["against"], best["against"]),
        is_start=best["start"],
        is_baseline=best["against"] in BASELINES,
        answer=best["answer"],
        measure=_named(best["measure"]) + form,
        difference=best["difference"],
        interval95=tuple(best["interval95"]),
        unit=best["unit"],
        tested=best["count"],
        value=best["against_value"],
        because=held_back(best),
        flattened=best["whitened"],
    )


def _baseline(best: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Alternative:
    """Return a comparison with a baseline: whether it is clear, all measures say together."""
    names = ("features", "baseline")
    alike = [
        each
        for each in evaluation["comparisons"]
        if all(each[name] == best[name] for name in names)
    ]
    clear = best in clear_comparisons(alike)
    by_chance = "" if clear or not excludes_zero(best["interval95"]) else NOT_CLEAR
    answer = "better" if best["difference"] > 0 else "worse"
    form = ", flattened" if best["whitened"] else ""
    rows = evaluation["rows"]
    return Alternative(
        name=BASELINES[best["baseline"]],
        is_start=False,
        is_baseline=True,
        answer=answer if clear else "no clear difference",
        measure=_named(best["column"]) + form,
        difference=best["difference"],
        interval95=tuple(best["interval95"]),
        unit="images",
        tested=next(row["queries"] for row in rows if row["column"] == best["column"]),
        value=best["baseline_value"],
        because=by_chance.format(len(alike)),
    )


def _named(measure: str) -> str:
    return f"{measure} accuracy" if measure in ACCURACY else measure


def _alone(evaluation: Mapping[str, Any]) -> str:
    """Return the first number of the model's own, which nothing stands beside."""
    rows = [row for row in evaluation["rows"] if row["features"] not in BASELINES]
    for measure in (KNN, RECALL):
        for row in rows:
            if row["column"] == measure and not row["whitened"]:
                low, high = (100 * end for end in row["interval95"])
                return (
                    f"{_named(measure)} {100 * row['value']:.1f} % (95 % interval {low:.1f} to "
                    f"{high:.1f}); whether the features are better than others is not known."
                )
    return "No accuracy was measured: how good the features are is not known."


def _next_alone(evaluation: Mapping[str, Any]) -> str:
    if unfinished(evaluation["facts"]).endswith("resumes it."):
        return _FINISH
    if evaluation.get("incomplete"):
        return "run the same command again, for the rest"
    if evaluation["facts"].get("step") == 0:
        return "train longer, or by other settings: these are the weights that the run began with"
    return for_caller("compare with weights that you could use instead, by --against SOURCE")


def _next(evaluation: Mapping[str, Any], alternative: Alternative) -> str:
    """Return what to do: the first of these rules that applies."""
    needed = _needed(alternative)
    better = alternative.answer == "better"
    worse = alternative.answer == "worse"
    below = "" if worse or alternative.is_baseline else _better_baseline(evaluation)
    tested = f"{alternative.tested:,} test {alternative.unit}"
    easy = alternative.value == 1 and alternative.answer == "no clear difference"
    weights = f"the start, {alternative.name}" if alternative.is_start else alternative.name
    more = f"more test {alternative.unit}: about {needed:,} would make this difference clear"
    # what an interval of this width would hide
    low, high = alternative.interval95
    unseen = ""
    if low < high and not worse:
        unseen = f"; {tested} show no difference below {50 * (high - low):.3g} points"
    rules = (
        (unfinished(evaluation["facts"]).endswith("resumes it."), _FINISH),
        (below != "", f"train longer: {below} are better still"),
        (better and alternative.is_baseline, _next_alone(evaluation)),
        (easy, f"take harder test images: on these {alternative.name} cannot be beaten ({tested})"),
        (alternative.is_baseline and needed > 0, f"train longer, or take {more}"),
        (alternative.is_baseline, f"train longer, or see what the report's alarms say{unseen}"),
        (better and alternative.flattened, _FLATTENED),
        (better, f"use it; {_EXPORT}"),
        (worse, f"use {weights}: this training made the features worse"),
        (needed > 0, more),
        (True, f"use {weights}, or train longer: {tested} show no difference"),
    )
    return next(text for applies, text in rules if applies)


def _better_baseline(evaluation: Mapping[str, Any]) -> str:
    """Name a baseline that is clearly better by kNN, as the features are; '' for none."""
    compared = evaluation.get("comparisons", ())
    ahead = (c for c in compared if c["interval95"][1] < 0 and not c["whitened"])
    return next((BASELINES[c["baseline"]] for c in ahead if c["column"] == KNN), "")


def _needed(alternative: Alternative) -> int:
    """Return how many test samples would show a gain of this size; 0: too many, or no gain.

    An interval shrinks with the root of their number.
    """
    low, high = alternative.interval95
    if alternative.difference <= 0 or low > 0:
        return 0
    times = ((high - low) / 2 / alternative.difference) ** 2
    return math.ceil(float(f"{alternative.tested * times:.1e}")) if times <= MOST_TIMES else 0
