"""What a pretraining trains: views, encoder and projector, and the objective.

Built from the recipe, and refused where the recipe asks for what cannot be built.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sslpipe.augment.two_views import FusedViews
from sslpipe.data.index import DatasetIndex
from sslpipe.errors import DataError, RecipeError
from sslpipe.evaluation.feature_files import load_embeddings
from sslpipe.export.encoder import build_encoder
from sslpipe.export.saved import SavedBackbone
from sslpipe.losses import Objective
from sslpipe.losses.distill import TeacherFeatures
from sslpipe.models.backbones import Backbone
from sslpipe.models.flops import step_flops
from sslpipe.models.limits import within_memory
from sslpipe.models.momentum import MomentumPair
from sslpipe.models.simclr import SimCLR
from sslpipe.models.tuning import (
    freeze_layers,
    learning_rate_scale,
    ramped_prefix,
)
from sslpipe.optim.parameter_groups import parameter_groups
from sslpipe.portable import sha256_of
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry.schema import refusals
from sslpipe.run.contract import PretrainingParts

Model = SimCLR | MomentumPair


@dataclass(frozen=True)
class Parts(PretrainingParts):
    """What a plan builds, on the CPU, from recipe.seed; tests hand in their own."""

    augment: FusedViews
    model: Model  # encoder and projector
    loss: Objective
    # of an anchor, in some planned batches, see `planned_negatives`; (): the objective has none, or
    # they were not counted
    negatives: Sequence[float] = ()

    @property
    def others(self) -> list[nn.Module]:
        return [self.loss]

    def first_frozen(self) -> list[Backbone]:
        return backbones(self.model)

    def saved(self) -> dict[str, Any]:
        return {"model": self.model, "loss": self.loss}

    def guarded(self) -> list[nn.Module]:
        return [self.model, self.loss]


def build_model(recipe: Recipe, crop_px: int, init_from: SavedBackbone | None = None) -> Model:
    """Build encoder and projector, the same on every rank."""
    backbone = build_encoder(recipe, crop_px, init_from)
    make = MomentumPair if recipe.momentum else SimCLR
    with within_memory("[backbone] and [projector]"):
        return make(backbone, recipe.projector)


def backbones(model: Model) -> list[Backbone]:
    """List the backbones that a run's weights go into: the trained one, and its slow copy."""
    copies = [model.momentum.backbone] if isinstance(model, MomentumPair) else []
    return [model.backbone, *copies]


def freeze_and_group(model: Model, recipe: Recipe) -> list[dict[str, Any]]:
    """Take what [tune] freezes out of training, in place; the groups are those of the rest."""
    tune = recipe.tune
    if not recipe.init:
        return parameter_groups(model, recipe.optim)
    still = tune.batchnorm == "frozen"
    for backbone in backbones(model):
        freeze_layers(backbone, frozen=False, last_blocks=tune.last_blocks, batchnorm=still)
    scale = learning_rate_scale(
        model.backbone,
        backbone_lr=tune.backbone_lr,
        layer_decay=tune.layer_decay,
    )
    return parameter_groups(model, recipe.optim, scale, pretrained=ramped_prefix(tune))


def recipe_flops(recipe: Recipe, model: Model, crop_px: int) -> float:
    """Count FLOPs of a step, forward and backward; what gradient caching repeats is not counted."""
    trained = nn.Sequential(model.backbone, model.projector)
    flops = step_flops(trained, recipe.data.batch_size, crop_px, model.backbone.channels)
    # forward and twice as much backward for either view; the keys of a pair have no backward
    return flops * (4 / 6 if recipe.momentum else 1)


def build_loss(recipe: Recipe, teacher: TeacherFeatures | None = None) -> Objective:
    """Build the recipe's objective; one with a queue learns how long its embeddings are.

    Args:
        recipe: Of a pretraining.
        teacher: What `open_teacher` gave; without it [teacher] is taken to hold no sample.

    Raises:
        RecipeError: It learns from a teacher and there is none, or the other way round; or one
            of LOSS_REFUSALS applies.
    """
    kind = recipe.loss.kind
    learns = "teacher" in recipe.loss.derived
    if learns and recipe.teacher is None:
        raise RecipeError(
            f"loss.kind = {kind!r} learns a teacher's features; write them with `sslpipe embed "
            "SOURCE --split train --out teacher.safetensors` and set teacher.features to that file"
        )
    if recipe.teacher is not None and not learns:
        raise RecipeError(
            f"loss.kind = {kind!r} makes no use of [teacher]; use loss.kind = 'distill', or leave "
            "the section out"
        )
    nobody = TeacherFeatures(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    masks = recipe.pairs.masks if recipe.pairs else ()
    with within_memory("[loss]"), refusals("loss", kind):
        loss_fn: Objective = recipe.loss.build(
            dim=recipe.projector.out_dim,
            group_columns=len(masks),
            teacher=teacher or nobody,
        )
    for refuse in LOSS_REFUSALS:
        refuse(recipe, loss_fn)
    return loss_fn


def has_weights_of_its_own(recipe: Recipe, loss_fn: Objective) -> None:
    """Refuse an objective with weights, which nothing would train."""
    learned = [name for name, weight in loss_fn.named_parameters() if weight.requires_grad]
    if learned:
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} has weights of its own ({', '.join(learned)}), and "
            "the optimizer has only those of encoder and projector, so they would keep their first "
            "values; make them settings, or buffers that the objective changes itself"
        )


def batch_is_too_small(recipe: Recipe, loss_fn: Objective) -> None:
    """Refuse a data.batch_size that leaves an objective with negatives without any."""
    batch = recipe.data.batch_size
    if loss_fn.negatives_per_anchor(batch + 1) > 0 and loss_fn.negatives_per_anchor(batch) == 0:
        raise RecipeError(
            f"data.batch_size = {batch} leaves loss.kind = {recipe.loss.kind!r} without negatives; "
            f"use {batch + 1} or more"
        )


def does_not_take_what_is_given(recipe: Recipe, loss_fn: Objective) -> None:
    """Refuse an objective whose `forward` lacks what a step gives beside the embeddings."""
    keywords = ["ids", "labels"]
    if recipe.pairs and recipe.pairs.masks:
        keywords.append("groups")
    try:
        inspect.signature(loss_fn.forward).bind(None, None, **dict.fromkeys(keywords))
    except TypeError as error:
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} cannot be called in this run: {error}; write its "
            "forward(self, z_a, z_b, *, ids=None, labels=None, groups=None)"
        ) from None


def has_no_momentum_encoder(recipe: Recipe, loss_fn: Objective) -> None:
    """Refuse an objective that compares keys of earlier steps without [momentum]."""
    if loss_fn.needs_momentum_encoder and recipe.momentum is None:
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} compares queries with keys of earlier steps, which "
            "only a momentum encoder keeps alike; add a section [momentum], or momentum.start=0.999"
        )


LOSS_REFUSALS = (
    has_weights_of_its_own,
    batch_is_too_small,
    does_not_take_what_is_given,
    has_no_momentum_encoder,
)


def open_teacher(recipe: Recipe, index: DatasetIndex) -> tuple[Recipe, TeacherFeatures | None]:
    """Read what [teacher] names; the recipe gets the file's hash. None without the section.

    Raises:
        DataError: The file is damaged, of other data, or has no row of some samples.
        RecipeError: It is not the one that the recipe was made for.
    """
    if recipe.teacher is None:
        return recipe, None
    path = recipe.teacher.features
    name = recipe.data.split
    try:
        rows, metadata = load_embeddings(path)
    except DataError as error:
        raise DataError(f"teacher.features: {error}") from error
    if not index.has_sha256(metadata.get("data_sha256")) or metadata.get("split") != name:
        raise DataError(
            f"teacher.features = {path!r} was not embedded from split {name!r} of this data set; "
            f"write it with `sslpipe embed SOURCE --split {name} --out {path}`"
        )
    ids = rows.ids.numpy()
    # who could not be decoded is not trained on
    missing = np.setdiff1d(np.arange(len(index.split(name))), ids)
    unknown = np.setdiff1d(missing, [one["id"] for one in metadata.get("left_out", [])])
    if len(unknown):
        raise DataError(
            f"teacher.features = {path!r} has no row of {len(unknown)} of the split's samples, the "
            f"first with id {unknown[0]}; embed the whole split"
        )
    sha256 = sha256_of(Path(path))
    if recipe.teacher.sha256 not in ("", sha256):
        raise RecipeError(
            f"teacher.features = {path!r} has sha256 {sha256[:16]}, and the recipe was made for "
            f"{recipe.teacher.sha256[:16]!r}; name that file"
        )
    order = rows.ids.argsort()
    teacher = recipe.teacher.model_copy(update={"sha256": sha256})
    recipe = recipe.model_copy(update={"teacher": teacher})
    return recipe, TeacherFeatures(rows.features[order], rows.ids[order])
