"""How good features may be, said without a label: numbers of held-out images' backbone features.

Each takes features of any scale and computes in float64; none is an accuracy. Without labels
run.keep chooses by view_recall; docs/reliability.md says what that is worth.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.precision import to_float64

MOST_PAIRED = 4096  # images of a table of all pairs: 128 MB
NUMBERS = ("rankme", "alignment", "uniformity", "view_recall")


def effective_rank(rows: Tensor) -> Tensor:
    """Compute RankMe of rows (R, D), in float64: 1 (one direction) to min(R, D); not centred.

    It is exp(entropy of s / sum(s)), s the singular values, from the smaller Gram matrix; NaN if
    one number is not finite.

    Source:
        Garrido et al. 2023, arXiv:2210.02885, eq. 1, without its epsilon.
    """
    rows = to_float64(rows)  # squaring halves the digits of small singular values
    gram = rows.T @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.T
    if not bool(torch.isfinite(gram).all()):  # eigvalsh would raise
        return gram.new_tensor(math.nan)
    s = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)
    p = s / s.sum().clamp_min(torch.finfo(s.dtype).tiny)
    entropy: Tensor = torch.special.entr(p).sum()
    return entropy.exp()


def uniformity_of_units(u: Tensor) -> Tensor:
    """Compute the log of the mean of exp(-2 |u_i - u_j|^2) over i != j; 0 for a single row."""
    if len(u) < 2:
        return u.new_zeros(())
    u = u - u.mean(dim=0)  # distances know no origin, rounding does
    lengths = u.square().sum(dim=1)
    squared = torch.addmm(lengths + lengths[:, None], u, u.T, alpha=-2).clamp_min_(0)
    # less one: the distances of collapsed rows would be lost beside it
    less_one = squared.mul_(-2).expm1_().fill_diagonal_(0)  # (M, M)
    mean: Tensor = to_float64(less_one.sum(dim=1)).sum() / (len(u) * (len(u) - 1))
    return mean.log1p()


def alignment(views: Tensor) -> float:
    """Compute the mean squared distance of unit features of two views of one image.

    `views` are (q, N, D), the mean over their pairs; the value is 0 (views do not matter) to 4.

    Source:
        Wang and Isola 2020, arXiv:2005.10242, eq. 4, alpha = 2.
    """
    u = _unit(views)
    # over pairs i != j: 2 - 2 cos, the cosines' sum being |sum of views|^2 less their own
    count = len(u)
    cosines = (u.sum(dim=0).square().sum(dim=1) - u.square().sum(dim=(0, 2))) / (
        count * (count - 1)
    )
    return float((2 - 2 * cosines).mean())


def uniformity(features: Tensor) -> float:
    """Compute the log of the mean of exp(-2 squared distance) over pairs of unit features (N, D).

    It is -4 (a sphere of many dimensions) to 0 (one point).

    Source:
        Wang and Isola 2020, arXiv:2005.10242, eq. 5, t = 2.
    """
    return float(uniformity_of_units(_unit(features)))


def concentration_text(*values: float) -> str:
    """Return what uniformities of weights' features mean; docs/adapting.md says what is not known.

    The reference is EfficientNet-Lite0 with ImageNet weights at 128 px on sets of docs/graded.md.
    """
    numbers = ", ".join(f"{value:.2f}" for value in values)
    return (
        f"uniformity {numbers} (0: all images look alike to these weights, -4: features spread "
        "evenly; EfficientNet-Lite0 has -1.8 on letters, -2.7 on icons, -3.0 on stamps; whether "
        "training will help it does not say)"
    )


def view_recall(views: Tensor) -> float:
    """Compute how often an image's other view is the nearest of all, by cosine, of (2, N, D).

    Of equal similarities the first counts, so that one point for all images gives 1 / N.
    """
    a, b = _unit(views)
    cosines = a @ b.T  # (N, N)
    places = torch.arange(len(a), device=a.device)
    hits = [(table.argmax(dim=1) == places).double().mean() for table in (cosines, cosines.T)]
    return float((hits[0] + hits[1]) / 2)


def label_free_numbers(features: Tensor, views: Tensor) -> dict[str, float]:
    """Compute all of them, NaN where a feature is not finite.

    `features` (N, D) are of the images as evaluation sees them, `views` (2, N, D) of two views of
    each. What compares all pairs takes MOST_PAIRED evenly spaced images at most.
    """
    if not bool(torch.isfinite(features).all() & torch.isfinite(views).all()):
        return dict.fromkeys(NUMBERS, float("nan"))
    some = torch.arange(min(len(features), MOST_PAIRED), device=features.device)
    some = some * len(features) // len(some)
    return {
        "rankme": float(effective_rank(features)),
        "alignment": alignment(views),
        "uniformity": uniformity(features[some]),
        "view_recall": view_recall(views[:, some]),
    }


def _unit(x: Tensor) -> Tensor:
    return F.normalize(to_float64(x), dim=-1, eps=1e-300)
