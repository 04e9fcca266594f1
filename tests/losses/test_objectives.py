"""Objectives with negatives in the batch against float64 loops and finite differences."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sslpipe.losses import LOSSES, DCLLoss, HardNegativeLoss, MoCoLoss, NTXentLoss, SupConLoss
from sslpipe.losses.engine.anchors import gather_anchors
from tests.losses.loops import (
    KNOWN,
    LargestTensor,
    assert_same,
    loops,
    pair,
    relative,
    tensors,
    value_and_grad,
)

KINDS = ("nt_xent", "dcl", "dclw", "sup_con", "hard_negatives")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("nt_xent", {"mask_labels": True}),
    ("dcl", {"mask_labels": True}),
    ("dclw", {"sigma": 0.2}),
    ("hard_negatives", {"beta": 0.0, "class_prior": 0.05}),
    ("hard_negatives", {"beta": 0.5, "class_prior": 0.0, "mask_labels": True}),
]
IMAGES = tensors(KNOWN["images"])


def test_every_objective_has_an_oracle() -> None:
    """Here, or in a file of its own: one that is added to LOSSES alone is found out."""
    folder = Path(__file__).parent
    own = {kind for kind in LOSSES if (folder / f"test_{kind}.py").is_file()}
    assert LOSSES.keys() == own | {kind for kind, _ in CASES}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
@pytest.mark.promise(3)
def test_objectives_equal_the_loops_of_their_papers(
    kind: str, settings: dict[str, Any], known: str
) -> None:
    z_a, z_b = pair(9, 4)
    every = (0.01, 0.1, 0.5, *((0.001, 5.0) if kind == "nt_xent" else ()))
    for temperature in every if known in ("nothing", "images") else every[1:2]:
        oracle, negatives = loops(kind, z_a, z_b, temperature, **KNOWN[known], **settings)
        exact = value_and_grad(oracle, z_a, z_b)
        for tile_rows in (1, 5, 512):
            objective = LOSSES[kind](temperature=temperature, tile_rows=tile_rows, **settings)
            objective.had_negatives = known == "one sample"  # else an error: no view has any
            loss = objective(z_a, z_b, **tensors(KNOWN[known]))
            assert_same(value_and_grad(loss, z_a, z_b), exact)
            assert objective.last_negatives == pytest.approx(negatives)
            if kind != "sup_con":  # whose negatives are less its positives, too
                assert objective.masked_pairs == round(18 * (16 - negatives))


def test_objectives_meet_where_the_papers_say_so() -> None:
    z_a, z_b = (z.detach() for z in pair(7, 4))
    nt_xent = NTXentLoss(temperature=0.2)(z_a, z_b)
    torch.testing.assert_close(SupConLoss(temperature=0.2)(z_a, z_b), nt_xent)
    torch.testing.assert_close(
        HardNegativeLoss(temperature=0.2, beta=0, class_prior=0)(z_a, z_b), nt_xent
    )
    torch.testing.assert_close(
        DCLLoss(temperature=0.2, sigma=1e6)(z_a, z_b), DCLLoss(temperature=0.2)(z_a, z_b)
    )


def test_one_group_of_whole_rows_is_the_only_mask_and_different_ids_are_none() -> None:
    """Then the samples' own numbers need no comparison: partners share the group."""
    z, column = torch.zeros(4, 2), torch.tensor([[3, 3], [3, 3], [5, 5], [-1, -1]])
    ids = torch.tensor([[0, 1], [1, 7], [2, 3], [4, 4]])
    masks = gather_anchors(z, ids, column[:, :, None]).masks
    assert masks is not None
    assert (len(masks.keys), masks.always) == (1, None)
    near = gather_anchors(z, ids).masks
    assert near is not None
    assert len(near.keys) == 3
    assert gather_anchors(z, torch.tensor([5, 3, 9, 0])).masks is None


@pytest.mark.promise(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_objectives_are_finite_and_right_in_any_dtype_length_and_temperature(
    kind: str, dtype: torch.dtype
) -> None:
    """Values within 1e-4, gradients within two roundings of the dtype, 2e-5 in float32."""
    z_a, z_b = pair(9, 16, closeness=0.1)
    coldest = 0.003 if kind == "nt_xent" else 0.01
    cases = (coldest, 1.0), (0.1, 1.0), (0.1, 1e-3), (0.01, 1e4)
    for temperature, length in cases if dtype is torch.float32 else cases[::3]:
        a, b = ((z.detach() * length / 20).to(dtype).requires_grad_() for z in (z_a, z_b))
        objective = LOSSES[kind](temperature=temperature, tile_rows=8)
        with torch.autocast("cpu", torch.bfloat16):  # must not reach the products inside
            loss = objective(a, b, **IMAGES)
        wide = [z.detach().double().requires_grad_() for z in (a, b)]
        oracle, _ = loops(kind, *wide, temperature, **KNOWN["images"])
        exact, exact_grad = value_and_grad(oracle, *wide)
        # a scaler's factor, so that fp16 gradients neither vanish nor overflow
        scale = 2.0 ** math.floor(math.log2(1000 / float(exact_grad.abs().max())))
        loss, grad = value_and_grad(loss * scale, a, b)
        torch.testing.assert_close(loss.double() / scale, exact, rtol=1e-4, atol=1e-5)
        assert grad.dtype is dtype
        assert relative(grad.double() / scale, exact_grad) < max(2e-5, 2 * torch.finfo(dtype).eps)


def test_a_repr_has_the_arguments_and_a_temperature_that_is_changed_counts() -> None:
    changed, (z_a, z_b) = NTXentLoss(temperature=0.5), pair(6, 4)
    changed.temperature = 0.1
    text = "NTXentLoss(temperature=0.1, tile_rows=None, mask_labels=False)"
    assert repr(changed) == text
    assert torch.equal(changed(z_a, z_b), NTXentLoss(temperature=0.1)(z_a, z_b))
    assert NTXentLoss().negatives_per_anchor(8) == 14
    assert MoCoLoss(queue_rows=40).negatives_per_anchor(8) == 40


@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("kind", ["nt_xent", "dcl", "dclw", "hard_negatives"])
def test_anchors_without_a_negative_have_loss_and_float32_gradient_zero(
    kind: str, temperature: float
) -> None:
    """A batch of one label by chance, where equal labels are no negatives."""
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(5, 4))
    objective = LOSSES[kind](temperature=temperature, mask_labels=True)
    objective.had_negatives = True
    loss, grad = value_and_grad(objective(z_a, z_b, labels=torch.full((5,), 3)), z_a, z_b)
    assert loss == 0
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-5)
    assert objective.last_negatives == 0


@pytest.mark.parametrize("kind", KINDS)
def test_float32_keeps_its_stated_error_over_many_tiles(kind: str) -> None:
    """Gradient within 1e-5 of float64, which equals the loops."""
    before = torch.get_float32_matmul_precision()
    z_a, z_b = (z.detach().float() for z in pair(300, 64))
    given = {"ids": torch.arange(300) % 290, "labels": torch.arange(300) % 290 % 20 - 1}
    exact_inputs = [z.double().requires_grad_() for z in (z_a, z_b)]
    objective = LOSSES[kind](temperature=0.1)
    exact, exact_grad = value_and_grad(objective(*exact_inputs, **given), *exact_inputs)
    a, b = (z.clone().requires_grad_() for z in (z_a, z_b))
    objective = LOSSES[kind](temperature=0.1, tile_rows=128)
    loss, grad = value_and_grad(objective(a, b, **given), a, b)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-6, abs=2e-6)
    assert relative(grad, exact_grad) < 1e-5
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.promise(3)
@pytest.mark.parametrize("kind", ["nt_xent", "dcl", "sup_con", "hard_negatives"])
def test_objectives_make_no_tensor_larger_than_a_tile_or_the_input(kind: str) -> None:
    images, dim, tile = 768, 32, 128
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(images, dim))
    row = torch.arange(images)
    of_images = {"ids": row // 2, "labels": row % 7 - 1}
    of_views = {
        "ids": torch.stack([row, (row + 1) % images], 1),
        "labels": torch.stack([row % 7 - 1, row % 5 - 1], 1),
        "groups": torch.stack([row // 3, row % 50], 1)[:, None].expand(-1, 2, -1),
    }
    counted = 1024**2  # where views are known one by one, masks are counted in tiles of 1,024 rows
    for temperature, known, tile_numel in (
        *((0.005, {}, tile**2), (0.1, {}, tile**2)),
        *((0.1, of_images, tile**2), (0.1, of_views, counted // 2)),
    ):
        with LargestTensor() as largest:
            LOSSES[kind](temperature=temperature, tile_rows=tile)(z_a, z_b, **known).backward()
        assert largest.numel <= 2 * max(tile_numel, 2 * images * dim)
    with LargestTensor() as largest:
        _ = z_a @ z_b.T
    assert largest.numel >= images**2  # the measure sees what it should


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda t=t: NTXentLoss(temperature=t), "temperature") for t in (0.0, -1.0, math.nan)),
        (lambda: DCLLoss(temperature=-1.0), "temperature = -1.0"),
        (lambda: SupConLoss(tile_rows=0), "tile_rows = 0"),
        (lambda: DCLLoss(sigma=0.0), "sigma = 0.0"),
        (lambda: HardNegativeLoss(beta=-1.0), "beta = -1.0"),
        (lambda: HardNegativeLoss(class_prior=1.0), "class_prior = 1.0"),
        (lambda: MoCoLoss(queue_rows=0), "queue_rows = 0"),
        (lambda: MoCoLoss(dim=8)(torch.ones(2, 3), torch.ones(2, 3)), r"loss\.dim = 8"),
        (lambda: SupConLoss()(*torch.ones(2, 2, 3), labels=torch.ones(3)), "labels must be"),
        (lambda: NTXentLoss()(*torch.ones(2, 2, 3), ids=torch.ones(3)), "ids must be"),
        (
            lambda: NTXentLoss()(*torch.ones(2, 2, 3), groups=torch.ones(2, 2)),
            r"groups must be \(2, 2, K\)",
        ),
        (lambda: NTXentLoss()(torch.ones(4, 3), torch.ones(3, 3)), r"got \(4, 3\) and \(3, 3\)"),
        (lambda: NTXentLoss()(*torch.ones(2, 0, 3)), "empty"),
        # the call orders of other libraries: views and labels, and all by place
        *(
            (lambda kind=kind: LOSSES[kind]()(*torch.ones(2, 2, 3), torch.ones(2)), "labels=labels")
            for kind in ("nt_xent", "dcl", "sup_con", "hard_negatives", "diet")
        ),
        (lambda: NTXentLoss()(torch.ones(4, 3)), "two views"),
        (lambda: SupConLoss()(torch.ones(4, 3), torch.arange(4)), "labels=labels"),
        (lambda: SupConLoss()(torch.ones(4, 2, 3), torch.arange(4)), "labels=labels"),
        (lambda: SupConLoss()(*torch.ones(2, 2, 3), labels=[0, 1]), "labels must be a tensor"),
        (
            lambda: SupConLoss()(*torch.ones(2, 32, 3), labels=torch.eye(2).long()[[0, *[1] * 31]]),
            r"one-hot.*labels\.argmax\(dim=1\)",
        ),
        (lambda: NTXentLoss()(*torch.ones(2, 2, 3).numpy()), "z_a must be a tensor"),
    ],
)
def test_bad_settings_and_shapes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["nt_xent", "hard_negatives"])
@pytest.mark.parametrize("whole", [False, True], ids=["the loss", "a step"])
def test_a_compiled_loss_has_the_gradient_of_the_eager_one(kind: str, whole: bool) -> None:
    """Compiled alone, or in a function; inductor had the value right, the gradient wrong."""
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(16, 8))
    objective = LOSSES[kind](temperature=0.1)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return objective(2 * a, b)

    eager = step if whole else objective
    expected = torch.autograd.grad(eager(z_a, z_b), (z_a, z_b))
    actual = torch.autograd.grad(torch.compile(eager)(z_a, z_b), (z_a, z_b))
    torch.testing.assert_close(actual, expected)


def test_labels_of_two_samples_a_row_are_taken_with_their_ids():
    """Each row may have a partner of the other of two classes."""
    z_a, z_b = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1], [1, 0]] * 32)
    ids = torch.arange(128).view(64, 2)
    paired = SupConLoss()(z_a, z_b, ids=ids, labels=labels)
    assert torch.isfinite(paired)
    with pytest.raises(ValueError, match="one-hot"):
        SupConLoss()(z_a, z_b, ids=ids[:, 0], labels=labels)


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (4, [[0, 1], [1, 0], [0, 1], [1, 0]]),  # by chance, as one small batch in sixteen has it
        (64, [[0, 1]] * 64),  # a photograph and a drawing a row
    ],
)
def test_labels_of_two_samples_a_row_may_look_one_hot(rows, labels):
    """Positives are those of one label, and the other sample of a row, written out."""
    z_a, z_b = torch.randn(2, rows, 3, generator=torch.Generator().manual_seed(1))
    loss = SupConLoss(temperature=0.5)(z_a, z_b, labels=torch.tensor(labels))
    z = torch.nn.functional.normalize(torch.cat([z_a, z_b]).double(), dim=1)
    classes = torch.tensor(labels).T.flatten()
    scores = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    log_share = scores - scores.logsumexp(dim=1, keepdim=True)
    others = torch.arange(2 * rows).roll(rows)
    positives = (classes[:, None] == classes).fill_diagonal_(False)
    positives[torch.arange(2 * rows), others] = True
    by_row = [-log_share[i, positives[i]].mean() for i in range(2 * rows)]
    torch.testing.assert_close(loss.double(), torch.stack(by_row).mean(), rtol=1e-5, atol=1e-6)
