"""Gradient caching against one autograd graph over the same micro-batches, and the whole batch."""

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sslpipe.distributed import Rank
from sslpipe.losses import LOSSES, TeacherFeatures
from sslpipe.losses.nt_xent import NTXentLoss
from sslpipe.models.sync_batchnorm import sync_batchnorm
from sslpipe.run.gradient_cache import GradientCache, PooledStatistics, micro_batch_rows
from tests.helpers.processes import run_processes

IMAGES, STREAMS = 24, 4
TEACHER = TeacherFeatures(
    torch.randn(64, 3, generator=torch.Generator().manual_seed(5)), torch.arange(64)
)
OBJECTIVES = {
    **{kind: LOSSES[kind] for kind in LOSSES if kind != "diet"},  # an output for each image
    "moco": partial(LOSSES["moco"], dim=5, queue_rows=40),
    "distill": partial(LOSSES["distill"], teacher=TEACHER),
}


class Counting(nn.Module):
    """Has a state that is no BatchNorm's, and that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


def network(batchnorm: bool = True, dropout: float = 0.0, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(3)
    norms = (nn.BatchNorm2d(6), nn.BatchNorm1d(5, momentum=None, affine=False))
    nothing = nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        norms[0] if batchnorm else nothing,
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(6 * 36, 5),
        Counting() if batchnorm else nothing,
        norms[1] if batchnorm else nothing,
    ).to(dtype)


def images(dtype=torch.float64) -> Tensor:
    """(2 IMAGES, 3, 8, 8): all first views, then all second; rows differ in mean and spread."""
    generator = torch.Generator().manual_seed(5)
    views = torch.randn(2 * IMAGES, 3, 8, 8, generator=generator, dtype=torch.float64)
    shift = torch.linspace(-1, 2, 2 * IMAGES, dtype=torch.float64)[:, None, None, None]
    return (views * (shift + 2) + shift).to(dtype)


def seed(micro_batch: int) -> None:
    torch.manual_seed(100 + micro_batch)


def rows_of(views: Tensor, rows: Tensor) -> Tensor:
    return views[torch.cat([rows, rows + len(views) // 2])]


def cached(model, loss_fn, views, micro_batches, wrapped=None, streams=STREAMS, ids=None):
    rows = micro_batch_rows(len(views) // 2, streams, micro_batches)
    statistics = {views.shape[-1]: PooledStatistics(model, views[:2])}
    cache = GradientCache(wrapped or model, statistics, rows)
    z_a, z_b = cache.embed(partial(rows_of, views), seed).chunk(2)
    loss = loss_fn(z_a, z_b, ids=ids, labels=None)
    loss.backward()
    cache.backward()
    return z_a.detach(), z_b.detach(), loss.detach()


def one_graph(model, loss_fn, views, micro_batches):
    """The same chunked forward, all of it alive, differentiated by autograd alone. Running
    statistics by hand: one step, from every value that a norm saw."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [(copy.deepcopy(norm), []) for norm in norms]
    handles = [
        norm.register_forward_pre_hook(lambda _, x, into=into: into.append(x[0].detach().clone()))
        for norm, (_, into) in zip(norms, before, strict=True)
    ]
    half = len(views) // 2
    z_a, z_b = [None] * half, [None] * half
    for k, rows in enumerate(micro_batch_rows(half, STREAMS, micro_batches)):
        seed(k)
        z = model(rows_of(views, rows))
        for place, row in enumerate(rows.tolist()):
            z_a[row], z_b[row] = z[place], z[len(rows) + place]
    z_a, z_b = torch.stack(z_a), torch.stack(z_b)
    loss = loss_fn(z_a, z_b, ids=None, labels=None)
    loss.backward()
    for handle in handles:
        handle.remove()
    for norm, (old, seen) in zip(norms, before, strict=True):
        values = torch.cat(seen).transpose(0, 1).flatten(1).double()  # (C, n)
        momentum = old.momentum or 1 / (int(old.num_batches_tracked) + 1)
        for name, now in (("running_mean", values.mean(1)), ("running_var", values.var(1))):
            kept = getattr(old, name).double()
            getattr(norm, name).copy_((1 - momentum) * kept + momentum * now)
        norm.num_batches_tracked.copy_(old.num_batches_tracked + 1)
    return z_a.detach(), z_b.detach(), loss.detach()


def assert_same(actual: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, p), q in zip(actual.named_parameters(), expected.parameters(), strict=True):
        error = (p.grad - q.grad).norm() / q.grad.norm()
        assert error < tolerance, (name, error)
    for (name, b), c in zip(actual.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.promise(4)
@pytest.mark.parametrize("micro_batches", [2, 3, 6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_gradient_and_statistics_are_those_of_one_graph_over_the_micro_batches(
    micro_batches, dtype, tolerance
):
    model = network(dropout=0.3, dtype=dtype)
    oracle = copy.deepcopy(model)
    loss_fn, views = NTXentLoss(temperature=0.2), images(dtype)
    for _ in range(2):  # the second step starts from statistics that moved
        model.zero_grad()
        oracle.zero_grad()
        actual = cached(model, loss_fn, views, micro_batches)
        expected = one_graph(oracle, loss_fn, views, micro_batches)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert_same(model, oracle, tolerance)
    assert [norm.momentum for norm in model if hasattr(norm, "momentum")] == [0.1, None]


@pytest.mark.promise(4)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_batchnorm_it_is_the_gradient_of_the_whole_batch(name):
    model = network(batchnorm=False)
    oracle, views = copy.deepcopy(model), images()
    calls = []
    loss_fn = OBJECTIVES[name]().double()

    def once(z_a, z_b, *, ids, labels):
        calls.append(1)
        return loss_fn(z_a, z_b, ids=ids, labels=ids % 3)

    whole_fn = copy.deepcopy(loss_fn)
    for step in range(2):  # a queue is empty in the first
        ids = torch.arange(IMAGES) + step * IMAGES
        model.zero_grad()
        oracle.zero_grad()
        _, _, loss = cached(model, once, views, 6, ids=ids)
        z_a, z_b = oracle(views).chunk(2)
        whole = whole_fn(z_a, z_b, ids=ids, labels=ids % 3)
        whole.backward()
    assert calls == [1, 1]  # a queue takes the batch in once
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(model, oracle, 1e-10)
    for a, b in zip(loss_fn.buffers(), whole_fn.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_every_micro_batch_takes_a_slice_of_every_stream_whatever_the_process_count():
    whole = micro_batch_rows(48, 4, 3)
    assert whole[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31, 40, 41, 42, 43]
    for world in (2, 4):
        parts = [micro_batch_rows(48 // world, 4 // world, 3)] * world
        for k, rows in enumerate(whole):
            shifted = [part[k] + rank * 48 // world for rank, part in enumerate(parts)]
            assert torch.cat(shifted).tolist() == rows.tolist()


@pytest.mark.promise(4)
def test_each_view_is_made_twice_and_those_of_one_micro_batch_are_alive():
    model, views, asked, made = network(), images(), [], []
    seen = PooledStatistics(model, views[:2])
    assert int(model[1].num_batches_tracked) == 0  # the probe leaves no trace
    rows = micro_batch_rows(IMAGES, STREAMS, 3)

    def make_views(part):
        assert sum(each() is not None for each in made) <= 1
        asked.append(part.tolist())
        some = rows_of(views, part)
        made.append(weakref.ref(some))
        return some

    cache = GradientCache(model, {8: seen}, rows)
    NTXentLoss()(*cache.embed(make_views, seed).chunk(2)).backward()
    cache.backward()
    assert asked == [part.tolist() for part in rows] * 2
    assert int(model[1].num_batches_tracked) == 1


def test_a_norm_that_is_used_twice_is_refused():
    norm = nn.BatchNorm2d(3)
    with pytest.raises(TypeError, match="used twice in a forward"):
        PooledStatistics(nn.Sequential(norm, norm), torch.zeros(2, 3, 4, 4))


def test_under_bf16_autocast_it_is_still_the_gradient_of_one_graph():
    model = network(dtype=torch.float32)
    oracle = copy.deepcopy(model)
    for module in (model, oracle):
        module.forward = partial(_under_bf16, module.forward)  # as accelerate wraps it
    views = images(torch.float32)
    actual = cached(model, NTXentLoss(temperature=0.2), views, 3)
    expected = one_graph(oracle, NTXentLoss(temperature=0.2), views, 3)
    assert torch.equal(actual[0], expected[0])
    # the order in which bfloat16 partial gradients are added differs
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() / q.grad.norm() < 2e-2


def _under_bf16(forward, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return forward(x).float()


def gradients_in_rank(process):
    """By objective, after two steps: loss, gradients and buffers of model and objective, and how
    often a step exchanged gradients."""
    views, share = images(), IMAGES // process.world_size
    mine = slice(process.rank * share, (process.rank + 1) * share)
    views = torch.cat([views[:IMAGES][mine], views[IMAGES:][mine]])
    actual = {}
    for name, objective in OBJECTIVES.items():
        model, loss_fn = sync_batchnorm(network(), process.world_size), objective().double()
        exchanged, wrapped = [], model
        if process.world_size > 1:
            wrapped = DistributedDataParallel(model, broadcast_buffers=False)

            def count(exchanged, bucket):
                exchanged.append(1)
                work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
                return work.get_future().then(lambda f: f.value()[0] / process.world_size)

            wrapped.register_comm_hook(exchanged, count)
        for step in range(2):  # a queue is empty in the first
            model.zero_grad()
            ids = torch.arange(IMAGES)[mine] + step * IMAGES
            labelled = partial(loss_fn, labels=ids % 3)
            given = (views, 3, wrapped, STREAMS // process.world_size, ids)
            loss = cached(model, lambda *z, ids, labels, f=labelled: f(*z, ids=ids), *given)[2]
        gradients = [p.grad for p in model.parameters()]
        tensors = [loss, *gradients, *model.buffers(), *loss_fn.buffers()]
        actual[name] = (tensors, len(exchanged) / 2)
    return actual


@pytest.mark.promise(4)
def test_processes_change_no_objective_with_micro_batches_and_talk_once():
    expected = gradients_in_rank(Rank(0, 1))
    for actual in run_processes(gradients_in_rank, 2):
        for name, (tensors, exchanged) in actual.items():
            assert exchanged == 1
            for a, b in zip(tensors, expected[name][0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
