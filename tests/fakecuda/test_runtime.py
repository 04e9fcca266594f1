"""The fake runtime: it counts what torch's CUDA code asks of a device."""

import os
from copy import deepcopy

import torch
import torch.distributed as dist

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _one_of_each():
    from tests.fakecuda.runtime import counts, events, reset, section

    with section("build"):
        x = torch.ones(4, 4, device="cuda")
        host, pinned = torch.ones(4, 4), torch.ones(4, 4).pin_memory()
    torch.cuda.synchronize()
    reset()
    with section("kernel"):
        x.add(1)
    with section("product"):
        x @ x
    with section("pageable copy"):
        host.cuda()
    with section("pinned copy"):
        pinned.to("cuda", non_blocking=True)
    with section("item"):
        x[0, 0].item()
    return counts(events()), torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()


def test_what_the_device_does_and_what_the_host_waits_for_is_counted():
    ((table, name, peak),) = run_on_cuda(_one_of_each, name="NVIDIA A100-SXM4-80GB")
    assert name == "NVIDIA A100-SXM4-80GB"
    assert 0 < peak < 2**26  # cuBLAS takes 32 MiB
    assert table["kernel"] == {"operations": 1}
    for part, waits in (("product", None), ("pageable copy", 1), ("pinned copy", 0)):
        assert table[part]["operations"] == 1
        assert waits is None or table[part].get("waits", 0) == waits
    assert table["item"]["waits"] == 1


def _values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 8, 8, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(1)
    )
    results = []
    for device in ("cpu", "cuda"):
        copy = deepcopy(model).to(device)
        leaf = x.clone().to(device).requires_grad_()
        loss = torch.nn.functional.log_softmax(copy(leaf)[leaf[:, 0, 0, 0] > 0], dim=1)[:, 0].sum()
        loss.backward()
        results.append([loss.item(), leaf.grad.cpu(), *[p.grad.cpu() for p in copy.parameters()]])
    return results


def test_small_tensors_have_the_values_of_a_cpu():
    ((expected, got),) = run_on_cuda(_values)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b))


def _spectrum_of_what_no_kernel_wrote():
    return torch.linalg.eigvalsh(torch.full((3, 3), float("nan")).cuda()).cpu()


def test_without_values_a_decomposition_is_of_the_identity():
    (found,) = run_on_cuda(_spectrum_of_what_no_kernel_wrote, env={"FAKE_VALUES": "0"})
    assert found.tolist() == [1.0] * 3


def _collectives():
    from tests.fakecuda.runtime import events, reset

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    mine = torch.tensor([float(rank + 1)] * 3).to(f"cuda:{rank}")
    dist.barrier()
    reset()
    total, largest = mine.clone(), mine.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    rows = torch.empty(world * 3, device=mine.device)
    dist.all_gather_into_tensor(rows, mine)
    part = torch.empty(3, device=mine.device)
    dist.reduce_scatter_tensor(part, rows)
    box = [f"of rank {rank}"]
    dist.broadcast_object_list(box, src=0, device=mine.device)
    log = events()
    dist.destroy_process_group()
    names = [event.name for event in log if event.kind == "C"]
    return total.cpu(), largest.cpu(), rows.cpu(), part.cpu(), box[0], names[:4]


def test_collectives_move_numbers_between_ranks():
    for rank, (total, largest, rows, part, box, names) in enumerate(
        run_on_cuda(_collectives, ranks=2)
    ):
        assert total.tolist() == [3.0] * 3
        assert largest.tolist() == [2.0] * 3
        assert rows.tolist() == [1.0] * 3 + [2.0] * 3
        assert part.tolist() == [2.0 * (rank + 1)] * 3
        assert box == "of rank 0"
        assert names == ["ncclAllReduce", "ncclAllReduce", "ncclAllGather", "ncclReduceScatter"]


def _device_after_its_setting_is_gone():
    import torch

    count = torch.cuda.device_count()
    del os.environ["FAKE_DEVICES"]  # as a thread sees it while another changes the environment
    torch.cuda.set_device(count - 1)
    return torch.cuda.current_device()


def test_a_device_stays_where_the_environment_is_being_changed():
    assert run_on_cuda(_device_after_its_setting_is_gone, env={"FAKE_DEVICES": "2"}) == [1]
