"""What a fine-tuning will train on, and how much of it: its parts are built, an epoch planned."""

import dataclasses

import numpy as np

from sslpipe.check.estimate import estimate_parts, step_seconds, time_text
from sslpipe.check.outcome import (
    Check,
    memory_parts,
    memory_text,
    start_text,
    straddle_warning,
    warmup_warning,
)
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.models.tuning import count_parameters
from sslpipe.planning.watch import watch_text


def check_finetuning(plan: Finetuning) -> Check:
    """Build every part of a planned fine-tuning, and describe its batches; train nothing.

    Raises:
        UserError: The plan cannot be trained, or this machine cannot train it.
    """
    recipe = plan.recipe
    estimate = estimate_parts(plan)
    parts = estimate.parts
    task = parts.model
    encoder = task.backbone
    step_s = step_seconds(
        encoder,
        parts.augment,
        canvas_px=recipe.data.canvas_px,
        batch_size=recipe.sampler.batch_size,
        precision=estimate.precision,
        device=estimate.device,
        image_type=plan.index.image_type,
        half_size_share=recipe.half_size_steps / recipe.total_steps,
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
        ("time", time_text(step_s, recipe, estimate.precision, estimate.device)),
        ("memory", memory_text(estimate.memory)),
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
        ("memory", memory_parts(estimate.memory)),
        *(("parameter group", line) for line in estimate.groups),
        ("digest", estimate.digest),
    ]
    warnings = [
        *estimate.remarks,
        straddle_warning(plan.index, plan.split.name),
        estimate.too_much,
        warmup_warning(recipe),
    ]
    return Check(
        recipe=recipe,
        views=tuple(dataclasses.asdict(spec) for spec in parts.augment.specs),
        rows=rows,
        details=details,
        warnings=tuple(text for text in warnings if text),
        memory=estimate.memory,
        digest=estimate.digest,
        step_seconds=step_s,
    )
