"""sslpipe.augment.batched: a GPU's operations on whole batches, on a CPU: the views of chunks."""

import pytest
import torch

from sslpipe.augment.base import ViewPlan
from sslpipe.augment.batched import BatchPlan
from sslpipe.augment.ops import ops_for
from sslpipe.augment.pixels import EAGER, Colours
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.two_views import FusedViews
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of


@pytest.mark.parametrize("colours", [EAGER, None])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("crop_px", [32, 96])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_whole_batch_at_once_gives_the_views_of_chunks(
    preset: str, crop_px: int, parts: int, colours: Colours | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    augment = FusedViews(preset, crop_px, MEAN, STD, normalize=False)
    batch = augment.prepare(batch_of(SIZES[:9]), seed=4, number=2)
    expected = augment(batch)
    assert isinstance(batch.plan, ViewPlan)
    pixels = max(64 * 64, 2 * crop_px**2)
    monkeypatch.setattr("sslpipe.augment.batched._PART_BYTES", 9 // parts * 3 * 4 * pixels)
    draws, jitter_ops = batch.plan.draws, augment.jitter_ops
    ops = ops_for(augment.specs)
    plan = BatchPlan(draws, augment.specs, (64, 64), jitter_ops, ops, colours, False)
    assert len(list(plan)) == parts
    views = augment(batch._replace(plan=ViewPlan(draws, plan)))
    assert views.stride() == expected.stride()
    assert (views - expected).abs().max() <= (2e-6 if crop_px == 32 else 1e-5)


def test_views_that_none_of_the_ops_touches_are_crops() -> None:
    augment = FusedViews("simclr", 32, jitter_prob=0, grayscale_prob=0, blur_prob=0)
    batch = augment.prepare(batch_of(SIZES[:4]), seed=0, number=0)
    assert isinstance(batch.plan, ViewPlan)
    draws, ops = batch.plan.draws, ops_for(augment.specs)
    plan = BatchPlan(draws, augment.specs, (64, 64), augment.jitter_ops, ops, None, False)
    (chunk,) = plan
    assert chunk.jitter is None
    assert not chunk.masked
    assert (augment(batch._replace(plan=ViewPlan(draws, plan))) - augment(batch)).abs().max() < 2e-6


def test_ops_of_others_get_memory_that_they_can_flatten() -> None:
    augment = FusedViews("simclr", 32)
    seen: list[bool] = []
    augment.extra = lambda views, draws: seen.append(views.is_contiguous()) or views  # type: ignore
    batch = augment.prepare(batch_of(SIZES[:4]), seed=0, number=0)
    assert isinstance(batch.plan, ViewPlan)
    draws, ops = batch.plan.draws, ops_for(augment.specs)
    plan = BatchPlan(draws, augment.specs, (64, 64), augment.jitter_ops, ops, None, False)
    augment(batch._replace(plan=ViewPlan(draws, plan)))
    assert seen == [True]


def test_rotation_comes_with_its_angles_on_the_device() -> None:
    augment = FusedViews("grayscale", 32)
    batch = augment.prepare(batch_of(SIZES[:4]), seed=0, number=0)
    assert isinstance(batch.plan, ViewPlan)
    draws, ops = batch.plan.draws, ops_for(augment.specs)
    plan = BatchPlan(draws, augment.specs, (64, 64), augment.jitter_ops, ops, None, False)
    (chunk,) = plan.to(torch.device("cpu"))
    assert torch.equal(chunk.params["angle_deg"], chunk.draws.angle_deg)
