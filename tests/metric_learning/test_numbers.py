"""Numbers that float32 or a wrong divisor would spoil, and batches that hold next to nothing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.clusters import k_means, squared_distances_of_rows
from tests.helpers import metric_loops as loops
from tests.helpers.metric_rows import sizes_of

OURS = sorted(set(METRIC_LOSSES) - {"pml"})
LABELS = torch.arange(16) // 4


def noise(size=16, dim=66, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dim, generator=generator)


def made(name, **arguments):
    torch.manual_seed(0)
    return {**METRIC_LOSSES, **HEADS}[name](**sizes_of(name, dim=66), **arguments)


def value_and_grad(loss, x, labels=LABELS, **given):
    x = x.detach().requires_grad_()
    value = loss(x, labels, **given)
    return value.detach().double(), torch.autograd.grad(value, x)[0].double()


def test_clusters_within_a_tight_class_are_those_of_float64():
    """One row far away sets the scale; the clusters are of differences 1e-4 of it."""
    middle = F.normalize(noise(3, seed=7))
    x = middle[torch.arange(60) % 3] * 1e-4 + 1e-6 * noise(60) + 1
    x[0] = 3
    found = k_means(x, torch.zeros(60, dtype=torch.int64), 4)
    assert torch.equal(found, k_means(x.double(), torch.zeros(60, dtype=torch.int64), 4))
    assert sorted(found.bincount().tolist()) == [1, 19, 20, 20]


def test_distances_between_classes_near_collapse_are_those_of_loops():
    rows = F.normalize(torch.ones(66) + 1e-3 * noise(12).double(), dim=1)
    means = rows.float().unflatten(0, (4, 3)).double().mean(1).float()
    expected = [[2 - 2 * sum(map(float, a * b)) for a in means.double()] for b in means.double()]
    np.testing.assert_allclose(squared_distances_of_rows(means), expected, rtol=1e-6)


def test_hierarchical_triplet_leaves_a_row_and_itself_out_of_the_mean_within_a_class():
    x = F.normalize(noise(dim=6).double())
    loss = made_tree()
    loss(x, LABELS)
    within = [
        sum(float(loops.d2(a, b)) for a in own for b in own) / 12 for own in x.split(4)
    ]  # 4 * 3 ordered pairs
    margins = loss.rule.margins()
    level = margins + torch.tensor(within)[:, None] - loss.rule.beta
    torch.testing.assert_close(level, level.T)  # what is left is the tree's, equal both ways
    # the running means of many batches know the distance as well: no batch size enters
    for seed in range(200):
        loss(F.normalize(noise(dim=6, seed=seed).double()), LABELS)
    spread = loss.rule.beta - loss.rule.margins().diagonal()
    assert float(spread.mean()) == pytest.approx(2.0, abs=0.1)  # of random directions


def made_tree():
    return METRIC_LOSSES["hierarchical_triplet"](num_classes=4, dim=6).double()


def test_a_tree_of_an_older_checkpoint_loads():
    old = made_tree().state_dict()
    assert old.pop("rule.self_share") is not None
    made_tree().load_state_dict(old)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("unlabelled", [-1, -100])
@pytest.mark.parametrize("name", HEADS)
def test_heads_skip_rows_without_a_label(name, unlabelled, train):
    x, labels = noise(), LABELS.clone()
    labels[[2, 9]] = unlabelled
    keep = labels >= 0
    some, every = made(name).train(train), made(name).train(train)
    expected, expected_grad = value_and_grad(some, x[keep], labels[keep])
    value, grad = value_and_grad(every, x, labels)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad[keep], expected_grad)
    assert not grad[~keep].any()
    for one, other in zip(some.buffers(), every.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [*HEADS, "deep_id2", "ranking_and_tags", "hierarchical_triplet"])
def test_a_label_beyond_the_classes_is_named(name):
    with pytest.raises(ValueError, match="label 4 is out of range: num_classes = 4"):
        made(name)(noise(), LABELS + 1)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", [*OURS, *HEADS])
def test_a_batch_without_rows_or_without_labels_gives_zero(name, train):
    for x, labels in ((noise()[:0], LABELS[:0]), (noise(), LABELS * 0 - 1)):
        # the second term of soft_triple is of its weights alone
        loss = made(name, **({"tau": 0.0} if name == "soft_triple" else {}))
        value, grad = value_and_grad(loss.train(train), x, labels)
        assert float(value) == 0
        assert not grad.any()
        for buffer in loss.buffers():
            assert bool(buffer.isfinite().all())


@pytest.mark.parametrize("name", ["triplet", "arcface"])
def test_numpy_arrays_and_lists_are_taken_and_wrong_labels_named(name):
    expected = made(name)(noise(), LABELS)
    for labels in (LABELS.numpy(), LABELS.tolist()):
        assert torch.equal(made(name)(noise(), labels), expected)
        assert torch.equal(made(name)(noise().numpy(), labels), expected)
    for labels in (LABELS.int(), LABELS.numpy().astype(np.int32)):
        with pytest.raises(ValueError, match=r"labels must be int64, got torch\.int32"):
            made(name)(noise(), labels)
    with pytest.raises(ValueError, match=r"float dtype, got torch\.int64"):
        made(name)(noise().long(), LABELS)
    assert MINERS["batch_hard"]()(noise().numpy(), LABELS.numpy()).positive.any()
