"""The parts of a fine-tuning, built from its recipe and checked before the first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.augment.two_views import Views, build_augment
from sslpipe.data.index import DatasetIndex, RelabelledSplit, Split
from sslpipe.data.order import ORDER_VERSION, lowest_hashes, with_a_partner
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError, did_you_mean, naming
from sslpipe.evaluation.monitor import retrieval_monitor
from sslpipe.export.saved import SavedBackbone
from sslpipe.export.start import Start, with_init
from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.losses import HDCLoss
from sslpipe.metric_learning.model import EmbeddingQueue, MetricTask
from sslpipe.metric_learning.neighbours import ClassNeighbours
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.metric_learning.sampling import PK_VERSION, PKOrder
from sslpipe.models.backbones import Backbone, build_backbone, stem_warning
from sslpipe.models.limits import within_memory
from sslpipe.models.momentum import averaged
from sslpipe.models.transfer import copy_weights
from sslpipe.models.tuning import (
    freeze_layers,
    learning_rate_scale,
    pretrained_groups,
    tune_warnings,
)
from sslpipe.optim import parameter_groups, rate_warning
from sslpipe.random import permutation
from sslpipe.recipe.base import Component
from sslpipe.registry.schema import refusals
from sslpipe.run.best import can_choose, nothing_to_choose_by
from sslpipe.run.health import Alarms
from sslpipe.run.plan import Plan, TrainingParts

Integers = NDArray[np.int64]

MOST_VALIDATED = 4000  # held-out samples that are scored: evenly spaced ones
MOST_BANK = 500  # trained ones that held-out images search, too
ORDER_AND_PK_VERSION = ORDER_VERSION * 1000 + PK_VERSION
# images that data.validation_classes = "auto" aims at
FEW_HELD_OUT = 100
MOST_HELD_OUT = 500
LEAST_HELD_OUT_CLASSES = 5
ALARM_REMEDY = (
    "Lower optim.peak_lr (and tune.loss_lr, of proxies), lengthen optim.warmup_steps, or use "
    "another loss.kind: sup_con with temperature = 0.1 learns from many shapes of labels"
)
_VALIDATION = 0x7A  # names the draw of validation classes


def validation_ids(split: Split, classes: int | Sequence[str], names: Sequence[str]) -> Integers:
    """Return the sorted ids of every sample of the validation classes.

    Args:
        split: The split that is trained on.
        classes: Their names, or how many of those that have samples: the first of a fixed shuffle.
        names: Of the data set's classes, by label.

    Raises:
        RecipeError: A name that is none of the classes, or no class is left to train on.
    """
    present = np.unique(split.labels[split.labels >= 0])
    if isinstance(classes, int):
        chosen = present[permutation(len(present), _VALIDATION)[:classes]]
        if classes >= len(present):
            raise RecipeError(
                f"data.validation_classes = {classes} leaves no class to train on; split "
                f"{split.name!r} has {len(present)}"
            )
    else:
        for name in classes:
            if name not in names:
                raise RecipeError(
                    f"data.validation_classes names {name!r}, which is no class of the data"
                    f"{did_you_mean(name, names)}; it has: {', '.join(names) or 'no names'}"
                )
        chosen = np.array([names.index(name) for name in classes], np.int64)
    return np.flatnonzero(np.isin(split.labels, chosen))


class HeldOut(NamedTuple):
    """What a fine-tuning does not train on, to choose its weights by."""

    ids: Integers  # sorted
    whole_classes: bool  # else images of classes that are trained on


def held_out(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> HeldOut:
    """Choose the samples that data.validation_classes holds out, those of no group included.

    "auto" aims at a tenth of the images; of few at FEW_HELD_OUT, if that is at most a quarter, of
    many at MOST_HELD_OUT. Whole classes, which say most of new ones, if these are at least
    LEAST_HELD_OUT_CLASSES and leave those of a batch; else of each class so many images, if it has
    more than images_per_class; where none has, two classes or more; where a batch needs these,
    nothing.

    Args:
        recipe: Of a fine-tuning.
        split: As `labelled_split` gives it, like names.
        names: Of the classes, by label.

    Raises:
        RecipeError: As in `validation_ids`.
    """
    chosen = recipe.data.validation_classes
    sampler = recipe.sampler
    if chosen != "auto":
        return HeldOut(validation_ids(split, chosen, names), whole_classes=True)
    labels, sizes = np.unique(split.labels[split.labels >= 0], return_counts=True)
    images = int(sizes.sum())
    classes = len(labels)
    spare_classes = int((sizes >= sampler.images_per_class).sum()) - sampler.classes_per_batch
    few = min(FEW_HELD_OUT, images // 4)
    share = min(max(images // 10, few), MOST_HELD_OUT) / max(1, images)
    wanted = round(share * classes)
    if LEAST_HELD_OUT_CLASSES <= wanted <= spare_classes:
        return HeldOut(validation_ids(split, wanted, names), whole_classes=True)
    if recipe.data.holdout_by is None:
        taken = [
            lowest_hashes(
                np.flatnonzero(split.labels == label),
                min(max(1, int(share * size)), size - sampler.images_per_class),
            )
            for label, size in zip(labels.tolist(), sizes.tolist(), strict=True)
            if size > sampler.images_per_class
        ]
        if len(taken) > 1:
            return HeldOut(np.sort(np.concatenate(taken)), whole_classes=False)
    if min(2, classes // 2) <= spare_classes and classes > 3:
        return HeldOut(validation_ids(split, max(2, min(wanted, spare_classes)), names), True)
    return HeldOut(np.zeros(0, np.int64), whole_classes=True)


def labelled_split(recipe: FinetuneRecipe, index: DatasetIndex) -> tuple[Split, Sequence[str]]:
    """Open the split that is trained on, and the names of its classes, by label.

    With sampler.column the labels number that column's values.

    Raises:
        DataError: There is no such column, or it is of floats.
    """
    split = index.split(recipe.data.split)
    column = recipe.sampler.column
    if column is None:
        return split, index.manifest.classes
    with naming("sampler.column"):
        by_column = RelabelledSplit(split, split.column(column))
    return by_column, by_column.names


def trained_labels(order: PKOrder, split: Split) -> list[int]:
    """List the data set's own labels that are trained on; split: of `labelled_split`."""
    if not isinstance(split, RelabelledSplit):
        classes: list[int] = order.classes.tolist()
        return classes
    own = np.unique(split.original.labels[np.isin(order.labels, order.classes)])
    labels: list[int] = own[own >= 0].tolist()
    return labels


def untrained_ids(recipe: FinetuneRecipe, index: DatasetIndex) -> Integers:
    """Return the sorted ids that are not trained on: those held out, and their groups.

    With data.holdout_by, a group that has a sample in a validation class is left out whole.
    """
    split, names = labelled_split(recipe, index)
    by = recipe.data.holdout_by
    ids = held_out(recipe, split, names).ids
    if by is None:
        return ids
    with naming("data.holdout_by"):
        groups = split.column(by).groups.whole_split()
    return np.flatnonzero(np.isin(groups, groups[ids]))


def plan_batches(recipe: FinetuneRecipe, index: DatasetIndex) -> PKOrder:
    """Plan the batches of a run: the split without its validation classes."""
    split = labelled_split(recipe, index)[0]
    sampler = recipe.sampler
    order = PKOrder(
        split,
        seed=recipe.seed,
        classes_per_batch=sampler.classes_per_batch,
        images_per_class=sampler.images_per_class,
        random_images=sampler.random_images,
        neighbours=sampler.neighbours,
        buffer=sampler.buffer,
        num_streams=sampler.num_streams,
        window=sampler.shuffle_window,
        without=untrained_ids(recipe, index),
    )
    if sampler.neighbours and order.steps_per_epoch < recipe.run.prefetch:
        raise RecipeError(
            f"sampler.neighbours plans an epoch ahead, and run.prefetch = {recipe.run.prefetch} "
            f"reads farther: an epoch has {order.steps_per_epoch} steps; use at most so many"
        )
    return order


def watched_ids(ids: Integers) -> Integers:
    """Return the held-out samples that are scored: evenly spaced ones, MOST_VALIDATED at most."""
    return ids[:: -(-len(ids) // MOST_VALIDATED) or 1]


def bank_ids(order: PKOrder) -> Integers:
    """Return the trained samples that held-out images search: MOST_BANK at most, by a hash."""
    trained = np.flatnonzero(np.isin(order.labels, order.classes))
    return lowest_hashes(trained, MOST_BANK)


@dataclass(frozen=True)
class FinetuningParts(TrainingParts):
    """What a plan builds, on the CPU, from recipe.seed; tests hand in their own.

    Attributes:
        augment: Makes the views of a batch, recipe.views of each image.
        model: Backbone, losses, miner and queue.
        neighbours: The table of near classes, with sampler.neighbours.
    """

    augment: Views
    model: MetricTask
    neighbours: ClassNeighbours | None = None

    @property
    def encoder(self) -> Backbone:
        """What takes views alone."""
        return self.model.backbone

    def moved(
        self, model: MetricTask, device: torch.device, dtype: torch.dtype
    ) -> "FinetuningParts":
        """Return the parts on a device, with this model, which is there already."""
        near = self.neighbours
        return FinetuningParts(
            augment=self.augment.to(device),
            model=model,
            neighbours=None if near is None else near.to(device, dtype),
        )

    def first_frozen(self) -> list[nn.Module]:
        """Return the networks that tune.projector_first_steps keeps out of training."""
        return [self.model.backbone.network]

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the optimizer; `model` is what an export takes."""
        task = self.model
        exported = nn.ModuleDict({"backbone": task.backbone})
        if task.ema is not None:
            exported["ema"] = task.ema
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


@dataclass(frozen=True)
class Finetuning(Plan[FinetuningParts]):
    """The plan of a fine-tuning: a value; it opens no device and writes nothing.

    Attributes:
        recipe: Resolved: backbone with its embedding layer, hashes, number of steps.
        index: The data set, of the channels that are read.
        split: What is trained on; its labels number the classes, or those of sampler.column.
        order: Which samples come in which batch.
        start: The weights it starts from.
        held_out: What is held out from training.
        watched: Sorted ids of the held-out samples that are scored during the run.
        bank: Ids of trained ones that they search, too; None: they search each other.
        not_used: What of the given recipe the weights replace, as a sentence; None: nothing.
    """

    order_version: ClassVar[int] = ORDER_AND_PK_VERSION

    recipe: FinetuneRecipe
    index: DatasetIndex
    split: Split
    order: PKOrder
    start: Start
    held_out: HeldOut
    watched: Integers
    bank: Integers | None
    not_used: str | None

    @classmethod
    def make(
        cls,
        recipe: FinetuneRecipe,
        index: DatasetIndex,
        named: SavedBackbone | None = None,
        run_dir: Path | None = None,
    ) -> "Finetuning":
        """Plan a fine-tuning; see `sslpipe.plan.Pretraining.make`."""
        index = index.with_channels(recipe.data.channels)
        split, names = labelled_split(recipe, index)
        index.check_files(split.name)
        order = plan_batches(recipe, index)
        start = Start.find(named, index, run_dir)
        not_used = start.remark(recipe)
        recipe = with_backbone(recipe, start.weights, index).resolved(order.steps_per_epoch)
        held = held_out(recipe, split, names)
        watched = watched_ids(held.ids)
        recipe = recipe.with_watch(can_choose(split.labels_of(watched), views=False))
        return cls(
            recipe=recipe,
            index=index,
            split=split,
            order=order,
            start=start,
            held_out=held,
            watched=watched,
            bank=None if held.whole_classes else bank_ids(order),
            not_used=not_used,
        )

    def build(self, *, compiled: bool = True) -> FinetuningParts:
        """Build the parts, the same on every rank; see `sslpipe.plan.Pretraining.build`."""
        compiled = compiled and self.recipe.run.compile != "off"
        augment = build_augment(self.recipe, self.index, compiled=compiled)
        augment.specs = augment.specs[: self.recipe.views]  # type: ignore[assignment]
        classes = len(self.order.classes)
        task = build_task(self.recipe, augment.crop_px, self.start.weights, classes)
        return FinetuningParts(augment, task, class_neighbours(self.recipe, task, classes))

    def remarks(self, parts: FinetuningParts) -> list[str]:
        """List what a user should know before the first step. Raises: RecipeError: refused."""
        said = plan_warnings(self, parts.augment.crop_px)
        return [*said, *filter(None, [self.not_used])]

    def groups(self, parts: FinetuningParts) -> list[dict[str, Any]]:
        """Take what [tune] freezes out of training; return the optimizer's parameter groups."""
        return freeze_and_group(parts.model, self.recipe)

    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        """Return the integers that decide dropout and the like."""
        return (self.recipe.seed, step, rank)

    def score(
        self,
        backbone: nn.Module,
        view: EvalView,
        *,
        reader: Reader,
        process: Rank,
        device: torch.device,
    ) -> dict[str, float]:
        """Score the held-out samples by `retrieval_monitor`. Collective."""
        return retrieval_monitor(
            backbone,
            view,
            self.split,
            self.watched,
            process,
            bank=self.bank,
            canvas_px=self.recipe.data.canvas_px,
            num_workers=self.recipe.run.num_workers,
            device=device,
            reader=reader,
        )

    def alarms(self, parts: FinetuningParts) -> Alarms:
        """Return what reads the numbers of each log line."""
        return Alarms(
            self.recipe.total_steps,
            most_rank=self.recipe.sampler.classes_per_batch / 2,
            grows="queue_rows" if self.recipe.queue is not None else "",
            remedy=ALARM_REMEDY,
        )

    def metadata(self, view: EvalView) -> dict[str, Any]:
        """Return what is stored beside each checkpoint: the classes trained on, and the start."""
        return {"classes": trained_labels(self.order, self.split), **self.start.metadata(view)}

    def describe(self) -> str:
        """Return how many images of how many classes are trained on, and from which weights."""
        order = self.order
        start = self.start.describe(self.recipe.tune) or "; random weights"
        return (
            f"{order.samples} images of {len(order.classes)} classes, {order.steps_per_epoch} "
            f"steps an epoch of {order.batch_size} images{start}"
        )


def with_backbone(
    recipe: FinetuneRecipe,
    init_from: SavedBackbone | None,
    index: DatasetIndex | None = None,
) -> FinetuneRecipe:
    """Return the recipe with its backbone and the embedding layer in one component.

    Args:
        recipe: With or without a [backbone].
        init_from: The weights that it starts from, whose kind and arguments then count.
        index: As in `with_init`.

    Raises:
        RecipeError: No backbone at all, or the recipe names another one.
    """
    recipe = with_init(recipe, init_from, index)
    assert recipe.backbone is not None
    tree = recipe.backbone.model_dump()
    tree.pop("embedding_dim", None)
    if recipe.embedding.dim is not None:
        tree["embedding_dim"] = recipe.embedding.dim
    tree.pop("embedding_taps", None)
    if recipe.embedding.taps:
        tree["embedding_taps"] = list(recipe.embedding.taps)
    tree["normalize"] = recipe.embedding.normalize
    return recipe.model_copy(update={"backbone": Component.model_validate(tree)})


def build_task(
    recipe: FinetuneRecipe, crop_px: int, init_from: SavedBackbone | None, num_classes: int
) -> MetricTask:
    """Build backbone, losses, miner and queue; random weights are drawn from recipe.seed."""
    assert recipe.backbone is not None
    check_negatives(recipe, num_classes)
    torch.manual_seed(recipe.seed)
    with within_memory("[backbone]"):
        backbone = build_backbone(recipe.backbone, crop_px=crop_px)
    if init_from is not None:
        copy_weights(init_from.backbone, backbone, recipe.backbone.kind)
    dim = backbone.num_features
    terms = [("loss", recipe.loss)]
    terms += [(f"also.{n}.loss", term.loss) for n, term in enumerate(recipe.also)]
    losses = []
    for section, settings in terms:
        with within_memory("[loss]"), refusals(section, settings.kind):
            losses.append(settings.build(num_classes=num_classes, dim=dim))
    branches = len(recipe.embedding.taps) + 1
    for loss in losses:
        shares = loss.shares if isinstance(loss, HDCLoss) else ()
        if branches > 1 and shares and len(shares) != branches:
            raise RecipeError(
                f"embedding.taps makes {branches} branches, and loss.shares = {list(shares)} are "
                f"of {len(shares)}; give a share for each branch"
            )
    for key, part in (("miner", recipe.miner), ("queue", recipe.queue)):
        if part is not None and recipe.loss.kind in HEADS and not recipe.also:
            raise RecipeError(
                f"loss.kind = {recipe.loss.kind!r} compares rows with weights, so [{key}] has "
                "nothing to do; leave it out"
            )
    miner = None
    if recipe.miner is not None:
        with refusals("miner", recipe.miner.kind):
            miner = recipe.miner.build()
    with within_memory("[queue]"):
        queue = None if recipe.queue is None else EmbeddingQueue(recipe.queue.size, dim)
    weights = [1.0, *(term.weight for term in recipe.also)]
    task = MetricTask(backbone, losses, weights, miner, queue)
    task.ema = averaged(backbone) if recipe.optim.ema else None
    return task


def check_negatives(recipe: FinetuneRecipe, num_classes: int) -> None:
    """Refuse a run in which nothing is ever compared with another class.

    Batches have `sampler.classes_per_batch` classes by construction. Heads compare with the weights
    of all classes, a queue brings rows of earlier batches.

    Raises:
        RecipeError: There is one class, or the batches hold one and the loss compares their rows.
    """
    sampler = recipe.sampler
    queue = recipe.queue
    if num_classes < 2:
        raise RecipeError(
            f"sampler.classes_per_batch = {sampler.classes_per_batch}: there is one class to train "
            "on, so that no image has a negative; train on two classes or more, or lower "
            "data.validation_classes"
        )
    others = sampler.classes_per_batch > 1 or sampler.random_images
    if others or (queue is not None and queue.start_step == 0):
        return
    kinds = [recipe.loss.kind, *(term.loss.kind for term in recipe.also)]
    for kind in kinds:
        if kind in METRIC_LOSSES and kind != "pml":  # which may be one with weights of classes
            raise RecipeError(
                f"sampler.classes_per_batch = 1: loss.kind = {kind!r} then has no "
                "negatives; use 2 or more, or set sampler.random_images"
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
        by_library=tune.layer_decay_by == "library",
    )
    return parameter_groups(task, recipe.optim, scale, **pretrained_groups(tune))


def class_numbers(labels: Tensor, classes: Tensor) -> Tensor:
    """Number labels of the data set, (n,) int64, by their place among sorted classes, else -1."""
    place = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    return torch.where(classes[place] == labels, place, -1)


def plan_warnings(plan: Finetuning, crop_px: int) -> list[str]:
    """List what a user should know before the first step, a sentence each.

    Raises:
        RecipeError: run.keep or run.patience need an evaluation that is not made.
    """
    recipe = plan.recipe
    order = plan.order
    assert recipe.backbone is not None
    warnings = tune_warnings(recipe)
    rate = rate_warning(recipe.optim, recipe.sampler.batch_size)
    warnings += [text for text in (stem_warning(recipe.backbone, crop_px), rate) if text]
    if order.small_classes:
        warnings.append(
            f"{order.small_classes} classes have fewer than sampler.images_per_class = "
            f"{order.images_per_class} images and are skipped"
        )
    if order.used < 0.8 * order.samples:
        larger = f"raise sampler.buffer = {order.buffer}, or " * bool(order.dropped)
        warnings.append(
            f"an epoch uses {order.used} of {order.samples} images ({order.dropped} had to leave "
            f"the buffer): {larger}lower sampler.classes_per_batch to use more"
        )
    held = len(plan.held_out.ids)
    labels = plan.split.labels_of(plan.held_out.ids)
    remedy = "raise data.validation_classes"
    for reason in nothing_to_choose_by(recipe.run, labels, views=False, remedy=remedy):
        raise RecipeError(reason)
    if more := len(untrained_ids(recipe, plan.index)) - held:
        warnings.append(
            f"{more:,} samples of other classes share {recipe.data.holdout_by} with the validation "
            "classes and are not trained on"
        )
    if not held:
        warnings.append(
            f"data.validation_classes = {recipe.data.validation_classes!r} holds nothing out: "
            "nothing says if training makes the weights worse, and its last ones are taken"
        )
    elif recipe.run.monitor_steps and not with_a_partner(labels):
        warnings.append(
            "run.monitor_steps is set, but each validation class has one image: no validation; "
            "raise data.validation_classes"
        )
    return warnings
