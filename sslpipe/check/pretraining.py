"""What a run will do and cost, worked out before it: nothing is trained, nothing is written."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import RenderableType

from sslpipe.augment.two_views import build_augment
from sslpipe.build import (
    MOST_HELD_OUT,
    Model,
    build_loss,
    build_model,
    freeze_and_group,
    open_teacher,
    plan_warnings,
    recipe_flops,
)
from sslpipe.check.columns import (
    PairsCheck,
    check_pairs,
    pair_rows,
    poorly_mixed_groups,
    straddle_warning,
)
from sslpipe.check.estimate import step_seconds
from sslpipe.check.tables import (
    Rows,
    format_duration,
    memory_text,
    start_text,
    tables,
    warmup_warning,
)
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.nvjpeg import jpeg_decoder
from sslpipe.data.order import WELL_MIXED, Order, mixing_score
from sslpipe.data.pairing import Pairing, plan_pairs, plan_version
from sslpipe.data.plan import holdout_ids, plan_order
from sslpipe.errors import RecipeError
from sslpipe.export.initial import backbone_note, fit_channels, with_init
from sslpipe.export.load import FrozenBackbone
from sslpipe.losses import Objective
from sslpipe.models.backbones import stem_warning
from sslpipe.models.tuning import count_parameters
from sslpipe.optim import describe_groups, rate_warning
from sslpipe.recipe.base import divisors
from sslpipe.recipe.identity import run_identities
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.cuda_graph import graph_refusal, will_record
from sslpipe.run.launch import check_precision, stored_precision, training_device
from sslpipe.run.log import logged_step_s
from sslpipe.run.memory import Memory, check_memory, estimate_memory

_PLANNED_STEPS = 100  # global batches of the first epoch that are looked at, evenly spread


class DataCheck(NamedTuple):
    """What the index and the order of the first epoch say."""

    name: str
    samples: int  # of the split
    held_out: int
    not_kept: int  # by data.keep
    steps_per_epoch: int
    epochs: float
    duplicates: int  # sample ids met twice in a global batch, over all batches looked at
    batches: int  # global batches looked at
    mixing: float | None  # see mixing_score; None: unlabelled, or one class
    pairs: PairsCheck | None  # None: second views show their own images
    digest: str


@dataclass(frozen=True)
class PretrainCheck:
    """A valid recipe's sizes and estimates. data: None without an index."""

    recipe: Recipe
    views: tuple[dict[str, Any], ...]  # each view's distribution, presets and defaults resolved
    model: Model
    negatives_per_anchor: int  # with a queue: once it is full
    groups: str  # of parameters, as describe_groups says it
    step_flops: float
    memory: Memory  # bytes, of one process with the whole batch, or micro-batch
    device: str
    precision: str
    step_seconds: float
    timed_by: Path | None
    warnings: tuple[str, ...]
    data: DataCheck | None


def check_pretraining(
    recipe: Recipe,
    index: DatasetIndex | None,
    init_from: FrozenBackbone | None = None,
    timed_by: Path | None = None,
) -> PretrainCheck:
    """Build every part of a pretraining and look at its order, as `check_recipe`; train nothing.

    Args:
        recipe: Of a pretraining.
        index: The data set; None skips what only the data can tell.
        init_from: The weights that the backbone starts from; None: random ones.
        timed_by: The directory of a few steps of this run, whose log times a step; None: a few
            images of noise do.
    """
    # what the machine may refuse
    device = training_device(recipe)
    check_precision(recipe.optim.precision, device.type)
    index = index and index.with_channels(recipe.data.channels)
    image_type = index.image_type if index else RGB8
    jpeg_decoder(recipe.data, device, image_type)  # refuses one that is not there

    # the order of the first epoch
    init_from = fit_channels(init_from, index)
    not_used = backbone_note(recipe, init_from)
    recipe = with_init(recipe, init_from, index)
    augment = build_augment(recipe, index)
    pairing = teacher = None
    if index is not None:
        split = index.split(recipe.data.split)
        index.check_files(recipe.data.split)
        order = plan_order(recipe, index)
        pairing = plan_pairs(recipe.pairs, split, order)
        recipe, teacher = open_teacher(recipe.resolved(order.steps_per_epoch), index)

    # sizes, memory, time
    loss_fn = build_loss(recipe, teacher)
    crop_px = augment.crop_px
    model = build_model(recipe, crop_px, init_from)
    if recipe.optim.precision == "fp64":
        model = model.double()
    # all parts are built: the digest covers the source of those from plug-ins
    data = None if index is None else _check_data(recipe, index, split, order, pairing)
    groups = describe_groups(freeze_and_group(model, recipe), model)
    named = "fp32" if recipe.optim.precision == "auto" else recipe.optim.precision
    recorded = will_record(recipe, 1, loss_fn)
    memory = estimate_memory(
        model, recipe, crop_px, named, others=[loss_fn], recorded=recorded, image_type=image_type
    )
    too_much = check_memory(memory, recipe, device)
    if too_much and (alone := check_memory(memory.of_images(4, recipe), recipe, device)):
        raise RecipeError(f"with no more than 4 images at a time {alone}")
    flops = recipe_flops(recipe, model, crop_px)
    if timed_by is None:
        image_px = min(recipe.data.canvas_px, crop_px * 8 // 7)
        precision, seconds = step_seconds(model, augment, image_px, recipe, device, image_type)
    else:
        precision, seconds = stored_precision(timed_by), logged_step_s(timed_by)
    return PretrainCheck(
        recipe=recipe,
        views=tuple(dataclasses.asdict(spec) for spec in augment.specs),
        model=model,
        negatives_per_anchor=loss_fn.negatives_per_anchor(recipe.data.batch_size),
        groups=groups,
        step_flops=flops,
        memory=memory,
        device=device.type,
        precision=precision,
        step_seconds=seconds,
        timed_by=timed_by,
        warnings=(
            *_warnings(recipe, loss_fn, crop_px, data, index, pairing, too_much),
            *filter(None, [not_used]),
        ),
        data=data,
    )


def _check_data(
    recipe: Recipe, index: DatasetIndex, split: Split, order: Order, pairing: Pairing | None
) -> DataCheck:
    held_out, version = len(holdout_ids(recipe, split)), plan_version(recipe.pairs)
    count = min(order.steps_per_epoch, _PLANNED_STEPS)
    steps = np.linspace(0, order.steps_per_epoch - 1, count).astype(np.int64).tolist()
    batches = [order.ids(step, range(order.num_streams))[1] for step in steps]
    served = np.concatenate(
        [
            split.starts[shard] + order.rows(shard, np.arange(kept))
            for shard, kept in enumerate(order.kept.tolist())
        ]
    )
    return DataCheck(
        name=index.manifest.name,
        samples=len(split),
        held_out=held_out,
        not_kept=len(split) - held_out - order.samples,
        steps_per_epoch=order.steps_per_epoch,
        epochs=recipe.total_steps / order.steps_per_epoch,
        duplicates=sum(len(ids) - len(np.unique(ids)) for ids in batches),
        batches=count,
        mixing=mixing_score([split.labels[ids] for ids in batches], split.labels[served]),
        pairs=check_pairs(pairing, order, steps),
        digest=run_identities(recipe, index, version)[0]["digest"],
    )


def _warnings(
    recipe: Recipe,
    loss_fn: Objective,
    crop_px: int,
    data: DataCheck | None,
    index: DatasetIndex | None,
    pairing: Pairing | None,
    too_much: str | None,
) -> tuple[str, ...]:
    assert recipe.backbone is not None
    if index is None:
        rate = rate_warning(recipe.optim, recipe.data.batch_size)
        warnings = [text for text in (stem_warning(recipe.backbone, crop_px), rate) if text]
    else:
        split = index.split(recipe.data.split)
        warnings = plan_warnings(recipe, split, loss_fn, crop_px, pairing)
        warnings += filter(None, [straddle_warning(index, recipe.data.split)])
    if too_much:
        warnings.append(too_much)
    if refusal := graph_refusal(recipe, training_device(recipe).type, 1, loss_fn):
        warnings.append(refusal)
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
    if recipe.optim.precision == "auto":
        warnings.append(
            "optim.precision = 'auto' picks fp32 or bf16 by speed, so results may differ between "
            "machines; set optim.precision to pin it"
        )
    warnings += warmup_warning(recipe)
    # few images left of some classes mix badly, however the shards are: that warning comes first
    holds_out_many = data is not None and data.held_out > MOST_HELD_OUT * data.samples
    if data and (poor := poorly_mixed_groups(data.pairs)):
        warnings.append(poor)
    elif data and data.mixing is not None and data.mixing < WELL_MIXED and not holds_out_many:
        warnings.append(
            f"mixing score {data.mixing:.3f}: batches hold fewer classes than a uniform shuffle's; "
            "build the shards shuffled, or raise data.num_streams or lower data.shuffle_window"
        )
    return tuple(warnings)


def render_pretraining(result: PretrainCheck) -> RenderableType:
    """Make tables for a terminal: estimates and warnings first, then views and settings."""
    rows = [*_size_rows(result), *_data_rows(result)]
    return tables(result.recipe, result.views, ("estimates", rows), result.warnings)


def _size_rows(result: PretrainCheck) -> Rows:
    data, batch = result.recipe.data, result.recipe.data.batch_size
    rows = [("time", _time_text(result)), ("memory", memory_text(result.memory))]
    if result.recipe.steps:  # else it gives epochs, and there is no index
        rows.append(("steps", f"{result.recipe.steps:,}"))
    if data.micro_batches > 1:
        text = f"{data.micro_batches} of {data.micro_batch} images: activations and views of one"
        rows.append(("micro-batches", f"{text} at a time, negatives of the whole batch"))
    negatives = result.negatives_per_anchor
    source = f"2 x {batch} - 2" if negatives == 2 * batch - 2 else "the full queue"
    backbone, processes = result.model.backbone, divisors(data.num_streams)
    stem = f", stem {backbone.stem}" if backbone.stem else ""
    return [
        *rows,
        (
            "negatives per anchor",
            f"{negatives} ({source})" if negatives else "none (the objective uses no negatives)",
        ),
        ("starts from", start_text(result.recipe)),
        (
            "parameters",
            f"backbone {count_parameters(backbone):,} ({backbone.num_features} features{stem}), "
            f"projector {count_parameters(result.model.projector):,}",
        ),
        *(("parameter group", line) for line in result.groups.splitlines()),
        ("FLOPs per step", f"{result.step_flops:.3g}, forward and backward of {2 * batch} views"),
        ("processes", f"{', '.join(map(str, processes))} (they divide num_streams)"),
    ]


def _time_text(result: PretrainCheck) -> str:
    seconds, steps = result.step_seconds, result.recipe.steps
    total = f", {format_duration(seconds * steps)} in all" if steps else ""
    how = (
        f"as measured in {result.timed_by}"
        if result.timed_by
        else f"one {result.device} process of this machine, without reading, loss and optimizer"
    )
    return f"{seconds:.2g} s/step{total} ({result.precision}, {how})"


def _data_rows(result: PretrainCheck) -> Rows:
    data = result.data
    if data is None:
        return [("data", "not given (--data): steps per epoch, duplicates, mixing, digest unknown")]
    mixing = "unknown (unlabelled, or one class)" if data.mixing is None else f"{data.mixing:.4f}"
    not_kept = f", {data.not_kept:,} not kept" if data.not_kept else ""
    looked = f"over {data.batches} planned batches of the first epoch"
    return [
        ("data", f"{data.name}: {data.samples:,} images, {data.held_out:,} held out{not_kept}"),
        ("steps per epoch", f"{data.steps_per_epoch:,} (the run: {data.epochs:.4g} epochs)"),
        ("duplicates in a global batch", f"{data.duplicates} {looked}"),
        ("mixing score", f"{mixing} (1: as a uniform shuffle) {looked}"),
        *pair_rows(data.pairs),
        ("digest", data.digest),
    ]
