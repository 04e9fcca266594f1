"""What a run will do and cost, worked out before it: nothing is trained, nothing is written.

For people about to start a run, and for scripts that refuse a bad one early. Start reading at
`check_recipe`; `pretraining` and `finetuning` build and measure each kind, `estimate` times a step,
`result` shows what was found.
"""

from pathlib import Path

from rich.console import RenderableType

from sslpipe.check.finetuning import check_finetuning
from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import DatasetIndex
from sslpipe.errors import RecipeError
from sslpipe.export.load import FrozenBackbone
from sslpipe.recipe import FinetuneRecipe, Recipe
from sslpipe.recipe.base import RunRecipe

SLACK = 1.25  # the whole recipe may take so many times as long: a timing is no more exact


def check_recipe(
    recipe: Recipe | FinetuneRecipe,
    index: DatasetIndex | None = None,
    init_from: FrozenBackbone | None = None,
) -> RenderableType:
    """Build every part of the run and plan its batches; train nothing.

    Args:
        recipe: Of either kind.
        index: The data set; None skips what only the data can tell.
        init_from: The weights that the backbone starts from; None: random ones.

    Returns:
        Tables for a terminal: settings, views, sizes, estimates, warnings.

    Raises:
        UserError: The recipe, the data or the backbone cannot be trained on.
    """
    if isinstance(recipe, FinetuneRecipe):
        return check_finetuning(recipe, index, init_from).render()
    return check_pretraining(recipe, index, init_from).render()


def check_within(
    recipe: Recipe | FinetuneRecipe,
    index: DatasetIndex | None,
    init_from: FrozenBackbone | None,
    within_s: float,
    timed_by: Path | None = None,
    whole_within_s: float | None = None,
) -> tuple[list[str], RenderableType]:
    """Check a pretraining as `check_recipe` does, and shorten it to what this machine does in time.

    Args:
        recipe: A pretraining whose length is given in steps.
        index: The data set, or None.
        init_from: The weights that the backbone starts from, or None.
        within_s: Seconds that all steps may take.
        timed_by: The directory of a few steps of the same run on this machine; None: as the check
            itself estimates, from a few images.
        whole_within_s: As in `shorten`.

    Returns:
        The overrides of `shorten`, and what `check_recipe` returns.
    """
    if isinstance(recipe, FinetuneRecipe) or recipe.steps is None:
        raise RecipeError("--within shortens a pretraining whose length is given in steps")
    result = check_pretraining(recipe, index, init_from, timed_by)
    overrides = shorten(recipe, result.step_seconds, within_s, whole_within_s)
    return overrides, result.render()


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
