"""What a fine-tuning will train on and how much of it, worked out before: nothing is written."""

import dataclasses
from typing import Any, NamedTuple

from rich.console import RenderableType

from sslpipe.augment.two_views import build_augment
from sslpipe.check.columns import straddle_warning
from sslpipe.check.tables import Rows, memory_text, start_text, tables, warmup_warning
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex
from sslpipe.export.initial import backbone_note, fit_channels
from sslpipe.export.load import FrozenBackbone
from sslpipe.metric_learning.build import (
    ORDER_AND_PK_VERSION,
    build_task,
    freeze_and_group,
    labelled_split,
    plan_batches,
    plan_warnings,
    validation_ids,
    with_backbone,
)
from sslpipe.metric_learning.model import MetricTask
from sslpipe.metric_learning.sampling import PKOrder
from sslpipe.models.backbones import stem_warning
from sslpipe.models.tuning import count_parameters
from sslpipe.optim import describe_groups, rate_warning
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.recipe.identity import run_identities
from sslpipe.run.launch import check_precision, training_device
from sslpipe.run.memory import Memory, check_memory, estimate_memory


class PlanCheck(NamedTuple):
    """What the index and the plan of the first epoch say."""

    name: str
    order: PKOrder
    validation_images: int
    digest: str


class FinetuneCheck(NamedTuple):
    """A valid recipe's sizes. plan: None without an index, and then the losses lack classes."""

    recipe: FinetuneRecipe
    views: tuple[dict[str, Any], ...]
    task: MetricTask
    groups: str
    memory: Memory  # bytes, of one process
    warnings: tuple[str, ...]
    plan: PlanCheck | None


def check_finetuning(
    recipe: FinetuneRecipe, index: DatasetIndex | None, init_from: FrozenBackbone | None
) -> FinetuneCheck:
    """Build every part of a fine-tuning and plan its batches, as `check_recipe`; train nothing."""
    # what the machine may refuse
    device = training_device(recipe)
    check_precision(recipe.optim.precision, device.type)

    # the batches of the first epoch
    index = index and index.with_channels(recipe.data.channels)
    image_type = index.image_type if index else RGB8
    init_from = fit_channels(init_from, index)
    not_used = backbone_note(recipe, init_from)
    recipe = with_backbone(recipe, init_from, index)
    augment = build_augment(recipe, index)
    assert recipe.backbone is not None
    stem = stem_warning(recipe.backbone, augment.crop_px)
    rate = rate_warning(recipe.optim, recipe.sampler.batch_size)
    plan, warnings = None, [text for text in (stem, rate) if text]
    num_classes = max(2, recipe.sampler.classes_per_batch)
    if index is not None:
        split, names = labelled_split(recipe, index)
        index.check_files(split.name)
        order = plan_batches(recipe, index)
        recipe, num_classes = recipe.resolved(order.steps_per_epoch), len(order.classes)
        held = validation_ids(split, recipe.data.validation_classes, names)
        warnings = plan_warnings(recipe, index, order, augment.crop_px)
        warnings += filter(None, [straddle_warning(index, split.name)])

    # sizes
    task = build_task(recipe, augment.crop_px, init_from, num_classes)
    if index is not None:  # all parts are built: the digest covers the source of plug-ins
        ours, *_ = run_identities(recipe, index, ORDER_AND_PK_VERSION)
        plan = PlanCheck(index.manifest.name, order, len(held), ours["digest"])
    groups = describe_groups(freeze_and_group(task, recipe), task)
    precision, crop_px = recipe.optim.precision, augment.crop_px
    memory = estimate_memory(
        task, recipe, crop_px, precision, encoder=task.backbone, image_type=image_type
    )
    if too_much := check_memory(memory, recipe, device):
        warnings.append(too_much)
    warnings += warmup_warning(recipe)
    return FinetuneCheck(
        recipe=recipe,
        views=tuple(dataclasses.asdict(spec) for spec in augment.specs[: recipe.views]),
        task=task,
        groups=groups,
        memory=memory,
        warnings=(*warnings, *filter(None, [not_used])),
        plan=plan,
    )


def render_finetuning(result: FinetuneCheck) -> RenderableType:
    """Make tables for a terminal: sizes and warnings first, then views and settings."""
    rows = [*_size_rows(result), *_plan_rows(result.plan)]
    return tables(result.recipe, result.views, ("sizes", rows), result.warnings)


def _size_rows(result: FinetuneCheck) -> Rows:
    recipe, sampler = result.recipe, result.recipe.sampler
    images = f"{sampler.classes_per_batch} classes x {sampler.images_per_class}"
    images += f" + {sampler.random_images} of others" if sampler.random_images else ""
    task = result.task
    rows = [
        ("memory", memory_text(result.memory)),
        (
            "batch",
            f"{images} = {sampler.batch_size} images, {recipe.views} "
            f"view{'s' * (recipe.views > 1)} each",
        ),
        (
            "embedding",
            f"{task.backbone.num_features} features"
            + (", length 1" if recipe.embedding.normalize else ", not normalised"),
        ),
        ("starts from", start_text(recipe)),
        ("parameters", f"backbone {count_parameters(task.backbone):,}"),
    ]
    if result.plan is None:
        return rows
    trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
    rows.append(("parameters of losses", f"{count_parameters(task.losses):,}"))
    rows.append(("parameters trained", f"{trained:,}"))
    return rows + [("parameter group", line) for line in result.groups.splitlines()]


def _plan_rows(plan: PlanCheck | None) -> Rows:
    if plan is None:
        return [("data", "not given (--data): classes, steps per epoch, digest unknown")]
    order = plan.order
    return [
        ("data", f"{plan.name}: {order.samples:,} images of {len(order.classes):,} classes"),
        ("validation", f"{plan.validation_images:,} images of classes held out from training"),
        ("steps per epoch", f"{order.steps_per_epoch:,}"),
        ("an epoch uses", f"{order.used:,} images; {order.dropped:,} leave the buffer unused"),
        ("digest", plan.digest),
    ]
