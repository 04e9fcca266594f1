"""What an eval.json answers, in one sentence with one number, and what to do next, in another."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sslpipe.errors import for_caller
from sslpipe.evaluation.comparison import BASELINES, KNN, LINEAR, RECALL
from sslpipe.evaluation.verdict import against_name, held_back, relation, unfinished
from sslpipe.files import Tree

ACCURACY = (KNN, LINEAR)  # measures that are accuracies; others have a name of their own
_FINISH = "finish the training: the same `sslpipe train` command resumes it"
_EXPORT = "`sslpipe export` writes the backbone"
_FLATTENED = (
    f"use it flattened: {_EXPORT}, and `sslpipe whiten EXPORT RUN/features/train.safetensors` "
    "flattens it"
)
MOST_TIMES = 10  # so many times the test data are worth asking for


class Advice(NamedTuple):
    """Two sentences."""

    answer: str
    next_step: str


def advise(evaluation: Mapping[str, Any]) -> Advice:
    """Compare the features with the best alternative that was measured; advise what to do."""
    best = best_alternative(evaluation)
    if best is None:
        return Advice(_alone(evaluation), _sentence(_next_alone(evaluation)))
    low, high = (100 * end for end in best["interval95"])
    form = ", flattened" if best["whitened"] else ""  # both are, each by its own power
    answer = (
        f"{relation(best)}: {100 * best['difference']:+.1f} points of {_named(best['measure'])}"
        f"{form} (95 % interval {low:+.1f} to {high:+.1f}{held_back(best)})."
    )
    return Advice(answer, _sentence(_next(evaluation, best)))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def best_alternative(evaluation: Mapping[str, Any]) -> Tree | None:
    """Return the deciding comparison with the best of the other networks, else of the baselines.

    None: nothing was compared.
    """
    for compared in (evaluation.get("against", ()), evaluation.get("baselines", ())):
        deciding = [each for each in compared if each["primary"]]
        if deciding:
            best: Tree = max(deciding, key=lambda each: float(each["against_value"]))
            return best
    return None


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


def _next(evaluation: Mapping[str, Any], best: Tree) -> str:
    """Return what to do: the first of these rules that applies."""
    name = against_name(best)
    is_baseline = best["against"] in BASELINES
    needed = _needed(best)
    better = best["answer"] == "better"
    worse = best["answer"] == "worse"
    below = "" if worse or is_baseline else _better_baseline(evaluation)
    tested = f"{best['count']:,} test {best['unit']}"
    easy = best["against_value"] == 1 and best["answer"] == "no clear difference"
    weights = f"the start, {name}" if best["start"] else name
    more = f"more test {best['unit']}: about {needed:,} would make this difference clear"
    # what an interval of this width would hide; where the other form decides it hides nothing
    low, high = best["interval95"]
    is_held_back = held_back(best) != ""
    unseen = ""
    if low < high and not worse and not is_held_back:
        unseen = f"; {tested} show no difference below {50 * (high - low):.3g} points"
    rules = (
        (unfinished(evaluation["facts"]).endswith("resumes it."), _FINISH),
        (below != "", f"train longer: {below} are better still"),
        (better and is_baseline, _next_alone(evaluation)),
        (easy, f"take harder test images: on these {name} cannot be beaten ({tested})"),
        (is_baseline and needed > 0, f"train longer, or take {more}"),
        (is_baseline, f"train longer, or see what the report's alarms say{unseen}"),
        (better and best["whitened"], _FLATTENED),
        (better, f"use it; {_EXPORT}"),
        (worse, f"use {weights}: this training made the features worse"),
        (needed > 0, more),
        (is_held_back, f"use {weights}, or train longer"),
        (True, f"use {weights}, or train longer: {tested} show no difference"),
    )
    return next(text for applies, text in rules if applies)


def _better_baseline(evaluation: Mapping[str, Any]) -> str:
    """Name a baseline that is clearly better; '' for none."""
    answers = (each for each in evaluation.get("baselines", ()) if each["primary"])
    return next((against_name(each) for each in answers if each["answer"] == "worse"), "")


def _needed(best: Tree) -> int:
    """Return how many test samples would show a gain of this size; 0: too many, or no gain.

    An interval shrinks with the root of their number.
    """
    low, high = best["interval95"]
    if best["difference"] <= 0 or low > 0:
        return 0
    times = ((high - low) / 2 / best["difference"]) ** 2
    return math.ceil(float(f"{best['count'] * times:.1e}")) if times <= MOST_TIMES else 0
