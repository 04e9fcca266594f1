"""Rules over a plan: why it cannot be carried out, and what a user should know before it is.

Each kind of plan lists its own beside the shared ones below.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from sslpipe.errors import RecipeError
from sslpipe.models.stems import stem_warning
from sslpipe.models.tuning import tune_warnings
from sslpipe.optim.parameter_groups import rate_warning
from sslpipe.planning.memory import saved_bytes
from sslpipe.run.contract import PartsT, Plan

PlanT = TypeVar("PlanT")
Rule = Callable[[PlanT, PartsT], Iterable[str]]  # yields a text where it applies


def judge(
    plan: PlanT,
    parts: PartsT,
    *,
    refusals: Sequence[Rule[PlanT, PartsT]],
    remarks: Sequence[Rule[PlanT, PartsT]],
) -> list[str]:
    """Refuse a plan by the first rule of `refusals` that applies; list what `remarks` say.

    Args:
        plan: What is judged.
        parts: What it built.
        refusals: Rules that say why the plan cannot be carried out.
        remarks: Rules that say what the user should know.

    Raises:
        RecipeError: A refusal applies.
    """
    for rule in refusals:
        for reason in rule(plan, parts):
            raise RecipeError(reason)
    return [text for rule in remarks for text in rule(plan, parts)]


# why no plan can be carried out


def network_takes_no_half_size(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Refuse an augment.half_size_share with a network that is made for one size of views."""
    if not plan.half_size_steps:
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
        yield (
            f"augment.half_size_share needs a network that takes views of {half_px} px as well as "
            f"of augment.crop_px; leave it out, or use a convolutional network: {error}"
        )


# what a user should know of any kind of plan


def stem_does_not_fit(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a backbone.stem that is for images of another size."""
    assert plan.recipe.backbone is not None
    if text := stem_warning(plan.recipe.backbone, parts.augment.crop_px):
        yield text


def rate_is_unusual(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a learning rate far above what is usual."""
    if text := rate_warning(plan.recipe.optim, plan.order.batch_size):
        yield text


def backbone_is_slowed(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention settings of [tune] that leave nothing to the backbone."""
    yield from tune_warnings(plan.recipe)


def weights_replace_the_backbone(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention what of the given [backbone] is not used."""
    if plan.not_used:
        yield plan.not_used
