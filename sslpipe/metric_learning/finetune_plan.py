"""A fine-tuning's plan: all that is known of it before its first step.

As `sslpipe.plan` for pretraining: `Finetuning.make` resolves, the rules below refuse and remark.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sslpipe.augment.two_views import build_augment
from sslpipe.data.index import DatasetIndex
from sslpipe.data.order import ORDER_VERSION
from sslpipe.data.subsets import with_a_partner
from sslpipe.errors import DataError, counted
from sslpipe.evaluation.monitor import retrieval_monitor
from sslpipe.export.saved import SavedBackbone
from sslpipe.export.start import Start, with_init
from sslpipe.metric_learning.classes import (
    HeldOut,
    bank_ids,
    class_names,
    held_out,
    labelled_split,
    trained_labels,
    untrained_ids,
    watched_ids,
)
from sslpipe.metric_learning.finetune_parts import (
    FinetuningParts,
    build_task,
    class_neighbours,
    freeze_and_group,
)
from sslpipe.metric_learning.fitting import fitting_settings, plan_batches, watching_new_classes
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.metric_learning.sampling import PK_VERSION, PKOrder
from sslpipe.models.backbones import backbone_settings
from sslpipe.planning.recipe_plan import RecipePlan
from sslpipe.planning.rules import (
    backbone_is_slowed,
    network_takes_no_half_size,
    rate_is_unusual,
    stem_does_not_fit,
    warmup_takes_the_run,
    weights_replace_the_backbone,
)
from sslpipe.planning.watch import can_choose, check_choice, choosing_nothing
from sslpipe.recipe.sections import EVALUATIONS
from sslpipe.run.health import Alarms

ORDER_AND_PK_VERSION = ORDER_VERSION * 1000 + PK_VERSION
ALARM_REMEDY = "Lower optim.peak_lr (and tune.loss_lr, of proxies), or lengthen optim.warmup_steps"
ANOTHER_LOSS = (  # where the loss is not this one
    ", or use another loss.kind: sup_con with temperature = 0.1 learns from many shapes of labels"
)


@dataclass(frozen=True, kw_only=True)
class Finetuning(RecipePlan[FinetuningParts]):
    """The plan of a fine-tuning: a value; it opens no device and writes nothing.

    `Plan` describes the fields that plans of all kinds have; the labels of this split number the
    classes, or the values of sampler.column.
    """

    recipe: FinetuneRecipe
    order: PKOrder
    held_out: HeldOut

    order_version = ORDER_AND_PK_VERSION
    measure = staticmethod(retrieval_monitor)

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
        start = Start.find(named, index, run_dir)
        not_used = start.remark(recipe)
        recipe = with_backbone(recipe, start.weights, index)
        order = plan_batches(recipe, index)
        recipe = recipe.resolved(order.steps_per_epoch)
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

    def build(self) -> FinetuningParts:
        augment = build_augment(self.recipe, self.index)
        augment.keep_first(self.recipe.views)
        classes = len(self.order.classes)
        task = build_task(self.recipe, augment.crop_px, self.start.weights, classes)
        return FinetuningParts(augment, task, class_neighbours(self.recipe, task, classes))

    def remarks(self, parts: FinetuningParts) -> list[str]:
        for refuse in REFUSALS:
            refuse(self, parts)
        return [text for remark in REMARKS for text in remark(self, parts)]

    def groups(self, parts: FinetuningParts) -> list[dict[str, Any]]:
        return freeze_and_group(parts.model, self.recipe)

    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        return (self.recipe.seed, step, rank)

    def alarms(self, parts: FinetuningParts) -> Alarms:
        return Alarms(
            self.recipe.total_steps,
            most_rank=self.recipe.sampler.classes_per_batch / 2,
            grows="queue_rows" if self.recipe.queue is not None else "",
            harder=self.recipe.sampler.neighbours > 0,
            remedy=ALARM_REMEDY + ANOTHER_LOSS * (self.recipe.loss.kind != "sup_con"),
        )

    def metadata(self, parts: FinetuningParts) -> dict[str, Any]:
        """Return what is stored beside each checkpoint: the classes trained on, and the start."""
        return {
            "classes": trained_labels(self.order, self.split),
            **super().metadata(parts),
        }

    def describe(self) -> str:
        order = self.order
        images = counted(order.samples, "image")
        classes = counted(len(order.classes), "class")
        steps = counted(order.steps_per_epoch, "step")
        return (
            f"{images} of {classes}, {steps} an epoch of {counted(order.batch_size, 'image')}; "
            f"{self.start.describe(self.recipe.tune)}"
        )


def with_backbone(
    recipe: FinetuneRecipe,
    init_from: SavedBackbone | None,
    index: DatasetIndex,
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
    settings = recipe.backbone.arguments
    settings.pop("embedding_dim", None)
    if recipe.embedding.dim is not None:
        settings["embedding_dim"] = recipe.embedding.dim
    settings.pop("embedding_taps", None)
    if recipe.embedding.taps:
        settings["embedding_taps"] = list(recipe.embedding.taps)
    settings["normalize"] = recipe.embedding.normalize
    backbone = backbone_settings(recipe.backbone.kind, settings)
    return recipe.model_copy(update={"backbone": backbone})


# why a plan cannot be carried out


def nothing_chooses_the_best(plan: Finetuning, parts: FinetuningParts) -> None:
    """Refuse a run.keep or run.patience that no evaluation of the run could decide."""
    recipe = plan.recipe
    labels = plan.split.labels_of(plan.held_out.ids)
    nothing = choosing_nothing(recipe.run)
    if not nothing:
        return
    watch = ""
    if not recipe.run.monitor_steps:
        watch = f" run.monitor_steps={max(1, recipe.total_steps // EVALUATIONS)}"
    if can_choose(labels, views=False):
        remedy = f"set{watch}, or set {nothing}"
    elif recipe.data.validation_classes == "auto":  # smaller batches may leave some to choose by
        fitting = fitting_settings(recipe, plan.split, class_names(plan.split))
        remedy = f"set {fitting or nothing}" + ("" if nothing in fitting else watch)
    else:
        also = f" and set{watch}" if watch else ""
        remedy = f"raise data.validation_classes{also}, or set {nothing}"
    check_choice(recipe.run, labels, views=False, remedy=remedy)


REFUSALS = (nothing_chooses_the_best, network_takes_no_half_size)


# what a user should know


def small_classes_are_skipped(plan: Finetuning, parts: FinetuningParts) -> Iterator[str]:
    """Mention classes with too few images for a batch, and how many need not be skipped."""
    order = plan.order
    if not order.small_classes:
        return
    text = (
        f"{order.small_classes} classes have fewer than sampler.images_per_class = "
        f"{order.images_per_class} images and are skipped"
    )
    _, sizes = np.unique(order.labels[order.labels >= 0], return_counts=True)
    pairs = int((sizes >= 2).sum()) - len(order.classes)
    if pairs:
        text += f"; sampler.images_per_class = 2 takes {pairs:,} more"
    yield text


def much_is_unused(plan: Finetuning, parts: FinetuningParts) -> Iterator[str]:
    """Mention that an epoch leaves many images out, and what can be set to use more."""
    order = plan.order
    if order.used >= 0.8 * order.samples:
        return
    group = order.neighbours + 1  # classes come in groups of so many
    remedies = [f"raise sampler.buffer = {order.buffer}"] if order.dropped else []
    if order.classes_per_batch - group >= max(2, group):
        remedies.append("lower sampler.classes_per_batch")
    elif order.images_per_class > 2:
        remedies.append("lower sampler.images_per_class")
    text = f"an epoch uses {order.used:,} of {order.samples:,} images, each epoch others"
    if order.dropped:
        text += f" ({order.dropped:,} find no room in the buffer)"
    yield f"{text}: {' or '.join(remedies)} to use more" if remedies else text


def groups_are_held_out_too(plan: Finetuning, parts: FinetuningParts) -> Iterator[str]:
    """Mention samples that are not trained on as their groups are held out."""
    data = plan.recipe.data
    untrained = untrained_ids(plan.recipe, plan.split, class_names(plan.split))
    if more := len(untrained) - len(plan.held_out.ids):
        yield (
            f"{more:,} samples of other classes share {data.holdout_by} with the validation "
            "classes and are not trained on"
        )


def nothing_is_validated(plan: Finetuning, parts: FinetuningParts) -> Iterator[str]:
    """Mention that nothing is held out, or nothing that can be scored."""
    chosen = plan.recipe.data.validation_classes
    labels = plan.split.labels_of(plan.held_out.ids)
    if not len(labels):
        yield (
            f"data.validation_classes = {chosen!r} holds nothing out: nothing says if training "
            "makes the weights worse, and its last ones are taken"
        )
    elif plan.recipe.run.monitor_steps and not with_a_partner(labels):
        yield (
            "run.monitor_steps is set, but each validation class has one image: no validation; "
            "raise data.validation_classes"
        )


def new_classes_are_not_watched(plan: Finetuning, parts: FinetuningParts) -> Iterator[str]:
    """Mention that the held-out images are of classes that are trained on."""
    if not plan.held_out.whole_classes:
        spare = len(plan.order.classes) - plan.order.classes_per_batch
        settings = "data.validation_classes=2"
        if spare < 2:
            settings = ""
            with suppress(DataError):  # of another split, which may lie elsewhere
                settings = watching_new_classes(plan.recipe, plan.split, class_names(plan.split))
        few = f"set {settings}, or " if settings else ""
        yield (
            "the classes are too few to hold out some of them: the held-out images are of the "
            "classes that are trained on, so the watch does not see whether others get worse; if "
            f"yours will be others, {few}compare the run with its start on such images"
        )


def random_weights_are_frozen(plan: Finetuning, parts: FinetuningParts) -> Iterator[str]:
    """Mention layers and statistics of random weights that stay as they are."""
    tune = plan.recipe.tune
    if plan.start.kind != "random":
        return
    if tune.last_blocks is not None:
        yield (
            f"tune.last_blocks = {tune.last_blocks} leaves blocks before these at random weights; "
            "name weights with --init, or take it out of the recipe"
        )
    if tune.batchnorm == "frozen":
        yield (
            "tune.batchnorm = 'frozen' leaves BatchNorm without statistics, as the weights are "
            "random: name weights with --init, or set tune.batchnorm=train"
        )


REMARKS = (
    warmup_takes_the_run,
    backbone_is_slowed,
    stem_does_not_fit,
    rate_is_unusual,
    small_classes_are_skipped,
    much_is_unused,
    groups_are_held_out_too,
    nothing_is_validated,
    new_classes_are_not_watched,
    random_weights_are_frozen,
    weights_replace_the_backbone,
)
