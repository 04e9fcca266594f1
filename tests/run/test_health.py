"""Health numbers against loops, closed forms and real processes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.evaluation.label_free import effective_rank
from sslpipe.run.health import MOST_IMAGES, Alarms, StartAlarm, embedding_health
from tests.helpers.processes import run_processes


def views(images: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z_a = torch.randn(images, dim, generator=generator, dtype=torch.float64)
    return z_a * 5, z_a + torch.randn(images, dim, generator=generator, dtype=torch.float64)


def by_loops(z_a: Tensor, z_b: Tensor) -> dict[str, float]:
    a, b = ([row / np.linalg.norm(row) for row in z.numpy()] for z in (z_a, z_b))
    n, dim = len(a), len(a[0])
    every = np.array(a + b)
    uniformity = [
        math.log(
            np.mean([math.exp(-2 * ((v[i] - v[j]) ** 2).sum()) for i in range(n) for j in range(i)])
        )
        for v in (a, b)
    ]
    s = np.linalg.svd(every, compute_uv=False)
    p = s / s.sum()
    negatives = [every[i] @ every[j] for i in range(2 * n) for j in range(2 * n) if i % n != j % n]
    return {
        "alignment": float(np.mean([((x - y) ** 2).sum() for x, y in zip(a, b, strict=True)])),
        "uniformity": float(np.mean(uniformity)),
        "embedding_std": float(every.std(0).mean() * math.sqrt(dim)),
        "effective_rank": float(np.exp(-(p * np.log(p)).sum())),
        "positive_similarity": float(np.mean([x @ y for x, y in zip(a, b, strict=True)])),
        "negative_similarity": float(np.mean(negatives)),
    }


@pytest.mark.parametrize(("images", "dim"), [(12, 5), (4, 9)])
def test_health_equals_loops(images: int, dim: int) -> None:
    z_a, z_b = views(images, dim)
    assert embedding_health(z_a.requires_grad_(), z_b) == pytest.approx(
        by_loops(z_a.detach(), z_b), rel=1e-9
    )


def test_a_large_batch_is_judged_by_rows_at_fixed_places() -> None:
    z_a, z_b = views(3 * MOST_IMAGES, 6)
    numbers, subset = embedding_health(z_a, z_b), embedding_health(z_a[::3], z_b[::3])
    for key in numbers.keys() - {"effective_rank"}:
        assert numbers[key] == pytest.approx(subset[key], rel=1e-12)
    assert numbers["effective_rank"] == pytest.approx(
        float(effective_rank(torch.cat([torch.nn.functional.normalize(z) for z in (z_a, z_b)])))
    )


def test_few_or_rounded_rows_give_finite_numbers_and_a_non_finite_batch_nan() -> None:
    for z in (torch.randn(1, 4), torch.randn(6, 4).bfloat16(), torch.zeros(3, 4)):
        assert all(math.isfinite(value) for value in embedding_health(z, z).values())
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    z[2, 1] = math.nan
    assert math.isnan(embedding_health(z, z)["effective_rank"])


def _on_ranks(process: Rank, split: tuple[int, ...], z_a: Tensor, z_b: Tensor) -> dict[str, float]:
    return embedding_health(z_a.split(split)[process.rank], z_b.split(split)[process.rank])


@pytest.mark.parametrize("split", [(2, 10), (3, 4, 5)])
def test_all_ranks_say_what_one_process_says(split: tuple[int, ...]) -> None:
    z_a, z_b = views(12, 5)
    for numbers in run_processes(_on_ranks, len(split), split, z_a, z_b):
        assert numbers == pytest.approx(embedding_health(z_a, z_b), rel=1e-12)


def changes_of(readings: list[dict[str, float]], alarms: Alarms | None = None) -> list[str]:
    """Readings, one a step -> "number of the reading: +name or -name"."""
    said = []
    alarms = alarms or Alarms(steps=1000, least_rank=2.0)
    for number, numbers in enumerate(readings, 1):
        for change in alarms.read(number, numbers):
            said.append(f"{number}: {'+' if change.raised else '-'}{change.name}")
    return said


def reading(cosine: float = 0.1, rank: float = 10.0, loss: float = 1.0, **more: float) -> Any:
    return {"negative_similarity": cosine, "effective_rank": rank, "loss": loss, **more}


def test_a_collapse_is_reported_at_once_and_its_end_once() -> None:
    """Thresholds: mean cosine 0.95, over below 0.9; rank 2, over above 4."""
    good, flat, thin = reading(), reading(0.99, 1.2), reading(0.1, 1.5)
    assert changes_of([good] * 9) == []
    both = ["2: +embedding_collapse", "2: +rank_collapse"]
    assert changes_of([good, *[flat] * 9]) == both
    ended = ["11: -embedding_collapse", "11: -rank_collapse"]
    assert changes_of([good, *[flat] * 9, *[good] * 9]) == both + ended
    twice = [good, thin, thin, good, thin]
    assert changes_of(twice) == ["2: +rank_collapse", "4: -rank_collapse", "5: +rank_collapse"]


def test_what_was_never_well_is_reported_by_the_third_reading() -> None:
    """A random network without BatchNorm begins so, and learns."""
    flat = reading(0.99)
    assert changes_of([flat, flat, *[reading()] * 5]) == []
    assert changes_of([flat] * 9) == ["3: +embedding_collapse"]
    nan = reading(math.nan, math.nan, math.nan)  # a skipped step says nothing
    assert changes_of([flat, nan, flat, nan, flat]) == ["5: +embedding_collapse"]


def test_a_number_at_the_edge_does_not_make_an_alarm_flicker() -> None:
    over, inside = reading(0.96, 1.9), reading(0.94, 2.1)
    expected = ["2: +embedding_collapse", "2: +rank_collapse"]
    assert changes_of([reading(), *[over, inside] * 9]) == expected


def test_the_rank_is_compared_with_the_first_ones() -> None:
    ranks = [reading(rank=rank) for rank in (60.0, 7.0, 5.9)]
    assert changes_of(ranks) == ["3: +rank_collapse"]
    two_classes = Alarms(steps=1000, most_rank=1.0)  # which need one direction
    assert changes_of([*ranks, reading(rank=1.2)], two_classes) == []


def test_a_loss_above_its_first_value_for_a_tenth_of_the_run_is_reported_once() -> None:
    def losses(*values: float, alarms: Alarms | None = None) -> list[str]:
        return changes_of([reading(loss=value) for value in values], alarms or Alarms(steps=50))

    assert losses(5, 6, 6, 6, 6, 4, 6, 6, 6, 6, 5) == []  # never five steps long
    assert losses(5, 6, 7, 7, 7, 7, 7, 7, 5, 6) == ["6: +loss_rises", "9: -loss_rises"]
    assert losses(5, 4, 3, 2, 1) == []
    short = Alarms(steps=8)  # of which a tenth would be one batch
    assert losses(5, 4, 6, 6, 6, 4, 3, 6, alarms=short) == []


def test_a_queue_that_fills_raises_the_loss_and_no_alarm() -> None:
    alarms = Alarms(steps=20, grows="negatives_per_anchor")
    rows = [0, 64, 128, 192, 256, *[256] * 20]
    losses = [0.0, 4.0, 5.0, 5.4, 5.7, *[5.6] * 10, *[5.9] * 10]
    lines = [reading(loss=x, negatives_per_anchor=n) for x, n in zip(losses, rows, strict=True)]
    assert changes_of(lines, alarms) == ["20: +loss_rises"]


def test_alarms_say_what_real_embeddings_do() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(64, 16, generator=generator)
    point = torch.ones(16) + 0.01 * spread
    line = torch.randn(64, 1, generator=generator) * torch.ones(16) + 1e-4 * spread
    actual = []
    for rows in (spread, point, line):
        alarms = Alarms(steps=100, least_rank=1.75)
        alarms.read(1, embedding_health(spread, spread))
        changes = alarms.read(2, embedding_health(rows, rows))
        actual.append([change.name for change in changes])
        assert all("Lower optim.peak_lr" in change.text for change in changes)
    assert actual == [[], ["embedding_collapse", "rank_collapse"], ["rank_collapse"]]


def test_a_fall_below_the_start_is_told_once_and_again_after_it_was_over():
    alarm = StartAlarm({"step": 0, "holdout_map_at_r": 0.8})
    readings = [0.79, 0.785, 0.77, 0.5, 0.79, 0.9, 0.81, 0.7]
    changes = [
        (n, a.raised) for n, v in enumerate(readings) for a in alarm.read({"holdout_map_at_r": v})
    ]
    assert changes == [(2, True), (5, False), (7, True)]
    (raised,) = StartAlarm({"holdout_map_at_r": 0.8}).read({"holdout_map_at_r": 0.5})
    keys = "optim.peak_lr", "tune.backbone_lr", "tune.last_blocks"
    assert all(words in raised.text for words in ("0.3 below the 0.8", *keys))
    assert not alarm.read({})
    assert not StartAlarm({}).read({"holdout_map_at_r": 0.1})
    tuned = StartAlarm({"step": 0, "validation_recall_at_1": 0.9, "validation_map_at_r": 0.5})
    assert not tuned.read({"validation_recall_at_1": 0.1, "validation_map_at_r": 0.49})
    (raised,) = tuned.read({"validation_recall_at_1": 0.9, "validation_map_at_r": 0.47})
    assert raised.text.startswith("below_start: validation_map_at_r is 0.47, 0.03 below the 0.5")
