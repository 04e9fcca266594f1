"""Whole runs from Python, in one call each: what the command line does, and a notebook can."""

from collections.abc import Sequence
from pathlib import Path

from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import UserError
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.metric_learning.finetune import finetune
from sslpipe.recipe import FinetuneRecipe, Recipe, load_recipe
from sslpipe.train import train as pretrain


def train(
    recipe: Recipe | FinetuneRecipe | str | Path,
    data: DatasetIndex | str | Path,
    run_dir: str | Path,
    *,
    backbone: FrozenBackbone | str | Path | None = None,
    checkpoint: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Pretrain or, with a recipe that has a [sampler], fine-tune; or resume this run directory.

    Args:
        recipe: A recipe, or the path of a TOML file.
        data: The data set's index, or the path or URL of its dataset.json.
        run_dir: Where the run lives; the same one resumes.
        backbone: Of a fine-tuning: the export or run that it starts from.
        checkpoint: Of that run, "step-00000012": this one instead of its newest.
        overrides: `section.key=value`, where `recipe` is a path.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: recipe, data, launch, a directory in use.
    """
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides are for the path of a recipe, and this is a recipe already")
    init_from = open_backbone(recipe, backbone, checkpoint=checkpoint)
    index = data if isinstance(data, DatasetIndex) else load_index(str(data))
    if isinstance(recipe, FinetuneRecipe):
        return finetune(recipe, index, Path(run_dir), init_from)
    return pretrain(recipe, index, Path(run_dir))


def open_backbone(
    recipe: Recipe | FinetuneRecipe,
    backbone: FrozenBackbone | str | Path | None,
    *,
    checkpoint: str | None = None,
) -> FrozenBackbone | None:
    """Load the backbone that a fine-tuning starts from.

    Args:
        recipe: Of either kind.
        backbone: A folder, or what is loaded already; None: random weights.
        checkpoint: As in `load_backbone`; only with a folder.

    Raises:
        UserError: The recipe pretrains, there is no folder for `checkpoint`, or as `load_backbone`.
    """
    if backbone is not None and isinstance(recipe, Recipe):
        raise UserError(f"--backbone is for a fine-tuning, and {recipe.name!r} has no [sampler]")
    if isinstance(backbone, str | Path):
        return load_backbone(backbone, checkpoint=checkpoint)
    if checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint} is for a --backbone that is a run directory")
    return backbone
