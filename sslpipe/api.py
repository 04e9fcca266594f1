"""Whole runs from Python, in one call each: what the command line does, and a notebook can."""

from collections.abc import Sequence
from pathlib import Path

from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import UserError
from sslpipe.export.initial import open_init
from sslpipe.export.load import FrozenBackbone, Weights
from sslpipe.metric_learning.finetune import finetune
from sslpipe.recipe import FinetuneRecipe, Recipe, load_recipe
from sslpipe.registry.plugins import made_with
from sslpipe.run.records import plugins_of
from sslpipe.train import train as pretrain


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
    if isinstance(recipe, FinetuneRecipe):
        return finetune(recipe, index, run_dir, init_from)
    return pretrain(recipe, index, run_dir, init_from)
