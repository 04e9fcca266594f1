"""Plans of views: made ahead, of rows of a batch, of partners' images, and a GPU's chunks."""

import pytest
import torch

from sslpipe.augment.chunks import ChunkPlan
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.triton_views import TritonPlan
from sslpipe.augment.two_views import AUGMENTS, FusedViews, ViewPlan
from sslpipe.data.pipeline import PairRows
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of, params_for


def prepared(augment, batch):
    return augment.prepare(batch, seed=4, number=2)


@pytest.mark.parametrize("kind", AUGMENTS)
def test_a_prepared_batch_gives_the_views_of_its_parameters(kind):
    augment, batch = AUGMENTS[kind].views("byol", 32), batch_of(SIZES[:8], epoch=2)
    ahead = prepared(augment, batch)
    assert torch.equal(augment(ahead), augment(batch, params_for(batch, augment, seed=4)))
    assert torch.equal(augment(ahead, dtype=torch.float64), augment(ahead).double())


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("kind", AUGMENTS)
def test_rows_of_a_prepared_batch_give_rows_of_its_views(kind, views):
    augment = AUGMENTS[kind].views("mocov2", 32)
    augment.specs = augment.specs[:views]
    batch, rows = prepared(augment, batch_of(SIZES[:6])), torch.tensor([4, 0, 3])
    expected = augment(batch).unflatten(0, (views, 6))[:, rows].flatten(0, 1)
    assert (augment(batch.rows(rows)) - expected).abs().max() <= 1e-6


def test_a_batch_without_a_plan_is_refused():
    with pytest.raises(ValueError, match="no plan of its views: call prepare, or give draws"):
        FusedViews("simclr", 32)(batch_of(SIZES[:2]))


# -- the chunks of a device that is no CPU ---------------------------------------------------------


def device_plan(augment, batch):
    """The batch with the plan by which a GPU's torch operations make its views."""
    assert isinstance(batch.plan, ViewPlan)
    plan = augment._plan_work(batch.plan.draws, batch, torch.device("cuda"))
    assert isinstance(plan, ChunkPlan)
    return plan, batch._replace(plan=ViewPlan(batch.plan.draws, plan))


def set_chunks(monkeypatch, images, pixels):
    """Have a chunk hold so many views, of images of so many pixels."""
    monkeypatch.setattr("sslpipe.augment.chunks._DEVICE_BYTES", images * 3 * 4 * pixels)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("crop_px", [32, 96])
@pytest.mark.parametrize("preset", PRESETS)
def test_large_chunks_give_the_views_of_small_ones(preset, crop_px, few, monkeypatch):
    augment = FusedViews(preset, crop_px, MEAN, STD, normalize=False, kernels="torch")
    batch = prepared(augment, batch_of([*SIZES[:9], (130, 200)]))
    expected = augment(batch)
    if few:
        set_chunks(monkeypatch, 2, 130 * 200)
    plan, batch = device_plan(augment, batch)
    chunks = list(plan)
    assert max(len(chunk.rows) for chunk in chunks) > 2 or few
    assert max(len(chunk.rows) for chunk in chunks) <= 2 or not few
    views = augment(batch)
    assert views.stride() == expected.stride()
    assert (views - expected).abs().max() <= (2e-6 if crop_px == 32 else 1e-5)


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
    augment, (both, first, second) = AUGMENTS[kind].views(preset, 32, MEAN, STD), paired_batch()
    batch, expected = prepared(augment, both), expected_views(augment, first, second)
    torch.testing.assert_close(augment(batch), expected, atol=2e-5, rtol=0)
    for rows in (torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([3])):
        wanted = expected[torch.cat([rows, rows + ROWS])]
        torch.testing.assert_close(augment(batch.rows(rows)), wanted, atol=2e-5, rtol=0)


def test_large_chunks_show_the_partners_too():
    augment, (both, first, second) = FusedViews("simclr", 32, kernels="torch"), paired_batch()
    batch, shown = prepared(augment, both), both.view_images(2)
    _, batch = device_plan(augment, batch)
    expected = expected_views(augment, first, second)
    torch.testing.assert_close(augment(batch), expected, atol=2e-5, rtol=0)
    assert isinstance(batch.plan, ViewPlan)
    tables = TritonPlan(batch.plan.draws, augment.specs, augment.jitter_ops, shown).tables[0]
    assert tables.boxes[:, 0].tolist() == [0, 1, 2, 3, 4, 1, 5, 3]
