"""What losses, heads and miners promise, whatever their formula; a new entry is held to it."""

import numpy as np
import pytest
import torch

from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.pairwise import References, compare
from tests.helpers.metric_rows import LABELS as ROW_LABELS
from tests.helpers.metric_rows import SIZES, made, rows, value_and_grad

LABELS = torch.tensor(ROW_LABELS)
OURS = sorted(set(METRIC_LOSSES) - {"pml"})  # "pml": losses/test_pml.py
TABLE = {**METRIC_LOSSES, **HEADS}
WITH_TEMPERATURE = ("info_nce", "nt_xent", "sup_con")


def built(name, **arguments):
    """In float64 and eval mode; hierarchical_triplet has seen the classes once."""
    loss = made(name, **arguments).double()
    if name == "hierarchical_triplet":
        loss(rows(9), LABELS)
    return loss.eval()


def gradient(loss, x, labels=LABELS, autocast=False, **given):
    def value(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # must not reach products
            return loss(x, labels, **given)

    return value_and_grad(value, x)


def awkward_batches():
    x = rows()
    u = x / x.norm(dim=1, keepdim=True)
    zero = x.clone()
    zero[[0, 3, 5]] = 0
    return {
        "identical rows": x[:1].expand(10, 6),
        "identical within classes": u[LABELS],
        "identical across classes": u[[0, 0, 0, 1, 1, 1, 2, 2, 2, 2]],
        "opposite rows": torch.cat([u[:5], -u[:5]]),
        "zero rows": zero,
        "all zero": torch.zeros_like(x),
        "tiny": x * 1e-6,
        "long": x * 100,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*OURS, *HEADS])
def test_value_and_gradient_are_finite_at_awkward_rows(name, dtype):
    batches = awkward_batches()
    if name in HEADS:  # on the weights of the classes, and against them
        weights = [p.detach() for p in built(name).parameters() if p.ndim > 1] or [rows()]
        batches["weights"] = weights[0].reshape(-1, 6)[LABELS]
        batches["against"] = -batches["weights"]
    for settings in [{}] + [{"temperature": 0.01}] * (name in WITH_TEMPERATURE):
        loss = built(name, **settings).float()
        trained = [p for p in loss.parameters() if p.requires_grad]
        for case, x in batches.items():
            for labels in (LABELS, torch.zeros_like(LABELS), torch.arange(10) % 4):
                leaf = x.to(dtype).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    value = loss(leaf, labels)
                grads = torch.autograd.grad(value, [leaf, *trained], materialize_grads=True)
                assert (value.dtype, grads[0].dtype) == (torch.float32, dtype), case
                assert all(bool(number.isfinite().all()) for number in (value, *grads)), case


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


@pytest.mark.parametrize("unlabelled", [-1, -100])
@pytest.mark.parametrize("name", [*OURS, *HEADS])
def test_rows_without_a_label_count_for_nothing(name, unlabelled):
    labels = LABELS.clone()
    labels[[2, 9]] = unlabelled
    known = labels >= 0
    for train in (True, False):
        some, every = built(name).train(train), built(name).train(train)
        expected, expected_grad = gradient(some, rows()[known], labels[known])
        value, grad = gradient(every, rows(), labels)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad[known], expected_grad, rtol=1e-8, atol=1e-11)
        assert not grad[~known].any()
        for one, other in zip(some.buffers(), every.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", [*OURS, *HEADS])
def test_a_batch_that_holds_nothing_to_compare_gives_zero_and_no_gradient(name, train):
    # the second term of soft_triple is of its weights alone
    loss = made(name, **({"tau": 0.0} if name == "soft_triple" else {})).train(train)
    batches = [(rows()[:0], LABELS[:0]), (rows(), LABELS * 0 - 1)]
    if name in OURS and name != "deep_id2":  # classifiers need no pair
        batches.append((rows()[:1], LABELS[:1]))
    for x, labels in batches:
        value, grad = gradient(loss, x.float(), labels)
        assert float(value) == 0
        assert not grad.any()
        assert all(bool(buffer.isfinite().all()) for buffer in loss.buffers())


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


def test_no_loss_falls_without_bound():
    """The unbounded contrastive loss would be -D2 here."""
    far = torch.tensor([[1e3, 0, 0, 0, 0, 0], [-1e3, 0, 0, 0, 0, 0]], dtype=torch.float64)
    x, labels = far.repeat_interleave(2, 0), torch.tensor([0, 0, 1, 1])
    for name in sorted(set(OURS) - {"n_pair"}):  # whose penalty is above 0 here
        assert made(name).double()(x, labels).item() >= 0


@pytest.mark.parametrize("kind", ["euclidean", "squared"])
def test_rows_that_are_one_have_distance_0_also_where_rounding_would_leave_some(kind):
    x = torch.cat([rows(size=40, dim=96), 50 + rows(3, size=40, dim=96)]).float()
    twice = torch.cat([x, x]).requires_grad_()
    batch, _ = compare(twice, torch.arange(160), None, None)
    d = batch.distances(kind)
    apart = twice.detach().double()[:, None] - twice.detach().double()
    exact = apart.square().sum(2) if kind == "squared" else apart.norm(dim=2)
    copies = torch.eye(80, dtype=torch.bool).repeat(2, 2)
    assert not d.detach()[copies].any()
    torch.testing.assert_close(d.detach().double(), exact, rtol=5e-3, atol=1e-12)
    assert bool((d.detach()[~copies] > 0).all())
    (grad,) = torch.autograd.grad(d[copies].sum(), twice)
    assert not grad.any()


@pytest.mark.parametrize(
    ("name", "wrong", "named"),
    [
        ("angular", {"angle_deg": 90}, "angle_deg = 90"),
        ("batch_hard", {"distance": "manhattan"}, "distance = 'manhattan'"),
        ("chopra", {"bound": 0}, "bound = 0"),
        ("contrastive", {"sides": "both"}, "sides = 'both'"),
        ("hdc", {"shares": [0.5, 1.0]}, "shares = "),
        ("info_nce", {"temperature": 0.0}, "temperature = 0.0"),
        ("magnet", {"clusters_per_class": 0}, "clusters_per_class = 0"),
        ("margin", {"learn": "always"}, "learn = 'always'"),
        ("nca", {"form": "sum"}, "form = 'sum'"),
        ("sup_con", {"form": "outside"}, "form = 'outside'"),
        ("triplet", {"triplets": "semihard"}, "triplets = 'semihard'"),
        ("multi_similarity", {"reduction": "average"}, "reduction = 'average'"),
        ("arcface", {"beyond": "flat"}, "beyond = 'flat'"),
        ("arcface", {"focal_gamma": -1.0}, "focal_gamma = -1.0"),
        ("sphereface", {"m": 0}, "m = 0"),
        ("sphereface", {"lam_first": -1.0}, "lam_first = -1.0"),
        ("proxy_nca", {"form": "old"}, "form = 'old'"),
        ("proxy_nca", {"scale": 0.0}, "scale = 0.0"),
        ("soft_triple", {"centers": 0}, "centers = 0"),
        ("center", {"reduction": "max"}, "reduction = 'max'"),
        ("cosface", {"num_classes": 1}, "num_classes = 1"),
    ],
)
def test_a_wrong_setting_is_an_error_before_the_first_step(name, wrong, named):
    with pytest.raises(ValueError, match=named):
        TABLE[name](**{**(SIZES if name in HEADS else {}), **wrong})


@pytest.mark.parametrize("name", ["triplet", "arcface"])
def test_numpy_arrays_and_lists_are_taken_and_wrong_rows_and_labels_named(name):
    x, loss = rows().float(), made(name)
    for labels in (LABELS.numpy(), LABELS.tolist()):
        assert torch.equal(loss(x, labels), loss(x, LABELS))
        assert torch.equal(loss(x.numpy(), labels), loss(x, LABELS))
    for wrong, text in (
        ((x, LABELS.int()), r"labels must be int64, got torch\.int32"),
        ((x, LABELS.numpy().astype(np.int32)), r"labels must be int64, got torch\.int32"),
        ((x.long(), LABELS), r"float dtype, got torch\.int64"),
        ((x, LABELS[:9]), r"\(10, 6\) and \(9,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            loss(*wrong)
    assert MINERS["batch_hard"]()(x.numpy(), LABELS.numpy()).positive.any()


@pytest.mark.parametrize("name", [*HEADS, "deep_id2", "ranking_and_tags", "hierarchical_triplet"])
def test_a_label_beyond_the_classes_is_named(name):
    with pytest.raises(ValueError, match="label 4 is out of range: num_classes = 4"):
        made(name)(rows(), LABELS + 1)


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
