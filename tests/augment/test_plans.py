"""Plans of views: made ahead, of rows of a batch, of partners' images, and a GPU's on a CPU."""

import pytest
import torch

from sslpipe.augment.ops import ops_for
from sslpipe.augment.plans import BatchPlan
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.triton_views import TritonPlan
from sslpipe.augment.two_views import AUGMENTS, FusedViews, ViewPlan
from sslpipe.data.pipeline import PairRows
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of, params_for


def prepared(augment, batch):
    return augment.prepare(batch, seed=4, number=2)


@pytest.mark.parametrize("kind", AUGMENTS)
def test_a_prepared_batch_gives_the_views_of_its_parameters(kind):
    augment, batch = AUGMENTS[kind]("byol", 32), batch_of(SIZES[:8], epoch=2)
    ahead = prepared(augment, batch)
    assert torch.equal(augment(ahead), augment(batch, params_for(batch, augment, seed=4)))
    assert torch.equal(augment(ahead, dtype=torch.float64), augment(ahead).double())


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("kind", AUGMENTS)
def test_rows_of_a_prepared_batch_give_rows_of_its_views(kind, views):
    augment = AUGMENTS[kind]("mocov2", 32)
    augment.specs = augment.specs[:views]
    batch, rows = prepared(augment, batch_of(SIZES[:6])), torch.tensor([4, 0, 3])
    expected = augment(batch).unflatten(0, (views, 6))[:, rows].flatten(0, 1)
    assert (augment(batch.rows(rows)) - expected).abs().max() <= 1e-6


def test_a_batch_without_a_plan_is_refused():
    with pytest.raises(ValueError, match="no plan of its views: call prepare, or give draws"):
        FusedViews("simclr", 32)(batch_of(SIZES[:2]))


# -- a GPU's operations on whole batches -----------------------------------------------------------


def gpu_plan(augment, batch, **options):
    """The plan by which a GPU makes the views of a prepared batch, and the batch with it."""
    assert isinstance(batch.plan, ViewPlan)
    draws, ops, canvas = batch.plan.draws, ops_for(augment.specs), tuple(batch.images.shape[2:])
    settings = augment.jitter_ops, ops, False, len(augment.channels)
    plan = BatchPlan(draws, augment.specs, canvas, *settings, **options)
    plan = plan.to(torch.device("cpu"))
    return plan, batch._replace(plan=ViewPlan(draws, plan))


def set_parts(monkeypatch, images, pixels):
    """Have a plan change so many images together, of so many pixels."""
    monkeypatch.setattr("sslpipe.augment.plans._PART_BYTES", images * 3 * 4 * pixels)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("crop_px", [32, 96])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_whole_batch_at_once_gives_the_views_of_chunks(preset, crop_px, parts, monkeypatch):
    augment = FusedViews(preset, crop_px, MEAN, STD, normalize=False)
    batch = prepared(augment, batch_of(SIZES[:9]))
    expected = augment(batch)
    set_parts(monkeypatch, 9 // parts, max(64 * 64, 2 * crop_px**2))
    plan, batch = gpu_plan(augment, batch)
    chunks = list(plan.chunks(torch.float32))
    assert len(chunks) == parts
    for chunk in chunks:
        assert torch.equal(chunk.params["angle_deg"], chunk.draws.angle_deg)
    views = augment(batch)
    assert views.stride() == expected.stride()
    assert (views - expected).abs().max() <= (2e-6 if crop_px == 32 else 1e-5)


def test_views_that_none_of_the_ops_touches_are_crops():
    augment = FusedViews("simclr", 32, jitter_prob=0, grayscale_prob=0, blur_prob=0)
    expected = prepared(augment, batch_of(SIZES[:4]))
    plan, batch = gpu_plan(augment, expected)
    (chunk,) = plan.chunks(torch.float32)
    assert chunk.jitter is None
    assert not chunk.masked
    assert (augment(batch) - augment(expected)).abs().max() < 2e-6


def test_ops_of_others_get_memory_that_they_can_flatten():
    augment, seen = FusedViews("simclr", 32), list[bool]()
    augment.extra = lambda views, draws: seen.append(views.is_contiguous()) or views
    augment(gpu_plan(augment, prepared(augment, batch_of(SIZES[:4])))[1])
    assert seen == [True]


# -- second views of another image: those that this image makes alone ------------------------------

ROWS = 4
IMAGE = torch.tensor([4, 1, 5, 3])  # rows 0 and 2 have partners, whose images come last


def paired_batch():
    """Four rows with two partners, and batches of what the first and the second views show."""
    images = batch_of([*SIZES[:5], (130, 200)])
    ids, numbers = torch.arange(10, 10 + ROWS), torch.full((ROWS, 2), -1)
    nobody = torch.zeros(ROWS, dtype=torch.bool)
    rows = {"labels": ids, "ids": ids, "source_ids": ids}
    first, second = (
        images._replace(images=images.images[shown], sizes=images.sizes[shown], **rows)
        for shown in (torch.arange(ROWS), IMAGE)
    )
    pairs = PairRows(IMAGE, numbers, numbers, numbers[:, :, None], nobody)
    return images._replace(**rows, pairs=pairs), first, second


def expected_views(augment, first, second):
    views = [augment(prepared(augment, batch)) for batch in (first, second)]
    return torch.cat([views[0][:ROWS], views[1][ROWS:]])


@pytest.mark.parametrize("kind", AUGMENTS)
@pytest.mark.parametrize("preset", ["simclr", "byol"])
def test_a_second_view_is_the_one_that_the_partners_image_makes_alone(kind, preset):
    augment, (both, first, second) = AUGMENTS[kind](preset, 32, MEAN, STD), paired_batch()
    batch, expected = prepared(augment, both), expected_views(augment, first, second)
    torch.testing.assert_close(augment(batch), expected, atol=2e-5, rtol=0)
    for rows in (torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([3])):
        wanted = expected[torch.cat([rows, rows + ROWS])]
        torch.testing.assert_close(augment(batch.rows(rows)), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_gpus_plan_makes_the_same_views(parts, monkeypatch):
    augment, (both, first, second) = FusedViews("simclr", 32, normalize=False), paired_batch()
    batch, shown = prepared(augment, both), both.view_images(2)
    height, width = both.images.shape[2:]
    set_parts(monkeypatch, 8 // parts, height * width)
    plan, batch = gpu_plan(augment, batch, shown=shown)
    assert len(list(plan.chunks(torch.float32))) == parts
    expected = expected_views(augment, first, second)
    torch.testing.assert_close(augment(batch), expected, atol=2e-5, rtol=0)
    assert isinstance(batch.plan, ViewPlan)
    tables = TritonPlan(batch.plan.draws, augment.specs, augment.jitter_ops, shown).tables[0]
    assert tables.boxes[:, 0].tolist() == [0, 1, 2, 3, 4, 1, 5, 3]
