"""The rates that papers train with, to tell one that is absurd: an extra digit, say."""

import math

from sslpipe.recipe.base import Optim

ABSURD = 100  # times the usual rate
_PUBLISHED = {  # optimizer -> rate for a batch of 256, and whose
    "sgd": (0.1, "Goyal et al. 2017"),
    "lars": (0.3, "SimCLR"),
    "adamw": (5e-4, "DINO"),
}
_LARS_BY_ROOT = 0.075


def usual_rate(kind: str, batch_size: int) -> float:
    """Return the peak rate that is usual of an optimizer: that of 256 images below that many.

    Source:
        sgd: Goyal et al. 2017, arXiv:1706.02677, section 5.1: 0.1 batch / 256. lars: SimCLR,
        arXiv:2002.05709, section 2.3 and appendix B.1: 0.3 batch / 256 or 0.075 sqrt(batch), the
        larger one. adamw: DINO, arXiv:2104.14294, section 3.2: 0.0005 batch / 256.
    """
    linear = _PUBLISHED[kind][0] * max(1.0, batch_size / 256)
    return max(linear, _LARS_BY_ROOT * math.sqrt(batch_size)) if kind == "lars" else linear


def rate_warning(optim: Optim, batch_size: int) -> str | None:
    """Say in one sentence that a rate is far above what is usual; None where it is not."""
    usual = usual_rate(optim.kind, batch_size)
    times = optim.peak_lr / usual
    if times <= ABSURD:
        return None
    return (
        f"optim.peak_lr = {optim.peak_lr:g} is {times:,.0f} times {usual:.2g}, which is usual of "
        f"{optim.kind} at a batch of {batch_size} ({_PUBLISHED[optim.kind][1]}): is a digit too "
        "many? Such steps end in NaN, or teach nothing"
    )
