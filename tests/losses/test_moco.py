"""MoCo's objective against float64 loops over a list as queue."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sslpipe.losses import MoCoLoss, moco
from tests.losses.loops import pair, unit

Step = tuple[Tensor, Tensor, list[list[int]], list[list[list[int]]]]


def moco_steps(steps: int = 5, images: int = 8) -> Iterator[Step]:
    """Queries, keys, and ids and groups of both images of a row; ids come again after two steps."""
    for step in range(steps):
        queries, keys = pair(images, 4, seed=step)
        first = step * images
        ids = [[(first + i) % 16, (first + i + i % 3) % 16] for i in range(images)]
        groups = [[[-1 if a % 5 == 0 else a % 7, a % 3 - 1] for a in row] for row in ids]
        yield queries, keys, ids, groups


def moco_loops(
    step: Step, queue: list[tuple[Tensor, int, list[int]]], t: float, columns: int
) -> tuple[Tensor, int]:
    """He et al. 2020, algorithm 1, query by query, and how many entries are masked."""
    values, masked = [], 0
    for query, key, ids, groups in zip(*step, strict=True):
        logits = [(unit(query) * unit(key.detach())).sum() / t]
        for other, sample, theirs in queue:
            shared = any(
                x == y >= 0 for x, y in zip(groups[0][:columns], theirs[:columns], strict=True)
            )
            if sample in ids or shared:
                masked += 1
            else:
                logits.append((unit(query) * other).sum() / t)
        values.append(torch.logsumexp(torch.stack(logits), 0) - logits[0])
    return torch.stack(values).mean(), masked


@pytest.mark.parametrize("unread", [False, True])  # True: as on CUDA, where no value is read
@pytest.mark.parametrize("known", ["nothing", "images", "pairs", "one column", "two columns"])
def test_moco_equals_loops_over_a_list_as_queue(
    known: str, unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unread:
        original = moco._columns
        monkeypatch.setattr(moco, "_columns", lambda *given, whole: original(*given, whole=True))
    columns = {"one column": 1, "two columns": 2}.get(known, 0)
    cases = (5, 0.2, 4), (12, 0.01, 4), (21, 0.2, 512), (100, 0.01, 4)
    for queue_rows, temperature, tile_rows in cases:
        objective = MoCoLoss(
            dim=4,
            queue_rows=queue_rows,
            temperature=temperature,
            tile_rows=tile_rows,
            group_columns=columns,
        ).double()
        queue: list[tuple[Tensor, int, list[int]]] = []
        for queries, keys, ids, groups in moco_steps():
            if known in ("nothing", "images"):
                ids = [[row[0]] * 2 for row in ids]
            entries = [row[1] if known != "nothing" else -1 for row in ids]
            given: dict[str, Any] = {"ids": torch.tensor(ids)}
            if columns:
                given["groups"] = torch.tensor(groups)[:, :, :columns]
            elif known != "pairs":
                given = {"ids": given["ids"][:, 0]} if known == "images" else {}
            step = queries, keys, ids, groups
            exact, masked = moco_loops(step, queue, temperature, columns)
            loss = objective(queries, keys, **given)
            torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
            grad, of_keys = torch.autograd.grad(loss, (queries, keys), allow_unused=True)
            (expected,) = torch.autograd.grad(exact, queries)
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
            assert of_keys is None
            assert objective.masked_pairs == masked
            assert objective.last_negatives == pytest.approx(len(queue) - masked / len(ids))
            rows = zip(keys, entries, groups, strict=True)
            queue += [(unit(key.detach()), entry, both[1]) for key, entry, both in rows]
            queue = queue[-queue_rows:]
            assert int(objective.filled_rows) == len(queue)
        assert ("key_groups" in objective.state_dict()) == (columns > 0)


def test_a_queue_is_told_how_many_columns_there_are() -> None:
    z = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"loss\.group_columns = 0, but the groups have 1"):
        MoCoLoss(dim=4, queue_rows=8)(z, z, groups=torch.zeros(2, 2, 1, dtype=torch.int64))


def test_moco_resumes_exactly_from_its_buffers_and_evaluation_leaves_them() -> None:
    steps = [(a, b, torch.tensor(ids)[:, 0]) for a, b, ids, _ in moco_steps()]
    straight, first, resumed = (MoCoLoss(dim=4, queue_rows=21).double() for _ in range(3))
    expected = [straight(a, b, ids=i).item() for a, b, i in steps]
    actual = [first(a, b, ids=i).item() for a, b, i in steps[:3]]
    resumed.load_state_dict(first.state_dict())
    resumed.eval()(*steps[0][:2])
    torch.testing.assert_close(resumed.state_dict(), first.state_dict(), rtol=0, atol=0)
    resumed.train()
    actual += [resumed(a, b, ids=i).item() for a, b, i in steps[3:]]
    assert actual == expected
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_a_queue_of_only_the_querys_own_sample_has_gradient_zero(temperature: float) -> None:
    objective = MoCoLoss(dim=4, queue_rows=6, temperature=temperature)
    objective.had_negatives = True  # else an error
    for seed in range(3):  # the queue: empty, half full, full
        z_a, z_b = (z.detach().float().requires_grad_() for z in pair(3, 4, seed=seed))
        loss = objective(z_a, z_b, ids=torch.tensor([7, 7, 7]))
        (grad,) = torch.autograd.grad(loss, z_a)
        assert loss.item() == 0
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=0)
    assert objective.masked_pairs == 18


def test_moco_takes_half_precision_and_keeps_normal_float32_keys() -> None:
    objective = MoCoLoss(dim=4, queue_rows=64, temperature=0.01)
    for queries, keys, ids, _ in moco_steps(3):
        a = queries.detach().bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(a, keys.detach().bfloat16(), ids=torch.tensor(ids)[:, 0])
        (grad,) = torch.autograd.grad(loss, a)
        assert bool(torch.isfinite(grad).all())
    assert objective.keys.dtype is torch.float32
    torch.testing.assert_close(objective.keys[:24].norm(dim=1), torch.ones(24))
