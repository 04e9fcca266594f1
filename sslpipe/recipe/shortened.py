"""A recipe made shorter, so that a slow machine trains it in a given time, and what says so.

The number of steps is part of the schedule, so it is chosen before the first of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sslpipe.recipe.base import RunRecipe

SLACK = 1.25  # the whole recipe may take so many times as long: a timing is no more exact


def shorten(
    recipe: RunRecipe, step_s: float, within_s: float, whole_within_s: float | None = None
) -> list[str]:
    """Return the overrides with which a run takes `within_s`; none where the whole recipe does.

    Warm-up and the other stretches of the schedule keep their shares of it.

    Args:
        recipe: With its number of steps.
        step_s: Measured seconds of a step.
        within_s: Seconds that all steps may take.
        whole_within_s: Seconds that the whole recipe may take, if more than `SLACK * within_s`.
    """
    whole = recipe.total_steps
    if whole * step_s <= max(SLACK * within_s, whole_within_s or 0.0):
        return []
    steps = max(1, int(within_s / step_s))
    stretches = {
        "optim.warmup_steps": recipe.optim.warmup_steps,
        "tune.projector_first_steps": recipe.tune.projector_first_steps,
        "tune.ramp_steps": recipe.tune.ramp_steps,
    }
    shares = [f"{key}={round(n * steps / whole)}" for key, n in stretches.items() if n]
    return [f"steps={steps}", f"run.full_steps={whole}", *shares]


def shortened_warning(recipe: RunRecipe, overrides: Sequence[str]) -> str:
    """Say with which rate a run from weights learns as much by `shorten`'s overrides; else "".

    Steps times rate is what counts there: docs/adapting.md has the measurement.
    """
    rate = recipe.tune.backbone_lr
    if not overrides or not recipe.init or not 0 < rate < 1:
        return ""
    steps = int(overrides[0].removeprefix("steps="))
    return (
        f"--within keeps the rate, and {steps} of {recipe.total_steps} steps change the weights "
        "less: steps times rate is what counts. Set "
        f"tune.backbone_lr={min(1.0, rate * recipe.total_steps / steps):.2g} instead of {rate:g}, "
        "too"
    )


def shortened_note(recipe: Mapping[str, Any]) -> str:
    """Say that a run (its `model_dump()`, recipe.json) had fewer steps than its recipe; else ""."""
    run = recipe.get("run")
    whole = run.get("full_steps") if isinstance(run, Mapping) else None
    if not whole:
        return ""
    return (
        f"trained {recipe.get('steps')} of {whole} steps, as this machine is slow: the numbers are "
        "below those of the whole recipe"
    )
