"""What every metric loss promises, whatever its formula: a new table entry is held to all of it."""

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.pairwise import References, compare
from tests.helpers.metric_rows import LABELS as ROW_LABELS
from tests.helpers.metric_rows import rows, sizes_of

LABELS = torch.tensor(ROW_LABELS)
OURS = sorted(set(METRIC_LOSSES) - {"pml"})  # "pml": losses/test_pml.py
WITH_TEMPERATURE = ("info_nce", "nt_xent", "sup_con")


def built(name, **arguments):
    """In float64 and eval mode; hierarchical_triplet has seen the classes once."""
    torch.manual_seed(0)
    loss = METRIC_LOSSES[name](**sizes_of(name), **arguments).double()
    if name == "hierarchical_triplet":
        loss(rows(9), LABELS)
    return loss.eval()


def gradient(loss, x, labels=LABELS, autocast=False, **given):
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # must not reach the products
        value = loss(x, labels, **given)
    return value.detach(), torch.autograd.grad(value, x)[0]


def awkward_batches():
    x = rows()
    u = x / x.norm(dim=1, keepdim=True)
    zero = x.clone()
    zero[[0, 3, 5]] = 0
    opposite = torch.cat([u[:5], -u[:5]])
    return {
        "identical rows": x[:1].expand(10, 6),
        "identical within classes": u[LABELS],
        "identical across classes": u[[0, 0, 0, 1, 1, 1, 2, 2, 2, 2]],
        "opposite rows": opposite,
        "zero rows": zero,
        "all zero": torch.zeros_like(x),
        "tiny": x * 1e-6,
        "long": x * 100,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_value_and_gradient_are_finite_at_awkward_rows(name, dtype):
    settings = [{}] + [{"temperature": 0.01}] * (name in WITH_TEMPERATURE)
    for arguments in settings:
        loss = built(name, **arguments).float()
        for case, x in awkward_batches().items():
            for labels in (LABELS, torch.zeros_like(LABELS), LABELS * 0 + torch.arange(10) % 4):
                value, grad = gradient(loss, x.to(dtype), labels, autocast=True)
                assert value.dtype is torch.float32, case
                assert grad.dtype is dtype, case
                assert bool(torch.isfinite(value)), case
                assert bool(torch.isfinite(grad).all()), case


@pytest.mark.parametrize("name", OURS)
def test_float32_equals_float64_also_under_autocast(name):
    value, grad = gradient(built(name), rows().float().double())
    value32, grad32 = gradient(built(name).float(), rows().float(), autocast=True)
    torch.testing.assert_close(value32.double(), value, rtol=1e-5, atol=1e-6)
    assert float((grad32.double() - grad).norm() / grad.norm()) < 1e-5


@pytest.mark.parametrize("name", sorted(set(OURS) - {"n_pair"}))
def test_the_order_of_rows_does_not_matter(name):
    """Except for n_pair, which takes the first two rows of a class."""
    order = torch.tensor([3, 7, 1, 0, 9, 8, 2, 6, 5, 4])
    value, grad = gradient(built(name), rows())
    shuffled, shuffled_grad = gradient(built(name), rows()[order], LABELS[order])
    torch.testing.assert_close(shuffled, value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(shuffled_grad, grad[order], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", OURS)
def test_rows_without_a_label_are_in_no_pair(name):
    value, grad = gradient(built(name), rows())
    x = torch.cat([rows()[:4], rows(5, size=3), rows()[4:]])
    labels = torch.cat([LABELS[:4], torch.full((3,), -1), LABELS[4:]])
    more, more_grad = gradient(built(name), x, labels)
    torch.testing.assert_close(more, value, rtol=1e-9, atol=1e-12)
    assert not more_grad[4:7].any()
    torch.testing.assert_close(
        torch.cat([more_grad[:4], more_grad[7:]]), grad, rtol=1e-8, atol=1e-11
    )


@pytest.mark.parametrize("name", sorted(set(OURS) - {"hdc", "hard_cluster", "magnet"}))
def test_references_are_columns_without_gradient(name):
    """As if they were rows of the batch whose own terms are masked.

    Not for losses that say something about the whole batch: the share of hdc, the clusters.
    """
    arguments = {"variance_weight": 0.0} if name == "tuplet_margin" else {}
    loss = built(name, reduction="none", **arguments)
    x, n = rows(), 6
    ref = References(x[n:], LABELS[n:], torch.arange(n, 10))
    given = {"ids": torch.arange(n), "ref": ref}
    value = loss(x[:n], LABELS[:n], **given)
    torch.testing.assert_close(value, loss(x, LABELS)[:n], rtol=1e-9, atol=1e-12)
    leaf = x.clone().requires_grad_()
    both = loss(leaf[:n], LABELS[:n], ids=given["ids"], ref=ref._replace(embeddings=leaf[n:])).sum()
    assert not torch.autograd.grad(both, leaf)[0][n:].any()


def test_an_old_copy_of_a_row_is_neither_its_positive_nor_its_negative():
    x, ids = rows(), torch.arange(10) + 2**33
    old = References(x[[1, 2]], torch.tensor([1, 0]), ids[[1, 2]])  # row 2 had another label
    batch, pairs = compare(x, LABELS, ids, old)
    assert batch.references == 2
    copies = torch.zeros(10, 2, dtype=torch.bool)
    copies[1, 0] = copies[2, 1] = True
    assert not pairs.positive[:, 10:][copies].any()
    assert not pairs.negative[:, 10:][copies].any()
    same = LABELS[:, None] == old.labels
    assert torch.equal(pairs.positive[:, 10:], same & ~copies)
    assert torch.equal(pairs.negative[:, 10:], ~same & ~copies)


@pytest.mark.parametrize("name", OURS)
def test_reductions_are_the_same_sums_divided_differently(name):
    total = built(name, reduction="none")(rows(), LABELS)
    assert total.shape == (10,)
    summed, loss = built(name, reduction="sum"), built(name)
    torch.testing.assert_close(summed(rows(), LABELS), total.sum())
    mean = loss(rows(), LABELS)
    if name not in ("deep_id2", "lmnn", "tuplet_margin", "hdc"):  # several terms, each its mean
        torch.testing.assert_close(mean, total.sum() / loss.last_count)
        active = built(name, reduction="mean_active")
        torch.testing.assert_close(active(rows(), LABELS), total.sum() / active.last_active)
    assert 0 < loss.last_active <= loss.last_count


@pytest.mark.parametrize("name", OURS)
def test_a_batch_without_pairs_gives_zero_and_no_gradient(name):
    alone = LABELS[:1]
    value, grad = gradient(built(name), rows(size=1), alone)
    if name != "deep_id2":  # its classifier needs no pair
        assert float(value) == 0
        assert not grad.any()
    assert bool(torch.isfinite(grad).all())


BAD = {
    "angular": {"angle_deg": 90},
    "batch_hard": {"distance": "manhattan"},
    "chopra": {"bound": 0},
    "contrastive": {"sides": "both"},
    "hdc": {"shares": [0.5, 1.0]},
    "info_nce": {"temperature": 0.0},
    "magnet": {"clusters_per_class": 0},
    "margin": {"learn": "always"},
    "nca": {"form": "sum"},
    "sup_con": {"form": "outside"},
    "triplet": {"triplets": "semihard"},
    "multi_similarity": {"reduction": "average"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_setting_is_an_error_before_the_first_step(name):
    (key,) = BAD[name]
    with pytest.raises(ValueError, match=f"{key}|distance"):
        METRIC_LOSSES[name](**BAD[name])


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"\(10, 6\) and \(9,\)"):
        built("triplet")(rows(), LABELS[:9])


@pytest.mark.parametrize("name", MINERS)
def test_a_miner_only_takes_away_and_what_is_left_trains(name):
    arguments = {"rows": 8} if name == "maximum_loss" else {}
    miner, loss = MINERS[name](**arguments), METRIC_LOSSES["triplet"]()
    batch, before = compare(rows(), LABELS, None, None)
    after = miner(batch, before, loss=lambda pairs: loss._reduce(batch, pairs))
    assert not (after.positive & ~before.positive).any()
    assert not (after.negative & ~before.negative).any()
    for dtype in (torch.float32, torch.bfloat16):
        for x in awkward_batches().values():
            value, grad = gradient(loss, x.to(dtype), miner=miner)
            assert bool(torch.isfinite(value))
            assert bool(torch.isfinite(grad).all())
