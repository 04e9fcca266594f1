"""Views on "cuda" by torch's operations: a CPU's numbers, and no wait."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sslpipe.augment.eval_view import ProbeViews
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch, pipelined
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda
PRESETS = ("simclr", "byol", "grayscale")
ROWS = torch.tensor([3, 0])
PX = 64  # the blur is a product from here on


def _views() -> list[Tensor]:
    device, found = torch.device("cuda", 0), []
    for preset in PRESETS:
        augment = FusedViews(preset, PX, MEAN, STD, kernels="torch").cuda()

        def collate(step: int, parts: list[None], augment: FusedViews = augment) -> Batch:
            return augment.prepare(batch_of(SIZES[:4]), seed=1, number=step)

        stages = lambda step: [], lambda part: part, collate
        stream = pipelined(iter([7]), *stages, num_workers=1, device=device, ahead=1)
        for batch in stream:
            batch = batch.to(device)
            found += [augment(batch).cpu(), augment(batch.rows(ROWS)).cpu()]
            found.append(augment(batch, dtype=torch.bfloat16).cpu())
    return found


def test_they_are_a_cpus_for_a_batch_and_a_part_of_it() -> None:
    (found,) = run_on_cuda(_views)
    for number, preset in enumerate(PRESETS):
        augment = FusedViews(preset, PX, MEAN, STD)
        batch = augment.prepare(batch_of(SIZES[:4]), seed=1, number=7)
        whole, some, rounded = found[3 * number : 3 * number + 3]
        assert whole.stride() == augment(batch).stride()
        assert (whole - augment(batch)).abs().max() <= 5e-5
        assert (some - augment(batch.rows(ROWS))).abs().max() <= 5e-5
        assert torch.equal(rounded, whole.bfloat16())


def _probe_views() -> Tensor:
    probe = ProbeViews(PX, MEAN, STD).cuda()
    return probe.make_views(batch_of(SIZES).to(torch.device("cuda", 0))).cpu()


def test_the_views_of_label_free_scores_are_a_cpus_for_a_batch_that_was_moved() -> None:
    (found,) = run_on_cuda(_probe_views)
    assert (found - ProbeViews(PX, MEAN, STD).make_views(batch_of(SIZES))).abs().max() <= 5e-5


def _peaks() -> list[float]:
    """GiB that the views of 128 and of 384 images of 1,024 px take, beside those and the result."""
    augment, found = FusedViews("simclr", 224, MEAN, STD, kernels="torch").cuda(), []
    for count in (128, 384):
        ids, sizes = torch.arange(count), torch.full((count, 2), 1024)
        shape = count, 1024, 1024, 3
        images = torch.empty(shape, dtype=torch.uint8, device="cuda").permute(0, 3, 1, 2)
        batch = Batch(torch.empty(images.shape, dtype=torch.uint8), sizes, ids, ids, ids, 0)
        plan = augment.prepare(batch, seed=0, number=0).plan
        assert plan is not None
        prepared = batch._replace(images=images, plan=plan.to(images.device))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        views = augment(prepared, dtype=torch.bfloat16)
        found.append((torch.cuda.max_memory_allocated() - before - views.nbytes) / 2**30)
    return found


def test_the_views_of_many_large_images_take_little_more_memory_than_of_a_few() -> None:
    ((few, many),) = run_on_cuda(_peaks, env={"FAKE_VALUES": "0"})
    assert 0 < few < 1
    assert many <= 1.3 * few


def _counted(presets: list[str], kernels: Any) -> list[tuple[list[str], int, int, list[int]]]:
    """By preset: launches, operations, copies from the host; waits for all views, and for some."""
    from tests.fakecuda.runtime import allow_triton, events, operations, reset, waits

    if kernels == "triton":
        allow_triton()
    batch, device, table = batch_of(SIZES), torch.device("cuda", 0), []
    for preset in presets:
        augment = FusedViews(preset, PX, MEAN, STD, kernels=kernels).cuda()
        moved = batch.to(device)
        augment(augment.prepare(batch, seed=0, number=0).to(device))  # keeps constants; compiles
        plan = augment.prepare(batch, seed=0, number=1).plan
        assert plan is not None
        reset()
        prepared = moved._replace(plan=plan.to(device))
        augment(prepared)
        log = events()
        reset()
        augment(prepared.rows(torch.arange(8)))
        names = [event.name for event in log if event.kind in "KGZ"]
        copies = sum(event.name == "H2D" for event in log)
        table.append(
            (names, operations(log), copies, [len(waits(each)) for each in (log, events())])
        )
    return table


needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.promise(9)
def test_the_host_sends_one_block_and_never_waits(kernels: str, tmp_path: Path) -> None:
    env, presets = {"TRITON_CACHE_DIR": str(tmp_path)}, PRESETS if kernels == "torch" else ["byol"]
    (table,) = run_on_cuda(_counted, presets, kernels, env=env)
    for names, operations, copies, waited in table:
        assert waited == [0, 0]
        if kernels == "triton":
            assert copies == 1
            assert 0 < operations <= 120
            own = ("crop", "colour", "blur_down", "blur_across")
            assert names == [f"{name}_kernel" for name in own]
