"""Every objective in 1 to 4 real processes with unequal shares: the loss and gradient of one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.losses import LOSSES
from tests.helpers.processes import run_processes
from tests.losses.loops import KNOWN, NoCollectives, loops, pair, tensors, value_and_grad
from tests.losses.test_moco import moco_steps

SPLITS = {
    1: [(9,)],
    2: [(4, 5), (9, 0), (1, 8)],
    3: [(3, 2, 4)],
    4: [(2, 2, 2, 3), (5, 1, 2, 1), (3, 1, 0, 5)],
}
CASES = [
    (kind, name)
    for kind in ("nt_xent", "dcl", "dclw", "sup_con", "hard_negatives")
    for name in ("nothing", "images", "views", "paired", "two groups")
]
TEMPERATURES = {"nt_xent": 0.01}  # of the others 0.1


def of_share(
    objective: Any,
    process: Rank,
    split: tuple[int, ...],
    batch: Any,
    talks: bool = False,
    **known: Any,
) -> list[Any]:
    """A rank's loss and gradient of its rows of a batch of two views.

    talks: whether backward may communicate.
    """
    rows = {k: x.detach().split(split)[process.rank].clone() for k, x in known.items()}
    z = [x.detach().split(split)[process.rank].clone().requires_grad_() for x in batch]
    loss = objective(*z, **rows)
    with nullcontext() if talks else NoCollectives():
        loss.backward()
    return [loss.detach(), z[0].grad, z[1].grad]


def _in_batch(process: Rank, split: tuple[int, ...]) -> list[Any]:
    answers = []
    for kind, name in CASES:
        objective = LOSSES[kind](temperature=TEMPERATURES.get(kind, 0.1), tile_rows=5)
        own = of_share(objective, process, split, pair(9, 4), **tensors(KNOWN[name]))
        answers.append([*own, objective.last_negatives])
    return answers


def _queue(process: Rank, split: tuple[int, ...]) -> list[Any]:
    """(loss, gradient) of three steps, and the buffers after them."""
    objective = LOSSES["moco"](temperature=0.1, tile_rows=6, dim=4, queue_rows=20).double()
    answers: list[Any] = []
    for z_a, z_b, numbers, _ in moco_steps(3, images=9):
        ids = torch.tensor(numbers)[:, 0] % 7
        answers.append(of_share(objective, process, split, (z_a, z_b), ids=ids)[:2])
    return [*answers, dict(objective.state_dict())]


def _all_splits(process: Rank) -> list[tuple[list[Any], list[Any]]]:
    splits = SPLITS[process.world_size]
    return [(_in_batch(process, split), _queue(process, split)) for split in splits]


def assert_whole(answers: list[Any], loss: Tensor, grad: Tensor, views: int) -> None:
    """The loss is the same on all ranks, bit for bit; W times the gradient: DDP takes W away."""
    for answer in answers:
        assert torch.equal(answer[0], answers[0][0])
        torch.testing.assert_close(answer[0], loss, rtol=1e-10, atol=1e-12)
    whole = torch.cat([answer[1 + view] for view in range(views) for answer in answers])
    torch.testing.assert_close(whole / len(answers), grad, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def oracles() -> list[Any]:
    """Value, gradient and mean number of negatives of each case."""
    found, (z_a, z_b) = [], pair(9, 4)
    for kind, name in CASES:
        value, negatives = loops(kind, z_a, z_b, TEMPERATURES.get(kind, 0.1), **KNOWN[name])
        found.append((*value_and_grad(value, z_a, z_b), negatives))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.promise(3)
def test_any_number_of_processes_gives_the_loss_and_gradient_of_one(
    world: int, oracles: list[Any]
) -> None:
    """Those of the loops; of the queue, one process's. Backward communicates nothing."""
    by_rank = run_processes(_all_splits, world)
    alone = _queue(Rank(), (9,))
    for case, (loss, grad, negatives) in enumerate(oracles):
        for number in range(len(SPLITS[world])):
            ranks = [splits[number][0][case] for splits in by_rank]
            assert_whole(ranks, loss, grad, views=2)
            assert [rank[3] for rank in ranks] == pytest.approx([negatives] * world)
    for number in range(len(SPLITS[world])):
        ranks = [splits[number][1] for splits in by_rank]
        for step in range(3):
            assert_whole([rank[step] for rank in ranks], *alone[step], views=1)
        for rank in ranks:
            torch.testing.assert_close(rank[3], alone[3], rtol=1e-9, atol=1e-12)


def _gathered_before(process: Rank) -> list[str]:
    """What each objective says of rows that are those of all ranks, and of each rank's own."""
    scored = [z.detach() for z in pair(6, 4)]  # by all ranks, as of a validation
    whole = [z.clone().requires_grad_() for z in scored]
    own = [z.split(3)[process.rank] for z in whole]
    alike = [torch.ones(3, 4, dtype=torch.float64, requires_grad=True)] * 2  # as of a head of zeros
    said = []
    for kind in ("nt_xent", "sup_con", "moco"):
        settings = {"dim": 4, "queue_rows": 12} if kind == "moco" else {}
        ids = torch.arange(6)  # which say that the copies are no negatives
        for (z_a, z_b), known in (
            (whole, None),
            (own, None),
            (alike, None),
            (scored, None),
            (whole, ids),
        ):
            objective = LOSSES[kind](**settings)
            try:
                for _ in range(2):  # moco's queue is empty at first
                    objective(z_a, z_b, ids=known)
                said.append("")
            except DataError as error:
                said.append(str(error))
    return said


def test_rows_that_were_gathered_before_the_call_are_refused() -> None:
    """As pytorch-metric-learning #10 and SupContrast #26 do it: copies would be negatives."""
    for said in run_processes(_gathered_before, 2):
        assert [bool(text) for text in said] == [True, False, False, False, False] * 3
        assert all("ranks 0 and 1" in text and "own rows" in text for text in said[::5])
