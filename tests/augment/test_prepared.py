"""The plan of a batch's views, made ahead: the same views as from parameters given later."""

import threading

import pytest
import torch

from sslpipe.augment.base import ViewPlan
from sslpipe.augment.two_views import AUGMENTS, FusedViews, Views
from sslpipe.data.pipeline import Batch, pipelined
from tests.augment.test_two_views import SIZES, batch_of, params_for


@pytest.mark.parametrize("kind", AUGMENTS)
def test_a_prepared_batch_gives_the_views_of_its_parameters(kind: str) -> None:
    augment, batch = AUGMENTS[kind]("byol", 32), batch_of(SIZES[:8], epoch=3)
    prepared = augment.prepare(batch, seed=5, number=3)
    assert torch.equal(augment(prepared), augment(batch, params_for(batch, augment, seed=5)))
    assert torch.equal(augment(prepared, dtype=torch.float64), augment(prepared).double())


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("kind", AUGMENTS)
def test_rows_of_a_prepared_batch_give_rows_of_its_views(kind: str, views: int) -> None:
    augment = AUGMENTS[kind]("mocov2", 32)
    augment.specs = augment.specs[:views]  # type: ignore[assignment]
    prepared = augment.prepare(batch_of(SIZES[:6]), seed=1, number=0)
    rows = torch.tensor([4, 0, 3])
    expected = augment(prepared).unflatten(0, (views, 6))[:, rows].flatten(0, 1)
    assert (augment(prepared.rows(rows)) - expected).abs().max() <= 1e-6


def test_a_plan_is_made_where_batches_are_collated() -> None:
    augment: Views = FusedViews("simclr", 32)
    threads = set()

    def collate(step: int, parts: list[None]) -> Batch:
        threads.add(threading.current_thread().name)
        return augment.prepare(batch_of(SIZES[:4], first_id=4 * step), seed=0, number=0)

    stream = pipelined(iter(range(3)), lambda step: [], lambda part: part, collate, 1, 2)
    for step, batch in enumerate(stream):
        assert isinstance(batch.plan, ViewPlan)
        assert batch.plan.work is not None
        given = batch_of(SIZES[:4], first_id=4 * step)
        assert torch.equal(augment(batch), augment(given, params_for(given, augment)))
    assert threads == {"sslpipe-collate_0"}


def test_a_batch_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan of its views: call prepare, or give draws"):
        FusedViews("simclr", 32)(batch_of(SIZES[:2]))
