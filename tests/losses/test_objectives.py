"""DCL, DCLW, SupCon, hard negatives, MoCo against float64 loops, finite differences, processes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.losses import LOSSES, DCLLoss, HardNegativeLoss, MoCoLoss, NTXentLoss, SupConLoss, moco
from tests.helpers.processes import run_processes
from tests.losses.test_nt_xent import _LargestTensor, _NoCollectives, pair, relative, value_and_grad

IDS = [0, 1, 2, 3, 4, 5, 6, 2, 8]
LABELS = [0, 1, -1, 0, 5, -1, 1, -1, 0]  # images 2 and 7 show one sample

# -- the oracle: one anchor at a time, from all its similarities --------------------------------


def dcl(positive: Tensor, negatives: list[Tensor], weight: Tensor | float = 1.0) -> Tensor:
    if not negatives:
        return positive * 0
    return torch.logsumexp(torch.stack(negatives), 0) - weight * positive


def hard(
    positive: Tensor, negatives: list[Tensor], temperature: float, beta: float, prior: float
) -> Tensor:
    """Robinson et al. 2021, eq. 4, with their estimators put in."""
    if not negatives:
        return positive * 0
    s = torch.stack(negatives)
    importance = torch.softmax(beta * s, 0)
    g = ((importance * s.exp()).sum() - prior * positive.exp()) / (1 - prior)
    g = torch.clamp(g, min=math.exp(-1 / temperature))
    return -torch.log(positive.exp() / (positive.exp() + len(negatives) * g))


def sup_con(positives: list[Tensor], negatives: list[Tensor]) -> Tensor:
    total = torch.logsumexp(torch.stack(positives + negatives), 0)
    return torch.stack([total - s for s in positives]).mean()


def loops(
    kind: str,
    z_a: Tensor,
    z_b: Tensor,
    temperature: float,
    ids: list[int],
    labels: list[int],
    **settings: Any,
) -> Tensor:
    """The mean over the anchors, pair by pair."""
    images = len(z_a)
    z = [row / row.square().sum().sqrt() for row in [*z_a.unbind(), *z_b.unbind()]]
    cosines = torch.stack([(z[i] * z[i + images]).sum() for i in range(images)])
    total = z_a.new_zeros(())
    for i in range(2 * images):
        own, positives, negatives = z_a.new_zeros(()), [], []
        for j in range(2 * images):
            if j == i:
                continue
            s = (z[i] * z[j]).sum() / temperature
            a, b = i % images, j % images
            same_label = labels[a] == labels[b] >= 0
            if a == b:
                own = s
                positives.append(s)
            elif kind == "sup_con" and same_label:
                positives.append(s)
            elif ids[a] == ids[b] or (settings.get("mask_labels") and same_label):
                continue
            else:
                negatives.append(s)
        if kind == "sup_con":
            total = total + sup_con(positives, negatives)
        elif kind == "hard_negatives":
            beta, prior = settings.get("beta", 1.0), settings.get("class_prior", 0.1)
            total = total + hard(own, negatives, temperature, beta, prior)
        elif kind == "dclw":
            weights = (cosines / settings.get("sigma", 0.5)).exp()
            weight = 2 - weights[i % images] / weights.mean()
            total = total + dcl(own, negatives, weight)
        else:
            total = total + dcl(own, negatives)
    return total / (2 * images)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("dcl", {}),
    ("dcl", {"mask_labels": True}),
    ("dclw", {}),
    ("dclw", {"sigma": 0.2}),
    ("sup_con", {}),
    ("hard_negatives", {}),
    ("hard_negatives", {"beta": 0.0, "class_prior": 0.05}),
    ("hard_negatives", {"beta": 0.5, "class_prior": 0.0, "mask_labels": True}),
]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
def test_objectives_equal_the_loops_of_their_papers(
    kind: str, settings: dict[str, Any], temperature: float
) -> None:
    for seed, (ids, labels) in enumerate(
        [(IDS, LABELS), (list(range(9)), [-1] * 9), ([4] * 9, [-1] * 9)]
    ):
        z_a, z_b = pair(9, 4, seed=seed)
        oracle = loops(kind, z_a, z_b, temperature, ids, labels, **settings)
        exact, exact_grad = value_and_grad(oracle, z_a, z_b)
        for tile_rows in (2, 8, 512):
            objective = LOSSES[kind](temperature=temperature, tile_rows=tile_rows, **settings)
            loss = objective(z_a, z_b, ids=torch.tensor(ids), labels=torch.tensor(labels))
            loss, grad = value_and_grad(loss, z_a, z_b)
            torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_objectives_pass_finite_differences(
    kind: str, settings: dict[str, Any], temperature: float
) -> None:
    z_a, z_b = pair(4, 3, closeness=0.1)
    objective = LOSSES[kind](temperature=temperature, tile_rows=4, **settings)
    ids, labels = torch.tensor([0, 1, 1, 2]), torch.tensor([0, -1, -1, 0])
    assert torch.autograd.gradcheck(
        lambda a, b: objective(a, b, ids=ids, labels=labels), (z_a, z_b)
    )


def test_objectives_meet_where_the_papers_say_so() -> None:
    z_a, z_b = (z.detach() for z in pair(7, 4))
    nt_xent = NTXentLoss(0.2)(z_a, z_b)
    torch.testing.assert_close(SupConLoss(0.2)(z_a, z_b), nt_xent)
    torch.testing.assert_close(HardNegativeLoss(0.2, beta=0, class_prior=0)(z_a, z_b), nt_xent)
    torch.testing.assert_close(DCLLoss(0.2, sigma=1e6)(z_a, z_b), DCLLoss(0.2)(z_a, z_b))


def test_negatives_are_counted_without_positives_and_masked_views() -> None:
    z_a, z_b = (z.detach() for z in pair(9, 4))
    given = {"ids": torch.tensor(IDS), "labels": torch.tensor(LABELS)}
    positives = 2 * sum(LABELS[a] == LABELS[b] >= 0 and a != b for a in range(9) for b in range(9))
    supervised = SupConLoss()
    supervised(z_a, z_b, **given)
    assert supervised.masked_pairs == 8  # two images, both views of each, either way
    assert supervised.last_negatives == pytest.approx(16 - 8 / 18 - positives / 9)
    masking = DCLLoss(mask_labels=True)
    masking(z_a, z_b, **given)
    assert masking.masked_pairs == 8 + 2 * positives
    assert masking.last_negatives == pytest.approx(16 - (8 + 2 * positives) / 18)


@pytest.mark.parametrize("kind", ["dcl", "dclw", "sup_con", "hard_negatives"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_objectives_are_finite_and_right_in_any_dtype_down_to_temperature_0_01(
    kind: str, dtype: torch.dtype
) -> None:
    """Values within 1e-4, gradients within two roundings of the dtype, 2e-5 in float32."""
    z_a, z_b = pair(9, 16, closeness=0.1)
    for temperature in (0.01, 0.1):
        a, b = ((z.detach() / 20).to(dtype).requires_grad_() for z in (z_a, z_b))
        objective = LOSSES[kind](temperature=temperature, tile_rows=8)
        given = {"ids": torch.tensor(IDS), "labels": torch.tensor(LABELS)}
        with torch.autocast("cpu", torch.bfloat16):  # must not reach the products inside
            loss = objective(a, b, **given)
        wide = [z.detach().double().requires_grad_() for z in (a, b)]
        exact, exact_grad = value_and_grad(loops(kind, *wide, temperature, IDS, LABELS), *wide)
        scale = 2.0 ** math.floor(math.log2(1000 / float(exact_grad.abs().max())))
        loss, grad = value_and_grad(loss * scale, a, b)
        torch.testing.assert_close(loss.double() / scale, exact, rtol=1e-4, atol=1e-5)
        assert relative(grad.double() / scale, exact_grad) < max(2e-5, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
@pytest.mark.parametrize(
    ("kind", "settings", "images"),
    [
        *((kind, {}, 1) for kind in ("nt_xent", "dcl", "dclw", "sup_con", "hard_negatives")),
        *((kind, {"mask_labels": True}, 5) for kind in ("nt_xent", "dcl", "dclw")),
    ],
    ids=str,
)
def test_anchors_without_a_negative_have_loss_and_float32_gradient_zero(
    kind: str, settings: dict[str, Any], images: int, temperature: float
) -> None:
    """A batch of one image, or of one label where equal labels are no negatives."""
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(images, 4))
    objective = LOSSES[kind](temperature=temperature, **settings)
    loss, grad = value_and_grad(objective(z_a, z_b, labels=torch.full((images,), 3)), z_a, z_b)
    # SupCon's is the difference of two similarities, each rounded
    rounding = 1e-7 / temperature if kind == "sup_con" else 0
    torch.testing.assert_close(loss, torch.zeros(()), rtol=0, atol=rounding)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-5)
    assert objective.last_negatives == 0


@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_moco_with_a_queue_of_only_the_querys_own_sample_has_gradient_zero(
    temperature: float,
) -> None:
    objective = MoCoLoss(4, 6, temperature)
    for seed in range(3):  # the queue: empty, half full, full
        z_a, z_b = (z.detach().float().requires_grad_() for z in pair(3, 4, seed=seed))
        loss = objective(z_a, z_b, ids=torch.tensor([7, 7, 7]))
        (grad,) = torch.autograd.grad(loss, z_a)
        assert loss.item() == 0
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=0)
    assert objective.masked_pairs == 18


@pytest.mark.parametrize("kind", ["dcl", "dclw", "sup_con", "hard_negatives"])
def test_float32_and_bfloat16_products_keep_their_stated_errors_over_many_tiles(kind: str) -> None:
    """Gradient within 1e-5 (float32) and 2e-2 (bfloat16) of float64, which equals the loops."""
    z_a, z_b = (z.detach().float() for z in pair(300, 64))
    given = {"ids": torch.arange(300) % 290, "labels": torch.arange(300) % 290 % 20 - 1}
    exact_inputs = [z.double().requires_grad_() for z in (z_a, z_b)]
    objective = LOSSES[kind](temperature=0.1)
    exact, exact_grad = value_and_grad(objective(*exact_inputs, **given), *exact_inputs)
    for products, of_loss, of_grad in (("float32", 2e-6, 1e-5), ("bfloat16", 1e-3, 2e-2)):
        a, b = (z.clone().requires_grad_() for z in (z_a, z_b))
        objective = LOSSES[kind](temperature=0.1, products=products, tile_rows=128)
        loss, grad = value_and_grad(objective(a, b, **given), a, b)
        assert loss.item() == pytest.approx(exact.item(), rel=of_loss, abs=of_loss)
        assert relative(grad, exact_grad) < of_grad


@pytest.mark.parametrize("kind", ["dcl", "sup_con", "hard_negatives"])
def test_objectives_make_no_tensor_larger_than_a_tile_or_the_input(kind: str) -> None:
    images, dim, tile = 1024, 32, 128
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(images, dim))
    given = {"ids": torch.arange(images) // 2, "labels": torch.arange(images) % 7 - 1}
    with _LargestTensor() as largest:
        LOSSES[kind](tile_rows=tile)(z_a, z_b, **given).backward()
    assert largest.numel <= 2 * max(tile * tile, 2 * images * dim)


# -- the queue ------------------------------------------------------------------------------------


def moco_loops(
    queries: Tensor, keys: Tensor, ids: list[int], queue: list[tuple[Tensor, int]], t: float
) -> Tensor:
    """He et al. 2020, algorithm 1, query by query; the queue is a list of (key, id)."""
    values = []
    for query, key, own in zip(queries, keys, ids, strict=True):
        query, key = query / query.norm(), key.detach() / key.detach().norm()
        others = [(query * k).sum() / t for k, other in queue if other != own]
        logits = torch.stack([(query * key).sum() / t, *others])
        values.append(torch.logsumexp(logits, 0) - logits[0])
    return torch.stack(values).mean()


def moco_steps(images: int = 8, steps: int = 5) -> list[tuple[Tensor, Tensor, list[int]]]:
    """Queries, keys and ids of some steps; ids come again after two steps."""
    return [
        (*pair(images, 4, seed=step), [(step * images + i) % 16 for i in range(images)])
        for step in range(steps)
    ]


@pytest.mark.parametrize("temperature", [0.01, 0.2])
@pytest.mark.parametrize("queue_rows", [5, 12, 21, 100])
@pytest.mark.parametrize("tile_rows", [4, 512])
@pytest.mark.parametrize("unread", [False, True])  # True: as on CUDA, where no value is read
def test_moco_equals_loops_over_a_list_as_queue(
    queue_rows: int,
    temperature: float,
    tile_rows: int,
    unread: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if unread:
        monkeypatch.setattr(moco, "_filled_queue", moco._whole_queue)
    objective = MoCoLoss(4, queue_rows, temperature, tile_rows=tile_rows).double()
    queue: list[tuple[Tensor, int]] = []
    for queries, keys, ids in moco_steps():
        exact = moco_loops(queries, keys, ids, queue, temperature)
        masked = sum(own == other for own in ids for _, other in queue)
        loss = objective(queries, keys, ids=torch.tensor(ids))
        torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
        grad, of_keys = torch.autograd.grad(loss, (queries, keys), allow_unused=True)
        (expected,) = torch.autograd.grad(exact, queries)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
        assert of_keys is None
        assert objective.masked_pairs == masked
        assert objective.last_negatives == pytest.approx(len(queue) - masked / len(ids))
        queue += [(key.detach() / key.detach().norm(), i) for key, i in zip(keys, ids, strict=True)]
        queue = queue[-queue_rows:]
        assert int(objective.filled_rows) == len(queue)


def test_moco_resumes_exactly_from_its_buffers_and_evaluation_leaves_them() -> None:
    steps = moco_steps()
    straight, first = MoCoLoss(4, 21).double(), MoCoLoss(4, 21).double()
    expected = [straight(a, b, ids=torch.tensor(i)).item() for a, b, i in steps]
    actual = [first(a, b, ids=torch.tensor(i)).item() for a, b, i in steps[:3]]
    resumed = MoCoLoss(4, 21).double()
    resumed.load_state_dict(first.state_dict())
    resumed.eval()(*steps[0][:2])
    torch.testing.assert_close(resumed.state_dict(), first.state_dict(), rtol=0, atol=0)
    resumed.train()
    actual += [resumed(a, b, ids=torch.tensor(i)).item() for a, b, i in steps[3:]]
    assert actual == expected
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_moco_without_ids_masks_nothing() -> None:
    objective = MoCoLoss(4, 64, 0.2).double()
    queue: list[tuple[Tensor, int]] = []
    for queries, keys, _ in moco_steps(steps=2):
        exact = moco_loops(queries, keys, list(range(8)), queue, 0.2)
        torch.testing.assert_close(objective(queries, keys), exact, rtol=1e-11, atol=1e-13)
        queue += [(key.detach() / key.detach().norm(), -1) for key in keys]


def test_moco_takes_half_precision_and_keeps_normal_float32_keys() -> None:
    objective = MoCoLoss(4, 64, 0.01)
    for queries, keys, ids in moco_steps(steps=3):
        a = queries.detach().bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(a, keys.detach().bfloat16(), ids=torch.tensor(ids))
        (grad,) = torch.autograd.grad(loss, a)
        assert bool(torch.isfinite(grad).all())
    assert objective.keys.dtype is torch.float32
    torch.testing.assert_close(objective.keys[:24].norm(dim=1), torch.ones(24))


# -- bad settings, processes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DCLLoss(sigma=0.0), "sigma = 0.0"),
        (lambda: DCLLoss(temperature=-1.0), "temperature = -1.0"),
        (lambda: HardNegativeLoss(beta=-1.0), "beta = -1.0"),
        (lambda: HardNegativeLoss(class_prior=1.0), "class_prior = 1.0"),
        (lambda: SupConLoss(tile_rows=0), "tile_rows = 0"),
        (lambda: MoCoLoss(queue_rows=0), "queue_rows = 0"),
        (lambda: MoCoLoss(8)(torch.ones(2, 3), torch.ones(2, 3)), r"loss\.dim = 8"),
        (lambda: SupConLoss()(*torch.ones(2, 2, 3), labels=torch.ones(3)), "labels must be"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


SPLITS = {1: [(8,)], 2: [(4, 4), (6, 2), (8, 0)], 4: [(2, 2, 2, 2), (3, 1, 0, 4)]}
KINDS = ("dcl", "dclw", "sup_con", "hard_negatives", "moco")
EXTRA: dict[str, dict[str, Any]] = {"moco": {"dim": 4, "queue_rows": 20}}
STEP_LABELS = torch.tensor([0, 1, -1, 0, 0, -1, 1, -1])


def _three_steps(process: Rank, split: tuple[int, ...], kind: str) -> list[Any]:
    """(loss, gradients) of three steps and the buffers after them."""
    objective = LOSSES[kind](temperature=0.1, tile_rows=6, **EXTRA.get(kind, {})).double()
    answers: list[Any] = []
    for z_a, z_b, ids in moco_steps(steps=3):
        mine = (torch.as_tensor(x).detach().split(split)[process.rank] for x in (z_a, z_b))
        a, b = (x.clone().requires_grad_() for x in mine)
        own = torch.tensor([i % 7 for i in ids]).split(split)[process.rank]
        loss = objective(a, b, ids=own, labels=STEP_LABELS.split(split)[process.rank])
        with _NoCollectives():
            loss.backward()
        of_b = torch.zeros_like(b) if b.grad is None else b.grad
        answers.append((loss.detach(), a.grad, of_b))
    return [*answers, dict(objective.state_dict())]


def _all_kinds(process: Rank) -> list[list[Any]]:
    return [
        _three_steps(process, split, kind) for kind in KINDS for split in SPLITS[process.world_size]
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_gives_the_steps_of_one(world: int) -> None:
    """Loss, gradient of unequal shares and queue, 1e-9; backward communicates nothing."""
    by_rank = run_processes(_all_kinds, world)
    cases = [(kind, split) for kind in KINDS for split in SPLITS[world]]
    for case, (kind, _) in enumerate(cases):
        expected = _three_steps(Rank(), (8,), kind)
        ranks = [answers[case] for answers in by_rank]
        for step in range(3):
            loss, *grads = expected[step]
            for answer in ranks:
                assert torch.equal(answer[step][0], ranks[0][step][0])  # bitwise on all ranks
                torch.testing.assert_close(answer[step][0], loss, rtol=1e-9, atol=1e-12)
            for view, grad in enumerate(grads, start=1):
                actual = torch.cat([answer[step][view] for answer in ranks]) / world
                torch.testing.assert_close(actual, grad, rtol=1e-9, atol=1e-12)
        for answer in ranks:
            torch.testing.assert_close(answer[3], expected[3], rtol=1e-9, atol=1e-12)
