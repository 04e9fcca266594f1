"""What a fine-tuning will train on, and how much of it: its parts are built, an epoch planned."""

import dataclasses

import numpy as np

from sslpipe.augment.two_views import build_augment
from sslpipe.check.result import (
    Check,
    memory_text,
    start_text,
    straddle_warning,
    warmup_warning,
)
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex
from sslpipe.export.load import FrozenBackbone
from sslpipe.export.start import Start, fit_channels
from sslpipe.metric_learning.build import (
    ORDER_AND_PK_VERSION,
    build_task,
    freeze_and_group,
    held_out,
    labelled_split,
    plan_batches,
    plan_warnings,
    with_backbone,
)
from sslpipe.models.backbones import stem_warning
from sslpipe.models.tuning import count_parameters
from sslpipe.optim import describe_groups, rate_warning
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.recipe.identity import run_identity
from sslpipe.run.best import can_choose
from sslpipe.run.launch import check_precision, training_device
from sslpipe.run.memory import check_memory, estimate_memory


def check_finetuning(
    recipe: FinetuneRecipe, index: DatasetIndex | None, init_from: FrozenBackbone | None
) -> Check:
    """Build every part of a fine-tuning and plan its batches, as `check_recipe`; train nothing."""
    # what the machine may refuse
    device = training_device(recipe)
    check_precision(recipe.optim.precision, device.type)

    # the batches of the first epoch
    index = index and index.with_channels(recipe.data.channels)
    image_type = index.image_type if index else RGB8
    init_from = fit_channels(init_from, index)
    start = Start("random" if init_from is None else "named", init_from)
    not_used = start.remark(recipe)
    recipe = with_backbone(recipe, init_from, index)
    augment = build_augment(recipe, index)
    crop_px, sampler = augment.crop_px, recipe.sampler
    if index is None:  # the losses lack classes
        assert recipe.backbone is not None
        num_classes = max(2, sampler.classes_per_batch)
        rate = rate_warning(recipe.optim, sampler.batch_size)
        warnings = [stem_warning(recipe.backbone, crop_px), rate]
    else:
        split, names = labelled_split(recipe, index)
        index.check_files(split.name)
        order = plan_batches(recipe, index)
        num_classes = len(order.classes)
        held, whole_classes = held_out(recipe, split, names)
        recipe = recipe.resolved(order.steps_per_epoch)
        recipe = recipe.with_watch(can_choose(split.labels_of(held), views=False))
        warnings = [*plan_warnings(recipe, index, order, crop_px)]
        warnings.append(straddle_warning(index, split.name))

    # sizes
    task = build_task(recipe, crop_px, init_from, num_classes)
    groups = describe_groups(freeze_and_group(task, recipe), task)
    precision, encoder = recipe.optim.precision, task.backbone
    memory = estimate_memory(
        task, recipe, crop_px, precision, encoder=encoder, image_type=image_type
    )
    others = f" + {sampler.random_images} of others" if sampler.random_images else ""
    images = f"{sampler.classes_per_batch} classes x {sampler.images_per_class}{others}"
    views = f"{recipe.views} view{'s' * (recipe.views > 1)} each"
    length = "length 1" if recipe.embedding.normalize else "not normalised"
    rows = [
        ("memory", memory_text(memory)),
        ("batch", f"{images} = {sampler.batch_size} images, {views}"),
        ("embedding", f"{encoder.num_features} features, {length}"),
        ("starts from", start_text(recipe)),
        ("parameters", f"backbone {count_parameters(encoder):,}"),
    ]
    if index is None:
        digest = ""
        rows.append(("data", "not given (--data): classes, steps per epoch, digest unknown"))
    else:  # all parts are built: the digest covers the source of plug-ins
        digest = run_identity(recipe, index, ORDER_AND_PK_VERSION)["digest"]
        classes = len(np.unique(split.labels_of(held)))
        what = f"images of {classes:,} classes held out" if whole_classes else "images held out"
        trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
        given = f"{order.samples:,} images of {len(order.classes):,} classes"
        rows += [
            ("parameters of losses", f"{count_parameters(task.losses):,}"),
            ("parameters trained", f"{trained:,}"),
            *(("parameter group", line) for line in groups.splitlines()),
            ("data", f"{index.manifest.name}: {given}"),
            ("validation", f"{len(held):,} {what} from training"),
            ("steps per epoch", f"{order.steps_per_epoch:,}"),
            ("an epoch uses", f"{order.used:,} images; {order.dropped:,} leave the buffer unused"),
            ("digest", digest),
        ]
    warnings += [check_memory(memory, recipe, device), warmup_warning(recipe), not_used]
    said = tuple(text for text in warnings if text)
    specs = tuple(dataclasses.asdict(spec) for spec in augment.specs[: recipe.views])
    return Check(recipe, specs, rows, said, memory, digest)
