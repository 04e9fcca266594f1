"""Metric losses, heads and miners in 2 and 3 real processes with unequal rows equal one process."""

import pytest
import torch

from sslpipe.distributed import Rank, all_gather_rows, global_sum
from sslpipe.errors import UserError
from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.pairwise import References
from tests.helpers.metric_rows import sizes_of
from tests.helpers.processes import run_processes

LABELS = torch.tensor([0, 0, 2, 1, 1, 3, 2, 0, -1, 1, 2, 0])
COUNTS = {1: [12], 2: [9, 3], 3: [2, 7, 3]}  # rows of each rank; classes are split between them
TABLE = {**METRIC_LOSSES, **HEADS}
OURS = sorted(set(TABLE) - {"pml"})
CASES = [
    *((name, {}, None, None) for name in OURS),
    ("triplet", {"reduction": "sum"}, None, None),
    ("triplet", {"reduction": "mean_active"}, None, None),
    *((name, {}, None, "ref") for name in ("triplet", "lifted", "angular", "contrastive")),
    ("triplet", {"triplets": "semi_hard"}, None, None),
    ("contrastive", {"sides": "apart"}, None, None),
    ("magnet", {"clusters_per_class": 2}, None, None),
    ("margin", {"learn": "class", "nu": 0.1, "num_classes": 4}, None, None),
    *(("triplet", {}, miner, None) for miner in MINERS),
    ("contrastive", {}, "triplets", None),
    ("multi_similarity", {}, "multi_similarity", None),
]


def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 5, generator=generator, dtype=torch.float64) / 2
    extra = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return x, weight, extra


def every_case(process):
    """For each case: value, gradients as DDP leaves them, counts, state of the loss."""
    results = []
    x, first_weight, extra = inputs()
    counts = COUNTS[process.world_size]
    start = sum(counts[: process.rank])
    mine = slice(start, start + counts[process.rank])
    for name, arguments, miner_name, with_ref in CASES:
        torch.manual_seed(1)
        loss = TABLE[name](**sizes_of(name), **arguments).double()
        miner = None
        if miner_name:
            miner = MINERS[miner_name](**({"rows": 8} if miner_name == "maximum_loss" else {}))
        ref = None
        if with_ref:
            ref = References(extra, torch.tensor([0, 3, 1, -1]), torch.tensor([3, 50, 51, 52]))
        weight = first_weight.clone().requires_grad_()
        ids = torch.arange(12)[mine]
        record = []
        stateful = len(list(loss.buffers())) or (miner is not None and len(list(miner.buffers())))
        for _ in range(2 if stateful else 1):  # running means; other random numbers
            embeddings = x[mine] @ weight.T
            value = loss(embeddings, LABELS[mine], ids=ids, ref=ref, miner=miner)
            parameters = [weight, *loss.parameters()]
            grads = torch.autograd.grad(
                value, [embeddings, *parameters], allow_unused=True, materialize_grads=True
            )
            shared = global_sum(torch.cat([g.flatten() for g in grads[1:]]))
            rows = all_gather_rows(grads[0])
            record += [value.detach(), shared / process.world_size, rows / process.world_size]
            if name in METRIC_LOSSES:
                record += [torch.tensor([loss.last_count, loss.last_active])]
        record += [buffer.double() for buffer in loss.buffers()]
        results.append(record)
    return results


@pytest.fixture(scope="module")
def one_process():
    return every_case(Rank(0, 1))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_with_unequal_rows_equal_one(world, one_process):
    everyone = run_processes(every_case, world)
    wrong = []
    for number, case in enumerate(CASES):
        for rank, results in enumerate(everyone):
            for ours, exact in zip(results[number], one_process[number], strict=True):
                if ours.shape != exact.shape or not torch.allclose(
                    ours.double(), exact.double(), rtol=1e-9, atol=1e-11
                ):
                    wrong.append((case, rank, ours, exact))
            # the value is not merely close on all ranks: a step is undone on all or on none
            assert torch.equal(results[number][0], everyone[0][number][0])
    assert wrong == []


def test_the_cases_are_not_empty_ones(one_process):
    silent = [
        case[:3]
        for case, record in zip(CASES, one_process, strict=True)
        if not (record[0] > 0 and record[1].abs().max() > 0)
    ]
    assert silent == []


def gathered_before(process):
    x, weight, _ = inputs()
    z = (x @ weight.T).detach()
    said = []
    own = slice(6 * process.rank, 6 * process.rank + 6)
    for rows, trained in ((slice(None), True), (own, True), (slice(None), False)):
        try:
            METRIC_LOSSES["triplet"]()(z[rows].clone().requires_grad_(trained), LABELS[rows])
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_rows_that_were_gathered_before_the_call_are_refused():
    """As pytorch-metric-learning #10 does it: each row would have its copies as positives."""
    for gathered, own, scored in run_processes(gathered_before, 2):
        assert "ranks 0 and 1" in gathered
        assert not own
        assert not scored


@pytest.mark.parametrize("name", ["triplet", "contrastive", "multi_similarity"])
def test_a_second_derivative_is_refused_and_not_left_out(name):
    x = inputs()[0].requires_grad_()
    loss = METRIC_LOSSES[name]()(x, LABELS)
    with pytest.raises(UserError, match="create_graph = True"):
        torch.autograd.grad(loss, x, create_graph=True)
