"""What a pretraining will do and cost: its parts are built, its first epoch is looked at."""

import dataclasses

import numpy as np

from sslpipe.augment.two_views import build_augment
from sslpipe.check.estimate import step_seconds
from sslpipe.check.result import (
    Check,
    Rows,
    memory_text,
    start_text,
    straddle_warning,
    warmup_warning,
)
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.order import ORDER_VERSION, WELL_MIXED, Order, mixing_score
from sslpipe.data.pairing import Pairing, joint_codes, plan_pairs
from sslpipe.data.plan import holdout_ids, plan_order, with_holdout
from sslpipe.errors import RecipeError
from sslpipe.export.load import FrozenBackbone
from sslpipe.export.start import Start, fit_channels, with_init
from sslpipe.losses import Objective
from sslpipe.models.backbones import stem_warning
from sslpipe.models.tuning import count_parameters
from sslpipe.optim import describe_groups, rate_warning
from sslpipe.plan import (
    MOST_HELD_OUT,
    Model,
    build_loss,
    build_model,
    freeze_and_group,
    open_teacher,
    plan_warnings,
    planned_negatives,
    recipe_flops,
)
from sslpipe.recipe.base import divisors
from sslpipe.recipe.identity import run_identity
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.best import can_choose
from sslpipe.run.launch import check_precision, resolve_precision, training_device
from sslpipe.run.memory import check_memory, estimate_memory

_PLANNED_STEPS = 100  # global batches of the first epoch that are looked at, evenly spread


def check_pretraining(
    recipe: Recipe,
    index: DatasetIndex | None,
    init_from: FrozenBackbone | None = None,
) -> Check:
    """Build every part of a pretraining and look at its order, as `check_recipe`; train nothing.

    Args:
        recipe: Of a pretraining.
        index: The data set; None skips what only the data can tell.
        init_from: The weights that the backbone starts from; None: random ones.
    """
    # what the machine may refuse
    device = training_device(recipe)
    check_precision(recipe.optim.precision, device.type)
    index = index and index.with_channels(recipe.data.channels)
    image_type = index.image_type if index else RGB8

    # the order of the first epoch
    init_from = fit_channels(init_from, index)
    start = Start("random" if init_from is None else "named", init_from)
    not_used = start.remark(recipe)
    recipe = with_init(recipe, init_from, index)
    augment = build_augment(recipe, index)
    pairing = teacher = None
    if index is not None:
        split = index.split(recipe.data.split)
        index.check_files(split.name)
        recipe = with_holdout(recipe, split)
        order = plan_order(recipe, index)
        pairing = plan_pairs(recipe.pairs, split, order)
        held_out_ids = holdout_ids(recipe, split)
        recipe = recipe.resolved(order.steps_per_epoch)
        recipe = recipe.with_watch(can_choose(split.labels_of(held_out_ids), views=True))
        recipe, teacher = open_teacher(recipe, index)

    # the other parts; when all are built, the digest covers the source of those from plug-ins
    loss_fn, crop_px = build_loss(recipe, teacher), augment.crop_px
    model = build_model(recipe, crop_px, init_from)
    if recipe.optim.precision == "fp64":
        model = model.double()
    digest, poorly_mixed = "", None
    negatives: list[float] = []
    planned = [("data", "not given (--data): steps per epoch, duplicates, mixing, digest unknown")]
    if index is None:
        assert recipe.backbone is not None
        rate = rate_warning(recipe.optim, recipe.data.batch_size)
        warnings = [stem_warning(recipe.backbone, crop_px), rate]
    else:
        negatives = planned_negatives(recipe, split, order, loss_fn, pairing)  # or refused
        warnings = [*plan_warnings(recipe, split, loss_fn, crop_px, pairing)]
        warnings.append(straddle_warning(index, split.name))
        planned, poorly_mixed = _look_at_order(recipe, split, order, pairing)
        digest = run_identity(recipe, index, ORDER_VERSION)["digest"]
        planned.append(("digest", digest))
    groups = describe_groups(freeze_and_group(model, recipe), model)

    # memory and time
    precision = resolve_precision(recipe.optim.precision, device)
    memory = estimate_memory(
        model,
        recipe,
        crop_px,
        precision,
        others=[loss_fn],
        image_type=image_type,
    )
    too_much = check_memory(memory, recipe, device)
    if too_much and (alone := check_memory(memory.of_images(4, recipe), recipe, device)):
        raise RecipeError(f"with no more than 4 images at a time {alone}")
    flops = recipe_flops(recipe, model, crop_px)
    image_px = min(recipe.data.canvas_px, crop_px * 8 // 7)
    step_s = step_seconds(model, augment, image_px, recipe, precision, device, image_type)
    how = f"one {device.type} process of this machine, without reading, loss and optimizer"
    in_all = f", {_duration(step_s * recipe.steps)} in all" if recipe.steps else ""
    time = f"{step_s:.2g} s/step{in_all} ({precision}, {how})"
    rows = [("time", time), ("memory", memory_text(memory))]
    rows += [*_size_rows(recipe, model, loss_fn, groups, flops, negatives), *planned]
    warnings += [too_much, *_setting_warnings(recipe), poorly_mixed, not_used]
    said = tuple(text for text in warnings if text)
    views = tuple(dataclasses.asdict(spec) for spec in augment.specs)
    return Check(recipe, views, rows, said, memory, digest, flops, step_s)


def _size_rows(
    recipe: Recipe,
    model: Model,
    loss_fn: Objective,
    groups: str,
    flops: float,
    planned_negatives: list[float],
) -> Rows:
    data, batch, backbone = recipe.data, recipe.data.batch_size, model.backbone
    rows = [("steps", f"{recipe.steps:,}")] if recipe.steps else []  # else epochs, and no index
    if data.micro_batches > 1:
        text = f"{data.micro_batches} of {data.micro_batch} images: activations and views of one"
        rows.append(("micro-batches", f"{text} at a time, negatives of the whole batch"))
    negatives = loss_fn.negatives_per_anchor(batch)
    in_batch = negatives == 2 * batch - 2
    counted = f"{negatives} ({f'2 x {batch} - 2' if in_batch else 'the full queue'})"
    if in_batch and planned_negatives and min(planned_negatives) < negatives:
        mean = sum(planned_negatives) / len(planned_negatives)
        counted = (
            f"{mean:.1f} on average over {len(planned_negatives)} planned batches (at most "
            f"{negatives})"
        )
    stem = f", stem {backbone.stem}" if backbone.stem else ""
    return [
        *rows,
        (
            "negatives per anchor",
            counted if negatives else "none (the objective uses no negatives)",
        ),
        ("starts from", start_text(recipe)),
        (
            "parameters",
            f"backbone {count_parameters(backbone):,} ({backbone.num_features} features{stem}), "
            f"projector {count_parameters(model.projector):,}",
        ),
        *(("parameter group", line) for line in groups.splitlines()),
        ("FLOPs per step", f"{flops:.3g}, forward and backward of {2 * batch} views"),
        (
            "processes",
            f"{', '.join(map(str, divisors(data.num_streams)))} (they divide num_streams)",
        ),
    ]


def _look_at_order(
    recipe: Recipe, split: Split, order: Order, pairing: Pairing | None
) -> tuple[Rows, str | None]:
    """Look at some batches of the first epoch: their rows, and a warning where they mix poorly."""
    count = min(order.steps_per_epoch, _PLANNED_STEPS)
    steps = np.linspace(0, order.steps_per_epoch - 1, count).astype(np.int64).tolist()
    batches = [order.ids(step, range(order.num_streams))[1] for step in steps]
    twice = sum(len(ids) - len(np.unique(ids)) for ids in batches)
    served = np.concatenate(
        [
            split.starts[shard] + order.rows(shard, np.arange(kept))
            for shard, kept in enumerate(order.kept.tolist())
        ]
    )
    mixing = mixing_score([split.labels[ids] for ids in batches], split.labels[served])
    pair_rows, poor = _look_at_pairs(pairing, order, steps)
    held_out = len(holdout_ids(recipe, split))
    # few images left of some classes mix badly, however the shards are: that warning comes first
    few_held_out = held_out <= MOST_HELD_OUT * len(split)
    if poor is None and mixing is not None and mixing < WELL_MIXED and few_held_out:
        poor = (
            f"mixing score {mixing:.3f}: batches hold fewer classes than a uniform shuffle's; "
            "build the shards shuffled, or raise data.num_streams or lower data.shuffle_window"
        )
    not_kept = len(split) - held_out - order.samples
    left_out = f"{held_out:,} held out" + (f", {not_kept:,} not kept" if not_kept else "")
    epochs = recipe.total_steps / order.steps_per_epoch
    looked = f"over {count} planned batches of the first epoch"
    score = "unknown (unlabelled, or one class)" if mixing is None else f"{mixing:.4f}"
    rows = [
        ("data", f"{split.index.manifest.name}: {len(split):,} images, {left_out}"),
        ("steps per epoch", f"{order.steps_per_epoch:,} (the run: {epochs:.4g} epochs)"),
        ("duplicates in a global batch", f"{twice} {looked}"),
        ("mixing score", f"{score} (1: as a uniform shuffle) {looked}"),
    ]
    return [*rows, *pair_rows], poor


def _look_at_pairs(
    pairing: Pairing | None, order: Order, steps: list[int]
) -> tuple[Rows, str | None]:
    """Say who finds a partner in some steps and what that costs; warn of groups that mix poorly."""
    if pairing is None or pairing.partners is None:
        return [], None
    partners, found = pairing.partners, pairing.survey(steps)
    text = (
        f"{found.partners / found.samples:.1%} of the samples have one, about "
        f"{1 - found.outside / max(1, found.partners):.1%} of these in the window that is read"
    )
    cost = f"{found.reads_an_epoch(order)} an epoch, unless run.cache holds them"
    rows = [("partners", text), ("reads of other partners", cost)]
    if not partners.same:
        return rows, None
    every = np.arange(len(pairing.split))
    codes = joint_codes(partners.same, every)
    codes = np.where(codes < 0, codes.max(initial=0) + 1 + every, codes)  # a group of one each
    codes = np.unique(codes, return_inverse=True)[1]
    batches = [order.ids(step, range(order.num_streams))[1] for step in steps]
    served = np.setdiff1d(every, order.without, assume_unique=True)
    mixing = mixing_score([codes[ids] for ids in batches], codes[served])
    if mixing is None:  # one group
        return rows, None
    rows.append(("mixing score of groups", f"{mixing:.4f} (1: as a uniform shuffle)"))
    if mixing >= WELL_MIXED:
        return rows, None
    return rows, (
        f"mixing score of groups {mixing:.3f}: each of {order.num_streams} streams gives "
        f"{order.batch_size // order.num_streams} samples to a batch from windows of "
        f"{order.window}, which hold few groups side by side; raise data.shuffle_window or "
        "data.num_streams"
    )


def _setting_warnings(recipe: Recipe) -> list[str | None]:
    """Say what settings cost that are allowed."""
    warnings = []
    if recipe.batchnorm == "local":
        warnings.append(
            "batchnorm = 'local': each process normalises by its own part of the batch, so results "
            "depend on the number of processes; 'global' does not"
        )
        if recipe.momentum:
            warnings.append(
                "batchnorm = 'local' with [momentum]: the statistics of a process's few images "
                "tell which keys belong to its queries; use 'global'"
            )
    return [*warnings, warmup_warning(recipe)]


def _duration(seconds: float) -> str:
    """As "12 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
