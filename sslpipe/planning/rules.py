"""Why a plan of any kind cannot be carried out, and what a user should know before it is.

Each kind lists these beside its own: refusals raise RecipeError, remarks yield texts.
"""

from collections.abc import Iterator

from sslpipe.errors import RecipeError
from sslpipe.models.stems import stem_warning
from sslpipe.optim.parameter_groups import rate_warning
from sslpipe.planning.memory import saved_bytes
from sslpipe.run.contract import PartsT, Plan

# why no plan can be carried out


def network_takes_no_half_size(plan: Plan[PartsT], parts: PartsT) -> None:
    """Refuse an augment.half_size_share with a network that is made for one size of views."""
    if not plan.recipe.half_size_steps:
        return
    half_px = parts.augment.crop_px // 2
    try:
        saved_bytes(
            parts.encoder or parts.model,
            rows=2,
            crop_px=half_px,
            precision="fp32",
            channels=len(plan.index.image_type.channels),
        )
    except RecipeError as error:
        raise RecipeError(
            f"augment.half_size_share needs a network that takes views of {half_px} px as well as "
            f"of augment.crop_px; leave it out, or use a convolutional network: {error}"
        ) from error


# what a user should know of any kind of plan


def stem_does_not_fit(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a backbone.stem that is for images of another size."""
    assert plan.recipe.backbone is not None
    if text := stem_warning(plan.recipe.backbone, parts.augment.crop_px):
        yield text


def rate_is_unusual(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a learning rate of 0, or far above what is usual."""
    if text := rate_warning(plan.recipe.optim, plan.order.batch_size):
        yield text


def warmup_takes_the_run(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a warm-up that does not end before the run."""
    warmup = plan.recipe.optim.warmup_steps
    steps = plan.recipe.total_steps
    if warmup >= steps:
        yield (
            f"optim.warmup_steps = {warmup} does not end before the run's {steps} steps: the peak "
            "rate is never used"
        )


def backbone_is_slowed(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention settings of [tune] that leave nothing to the backbone."""
    tune = plan.recipe.tune
    full = tune.projector_first_steps + tune.ramp_steps
    if full and full >= plan.recipe.total_steps:
        yield (
            f"tune.projector_first_steps + tune.ramp_steps = {full}, of "
            f"{plan.recipe.total_steps} steps: the backbone never has its full rate"
        )


def weights_replace_the_backbone(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention what of the given [backbone] is not used."""
    if plan.not_used:
        yield plan.not_used
