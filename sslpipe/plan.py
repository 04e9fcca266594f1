"""A pretraining's plan: all that is known of it before its first step.

`Pretraining.make` resolves the recipe and fits weights, the rules below it refuse and remark;
afterwards the recipe does not change. `pretrain` executes a plan, `check` prints it, `api.train`
compares its identity with a run's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sslpipe.augment.preview import PartnersOf
from sslpipe.augment.two_views import build_augment
from sslpipe.data.holdout import (
    MOST_HELD_OUT,
    as_overrides,
    bank_ids,
    fitting,
    holdout_doubt,
    holdout_ids,
    plan_order,
    suggested_holdout,
    with_holdout,
)
from sslpipe.data.index import DatasetIndex
from sslpipe.data.order import ORDER_VERSION, Order
from sslpipe.data.pairing import pairing_warnings, plan_pairs
from sslpipe.errors import RecipeError, counted
from sslpipe.evaluation.monitor import monitor
from sslpipe.export.saved import SavedBackbone
from sslpipe.export.start import Start, with_init
from sslpipe.losses.distill import TeacherFeatures
from sslpipe.losses.planned import planned_negatives
from sslpipe.models.momentum import MomentumPair, momentum_at
from sslpipe.parts import (
    Parts,
    build_loss,
    build_model,
    freeze_and_group,
    open_teacher,
)
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
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.sections import EVALUATIONS
from sslpipe.run.contract import PretrainingPlan
from sslpipe.run.gradient_cache import micro_batch_rows
from sslpipe.run.health import Alarms

LEAST_RANK_SHARE = 0.05  # (rank - 1) / (highest possible - 1) of embeddings: 0 in one direction
ALARM_REMEDY = (
    "Look at the views with `sslpipe preview`, lengthen optim.warmup_steps, or lower optim.peak_lr"
)


@dataclass(frozen=True, kw_only=True)
class Pretraining(RecipePlan[Parts], PretrainingPlan[Parts]):
    """The plan of a pretraining: a value; it opens no device and writes nothing.

    `Plan` describes the fields that plans of all kinds have, `PretrainingPlan` the pairing.
    """

    recipe: Recipe
    order: Order
    teacher: TeacherFeatures | None  # features of [teacher]; None without

    order_version = ORDER_VERSION
    measure = staticmethod(monitor)

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        index: DatasetIndex,
        named: SavedBackbone | None = None,
        run_dir: Path | None = None,
    ) -> "Pretraining":
        """Plan a pretraining; nothing is built and no image is read.

        Args:
            recipe: As given; [backbone] is for random weights.
            index: The data set.
            named: The weights that --init names; None: random ones, or those that the run keeps.
            run_dir: The run directory, if there is one: it may keep a start.

        Raises:
            UserError: Recipe, data and weights do not go together; names key, value and remedy.
        """
        index = index.with_channels(recipe.data.channels)
        split = index.split(recipe.data.split)
        index.check_files(split.name)
        start = Start.find(named, index, run_dir)
        not_used = start.remark(recipe)
        recipe = with_init(recipe, start.weights, index)
        recipe = with_holdout(recipe, split).with_outputs(len(split))
        order = plan_order(recipe, index)
        recipe = recipe.resolved(order.steps_per_epoch)
        watched = holdout_ids(recipe, split)
        recipe = recipe.with_watch(can_choose(split.labels_of(watched), views=True))
        pairing = plan_pairs(recipe.pairs, split, order)
        recipe, teacher = open_teacher(recipe, index)
        return cls(
            recipe=recipe,
            index=index,
            split=split,
            order=order,
            watched=watched,
            bank=bank_ids(recipe, split),
            pairing=pairing,
            start=start,
            teacher=teacher,
            not_used=not_used,
        )

    def build(self) -> Parts:
        augment = build_augment(self.recipe, self.index)
        model = build_model(self.recipe, augment.crop_px, self.start.weights)
        loss = build_loss(self.recipe, self.teacher)
        negatives = planned_negatives(loss, self.split, self.order, self.pairing)
        return Parts(augment, model, loss, negatives)

    def remarks(self, parts: Parts) -> list[str]:
        for refuse in REFUSALS:
            refuse(self, parts)
        return [text for remark in REMARKS for text in remark(self, parts)]

    def groups(self, parts: Parts) -> list[dict[str, Any]]:
        return freeze_and_group(parts.model, self.recipe)

    def micro_batches(self, world_size: int) -> list[Tensor]:
        data = self.recipe.data
        images = data.batch_size // world_size
        return micro_batch_rows(images, data.num_streams // world_size, data.micro_batches)

    @property
    def drawn_partners(self) -> PartnersOf | None:
        """What draws the samples that second views show, with [pairs] of partners."""
        partners = None if self.pairing is None else self.pairing.partners
        return None if partners is None else partners.of_samples

    def follow(self, parts: Parts, step: int) -> None:
        momentum = self.recipe.momentum
        if isinstance(parts.model, MomentumPair) and momentum is not None:
            parts.model.follow(momentum_at(step, momentum, self.recipe.total_steps))

    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        return (self.recipe.seed, step, rank, micro_batch)

    def alarms(self, parts: Parts) -> Alarms:
        recipe = self.recipe
        highest_rank = min(recipe.projector.out_dim, 2 * recipe.data.batch_size)
        return Alarms(
            recipe.total_steps,
            least_rank=1 + LEAST_RANK_SHARE * (highest_rank - 1),
            grows="negatives_per_anchor" if parts.loss.needs_momentum_encoder else "",
            remedy=ALARM_REMEDY + (", or tune.backbone_lr" if recipe.init else ""),
        )

    def describe(self) -> str:
        images = counted(self.order.samples, "image")
        size = f"{images}, {counted(self.order.steps_per_epoch, 'step')} an epoch"
        if self.start.weights is None:
            return size
        return f"{size}; {self.start.describe(self.recipe.tune)}"


# why a plan cannot be carried out


def no_image_has_a_negative(plan: Pretraining, parts: Parts) -> None:
    """Refuse ids, labels or columns by which all images of each planned batch are alike."""
    batch_size = plan.order.batch_size
    if not parts.negatives or max(parts.negatives) * batch_size > 0.25:  # less is rounding
        return
    loss = plan.recipe.loss
    pairs = plan.recipe.pairs
    settings = []
    if parts.loss.uses_labels:
        settings.append(f"loss.kind = {loss.kind!r}")
    if getattr(loss, "mask_labels", False):
        settings.append("loss.mask_labels = True")
    if pairs and pairs.positive:
        settings.append(f"pairs.positive = {pairs.positive!r}")
    if pairs and pairs.never_negative:
        settings.append(f"pairs.never_negative = {pairs.never_negative!r}")
    raise RecipeError(
        f"{' with '.join(settings) or f'data.split = {plan.split.name!r}'}: no image has a "
        f"negative in any of the planned batches of {batch_size}, as ids, labels or columns say "
        "that all are alike, and such a loss teaches nothing; train on images of two classes, name "
        "a column of several values, leave the setting out, or use an objective without negatives "
        "(loss.kind = 'diet')"
    )


def objective_cannot_learn_the_split(plan: Pretraining, parts: Parts) -> None:
    """Refuse a split, or [pairs], that the objective itself refuses."""
    if reason := parts.loss.refuses(len(plan.split), paired=plan.pairing is not None):
        raise RecipeError(f"loss.kind = {plan.recipe.loss.kind!r} {reason}")


def nothing_chooses_the_best(plan: Pretraining, parts: Parts) -> None:
    """Refuse a run.keep or run.patience that no evaluation of the run could decide."""
    labels = plan.split.labels_of(plan.watched)
    run = plan.recipe.run
    missing = [] if can_choose(labels, views=True) else [advised_holdout(plan)[0]]
    if not run.monitor_steps:
        missing.append(f"run.monitor_steps={max(1, plan.recipe.total_steps // EVALUATIONS)}")
    settings = " ".join(filter(None, missing))
    remedy = f"{f'set {settings}' if settings else 'hold some out'}, or set {choosing_nothing(run)}"
    check_choice(run, labels, views=True, remedy=remedy)


REFUSALS = (
    no_image_has_a_negative,
    objective_cannot_learn_the_split,
    nothing_chooses_the_best,
    network_takes_no_half_size,
)


# what a user should know


def much_is_held_out(plan: Pretraining, parts: Parts) -> Iterator[str]:
    """Mention that few images are left to train on."""
    held = len(plan.watched)
    settings = advised_holdout(plan)[0]
    if settings and held > MOST_HELD_OUT * len(plan.split):  # else fewer could not be scored
        yield (
            f"data.holdout = {plan.recipe.data.holdout} holds out {held} of {len(plan.split)} "
            f"images of the split {plan.split.name!r} ({held / len(plan.split):.0%}); fewer are "
            f"enough: set {settings}"
        )


def pairs_are_unusual(plan: Pretraining, parts: Parts) -> Iterator[str]:
    """Mention samples without a partner, partners far away, and columns that mask much."""
    if plan.pairing is not None:
        yield from pairing_warnings(plan.pairing, plan.recipe.run.cache)


def pair_labels_have_no_effect(plan: Pretraining, parts: Parts) -> Iterator[str]:
    """Mention a pairs.label with an objective that ignores labels."""
    pairs = plan.recipe.pairs
    if pairs is not None and pairs.label is not None and not parts.loss.uses_labels:
        yield (
            f"pairs.label = {pairs.label!r} has no effect: loss.kind = "
            f"{plan.recipe.loss.kind!r} ignores labels; use sup_con or loss.mask_labels = true"
        )


def labels_are_missing(plan: Pretraining, parts: Parts) -> Iterator[str]:
    """Mention an objective that uses labels, on a split without."""
    split = plan.split if plan.pairing is None else plan.pairing.split  # of pairs.label
    if parts.loss.uses_labels and not bool((split.labels >= 0).any()):
        masks = getattr(plan.recipe.loss, "mask_labels", False)
        setting = "loss.mask_labels = true" if masks else f"loss.kind = {plan.recipe.loss.kind!r}"
        yield f"{setting}, but the split {split.name!r} has no labels: no effect"


def start_is_not_monitored(plan: Pretraining, parts: Parts) -> Iterator[str]:
    """Mention that nothing shows whether a run from weights makes them worse."""
    if plan.recipe.init and not plan.recipe.run.monitor_steps:
        settings = "" if len(plan.watched) else f" and {advised_holdout(plan)[0]}"
        yield (
            "no monitoring: you will not see if training damages the pretrained weights; set "
            f"run.monitor_steps{settings}"
        )


def held_out_images_say_little(plan: Pretraining, parts: Parts) -> Iterator[str]:
    """Mention that kNN among the held-out images is not useful."""
    doubt = holdout_doubt(plan.recipe, plan.split, plan.watched)
    if not doubt or not plan.recipe.run.monitor_steps:
        return
    settings, scores_knn = advised_holdout(plan)
    if not len(plan.watched):
        unlabelled = "" if scores_knn else " for scores without labels"
        yield f"no useful held-out kNN: {doubt}; nothing is monitored; set {settings}{unlabelled}"
        return
    remedy = f"; set {settings}" if scores_knn and settings else ""
    if remedy or plan.recipe.data.holdout_from != "all":  # "all" asks for scores without labels
        yield f"no useful held-out kNN: {doubt}; scores without labels are logged{remedy}"


REMARKS = (
    stem_does_not_fit,
    rate_is_unusual,
    much_is_held_out,
    pairs_are_unusual,
    pair_labels_have_no_effect,
    labels_are_missing,
    warmup_takes_the_run,
    backbone_is_slowed,
    start_is_not_monitored,
    held_out_images_say_little,
    weights_replace_the_backbone,
)


def advised_holdout(plan: Pretraining) -> tuple[str, bool]:
    """Return overrides that hold out about a tenth and go together, and whether kNN is then scored.

    Images that are held out are not trained on: the batch may have to shrink. No overrides where
    these are held out already, or what a run from weights holds out by itself.
    """
    recipe = plan.recipe
    settings, scores_knn = suggested_holdout(recipe, plan.split)
    unset = recipe.model_copy(update={"data": recipe.data.model_copy(update={"holdout": None})})
    if recipe.init and with_holdout(unset, plan.split) == recipe:
        return "", scores_knn
    return as_overrides(fitting(settings, recipe, plan.split)), scores_knn
