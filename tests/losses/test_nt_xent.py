"""NT-Xent against float64 loops, closed forms, finite differences and real processes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sslpipe.distributed import Rank
from sslpipe.losses import LOSSES, NTXentLoss
from sslpipe.losses.engine import tiles
from sslpipe.losses.engine.anchors import gather_anchors
from sslpipe.losses.engine.contrast import normalised
from tests.helpers.processes import run_processes

TILES = (1, 5, 7, 512)


def loops(z_a: Tensor, z_b: Tensor, temperature: float, ids: list[int] | None = None) -> Tensor:
    """Chen et al. 2020, algorithm 1, by loops over single pairs; differentiable, no shortcuts."""
    images = len(z_a)
    ids = ids or list(range(images))
    z = [row / row.square().sum().sqrt() for row in [*z_a.unbind(), *z_b.unbind()]]
    total = z_a.new_zeros(())
    for i in range(2 * images):
        similarities, positive = [], None
        for j in range(2 * images):
            if j == i:
                continue
            similarity = (z[i] * z[j]).sum() / temperature
            if j % images == i % images:
                positive = similarity
            elif ids[i % images] == ids[j % images]:
                continue  # another copy of the anchor's sample is no negative
            similarities.append(similarity)
        assert positive is not None
        total = total - positive + torch.logsumexp(torch.stack(similarities), 0)
    return total / (2 * images)


def textbook(z_a: Tensor, z_b: Tensor, temperature: float) -> Tensor:
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z_a)))


def pair(images: int, dim: int, *, seed: int = 0, closeness: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z_a = torch.randn(images, dim, generator=generator, dtype=torch.float64) * 3
    z_b = closeness * z_a + torch.randn(images, dim, generator=generator, dtype=torch.float64)
    return z_a.requires_grad_(), z_b.requires_grad_()


def value_and_grad(loss: Tensor, z_a: Tensor, z_b: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.cat(torch.autograd.grad(loss, (z_a, z_b)))


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("tile_rows", TILES)
@pytest.mark.parametrize("temperature", [0.001, 0.01, 0.1, 0.5, 5.0])
def test_ntxent_equals_the_loops_of_algorithm_1(temperature: float, tile_rows: int) -> None:
    z_a, z_b = pair(9, 4)
    exact, exact_grad = value_and_grad(loops(z_a, z_b, temperature), z_a, z_b)
    loss_fn = NTXentLoss(temperature, tile_rows=tile_rows)
    loss, grad = value_and_grad(loss_fn(z_a, z_b, ids=None, labels=None), z_a, z_b)
    torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)
    assert (loss_fn.masked_pairs, loss_fn.last_negatives) == (0, 16.0)


@pytest.mark.parametrize("tile_rows", TILES)
@pytest.mark.parametrize("temperature", [0.01, 0.1])
@pytest.mark.parametrize(
    "ids", [[0, 1, 2, 3, 4, 5, 0, 7, 8], [3, 3, 9, 9, 9, 1, 2, 1, 5], [4] * 9], ids=str
)
def test_equal_ids_are_no_negatives_of_each_other(
    ids: list[int], temperature: float, tile_rows: int
) -> None:
    z_a, z_b = pair(9, 4)
    exact, exact_grad = value_and_grad(loops(z_a, z_b, temperature, ids), z_a, z_b)
    loss_fn = NTXentLoss(temperature, tile_rows=tile_rows)
    loss, grad = value_and_grad(loss_fn(z_a, z_b, ids=torch.tensor(ids)), z_a, z_b)
    torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)
    masked = sum(ids[i % 9] == ids[j % 9] and i % 9 != j % 9 for i in range(18) for j in range(18))
    assert loss_fn.masked_pairs == masked
    assert loss_fn.last_negatives == 16 - masked / 18


def test_all_ids_different_means_no_masking_work() -> None:
    z = torch.zeros(3, 2)
    assert gather_anchors(z, torch.tensor([5, 3, 9])).masks is None
    twins = gather_anchors(z, torch.tensor([5, 3, 5]))
    assert twins.masks is not None
    assert twins.masks.numbers.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert twins.masked_pairs == 8


def test_tiles_that_are_kept_for_the_gradient_equal_those_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z_a, z_b = pair(40, 8)
    results = []
    for room in (tiles.KEPT_TILES_BYTES, 0):
        monkeypatch.setattr(tiles, "KEPT_TILES_BYTES", room)
        results.append(value_and_grad(NTXentLoss(0.1, tile_rows=16)(z_a, z_b), z_a, z_b))
    (loss, grad), (loss_again, grad_again) = results
    assert torch.equal(loss, loss_again)
    assert torch.equal(grad, grad_again)


@pytest.mark.parametrize("tile_rows", TILES)
def test_equal_labels_are_no_negatives_where_asked_but_unlabelled_images_are(
    tile_rows: int,
) -> None:
    z_a, z_b = pair(9, 4)
    labels, ids = [0, 1, -1, 0, 7, -1, 1, 0, -1], [0, 1, 2, 3, 4, 5, 6, 7, 2]
    groups = [0, 1, -2, 0, 7, -5, 1, 0, -2]  # a label, or an unlabelled sample
    exact, exact_grad = value_and_grad(loops(z_a, z_b, 0.2, groups), z_a, z_b)
    loss_fn = NTXentLoss(0.2, mask_labels=True, tile_rows=tile_rows)
    loss = loss_fn(z_a, z_b, ids=torch.tensor(ids), labels=torch.tensor(labels))
    loss, grad = value_and_grad(loss, z_a, z_b)
    torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)
    assert loss_fn.masked_pairs == 4 * (6 + 2 + 2)


@pytest.mark.parametrize("temperature", [0.01, 0.1, 1.0])
def test_the_gradient_passes_finite_differences(temperature: float) -> None:
    z_a, z_b = pair(4, 3, closeness=0.1)
    loss_fn = NTXentLoss(temperature, tile_rows=3)
    ids = torch.tensor([0, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda a, b: loss_fn(a, b, ids=ids), (z_a, z_b))


GOLDEN = 0.6366966225769699


def test_golden_value_of_a_4_by_3_input() -> None:
    """The number was made once by scalar Python loops; a factor 2 or 1/temperature would show."""
    z_a = torch.tensor(
        [[1.0, 2, 3], [-1, 0, 1], [2, -2, 0.5], [0.1, 0.2, -0.3]], dtype=torch.float64
    )
    z_b = torch.tensor(
        [[1.0, 2, 2], [-1, 1, 1], [2, -1, 0.5], [0.1, 0.3, -0.3]], dtype=torch.float64
    )

    def cosine(x: list[float], y: list[float]) -> float:
        return sum(map(math.prod, zip(x, y, strict=True))) / math.hypot(*x) / math.hypot(*y)

    rows = z_a.tolist() + z_b.tolist()
    by_hand = 0.0
    for i in range(8):
        terms = {j: math.exp(cosine(rows[i], rows[j]) / 0.5) for j in range(8) if j != i}
        by_hand -= math.log(terms[(i + 4) % 8] / sum(terms.values())) / 8
    assert NTXentLoss(0.5)(z_a, z_b).item() == pytest.approx(by_hand, rel=1e-13)
    assert by_hand == pytest.approx(GOLDEN, rel=1e-12)


@pytest.mark.parametrize("temperature", [0.005, 0.1, 1.0])
@pytest.mark.parametrize("images", [1, 2, 6])
def test_orthonormal_rows_have_the_loss_known_in_closed_form(
    images: int, temperature: float
) -> None:
    """Views equal, images orthogonal: log((e^(1/t) + 2N - 2) / e^(1/t)), 2N - 1 terms."""
    z = torch.eye(8, dtype=torch.float64)[:images] * 4
    expected = math.log1p((2 * images - 2) * math.exp(-1 / temperature))
    loss = NTXentLoss(temperature)(z, z)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("temperature", [0.01, 0.02, 0.07, 0.1, 0.5])
@pytest.mark.parametrize("closeness", [0.0, 1.0, 20.0])
def test_float32_gradient_is_within_1e_5_of_float64(closeness: float, temperature: float) -> None:
    """Also where the loss is nearly 0 and p of the positive nearly 1: nothing may cancel."""
    z_a, z_b = pair(300, 64, closeness=closeness)
    exact, exact_grad = value_and_grad(textbook(z_a, z_b, temperature), z_a, z_b)
    a, b = (z.detach().float().requires_grad_() for z in (z_a, z_b))
    exact32 = textbook(a.double(), b.double(), temperature)  # of the rounded inputs
    _, exact_grad = value_and_grad(exact32, a, b)
    loss, grad = value_and_grad(NTXentLoss(temperature, tile_rows=128)(a, b), a, b)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(exact32.item(), rel=2e-5, abs=1e-9)
    if exact.item() > 1e-6:  # below, textbook's own 1 - p has no digits left in float64
        assert relative(grad, exact_grad.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.003, 0.01, 0.1])
@pytest.mark.parametrize("length", [1e-3, 1.0, 1e4])
def test_any_dtype_length_and_temperature_is_finite_and_right(
    dtype: torch.dtype, temperature: float, length: float
) -> None:
    z_a, z_b = pair(24, 16, closeness=0.1)
    a, b = ((z.detach() * length / 20).to(dtype).requires_grad_() for z in (z_a, z_b))
    with torch.autocast("cpu", torch.bfloat16):  # must not reach the products inside
        loss = NTXentLoss(temperature, tile_rows=20)(a, b)
    wide = [z.detach().double().requires_grad_() for z in (a, b)]
    exact, exact_grad = value_and_grad(loops(*wide, temperature), *wide)
    # a scaler's factor, so that fp16 gradients neither vanish nor overflow
    scale = 2.0 ** math.floor(math.log2(1000 / float(exact_grad.abs().max())))
    loss, grad = value_and_grad(loss * scale, a, b)
    torch.testing.assert_close(loss.double() / scale, exact, rtol=1e-4, atol=1e-5)
    assert grad.dtype is dtype
    assert torch.isfinite(grad).all()
    assert relative(grad.double() / scale, exact_grad) < max(2e-5, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("length", [1e-36, 1e-25, 1e25, 1e36])
def test_lengths_near_the_limits_of_float32_do_not_matter(length: float) -> None:
    z_a, z_b = (z.detach().float() for z in pair(12, 8))
    usual = NTXentLoss(0.1)(z_a, z_b)
    a, b = (z_a * (length / 20)).requires_grad_(), (z_b * (length / 20)).requires_grad_()
    loss = NTXentLoss(0.1)(a, b)
    torch.testing.assert_close(loss, usual, rtol=1e-4, atol=1e-6)
    _, grad = value_and_grad(loss * min(length, 1.0), a, b)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("length", [1e-300, 1e-170, 1e160, 1e300])
def test_lengths_near_the_limits_of_float64_do_not_matter(length: float) -> None:
    z_a, z_b = (z.detach() for z in pair(12, 8))
    scaled = (z_a * (length / 20)).requires_grad_(), (z_b * (length / 20)).requires_grad_()
    loss, grad = value_and_grad(NTXentLoss(0.1)(*scaled) * min(length, 1.0), *scaled)
    torch.testing.assert_close(loss / min(length, 1.0), NTXentLoss(0.1)(z_a, z_b))
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("temperature", [0.01, 0.1])
def test_a_zero_row_is_finite_and_leaves_the_others_exact(temperature: float) -> None:
    z_a, z_b = pair(6, 4)
    with torch.no_grad():
        z_a[2] = 0
    loss, grad = value_and_grad(NTXentLoss(temperature, tile_rows=5)(z_a, z_b), z_a, z_b)
    exact, exact_grad = value_and_grad(textbook(z_a, z_b, temperature), z_a, z_b)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0)
    assert (grad[2] == 0).all()
    others = torch.arange(12) != 2
    torch.testing.assert_close(grad[others], exact_grad[others], rtol=1e-9, atol=1e-12)


def test_normalised_rows_have_length_1_and_the_inverse_length() -> None:
    z = pair(5, 7)[0].detach()
    u, inverse = normalised(z)
    torch.testing.assert_close(u, F.normalize(z, dim=1))
    torch.testing.assert_close(1 / inverse, z.norm(dim=1, keepdim=True))


def test_bfloat16_products_stay_within_their_stated_error() -> None:
    before = torch.get_float32_matmul_precision()
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(256, 64))
    exact, exact_grad = value_and_grad(textbook(z_a.double(), z_b.double(), 0.1), z_a, z_b)
    loss, grad = value_and_grad(NTXentLoss(0.1, products="bfloat16")(z_a, z_b), z_a, z_b)
    assert abs(loss.item() - exact.item()) < 1e-3
    assert relative(grad, exact_grad.double()) < 2e-2
    assert torch.get_float32_matmul_precision() == before


class _LargestTensor(TorchDispatchMode):
    """Records the most numbers in any tensor an operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.itemsize)
        return result


@pytest.mark.parametrize("temperature", [0.005, 0.1])
@pytest.mark.parametrize("twins", [False, True])
def test_no_tensor_is_larger_than_a_tile_or_the_input(temperature: float, twins: bool) -> None:
    images, dim, tile = 2048, 32, 256
    z_a, z_b = (z.detach().float().requires_grad_() for z in pair(images, dim))
    ids = torch.arange(images) // (2 if twins else 1)
    with _LargestTensor() as largest:
        NTXentLoss(temperature, tile_rows=tile)(z_a, z_b, ids=ids).backward()
    assert largest.numel <= 2 * max(tile * tile, 2 * images * dim)
    with _LargestTensor() as largest:
        textbook(z_a, z_b, temperature).backward()
    assert largest.numel >= (2 * images) ** 2  # the measure sees what it should


def test_without_gradient_no_gradient_is_made_and_the_value_is_the_same() -> None:
    z_a, z_b = pair(9, 4)
    with torch.no_grad():
        loss = NTXentLoss()(z_a, z_b)
    assert not loss.requires_grad
    assert torch.equal(loss, NTXentLoss()(z_a, z_b).detach())


def test_only_one_view_may_need_a_gradient() -> None:
    z_a, z_b = pair(5, 4)
    (both, _) = torch.autograd.grad(NTXentLoss()(z_a, z_b), (z_a, z_b))
    (one,) = torch.autograd.grad(NTXentLoss()(z_a, z_b.detach()), (z_a,))
    torch.testing.assert_close(one, both)


def test_swapping_the_views_or_permuting_images_changes_nothing() -> None:
    z_a, z_b = (z.detach() for z in pair(9, 4))
    loss = NTXentLoss()(z_a, z_b)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(NTXentLoss()(z_b, z_a), loss)
    torch.testing.assert_close(NTXentLoss()(z_a[order], z_b[order]), loss)


def test_bad_arguments_are_named() -> None:
    z = torch.randn(4, 3)
    for arguments in ({"temperature": 0.0}, {"temperature": -1.0}, {"temperature": math.nan}):
        with pytest.raises(ValueError, match="temperature"):
            NTXentLoss(**arguments)
    with pytest.raises(ValueError, match="products = 'fp8'"):
        NTXentLoss(products="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tile_rows"):
        NTXentLoss(tile_rows=0)
    with pytest.raises(ValueError, match=r"got \(4, 3\) and \(3, 3\)"):
        NTXentLoss()(z, z[:3])
    with pytest.raises(ValueError, match="ids must be"):
        NTXentLoss()(z, z, ids=torch.arange(3))
    with pytest.raises(ValueError, match="empty"):
        NTXentLoss()(z[:0], z[:0])


def test_the_loss_is_registered_and_keeps_no_state() -> None:
    loss_fn = LOSSES["nt_xent"](temperature=0.2)
    assert isinstance(loss_fn, NTXentLoss)
    assert loss_fn.state_dict() == {}
    assert copy.deepcopy(loss_fn).engine.temperature == 0.2


# -- processes -------------------------------------------------------------------------------------

SPLITS = [(6, 6), (8, 4), (2, 10), (12, 0), (3, 4, 5), (3, 3, 3, 3), (5, 1, 2, 4)]
IDS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 9, 0, 2])


def _ranks(
    process: Rank, splits: list[tuple[int, ...]], z_a: Tensor, z_b: Tensor
) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    answers = []
    for split in splits:
        for temperature in (0.01, 0.2):
            for ids in (None, IDS.split(split)[process.rank]):
                a, b = (z.split(split)[process.rank].clone().requires_grad_() for z in (z_a, z_b))
                loss_fn = NTXentLoss(temperature, tile_rows=5)
                loss = loss_fn(a, b, ids=ids)
                with _NoCollectives():
                    loss.backward()
                assert a.grad is not None
                assert b.grad is not None
                answers.append((loss.detach(), a.grad, b.grad, loss_fn.masked_pairs))
    return answers


class _NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "c10d" not in str(func), f"{func} in backward"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_processes_gives_the_loss_and_gradient_of_one(world: int) -> None:
    splits = [split for split in SPLITS if len(split) == world] or [(12,)]
    z_a, z_b = pair(12, 5)
    by_rank = run_processes(_ranks, world, splits, z_a.detach(), z_b.detach())
    for i in range(4 * len(splits)):
        temperature, ids = (0.01, 0.2)[i // 2 % 2], (None, IDS.tolist())[i % 2]
        exact, exact_grad = value_and_grad(loops(z_a, z_b, temperature, ids), z_a, z_b)
        answers = [rank[i] for rank in by_rank]
        for loss, *_, masked in answers:
            assert torch.equal(loss, answers[0][0])  # bitwise equal on all ranks
            torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-13)
            assert masked == (0 if ids is None else 4 * (2 + 6))
        # W times the complete gradient: DDP's mean takes the W away again
        grad = torch.cat([a[1] for a in answers] + [a[2] for a in answers]) / world
        torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-12)
