"""A few numbers that say whether training is healthy, cheap enough for every log line."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.distributed import all_gather_rows, row_counts
from sslpipe.evaluation.label_free import effective_rank, uniformity_of_units
from sslpipe.precision import to_float64
from sslpipe.run.best import LABELLED

MOST_IMAGES = 512  # both views of each: 1,024 rows

# Healthy runs on small images keep a standard deviation near 1 and a rank share of 0.15 to 0.5.
LEAST_STD = 0.1  # the mean cosine of two rows is 0.99 then
# (effective rank - 1) / (highest possible - 1): 0 in one direction, 1 in all
LEAST_RANK_SHARE = 0.05
OVER = 2.0  # an alarm ends above OVER times its threshold
PATIENCE = 3  # readings in a row that raise or end an alarm
MOST_FALL = 0.02  # of held-out kNN or MAP@R, below what the run's weights had at the start


@torch.no_grad()
def embedding_health(z_a: Tensor, z_b: Tensor) -> dict[str, float]:
    """Measure the directions u of the two views' projections z_a, z_b, (B, D) each. Collective.

    The effective rank is over all rows of the global batch, the rest over at most 512 images at
    evenly spaced places of it.

    Returns:
        Equal on all ranks.

        alignment: mean |u_a - u_b|^2 of positive pairs; 0 to 4, small is aligned.
        uniformity: log of the mean of exp(-2 |u_i - u_j|^2) over the pairs of one view, averaged
        over the views; 0 when all are one point, near -4 on a uniform sphere of many dimensions.
        embedding_std: mean over the dimensions of the standard deviation, times sqrt(D); 1 when
        spread over the sphere, 0 when collapsed.
        effective_rank: exp of the entropy of the normalised singular values, not centred; 1 to D.
        positive_similarity, negative_similarity: mean cosine of the views of one image, and of two.

    Source:
        Wang & Isola 2020, arXiv:2005.10242, eq. 4 and 5 (alpha = t = 2); Garrido et al. 2023
        (RankMe), arXiv:2210.02885, eq. 1, without its epsilon.
    """
    counts = row_counts(z_a.shape[0])
    z_all = all_gather_rows(torch.cat([z_a, z_b], dim=1), counts)  # (N, 2D)
    z_all = z_all.to(torch.promote_types(z_all.dtype, torch.float32))
    u_a, u_b = (F.normalize(view, dim=1) for view in z_all.chunk(2, dim=1))  # (N, D) each
    rank = effective_rank(torch.cat([u_a, u_b]))

    images = min(sum(counts), MOST_IMAGES)
    at = torch.arange(images, device=u_a.device) * sum(counts) // images
    u_a, u_b = u_a[at], u_b[at]
    u = torch.cat([u_a, u_b])  # (2M, D)
    positive = (u_a * u_b).sum(1).mean()
    # the sum of all cosines is the squared length of the sum; less those of an image with itself
    of_one_image = (u_a + u_b).square().sum()
    negative = (u.sum(0).square().sum() - of_one_image) / max(1, 4 * images * (images - 1))
    numbers = {
        "alignment": (u_a - u_b).square().sum(1).mean(),
        "uniformity": (uniformity_of_units(u_a) + uniformity_of_units(u_b)) / 2,
        "embedding_std": u.std(0, correction=0).mean() * math.sqrt(u.shape[1]),
        "effective_rank": rank,
        "positive_similarity": positive,
        "negative_similarity": negative,
    }
    values = torch.stack([to_float64(value) for value in numbers.values()]).tolist()  # one copy
    return dict(zip(numbers, values, strict=True))


class Alarm(NamedTuple):
    """A change of "embedding_collapse", "rank_collapse" or "below_start": raised, or over."""

    name: str
    raised: bool
    value: float  # the reading that changed it
    threshold: float
    text: str  # what it means, and what to change


_COLLAPSES = {  # what is measured, and what it means
    "embedding_collapse": ("embedding_std", "all images get nearly the same embedding"),
    "rank_collapse": ("effective_rank", "embeddings vary in a few directions only"),
}


class Alarms:
    """Embedding collapse and rank collapse, from what `embedding_health` says.

    Raised when a number was under its threshold in PATIENCE readings in a row, over when it was
    above OVER times that as often, so that a long collapse is reported once. NaN (a skipped step)
    counts as no reading. A resumed run begins anew.

    Args:
        highest_rank: That the embeddings can have: min(dimensions, rows).
    """

    def __init__(self, highest_rank: int) -> None:
        least_rank = 1 + LEAST_RANK_SHARE * (highest_rank - 1)
        self._thresholds = {"embedding_collapse": LEAST_STD, "rank_collapse": least_rank}
        self._raised = dict.fromkeys(self._thresholds, False)
        self._in_a_row = dict.fromkeys(self._thresholds, 0)

    def read(self, numbers: Mapping[str, float]) -> list[Alarm]:
        """Take in the numbers of `embedding_health`. Returns what changes; mostly nothing."""
        changes = []
        for name, threshold in self._thresholds.items():
            measured, meaning = _COLLAPSES[name]
            value = numbers[measured]
            if math.isnan(value):
                continue
            raised = self._raised[name]
            crossed = value > OVER * threshold if raised else value < threshold
            self._in_a_row[name] = self._in_a_row[name] + 1 if crossed else 0
            if self._in_a_row[name] == PATIENCE:
                self._raised[name], self._in_a_row[name] = not raised, 0
                text = f"above {OVER * threshold:.3g} again"
                if not raised:
                    text = (
                        f"under {threshold:.3g} for {PATIENCE} readings: {meaning}. Lower "
                        "optim.peak_lr, lengthen optim.warmup_steps, or look at the views with "
                        "`sslpipe preview`"
                    )
                text = f"{name}: {measured} is {value:.3g}, {text}"
                changes.append(Alarm(name, not raised, value, threshold, text))
        return changes


class StartAlarm:
    """The score of `best.LABELLED` of a run that starts from weights fell below the start's.

    Raised at the first reading MOST_FALL below the start, over at the first that is not below it.

    Args:
        start: What the evaluation of step 0 measured; without either number there is no alarm.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._measured = next((name for name in LABELLED if name in start), "")
        self._start, self._raised = start.get(self._measured), False

    def read(self, values: Mapping[str, float]) -> list[Alarm]:
        """Take in the numbers of an evaluation. Returns what changes; mostly nothing."""
        value = values.get(self._measured)
        if self._start is None or value is None:
            return []
        threshold = self._start - MOST_FALL
        # NaN, of features that are not finite, is below the start
        changed = value >= self._start if self._raised else not value > threshold
        if not changed:
            return []
        self._raised = not self._raised
        text = "back above the start"
        if self._raised:
            fall = "no finite number" if math.isnan(value) else f"{self._start - value:.3g}"
            text = (
                f"{fall} below the {self._start:.3g} that the run started from: "
                "training makes these weights worse. Begin again with a smaller optim.peak_lr or "
                "tune.backbone_lr, or with tune.projector_first_steps"
            )
        text = f"below_start: {self._measured} is {value:.3g}, {text}"
        return [Alarm("below_start", self._raised, value, threshold, text)]
