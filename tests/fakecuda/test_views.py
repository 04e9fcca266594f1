"""Views on "cuda" by torch's operations: a CPU's numbers, few operations, and no wait."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

        stream = pipelined(iter([7]), lambda step: [], lambda part: part, collate, 1, 1, device)
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
        # rounded to bfloat16, out of crops by products of float16
        assert rounded.dtype == torch.bfloat16
        error = (rounded.float() - whole).abs()
        assert (error <= 2**-8 * whole.abs() + 0.01).all()
        assert error.mean() <= 1.25 * (whole.bfloat16().float() - whole).abs().mean()


def _probe_views() -> Tensor:
    probe = ProbeViews(PX, MEAN, STD).cuda()
    return probe.make_views(batch_of(SIZES).to(torch.device("cuda", 0))).cpu()


def test_the_views_of_label_free_scores_are_a_cpus_for_a_batch_that_was_moved() -> None:
    (found,) = run_on_cuda(_probe_views)
    assert (found - ProbeViews(PX, MEAN, STD).make_views(batch_of(SIZES))).abs().max() <= 5e-5


# what an indexed operation reads or writes beside its index is as much as it picks, or puts: the
# argument that is put
PUT = {"index_copy_": 3, "index_put_": 2, "scatter_add_": 3}


class Moved(TorchDispatchMode):
    """Sum up what each operation on the device reads and writes, as if there were no cache.

    A dimension of stride 0 counts once.
    """

    bytes = calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        made = _on_device(out)
        if func.is_view or not made or name.startswith(("empty", "new_empty", "_unsafe_view")):
            return out
        given = _on_device((args, kwargs or {}))
        if name in ("index_select", "index", "gather"):
            given = [*made, *given[1:]]
        elif name in PUT:
            put = args[PUT[name]]
            # a sum is read before it is written
            made, given = [put] * (1 + (name == "scatter_add_")), given[1:]
        elif name in ("copy_", "fill_", "zero_", "zeros", "zeros_like", "arange"):
            given = given[1:] if name == "copy_" else []
        elif "out" in func._schema.overload_name:  # written, and read only where it is given, too
            given = _on_device(args)
        self.calls += 1
        for x in [*given, *made]:
            sides = zip(x.shape, x.stride(), strict=True)
            self.bytes += x.element_size() * math.prod(n if stride else 1 for n, stride in sides)
        return out


def _on_device(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_cuda]


def _full_size() -> tuple[int, int, int, int]:
    """Bytes of two views of 256 photographs; operations seen by torch and on the device; waits."""
    from tests.fakecuda.runtime import events, operations, reset, waits

    device, ids = torch.device("cuda", 0), torch.arange(256)
    images = torch.zeros(256, 500, 500, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    sizes = torch.tensor([(375, 500), (500, 375)] * 128)
    augment = FusedViews("simclr", 224, MEAN, STD, kernels="torch").cuda()
    for count in (4, 256):  # the first keeps constants
        numbers = sizes[:count], torch.zeros_like(ids)[:count], ids[:count], ids[:count]
        batch = augment.prepare(Batch(images[:count], *numbers, 0), seed=0, number=0).to(device)
        reset()
        with Moved() as moved:
            augment(batch, dtype=torch.bfloat16)
    return moved.bytes, moved.calls, operations(events()), len(waits(events()))


def test_two_views_of_256_photographs_move_few_bytes() -> None:
    ((size, calls, operations, waited),) = run_on_cuda(_full_size, env={"FAKE_VALUES": "0"})
    assert size <= 14e9
    assert calls == operations  # no copy that torch makes by itself
    assert operations <= 100
    assert not waited


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
        assert copies == 1
        assert waited == [0, 0]
        assert 0 < operations <= 120
        if kernels == "triton":
            own = ("crop", "colour", "blur_down", "blur_across")
            assert names == [f"{name}_kernel" for name in own]
