"""Views on "cuda" by torch's operations: a CPU's numbers, few operations, and no wait."""

import pytest
import torch
from torch import Tensor

from sslpipe.augment.presets import PRESETS
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch, pipelined
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda
ROWS = torch.tensor([3, 0, 6])


def _views(preset: str, crop_px: int) -> list[Tensor]:
    augment = FusedViews(preset, crop_px, MEAN, STD, kernels="torch").cuda()

    def collate(step: int, parts: list[None]) -> Batch:
        return augment.prepare(batch_of(SIZES[:8], first_id=8 * step), seed=1, number=step)

    device = torch.device("cuda", 0)
    stream = pipelined(iter(range(2)), lambda step: [], lambda part: part, collate, 1, 1, device)
    found = []
    for batch in stream:
        batch = batch.to(device)
        found += [augment(batch).cpu(), augment(batch.rows(ROWS)).cpu()]
        found.append(augment(batch, dtype=torch.bfloat16).cpu())
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_they_are_a_cpus_for_batches_and_parts_of_them(preset: str) -> None:
    (found,) = run_on_cuda(_views, preset, 64)
    augment = FusedViews(preset, 64, MEAN, STD)
    for step in range(2):
        batch = augment.prepare(batch_of(SIZES[:8], first_id=8 * step), seed=1, number=step)
        whole, some, rounded = found[3 * step : 3 * step + 3]
        assert whole.stride() == augment(batch).stride()
        assert (whole - augment(batch)).abs().max() <= 5e-5
        assert (some - augment(batch.rows(ROWS))).abs().max() <= 5e-5
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, whole.bfloat16())


def _counted(preset: str) -> tuple[int, int, int, int]:
    """Copies from the host and all operations of a batch's views; waits of both, while training."""
    from tests.fakecuda.runtime import events, operations, reset, waits

    device = torch.device("cuda", 0)
    augment = FusedViews(preset, 64, MEAN, STD, kernels="torch").cuda()
    batch = batch_of(SIZES * 11)
    for _ in range(2):  # the first keeps constants
        prepared = augment.prepare(batch, seed=0, number=0).to(device)
        reset()
        plan = augment.prepare(batch, seed=0, number=0).plan
        assert plan is not None
        prepared = prepared._replace(plan=plan.to(device))
        copies = sum(event.name == "H2D" for event in events())
        augment(prepared)
        counted = operations(events()), len(waits(events()))
        reset()
        augment(prepared.rows(torch.arange(64)))
    return copies, *counted, len(waits(events()))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_host_sends_one_block_and_never_waits(preset: str) -> None:
    ((copies, made, waited, waited_for_rows),) = run_on_cuda(_counted, preset)
    assert copies == 1
    assert made <= 120
    assert waited == waited_for_rows == 0
