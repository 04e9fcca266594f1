"""What a fine-tuning trains: backbone, losses, miner and queue; built from the recipe."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from sslpipe.augment.two_views import FusedViews
from sslpipe.errors import RecipeError
from sslpipe.export.encoder import build_encoder
from sslpipe.export.saved import SavedBackbone
from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.metric_task import EmbeddingQueue, MetricTask
from sslpipe.metric_learning.near_classes import ClassNeighbours
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.models.backbones import Backbone
from sslpipe.models.limits import within_memory
from sslpipe.models.tuning import (
    freeze_layers,
    learning_rate_scale,
    ramped_prefix,
)
from sslpipe.optim.parameter_groups import parameter_groups
from sslpipe.registry.schema import KindSettings, refusals
from sslpipe.run.contract import TrainingParts


@dataclass(frozen=True)
class FinetuningParts(TrainingParts):
    """What a plan builds, on the CPU, from recipe.seed; tests hand in their own."""

    augment: FusedViews  # makes recipe.views of each image
    model: MetricTask  # backbone, losses, miner and queue
    neighbours: ClassNeighbours | None = None  # the table of near classes, of sampler.neighbours

    @property
    def encoder(self) -> Backbone:
        return self.model.backbone

    @property
    def others(self) -> list[nn.Module]:
        return [] if self.neighbours is None else [self.neighbours]

    def first_frozen(self) -> list[nn.Module]:
        return [self.model.backbone.network]

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the optimizer; `model` is what an export takes."""
        task = self.model
        exported = nn.ModuleDict({"backbone": task.backbone})
        saved: dict[str, nn.Module] = {"model": exported, "losses": task.losses}
        if task.miner is not None:
            saved["miner"] = task.miner
        if task.queue is not None:
            saved["queue"] = task.queue
        if self.neighbours is not None:
            saved["neighbours"] = self.neighbours
        return saved

    def guarded(self) -> list[nn.Module]:
        """Return the module whose buffers a non-finite step must not change.

        The neighbours follow only steps that were taken.
        """
        return [self.model]


def build_task(
    recipe: FinetuneRecipe, crop_px: int, init_from: SavedBackbone | None, num_classes: int
) -> MetricTask:
    """Build backbone, losses, miner and queue; random weights are drawn from recipe.seed.

    Raises:
        RecipeError: As `check_task`, or a part refuses its settings.
    """
    check_task(recipe, num_classes)
    backbone = build_encoder(recipe, crop_px, init_from)
    dim = backbone.num_features
    terms = [("loss", recipe.loss)]
    terms += [(f"also.{n}.loss", term.loss) for n, term in enumerate(recipe.also)]
    losses = []
    for section, settings in terms:
        with within_memory("[loss]"), refusals(section, settings.kind):
            losses.append(settings.build(num_classes=num_classes, dim=dim))
    miner = None
    if recipe.miner is not None:
        with refusals("miner", recipe.miner.kind):
            miner = recipe.miner.build()
    with within_memory("[queue]"):
        queue = None if recipe.queue is None else EmbeddingQueue(recipe.queue.size, dim)
    weights = [1.0, *(term.weight for term in recipe.also)]
    return MetricTask(backbone=backbone, losses=losses, weights=weights, miner=miner, queue=queue)


def check_task(recipe: FinetuneRecipe, num_classes: int) -> None:
    """Refuse losses that have nothing to learn from, in such batches of so many classes.

    Heads compare rows with the weights of all classes; other losses compare rows, those of a queue,
    too.

    Raises:
        RecipeError: Names the setting, and what to change.
    """
    if num_classes < 2:
        raise RecipeError(
            f"sampler.classes_per_batch = {recipe.sampler.classes_per_batch}: there is one class "
            "to train on, so that no image has a negative; train on two classes or more, or lower "
            "data.validation_classes"
        )
    for loss in (recipe.loss, *(term.loss for term in recipe.also)):
        _check_loss(recipe, loss)
    if recipe.loss.kind in HEADS and not recipe.also:
        for key, part in (("miner", recipe.miner), ("queue", recipe.queue)):
            if part is not None:
                raise RecipeError(
                    f"loss.kind = {recipe.loss.kind!r} compares rows with weights, so [{key}] has "
                    "nothing to do; leave it out"
                )


def _check_loss(recipe: FinetuneRecipe, loss: KindSettings) -> None:
    sampler = recipe.sampler
    no_others = sampler.classes_per_batch == 1 and not sampler.random_images
    compares_rows = loss.kind in METRIC_LOSSES and loss.kind != "pml"  # which may have weights
    if compares_rows and no_others and recipe.queue is None:
        raise RecipeError(
            f"sampler.classes_per_batch = 1: loss.kind = {loss.kind!r} then has no negatives; use "
            "2 or more, or set sampler.random_images"
        )
    branches = len(recipe.embedding.taps) + 1
    shares = getattr(loss, "shares", ())  # of "hdc"
    if branches > 1 and shares and len(shares) != branches:
        raise RecipeError(
            f"embedding.taps makes {branches} branches, and loss.shares = {list(shares)} are of "
            f"{len(shares)}; give a share for each branch"
        )


def class_neighbours(
    recipe: FinetuneRecipe, task: MetricTask, num_classes: int
) -> ClassNeighbours | None:
    """Return the table of near classes that the order reads, with sampler.neighbours; else None."""
    if not recipe.sampler.neighbours:
        return None
    return ClassNeighbours(
        num_classes=num_classes,
        dim=task.backbone.num_features,
        size=recipe.sampler.classes_per_batch,
    )


def freeze_and_group(task: MetricTask, recipe: FinetuneRecipe) -> list[dict[str, Any]]:
    """Take what [tune] freezes out of training, in place; the groups are those of the rest."""
    tune = recipe.tune
    freeze_layers(
        task.backbone,
        frozen=tune.backbone == "frozen",
        last_blocks=tune.last_blocks,
        batchnorm=tune.batchnorm == "frozen",
    )
    behind = nn.ModuleList(filter(None, (task.backbone.embedding, *task.losses)))
    if tune.projector_first_steps and not any(p.requires_grad for p in behind.parameters()):
        raise RecipeError(
            f"tune.projector_first_steps = {tune.projector_first_steps} trains nothing: there is "
            "no embedding.dim, and the loss has no weights of its own; leave it out"
        )
    if not any(p.requires_grad for p in task.parameters()):
        raise RecipeError(
            "nothing is trained: tune.backbone = 'frozen', no embedding.dim, and a loss without "
            "weights of its own; set embedding.dim"
        )
    scale = learning_rate_scale(
        task.backbone,
        backbone_lr=tune.backbone_lr,
        layer_decay=tune.layer_decay,
        loss_lr=tune.loss_lr,
    )
    return parameter_groups(task, recipe.optim, scale, pretrained=ramped_prefix(tune))
