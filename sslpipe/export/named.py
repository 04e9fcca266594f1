"""The weights that a command names for a run to start from: `--init SOURCE`."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sslpipe.errors import UserError, WeightsError
from sslpipe.export.folder import read_folder
from sslpipe.export.join import first_part
from sslpipe.export.load import load_backbone
from sslpipe.export.model import FrozenBackbone
from sslpipe.export.start import KEPT, init_facts, with_channels
from sslpipe.models.backbones import JOIN
from sslpipe.recipe.sections import RunRecipe
from sslpipe.weights.source import parse_source

LARGER = 1.5  # evaluated images than training views, tune.eval_crop_px = "auto"


def open_init(
    recipe: RunRecipe,
    source: nn.Module | str | Path | None,
    *,
    checkpoint: str | None = None,
    run_dir: Path | None = None,
) -> FrozenBackbone | None:
    """Load the weights that a run is to start from; None: random ones, or it keeps its own.

    Of an export that is a join the first part is taken, of a flattened one the network.

    Args:
        recipe: Its views count; its [backbone], where weights of another program fit it.
        source: What `load_backbone` takes, or what is loaded already.
        checkpoint: As in `load_backbone`.
        run_dir: Of the run: once it keeps its start, that source is read no more.

    Raises:
        UserError: As `load_backbone`.
    """
    if source is None or isinstance(source, FrozenBackbone):
        if checkpoint is not None:
            raise UserError(f"--checkpoint={checkpoint!r} is for an --init that is a run directory")
        return source
    if run_dir is not None and _keeps(run_dir, str(source), checkpoint):
        return None  # it may have gone since, and a hub may be out of reach
    parsed = None if isinstance(source, nn.Module) else parse_source(source)
    crop_px = _eval_crop_px(recipe, None if parsed is None else parsed.px)
    model = _load_fitting(recipe, source, checkpoint=checkpoint, crop_px=crop_px)
    if model.config.is_join and (parsed is None or parsed.scheme != JOIN):
        model = first_part(model)
    facts = model.config.facts
    if "recipe" in facts or "init" not in facts:  # a run of ours: its own start is another matter
        report: dict[str, Any] = {"source": str(source), "format": "sslpipe"}
        kept_facts = ("name", "step", "part", "notes", "classes_seen")
        report |= {key: facts[key] for key in kept_facts if key in facts}
        model.update_config(facts={"init": report})
    return model


def _keeps(run_dir: Path, source: str, checkpoint: str | None) -> bool:
    """Return whether a run keeps a start that was read from this source."""
    if not (run_dir / KEPT).exists():
        return False
    # of a run: is the named checkpoint the one that was taken?
    is_of_run = bool(checkpoint) and Path(source).exists()
    return bool(init_facts(read_folder(run_dir / KEPT))["source"] == source) and not is_of_run


def _load_fitting(
    recipe: RunRecipe,
    source: nn.Module | str | Path,
    *,
    checkpoint: str | None,
    crop_px: int | None,
) -> FrozenBackbone:
    """Load weights of the recipe's backbone, or of one that they name, or show by their keys."""
    load = partial(load_backbone, source, checkpoint=checkpoint, crop_px=crop_px)
    if recipe.backbone is None:
        return load()
    try:
        return load(component=with_channels(recipe.backbone, None))  # see `fit_channels`
    except WeightsError as error:
        if recipe._backbone_overrides:
            raise
        try:
            return load()
        except UserError:
            raise error from None


def _eval_crop_px(recipe: RunRecipe, named_px: int | None) -> int | None:
    """Return the side of the images that the weights of others see in evaluations; None: their own.

    `named_px` is the PX of SOURCE@PX. An export and a run have their own size in any case.
    """
    crop_px = recipe.augment.arguments.get("crop_px")
    wanted = recipe.tune.eval_crop_px
    if wanted == "auto":
        return None if named_px or crop_px is None else round(LARGER * crop_px)
    if wanted is not None:
        return wanted
    return crop_px if isinstance(crop_px, int) else None
