"""What a fine-tuning will train on, and how much of it: its parts are built, an epoch planned."""

import numpy as np

from sslpipe.check.estimate import check_of, estimate_parts
from sslpipe.check.outcome import Check
from sslpipe.errors import counted
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
    task = estimate.parts.model
    encoder = task.backbone
    order = plan.order
    sampler = recipe.sampler
    others = f" + {sampler.random_images} of others" if sampler.random_images else ""
    images = f"{sampler.classes_per_batch} classes x {sampler.images_per_class}{others}"
    views = f"{counted(recipe.views, 'view')} each"
    length = "length 1" if recipe.embedding.normalize else "not normalised"
    trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
    trained_on = f"{order.samples:,} images of {len(order.classes):,} classes"
    held = plan.held_out.ids
    classes = len(np.unique(plan.split.labels_of(held)))
    whole_classes = f"images of {classes:,} classes held out"
    what = whole_classes if plan.held_out.whole_classes else "images held out"
    return check_of(
        plan,
        estimate,
        watch=watch_text(recipe.run, plan.split.labels_of(plan.watched), views=False),
        rows=[
            ("steps", f"{recipe.total_steps:,}"),
            ("batch", f"{images} = {sampler.batch_size} images, {views}"),
            ("embedding", f"{encoder.num_features} features, {length}"),
            ("starts from", plan.start.describe(recipe.tune)),
            ("parameters", f"backbone {count_parameters(encoder):,}"),
            ("parameters of losses", f"{count_parameters(task.losses):,}"),
            ("parameters trained", f"{trained:,}"),
            ("data", f"{plan.index.manifest.name}: {trained_on}"),
            ("validation", f"{len(held):,} {what} from training"),
            ("steps per epoch", f"{order.steps_per_epoch:,}"),
            ("an epoch uses", f"{order.used:,} of {order.samples:,} images"),
        ],
    )
