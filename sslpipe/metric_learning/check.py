"""What a fine-tuning will train on, and how much of it: its parts are built, an epoch planned."""

import dataclasses

import numpy as np

from sslpipe.check.estimate import step_seconds, time_text
from sslpipe.check.result import (
    Check,
    memory_parts,
    memory_text,
    start_text,
    straddle_warning,
    warmup_warning,
)
from sslpipe.metric_learning.parts import freeze_and_group
from sslpipe.metric_learning.plan import Finetuning
from sslpipe.models.tuning import count_parameters
from sslpipe.optim import describe_groups
from sslpipe.run.accelerator import check_precision, resolve_precision, training_device
from sslpipe.run.best import watch_text
from sslpipe.run.memory import Room, check_memory, memory_of_plan


def check_finetuning(plan: Finetuning) -> Check:
    """Build every part of a planned fine-tuning, and describe its batches; train nothing.

    Raises:
        UserError: The plan cannot be trained, or this machine cannot train it.
    """
    # what the machine may refuse
    recipe = plan.recipe
    device = training_device(recipe)
    check_precision(recipe.optim.precision, device.type)

    # the parts; when all are built, the digest covers the source of those from plug-ins
    parts = plan.build(compiled=False)
    task = parts.model
    if recipe.optim.precision == "fp64":
        task = task.double()
    remarks = plan.remarks(parts)  # or refused
    digest = plan.identity()["digest"]
    groups = describe_groups(freeze_and_group(task, recipe), task)
    encoder = task.backbone
    precision = resolve_precision(recipe.optim.precision, device)
    memory = memory_of_plan(plan, parts, precision)
    too_much = check_memory(memory, recipe, Room.here(device))
    step_s = step_seconds(
        encoder,
        parts.augment,
        canvas_px=recipe.data.canvas_px,
        batch_size=recipe.sampler.batch_size,
        precision=precision,
        device=device,
        image_type=plan.index.image_type,
    )

    order = plan.order
    sampler = recipe.sampler
    others = f" + {sampler.random_images} of others" if sampler.random_images else ""
    images = f"{sampler.classes_per_batch} classes x {sampler.images_per_class}{others}"
    views = f"{recipe.views} view{'s' * (recipe.views > 1)} each"
    length = "length 1" if recipe.embedding.normalize else "not normalised"
    trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
    given = f"{order.samples:,} images of {len(order.classes):,} classes"
    held = plan.held_out.ids
    classes = len(np.unique(plan.split.labels_of(held)))
    whole_classes = f"images of {classes:,} classes held out"
    what = whole_classes if plan.held_out.whole_classes else "images held out"
    rows = [
        ("time", time_text(step_s, recipe, precision, device)),
        ("memory", memory_text(memory)),
        ("watch", watch_text(recipe.run, plan.split.labels_of(plan.watched), views=False)),
        ("steps", f"{recipe.total_steps:,}"),
        ("batch", f"{images} = {sampler.batch_size} images, {views}"),
        ("embedding", f"{encoder.num_features} features, {length}"),
        ("starts from", start_text(recipe)),
        ("parameters", f"backbone {count_parameters(encoder):,}"),
        ("parameters of losses", f"{count_parameters(task.losses):,}"),
        ("parameters trained", f"{trained:,}"),
        ("data", f"{plan.index.manifest.name}: {given}"),
        ("validation", f"{len(held):,} {what} from training"),
        ("steps per epoch", f"{order.steps_per_epoch:,}"),
        ("an epoch uses", f"{order.used:,} images; {order.dropped:,} leave the buffer unused"),
    ]
    details = [
        ("memory", memory_parts(memory)),
        *(("parameter group", line) for line in groups.splitlines()),
        ("digest", digest),
    ]
    warnings = [
        *remarks,
        straddle_warning(plan.index, plan.split.name),
        too_much,
        warmup_warning(recipe),
    ]
    return Check(
        recipe=recipe,
        views=tuple(dataclasses.asdict(spec) for spec in parts.augment.specs),
        rows=rows,
        details=details,
        warnings=tuple(text for text in warnings if text),
        memory=memory,
        digest=digest,
        step_seconds=step_s,
    )
