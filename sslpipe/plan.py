"""A pretraining's plan: all that is known of it before its first step.

`Pretraining.make` alone resolves, fits weights and refuses; afterwards nobody changes the recipe.
`pretrain` executes a plan, `check` prints it, `api.train` compares its identity with a run's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.augment.two_views import Views, build_augment
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.order import ORDER_VERSION, Order, suggest_holdout
from sslpipe.data.pairing import Pairing, plan_pairs
from sslpipe.data.pipeline import Batch
from sslpipe.data.plan import (
    MOST_HOLDOUT,
    MOST_READ,
    bank_ids,
    holdout_doubt,
    holdout_ids,
    plan_order,
    with_holdout,
)
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank, current_rank
from sslpipe.errors import DataError, RecipeError
from sslpipe.evaluation.embed import load_embeddings
from sslpipe.evaluation.monitor import monitor
from sslpipe.export.load import FrozenBackbone
from sslpipe.export.start import Start
from sslpipe.losses import Objective
from sslpipe.losses.base import ContrastiveObjective, InBatchLoss, takes_groups
from sslpipe.losses.distill import TeacherFeatures
from sslpipe.models.backbones import Backbone, build_backbone, stem_warning
from sslpipe.models.limits import within_memory
from sslpipe.models.momentum import MomentumPair, averaged
from sslpipe.models.simclr import SimCLR
from sslpipe.models.transfer import copy_weights
from sslpipe.models.tuning import (
    freeze_layers,
    learning_rate_scale,
    pretrained_groups,
    tune_warnings,
)
from sslpipe.optim import parameter_groups, rate_warning
from sslpipe.portable import sha256_of
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry.schema import refusals
from sslpipe.run.best import can_choose, check_keeping
from sslpipe.run.gradient_cache import micro_batch_rows
from sslpipe.run.health import Alarms
from sslpipe.run.launcher import check_streams
from sslpipe.run.plan import Plan, TrainingParts
from sslpipe.run.throughput import step_flops

Model = SimCLR | MomentumPair

LEAST_RANK_SHARE = 0.05  # (rank - 1) / (highest possible - 1) of embeddings: 0 in one direction
ALARM_REMEDY = (
    "Look at the views with `sslpipe preview`, lengthen optim.warmup_steps, or lower optim.peak_lr"
)
MOST_HELD_OUT = 1 / 4  # of a split, before a warning
MOST_PLANNED = 16  # batches whose negatives are counted; fewer of large ones


@dataclass(frozen=True)
class Parts(TrainingParts):
    """What a plan builds, on the CPU, from recipe.seed; tests hand in their own.

    Attributes:
        augment: Makes both views of a batch.
        model: Encoder and projector.
        loss: The objective.
    """

    augment: Views
    model: Model
    loss: Objective

    @property
    def others(self) -> list[nn.Module]:
        """What needs memory beside the model: the objective."""
        return [self.loss]

    def moved(self, model: Model, device: torch.device, dtype: torch.dtype) -> "Parts":
        """Return the parts on a device, with this model, which is there already."""
        return Parts(self.augment.to(device), model, self.loss.to(device, dtype))

    def first_frozen(self) -> list[Backbone]:
        """Return the networks that tune.projector_first_steps keeps out of training."""
        return backbones(self.model)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the optimizer."""
        return {"model": self.model, "loss": self.loss}

    def guarded(self) -> list[nn.Module]:
        """Return the modules whose buffers a non-finite step must not change."""
        return [self.model, self.loss]


@dataclass(frozen=True)
class Pretraining(Plan[Parts]):
    """The plan of a pretraining: a value; it opens no device and writes nothing.

    Attributes:
        recipe: Resolved: backbone, hashes, number of steps.
        index: The data set, of the channels that are read.
        split: What is trained on, and held out from.
        order: Which sample comes in which step.
        watched: Ids of the held-out samples, which are scored during the run.
        pairing: Partners, masks and labels of [pairs]; None without.
        start: The weights it starts from.
        teacher: Features of [teacher]; None without.
        not_used: What of the given recipe the weights replace, as a sentence; None: nothing.
    """

    order_version: ClassVar[int] = ORDER_VERSION

    recipe: Recipe
    index: DatasetIndex
    split: Split
    order: Order
    watched: NDArray[np.int64]
    pairing: Pairing | None
    start: Start
    teacher: TeacherFeatures | None
    not_used: str | None

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        index: DatasetIndex,
        named: FrozenBackbone | None = None,
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
        recipe = with_holdout(start.resolve(recipe, index), split)
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
            pairing=pairing,
            start=start,
            teacher=teacher,
            not_used=not_used,
        )

    def build(self, *, compiled: bool = True) -> Parts:
        """Build the parts, the same on every rank.

        Args:
            compiled: Compile the views where run.compile says so; False, to look at the parts.

        Raises:
            RecipeError: The recipe names what cannot be built.
        """
        compiled = compiled and self.recipe.run.compile != "off"
        augment = build_augment(self.recipe, self.index, compiled=compiled)
        model = build_model(self.recipe, augment.crop_px, self.start.weights)
        return Parts(augment, model, build_loss(self.recipe, self.teacher))

    def negatives(self, parts: Parts) -> list[float]:
        """Return `planned_negatives`. Raises: RecipeError where no anchor has any."""
        return planned_negatives(self.recipe, self.split, self.order, parts.loss, self.pairing)

    def remarks(self, parts: Parts) -> list[str]:
        """List what a user should know before the first step. Raises: RecipeError: refused."""
        self.negatives(parts)  # or refused
        crop_px = parts.augment.crop_px
        said = plan_warnings(self.recipe, self.split, parts.loss, crop_px, self.pairing)
        return [*said, *filter(None, [self.not_used])]

    def check_processes(self, world_size: int) -> None:
        """Refuse a number of processes that cannot share the streams. Raises: RecipeError."""
        check_streams(self.recipe.data.num_streams, world_size)

    def groups(self, parts: Parts) -> list[dict[str, Any]]:
        """Take what [tune] freezes out of training; return the optimizer's parameter groups."""
        return freeze_and_group(parts.model, self.recipe)

    def step_flops(self, parts: Parts) -> float:
        """Count FLOPs of a step, forward and backward."""
        return recipe_flops(self.recipe, parts.model, parts.augment.crop_px)

    def micro_batches(self, world_size: int) -> list[Tensor]:
        """Return the rows of a rank's batch that each of data.micro_batches takes."""
        data = self.recipe.data
        images = data.batch_size // world_size
        return micro_batch_rows(images, data.num_streams // world_size, data.micro_batches)

    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        """Return the integers that decide dropout and the like."""
        return (self.recipe.seed, step, rank, micro_batch)

    def score(
        self,
        backbone: nn.Module,
        view: EvalView,
        *,
        reader: Reader,
        process: Rank,
        device: torch.device,
    ) -> dict[str, float]:
        """Score the held-out samples by `monitor`. Collective."""
        return monitor(
            backbone,
            view,
            self.split,
            self.watched,
            process,
            bank=bank_ids(self.recipe, self.split),
            canvas_px=self.recipe.data.canvas_px,
            num_workers=self.recipe.run.num_workers,
            device=device,
            reader=reader,
        )

    def alarms(self, parts: Parts) -> Alarms:
        """Return what reads the numbers of each log line."""
        recipe = self.recipe
        highest_rank = min(recipe.projector.out_dim, 2 * recipe.data.batch_size)
        return Alarms(
            recipe.total_steps,
            least_rank=1 + LEAST_RANK_SHARE * (highest_rank - 1),
            grows="negatives_per_anchor" if parts.loss.needs_momentum_encoder else "",
            remedy=ALARM_REMEDY + (", or tune.backbone_lr" if recipe.init else ""),
        )

    def metadata(self, view: EvalView) -> dict[str, Any]:
        """Return what is stored beside each checkpoint: the start."""
        return self.start.metadata(view)

    def describe(self) -> str:
        """Return how many images are trained on, and from which weights."""
        size = f"{self.order.samples} images, {self.order.steps_per_epoch} steps an epoch"
        return size + self.start.describe(self.recipe.tune)


def build_model(recipe: Recipe, crop_px: int, init_from: FrozenBackbone | None = None) -> Model:
    """Build encoder and projector, the same on every rank; `init_from`'s weights or random ones."""
    assert recipe.backbone is not None  # by `with_init`
    torch.manual_seed(recipe.seed)
    with within_memory("[backbone] and [projector]"):
        backbone = build_backbone(recipe.backbone, crop_px=crop_px)
        if init_from is not None:
            copy_weights(init_from.backbone, backbone, recipe.backbone.kind)
        model = (MomentumPair if recipe.momentum else SimCLR)(backbone, recipe.projector)
        model.ema = averaged(backbone) if recipe.optim.ema else None
        return model


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
    rates = {"backbone_lr": tune.backbone_lr, "layer_decay": tune.layer_decay}
    scale = learning_rate_scale(model.backbone, **rates, by_library=True)
    return parameter_groups(model, recipe.optim, scale, **pretrained_groups(tune))


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


def build_loss(recipe: Recipe, teacher: TeacherFeatures | None = None) -> Objective:
    """Build the recipe's objective; one with a queue learns how long its embeddings are.

    Args:
        recipe: Of a pretraining.
        teacher: What `open_teacher` gave; without it [teacher] is taken to hold no sample.

    Raises:
        RecipeError: It lacks a momentum encoder or a teacher, cannot do what [pairs] says, makes no
            use of [teacher], or has weights, which nothing would train.
    """
    kind = recipe.loss.kind
    learns = "teacher" in recipe.loss.given
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
    learned = [name for name, weight in loss_fn.named_parameters() if weight.requires_grad]
    if learned:
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} has weights of its own ({', '.join(learned)}), and "
            "the optimizer has only those of encoder and projector, so they would keep their first "
            "values; make them settings, or buffers that the objective changes itself"
        )
    batch = recipe.data.batch_size
    has_negatives = loss_fn.negatives_per_anchor(batch) > 0
    if not has_negatives and loss_fn.negatives_per_anchor(batch + 1) > 0:
        raise RecipeError(
            f"data.batch_size = {batch} leaves loss.kind = {kind!r} without negatives; use "
            f"{batch + 1} or more"
        )
    if masks and has_negatives and not takes_groups(loss_fn):
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} takes no groups, so that [pairs] cannot keep images "
            "from being negatives; leave pairs.positive and pairs.never_negative out"
        )
    if loss_fn.needs_momentum_encoder and recipe.momentum is None:
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} compares queries with keys of earlier steps, which "
            "only a momentum encoder keeps alike; add a section [momentum], or momentum.start=0.999"
        )
    return loss_fn


def planned_negatives(
    recipe: Recipe, split: Split, order: Order, loss_fn: Objective, pairing: Pairing | None
) -> list[float]:
    """Count the negatives of an anchor in some batches of the first epoch, from ids and columns.

    Args:
        recipe: Of a pretraining.
        split: That is trained on.
        order: Of the run.
        loss_fn: The objective.
        pairing: What [pairs] says, or None.

    Returns:
        The mean of each batch, the first step's first; [] for an objective without negatives. One
        with a queue meets earlier batches: of these all are counted as one.

    Raises:
        RecipeError: No anchor of any of these batches has a negative.
    """
    if not isinstance(loss_fn, ContrastiveObjective):
        return []
    batch_size = order.batch_size
    steps = order.steps_per_epoch
    most = min(MOST_PLANNED, max(2, MOST_PLANNED * 256 // batch_size))
    looked_at = np.unique(np.linspace(0, steps - 1, min(steps, most)).astype(np.int64)).tolist()
    streams = current_rank().share(order.num_streams)
    shown = split if pairing is None else pairing.split  # its labels are those of pairs.label
    arguments = [planned_arguments(shown, order, pairing, step, streams) for step in looked_at]
    if not isinstance(loss_fn, InBatchLoss):
        arguments = [{key: torch.cat([each[key] for each in arguments]) for key in arguments[0]}]
    found = []
    for known in arguments:
        rows = torch.empty(len(known["ids"]), 1)
        groups = known.get("groups") if takes_groups(loss_fn) else None
        anchors = loss_fn.find_anchors(rows, known["ids"], known["labels"], groups)
        found.append(float(anchors.mean_negatives))
    if max(found) * batch_size > 0.25:  # less is rounding
        return found
    settings = [
        f"{key} = {value!r}"
        for key, value, counts in (
            ("loss.kind", recipe.loss.kind, loss_fn.uses_labels),
            ("loss.mask_labels", True, getattr(recipe.loss, "mask_labels", False)),
            ("pairs.positive", recipe.pairs and recipe.pairs.positive, True),
            ("pairs.never_negative", recipe.pairs and recipe.pairs.never_negative, True),
        )
        if value and counts
    ]
    raise RecipeError(
        f"{' with '.join(settings) or f'data.split = {split.name!r}'}: no image has a negative in "
        f"any of {len(looked_at)} planned batches of {batch_size}, as ids, labels or columns say "
        "that all are alike, and such a loss teaches nothing; train on images of two classes, name "
        "a column of several values, leave the setting out, or use an objective without negatives "
        "(loss.kind = 'diet')"
    )


def planned_arguments(
    split: Split, order: Order, pairing: Pairing | None, step: int, streams: range
) -> dict[str, Tensor]:
    """Return what the objective will get of a step's samples beside the embeddings."""
    epoch, ids = order.ids(step, streams)
    nothing = torch.empty(0)
    batch = Batch(
        images=nothing,
        sizes=nothing,
        labels=torch.from_numpy(split.labels_of(ids)),
        ids=torch.from_numpy(ids),
        source_ids=torch.from_numpy(ids),
        epoch=epoch,
    )
    if pairing is not None:
        batch = pairing.describe(step, streams, batch, pairing.drawn(step, streams))
    return batch.loss_arguments


def recipe_flops(recipe: Recipe, model: Model, crop_px: int) -> float:
    """FLOPs of a step's forward and backward; what gradient caching repeats is not counted."""
    trained = nn.Sequential(model.backbone, model.projector)
    flops = step_flops(trained, recipe.data.batch_size, crop_px, model.backbone.channels)
    # forward and twice as much backward for either view; the keys of a pair have no backward
    return flops * (4 / 6 if recipe.momentum else 1)


def plan_warnings(
    recipe: Recipe,
    split: Split,
    loss_fn: Objective,
    crop_px: int,
    pairing: Pairing | None = None,
) -> list[str]:
    """List what a user should know before the first step.

    Raises:
        RecipeError: run.keep or run.patience need an evaluation that is not made; the objective
            cannot train on the split.
    """
    assert recipe.backbone is not None
    if reason := loss_fn.cannot(len(split), paired=pairing is not None):
        raise RecipeError(f"loss.kind = {recipe.loss.kind!r} {reason}")
    ids = holdout_ids(recipe, split)
    doubt = holdout_doubt(recipe, split, ids)
    settings = MOST_HOLDOUT
    tells = True
    if len(split) <= MOST_READ:
        settings, tells = suggest_holdout(split.labels)
    remedy = f"set {settings}" if tells else ""
    check_keeping(recipe.run, split.labels_of(ids), views=True, remedy=remedy)
    warnings = [stem_warning(recipe.backbone, crop_px)]
    warnings += [rate_warning(recipe.optim, recipe.data.batch_size)]
    if len(ids) > MOST_HELD_OUT * len(split):
        warnings.append(
            f"data.holdout = {recipe.data.holdout} holds out {len(ids)} of {len(split)} images of "
            f"the split {split.name!r} ({len(ids) / len(split):.0%}); for a tenth, set {settings}"
        )
    if pairing is not None:
        split = pairing.split  # its labels are those of pairs.label
        warnings += pairing.warnings(recipe.run.cache)
        if pairing.pairs.label is not None and not loss_fn.uses_labels:
            warnings.append(
                f"pairs.label = {pairing.pairs.label!r} has no effect: loss.kind = "
                f"{recipe.loss.kind!r} ignores labels; use sup_con or loss.mask_labels = true"
            )
    if loss_fn.uses_labels and not bool((split.labels >= 0).any()):
        masks = getattr(recipe.loss, "mask_labels", False)
        setting = "loss.mask_labels = true" if masks else f"loss.kind = {recipe.loss.kind!r}"
        warnings.append(f"{setting}, but the split {split.name!r} has no labels: no effect")
    warnings += tune_warnings(recipe)
    if recipe.init and not recipe.run.monitor_steps:
        warnings.append(
            "no monitoring: you will not see if training damages the pretrained weights; set "
            "run.monitor_steps" + ("" if len(ids) else f" and {settings}")
        )
    if recipe.run.monitor_steps and doubt:
        logged = "scores without labels are logged" if len(ids) else "nothing is monitored"
        warnings.append(
            f"no useful held-out kNN: {doubt}; {logged}"
            + (f"; set {settings}" if tells or not len(ids) else "")
            + ("" if tells or len(ids) else " for scores without labels")
        )
    return [warning for warning in warnings if warning]
