"""A recipe made shorter, so that a slow machine trains it in a given time, and what says so.

The number of steps is part of the schedule, so it is chosen before the first of them.
"""

from collections.abc import Mapping
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
