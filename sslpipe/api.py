"""Whole runs from Python, in one call each: what the command line does, and a notebook can."""

from collections.abc import Sequence
from pathlib import Path

from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.order import ORDER_VERSION
from sslpipe.data.plan import plan_order
from sslpipe.errors import UserError
from sslpipe.export.initial import KEPT, open_init, with_init
from sslpipe.export.load import FrozenBackbone, Weights
from sslpipe.recipe import FinetuneRecipe, Recipe, load_recipe
from sslpipe.recipe.identity import run_identity
from sslpipe.registry.plugins import made_with
from sslpipe.run.checkpoint_files import damage_of, newest, read_state
from sslpipe.run.console import say_last
from sslpipe.run.launcher import launched_processes
from sslpipe.run.records import plugins_of


def train(
    recipe: Recipe | FinetuneRecipe | str | Path,
    data: DatasetIndex | str | Path,
    run_dir: str | Path,
    *,
    init: FrozenBackbone | str | Path | None = None,
    checkpoint: str | None = None,
    weights: Weights | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Pretrain or, with a recipe that has a [sampler], fine-tune; or resume this run directory.

    Args:
        recipe: A recipe, or the path of a TOML file; its parts of your own are known after
            `sslpipe.load_plugins`.
        data: The data set's index, or the path or URL of its dataset.json.
        run_dir: Where the run lives; the same one resumes.
        init: The weights that the backbone starts from: what `load_backbone` takes, or returns. A
            run that has begun keeps them, and needs none.
        checkpoint: Of a run that `init` names, "step-00000012": this one instead of its newest.
        weights: Of a run that `init` names: "trained" or "ema", see `load_run`.
        overrides: `section.key=value`, where `recipe` is a path.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: recipe, data, launch, a directory in use.
    """
    if isinstance(recipe, str | Path):
        with made_with(plugins_of(Path(run_dir))):
            recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides are for the path of a recipe, and this is a recipe already")
    run_dir = Path(run_dir)
    init_from = open_init(recipe, init, checkpoint=checkpoint, weights=weights, run_dir=run_dir)
    index = data if isinstance(data, DatasetIndex) else load_index(str(data))
    steps = _finished_steps(recipe, index, run_dir) if init_from is None else None
    if steps is not None:
        say_last(f"{run_dir} is finished: {steps} of {steps} steps; nothing is left to train")
        return steps
    if isinstance(recipe, FinetuneRecipe):
        from sslpipe.metric_learning.finetune import finetune

        return finetune(recipe, index, run_dir, init_from)
    from sslpipe.pretrain import pretrain

    return pretrain(recipe, index, run_dir, init_from)


def _finished_steps(
    recipe: Recipe | FinetuneRecipe, index: DatasetIndex, run_dir: Path
) -> int | None:
    """Return the steps of a run that is DONE, by this recipe and data; None: the training looks.

    Then no network is built, and what only a training needs is not imported. The training judges
    several processes, weights to start from, a teacher, a damaged or another run.
    """
    if not (run_dir / "DONE").is_file() or (run_dir / KEPT).exists() or launched_processes() > 1:
        return None
    last = newest(run_dir)
    if last is None or damage_of(last) is not None:
        return None
    index = index.with_channels(recipe.data.channels)
    if isinstance(recipe, FinetuneRecipe):
        from sslpipe.metric_learning import build

        version = build.ORDER_AND_PK_VERSION
        steps_per_epoch = build.plan_batches(recipe, index).steps_per_epoch
        recipe = build.with_backbone(recipe, None, index)
    else:
        version = ORDER_VERSION
        steps_per_epoch = plan_order(recipe, index).steps_per_epoch
        recipe = with_init(recipe, None, index)
    resolved, state = recipe.resolved(steps_per_epoch), read_state(last)
    same = state["identity"]["digest"] == run_identity(resolved, index, version)["digest"]
    return resolved.total_steps if same and state["step"] == resolved.total_steps else None
