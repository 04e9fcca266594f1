"""A few numbers that say whether training is healthy, cheap enough for every log line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.distributed import all_gather_rows, row_counts
from sslpipe.evaluation.label_free import effective_rank, uniformity_of_units
from sslpipe.precision import to_float64
from sslpipe.run.best import LABELLED

MOST_IMAGES = 512  # both views of each: 1,024 rows

# Healthy runs on small images keep a mean cosine near 0 and a rank share of 0.15 to 0.5.
MOST_COSINE = 0.95  # of two images, on average; random networks may begin above it
OVER_COSINE = 0.9  # an alarm ends below it
LEAST_RANK = 0.1  # of the first logged effective rank
OVER = 2.0  # an alarm of the rank ends above OVER times its threshold
MOST_HIGHER = 0.1  # of the run's steps: so long the loss may lie above its first logged value
LEAST_HIGHER = 5  # steps, of a short run: a batch each, they vary
PATIENCE = 3  # readings in a row that raise an alarm of what was never well
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
    u_a = u_a[at]
    u_b = u_b[at]
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
    """A change of an alarm of `Alarms`, or of "below_start": raised, or over."""

    name: str
    raised: bool
    value: float  # the reading that changed it
    threshold: float
    text: str  # what it means, and what to change


@dataclass(eq=False)
class Alarms:
    """Collapse of embeddings or of their rank, and a loss that rises, from log lines' numbers.

    An alarm is raised at once by the reading that passes its threshold; by the third, if none
    before it was well: some networks begin collapsed, and learn. It ends further back, so that a
    number at the edge is reported once. NaN (a skipped step) counts as no reading.
    """

    steps: int  # of the whole run
    # threshold of the rank, where a tenth of the first reading is lower
    least_rank: float = 1.0
    # the same, where that tenth is higher: embeddings of a few classes may have few directions
    most_rank: float = math.inf
    grows: str = (
        ""  # a number that a queue raises, and the loss with it, until it is full; "": none
    )
    harder: bool = False  # batches become harder on purpose: then a loss that rises is no sign
    remedy: str = "Lower optim.peak_lr, or lengthen optim.warmup_steps"

    def __post_init__(self) -> None:
        self._raised: dict[str, bool] = {}
        self._well: dict[str, bool] = {}  # a reading passed no threshold yet
        self._in_a_row: dict[str, int] = {}
        self._first_rank: float | None = None
        self._first_loss: float | None = None
        self._most_grown = -math.inf
        self._higher_since: int | None = None  # the step of the last loss that was not higher

    def read(self, step: int, numbers: Mapping[str, Any]) -> list[Alarm]:
        """Take in the numbers of a log line after `step` steps; a resumed run reads its first, too.

        Args:
            step: Steps done.
            numbers: `loss`, and what there is of `negative_similarity` and `effective_rank`.

        Returns:
            What changes; mostly nothing.
        """
        changes = [
            self._read_cosine(_number(numbers, "negative_similarity")),
            self._read_rank(_number(numbers, "effective_rank")),
            self._read_loss(step, _number(numbers, "loss"), _number(numbers, self.grows)),
        ]
        return [change for change in changes if change is not None]

    def _read_cosine(self, value: float | None) -> Alarm | None:
        if value is None:
            return None
        raised = self._raised.get("embedding_collapse", False)
        crossed = value < OVER_COSINE if raised else value > MOST_COSINE
        meaning = "all images get nearly the same embedding"
        limit = f"below {OVER_COSINE} again" if raised else f"above {MOST_COSINE}: {meaning}"
        text = f"the mean cosine of two images is {value:.3g}, {limit}"
        return self._change(
            name="embedding_collapse",
            crossed=crossed,
            value=value,
            threshold=MOST_COSINE,
            text=text,
        )

    def _read_rank(self, value: float | None) -> Alarm | None:
        if value is None:
            return None
        if self._first_rank is None:
            self._first_rank = value
        least = min(max(LEAST_RANK * self._first_rank, self.least_rank), self.most_rank)
        raised = self._raised.get("rank_collapse", False)
        crossed = value > OVER * least if raised else value < least
        meaning = "embeddings vary in a few directions only"
        limit = f"above {OVER * least:.3g} again" if raised else f"under {least:.3g}: {meaning}"
        text = f"effective_rank is {value:.3g} (first {self._first_rank:.3g}), {limit}"
        return self._change(
            name="rank_collapse", crossed=crossed, value=value, threshold=least, text=text
        )

    def _read_loss(self, step: int, value: float | None, grown: float | None) -> Alarm | None:
        if value is None or self.harder:
            return None
        grows = grown is not None and grown > self._most_grown
        if self._first_loss is None or grows:
            self._first_loss = value
            self._most_grown = grown if grown is not None else -math.inf
        if value <= self._first_loss or self._higher_since is None:
            self._higher_since = step
        raised = self._raised.get("loss_rises", False)
        long = max(LEAST_HIGHER, MOST_HIGHER * self.steps)
        crossed = value <= self._first_loss if raised else step - self._higher_since >= long
        text = f"the loss is {value:.4g}, no longer above its first value {self._first_loss:.4g}"
        if not raised:
            text = (
                f"the loss is {value:.4g}, above its first value {self._first_loss:.4g} for "
                f"{step - self._higher_since} steps"
            )
        self._well["loss_rises"] = True  # its threshold is a time
        return self._change(
            name="loss_rises", crossed=crossed, value=value, threshold=self._first_loss, text=text
        )

    def _change(
        self, name: str, crossed: bool, value: float, threshold: float, text: str
    ) -> Alarm | None:
        """Raise or end an alarm where a reading has crossed its threshold often enough."""
        raised = self._raised.get(name, False)
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if crossed else 0
        if not crossed and not raised:
            self._well[name] = True
        enough = 1 if raised or self._well.get(name, False) else PATIENCE
        if self._in_a_row[name] < enough:
            return None
        self._raised[name] = not raised
        self._in_a_row[name] = 0
        remedy = "" if raised else f". {self.remedy}"
        return Alarm(
            name=name,
            raised=not raised,
            value=value,
            threshold=threshold,
            text=f"{name}: {text}{remedy}",
        )


def _number(numbers: Mapping[str, Any], name: str) -> float | None:
    """Return a number that is there and finite."""
    value = numbers.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class StartAlarm:
    """The score of `best.LABELLED` of a run that starts from weights fell below the start's.

    Raised at the first reading MOST_FALL below the start, over at the first that is not below it.

    Args:
        start: What the evaluation of step 0 measured; without either number there is no alarm.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._measured = next((name for name in LABELLED if name in start), "")
        self._start = start.get(self._measured)
        self._raised = False

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
                "tune.backbone_lr, or with fewer tune.last_blocks"
            )
        text = f"below_start: {self._measured} is {value:.3g}, {text}"
        return [
            Alarm(
                name="below_start", raised=self._raised, value=value, threshold=threshold, text=text
            )
        ]
