"""Objectives whose views show two samples, and masks by columns, against float64 loops."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.losses import LOSSES, MoCoLoss, moco
from sslpipe.losses.engine.anchors import gather_anchors
from tests.helpers.processes import run_processes
from tests.losses.test_nt_xent import _LargestTensor, _NoCollectives, pair, value_and_grad
from tests.losses.test_objectives import dcl, hard, sup_con

IDS = [[0, 0], [1, 2], [2, 2], [3, 4], [4, 9], [5, 5], [6, 1], [2, 8], [7, 7]]
# of each sample
LABEL_OF = (0, 1, -1, 0, 2, -1, 1, 0, 0, 5)
GROUP_OF: dict[str, list[tuple[int, ...]]] = {
    "none": [],
    "one": [(0, 1, 1, -1, 2, -1, 0, 2, 2, -1)],
    "paired": [(0, 3, 3, 5, 5, 0, 3, 7, 3, 5)],  # equal in both views of each row
    "paired and another": [(0, 3, 3, 5, 5, 0, 3, 7, 3, 5), (1, 1, 2, -1, 2, 3, 3, 3, -1, 4)],
    "two": [(0, 0, 1, 1, -1, 2, 2, 3, 3, 0), (0, 1, 1, 2, 0, -1, 4, 4, 0, 2)],
    "three": [
        (0, 0, 1, 1, -1, 2, 2, 3, 3, 0),
        (0, 1, 1, 2, 0, -1, 4, 4, 0, 2),
        (-1,) * 7 + (4,) * 3,
    ],
}
LABELS = [[LABEL_OF[i] for i in row] for row in IDS]
GROUPS = {
    name: [[[of[i] for of in columns] for i in row] for row in IDS] if columns else None
    for name, columns in GROUP_OF.items()
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("nt_xent", {}),
    ("nt_xent", {"mask_labels": True}),
    ("dcl", {}),
    ("dclw", {}),
    ("sup_con", {}),
    ("hard_negatives", {}),
    ("hard_negatives", {"beta": 0.5, "class_prior": 0.0, "mask_labels": True}),
]


def is_masked(a: tuple[int, int], b: tuple[int, int], ids: Any, groups: Any) -> bool:
    """Views (row, view) of two rows: they share a group, or one shows what the other's row does."""
    (i, u), (j, v) = a, b
    if groups is not None:
        shared = zip(groups[i][u], groups[j][v], strict=True)
        if any(x == y >= 0 for x, y in shared):
            return True
    return ids[j][v] in ids[i] or ids[i][u] in ids[j]


def loops(
    kind: str,
    z_a: Tensor,
    z_b: Tensor,
    t: float,
    ids: Any,
    labels: Any,
    groups: Any,
    **settings: Any,
) -> tuple[Tensor, float]:
    """The mean over the anchors, pair by pair, and the mean number of negatives."""
    z = [[row / row.norm() for row in rows] for rows in zip(z_a, z_b, strict=True)]
    views = [(i, u) for u in (0, 1) for i in range(len(z))]
    cosines = torch.stack([(a * b).sum() for a, b in z])
    total, count = z_a.new_zeros(()), 0
    for i, u in views:
        positives, negatives = [(z[i][0] * z[i][1]).sum() / t], []
        for j, v in views:
            s, same_label = (z[i][u] * z[j][v]).sum() / t, labels[i][u] == labels[j][v] >= 0
            if i == j:
                continue
            if kind == "sup_con" and same_label:
                positives.append(s)
            elif is_masked((i, u), (j, v), ids, groups):
                continue
            elif not (settings.get("mask_labels") and same_label):
                negatives.append(s)
        count += len(negatives)
        own = positives[0]
        if kind == "sup_con":
            value = sup_con(positives, negatives)
        elif kind == "hard_negatives":
            beta, prior = settings.get("beta", 1.0), settings.get("class_prior", 0.1)
            value = hard(own, negatives, t, beta, prior)
        elif kind == "nt_xent":
            value = torch.logsumexp(torch.stack([own, *negatives]), 0) - own
        else:
            weights = (cosines / settings.get("sigma", 0.5)).exp()
            weight = 2 - weights[i] / weights.mean() if kind == "dclw" else 1.0
            value = dcl(own, negatives, weight)
        total = total + value
    return total / len(views), count / len(views)


def given(groups: Any) -> dict[str, Tensor]:
    known = {"ids": torch.tensor(IDS), "labels": torch.tensor(LABELS)}
    return known if groups is None else {**known, "groups": torch.tensor(groups)}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_loss_and_gradient_equal_the_loops(
    kind: str, settings: dict[str, Any], groups: str
) -> None:
    z_a, z_b = pair(9, 4)
    for temperature in (0.05, 0.5):
        oracle, negatives = loops(
            kind, z_a, z_b, temperature, IDS, LABELS, GROUPS[groups], **settings
        )
        exact, exact_grad = value_and_grad(oracle, z_a, z_b)
        for tile_rows in (2, 8, 512):
            objective = LOSSES[kind](temperature=temperature, tile_rows=tile_rows, **settings)
            loss, grad = value_and_grad(objective(z_a, z_b, **given(GROUPS[groups])), z_a, z_b)
            torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)
            assert objective.last_negatives == pytest.approx(negatives)


@pytest.mark.parametrize("kind", ["nt_xent", "sup_con", "hard_negatives", "dclw"])
def test_the_gradient_passes_finite_differences(kind: str) -> None:
    z_a, z_b = pair(4, 3, closeness=0.1)
    objective = LOSSES[kind](temperature=0.5, tile_rows=4)
    known = {"ids": torch.tensor(IDS[:4]), "labels": torch.tensor(LABELS[:4])}
    groups = given(GROUPS["two"])["groups"][:4]
    assert torch.autograd.gradcheck(
        lambda a, b: objective(a, b, groups=groups, **known), (z_a, z_b)
    )


def test_views_of_the_same_samples_are_as_images() -> None:
    """(B, 2) of equal columns gives what (B,) does."""
    z_a, z_b = pair(9, 4)
    ids, labels = (
        torch.tensor([0, 1, 2, 3, 4, 5, 6, 2, 8]),
        torch.tensor([0, 1, -1, 0, 1, -1, 0, -1, 1]),
    )
    for kind, settings in CASES:
        objective = LOSSES[kind](temperature=0.1, **settings)
        once = value_and_grad(objective(z_a, z_b, ids=ids, labels=labels), z_a, z_b)
        twice = [x[:, None].expand(-1, 2) for x in (ids, labels)]
        again = value_and_grad(objective(z_a, z_b, ids=twice[0], labels=twice[1]), z_a, z_b)
        for x, y in zip(once, again, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_one_group_of_whole_rows_is_the_only_mask() -> None:
    """Then the samples' own numbers need no comparison: partners share the group."""
    z, column = torch.zeros(4, 2), torch.tensor([[3, 3], [3, 3], [5, 5], [-1, -1]])
    ids = torch.tensor([[0, 1], [1, 7], [2, 3], [4, 4]])
    masks = gather_anchors(z, ids, column[:, :, None]).masks
    assert masks is not None
    assert len(masks.keys) == 1
    assert masks.own is None
    near = gather_anchors(z, ids).masks
    assert near is not None
    assert len(near.keys) == 3


def test_no_matrix_of_all_pairs_is_made() -> None:
    images, dim, tile = 1024, 32, 128
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(images, dim))
    row = torch.arange(images)
    known = {
        "ids": torch.stack([row, (row + 1) % images], 1),
        "labels": torch.stack([row % 7 - 1, row % 5 - 1], 1),
        "groups": torch.stack([row // 3, row % 50], 1)[:, None].expand(-1, 2, -1),
    }
    for kind in ("nt_xent", "sup_con", "hard_negatives"):
        with _LargestTensor() as largest:
            LOSSES[kind](tile_rows=tile)(z_a, z_b, **known).backward()
        assert largest.numel <= max(1024**2, 2 * 2 * images * dim)  # counted in tiles of 1,024 rows


# -- the queue ------------------------------------------------------------------------------------


def moco_steps() -> Iterator[tuple[Tensor, Tensor, list[list[int]], list[list[list[int]]]]]:
    for step in range(5):
        queries, keys = pair(8, 4, seed=step)
        ids = [[(step * 8 + i) % 16, (step * 8 + i + i % 3) % 16] for i in range(8)]
        groups = [[[-1 if a % 5 == 0 else a % 7, a % 3 - 1] for a in row] for row in ids]
        yield queries, keys, ids, groups


@pytest.mark.parametrize("unread", [False, True])  # True: as on CUDA, where no value is read
@pytest.mark.parametrize("columns", [0, 1, 2])
def test_moco_masks_samples_partners_and_groups(
    columns: int, unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unread:
        monkeypatch.setattr(moco, "_filled_queue", moco._whole_queue)
    objective = MoCoLoss(4, 21, 0.2, tile_rows=4, group_columns=columns).double()
    queue: list[tuple[Tensor, int, list[int]]] = []
    for queries, keys, ids, groups in moco_steps():
        values, masked = [], 0
        for row, (query, key) in enumerate(zip(queries, keys, strict=True)):
            query, key = query / query.norm(), key.detach() / key.detach().norm()
            mine = groups[row][0][:columns]
            logits = [(query * key).sum() / 0.2]
            for other, sample, theirs in queue:
                shared = any(x == y >= 0 for x, y in zip(mine, theirs, strict=True))
                if sample in ids[row] or shared:
                    masked += 1
                else:
                    logits.append((query * other).sum() / 0.2)
            values.append(torch.logsumexp(torch.stack(logits), 0) - logits[0])
        exact = torch.stack(values).mean()
        numbers = torch.tensor(groups)[:, :, :columns]
        known = {"groups": numbers} if columns else {}
        loss = objective(queries, keys, ids=torch.tensor(ids), **known)
        torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
        (grad,) = torch.autograd.grad(loss, queries)
        (expected,) = torch.autograd.grad(exact, queries)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
        assert objective.masked_pairs == masked
        queue += [
            (key.detach() / key.detach().norm(), row[1], of[1][:columns])
            for key, row, of in zip(keys, ids, groups, strict=True)
        ]
        queue = queue[-21:]
    assert ("key_groups" in objective.state_dict()) == (columns > 0)


def test_a_queue_is_told_how_many_columns_there_are() -> None:
    z = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"loss\.group_columns = 0, but the groups have 1"):
        MoCoLoss(4, 8)(z, z, groups=torch.zeros(2, 2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"groups must be \(2, 2, K\)"):
        LOSSES["nt_xent"]()(z, z, groups=torch.zeros(2, 2, dtype=torch.int64))


# -- processes ------------------------------------------------------------------------------------

SPLITS = {1: [(9,)], 2: [(4, 5), (9, 0)], 4: [(2, 2, 2, 3), (3, 1, 0, 5)]}
WHOLE = [(kind, name) for kind, _ in CASES[2:6] for name in ("none", "paired", "two")]


def _answers(process: Rank, split: tuple[int, ...]) -> list[Any]:
    answers = []
    z_a, z_b = (z.detach() for z in pair(9, 4))
    for kind, name in WHOLE:
        mine = {k: x.split(split)[process.rank] for k, x in given(GROUPS[name]).items()}
        a, b = (z.split(split)[process.rank].clone().requires_grad_() for z in (z_a, z_b))
        objective = LOSSES[kind](temperature=0.1, tile_rows=4)
        loss = objective(a, b, **mine)
        with _NoCollectives():
            loss.backward()
        answers.append((loss.detach(), a.grad, b.grad, objective.last_negatives))
    return answers


def _all_splits(process: Rank) -> list[list[Any]]:
    return [_answers(process, split) for split in SPLITS[process.world_size]]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_processes_gives_the_loss_and_gradient_of_the_loops(world: int) -> None:
    by_rank = run_processes(_all_splits, world)
    z_a, z_b = pair(9, 4)
    for case, (kind, name) in enumerate(WHOLE):
        oracle, negatives = loops(kind, z_a, z_b, 0.1, IDS, LABELS, GROUPS[name])
        exact, exact_grad = value_and_grad(oracle, z_a, z_b)
        for number in range(len(SPLITS[world])):
            ranks = [splits[number][case] for splits in by_rank]
            for loss, _, _, count in ranks:
                assert torch.equal(loss, ranks[0][0])
                torch.testing.assert_close(loss, exact, rtol=1e-10, atol=1e-12)
                assert math.isclose(count, negatives)
            grad = torch.cat([r[1] for r in ranks] + [r[2] for r in ranks]) / world
            torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)
