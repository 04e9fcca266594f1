"""Second views of another image than the first: the views that this image makes alone."""

import pytest
import torch

from sslpipe.augment.base import ViewPlan
from sslpipe.augment.batched import BatchPlan
from sslpipe.augment.ops import ops_for
from sslpipe.augment.triton_views import TritonPlan
from sslpipe.augment.two_views import FusedViews, KorniaViews, Views
from sslpipe.data.pipeline import Batch, PairRows
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of

ROWS = 4
IMAGE = torch.tensor([4, 1, 5, 3])  # rows 0 and 2 have partners, whose images come last


def paired_batch() -> tuple[Batch, Batch, Batch]:
    """Four rows with two partners, and batches of what the first and the second views show."""
    images = batch_of([*SIZES[:5], (130, 200)])
    ids = torch.arange(10, 10 + ROWS)
    numbers = torch.full((ROWS, 2), -1)
    pairs = PairRows(
        IMAGE, numbers, numbers, numbers[:, :, None], torch.zeros(ROWS, dtype=torch.bool)
    )
    rows = {"labels": ids, "ids": ids, "source_ids": ids}
    both = images._replace(**rows, pairs=pairs)
    first, second = (
        images._replace(images=images.images[shown], sizes=images.sizes[shown], **rows)
        for shown in (torch.arange(ROWS), IMAGE)
    )
    return both, first, second


def expected_views(augment: Views, first: Batch, second: Batch) -> torch.Tensor:
    views = [augment(augment.prepare(batch, seed=4, number=2)) for batch in (first, second)]
    return torch.cat([views[0][:ROWS], views[1][ROWS:]])


@pytest.mark.parametrize("kind", [FusedViews, KorniaViews])
@pytest.mark.parametrize("preset", ["simclr", "byol"])
def test_a_second_view_is_the_one_that_the_partners_image_makes_alone(
    kind: type[Views], preset: str
) -> None:
    augment, (both, first, second) = kind(preset, 32, MEAN, STD), paired_batch()
    views = augment(augment.prepare(both, seed=4, number=2))
    assert views.shape == (2 * ROWS, 3, 32, 32)
    torch.testing.assert_close(views, expected_views(augment, first, second), atol=2e-5, rtol=0)


def test_micro_batches_make_the_same_views() -> None:
    augment, (both, first, second) = FusedViews("simclr", 32, MEAN, STD), paired_batch()
    expected = expected_views(augment, first, second)
    batch = augment.prepare(both, seed=4, number=2)
    for rows in (torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([3])):
        views = augment(batch.rows(rows))
        torch.testing.assert_close(
            views, expected[torch.cat([rows, rows + ROWS])], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("parts", [1, 4])
def test_a_gpus_plan_makes_the_same_views(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    augment, (both, first, second) = FusedViews("simclr", 32, normalize=False), paired_batch()
    batch = augment.prepare(both, seed=4, number=2)
    assert isinstance(batch.plan, ViewPlan)
    draws, ops, canvas = batch.plan.draws, ops_for(augment.specs), tuple(both.images.shape[2:])
    size = 8 // parts * 3 * 4 * canvas[0] * canvas[1]
    monkeypatch.setattr("sslpipe.augment.batched._PART_BYTES", size)
    shown = both.view_images(2)
    plan = BatchPlan(
        draws, augment.specs, canvas, augment.jitter_ops, ops, None, False, shown=shown
    ).to(torch.device("cpu"))
    assert len(list(plan)) == parts
    views = augment(batch._replace(plan=ViewPlan(draws, plan)))
    torch.testing.assert_close(views, expected_views(augment, first, second), atol=2e-5, rtol=0)
    tables = TritonPlan(draws, augment.specs, augment.jitter_ops, shown).tables[0]
    assert tables.boxes[:, 0].tolist() == [0, 1, 2, 3, 4, 1, 5, 3]
