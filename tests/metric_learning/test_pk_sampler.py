"""PK batches in a loop of one's own."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sslpipe.errors import UserError
from sslpipe.metric_learning import PKSampler, TripletLoss

COUNTS = (9, 9, 4, 5, 30, 3, 8)
LABELS = np.repeat([*range(len(COUNTS)), -1], [*COUNTS, 11])


@pytest.mark.parametrize("labels", [LABELS, torch.from_numpy(LABELS), LABELS.tolist()])
def test_batches_have_k_images_of_p_classes_each_image_once(labels):
    sampler = PKSampler(labels, classes_per_batch=3, images_per_class=4, seed=1)
    for _ in range(3):
        batches = list(sampler)
        assert len(batches) == len(sampler) > 2
        drawn = [number for batch in batches for number in batch]
        assert len({*drawn}) == len(drawn)
        for batch in batches:
            found, counts = np.unique(LABELS[batch], return_counts=True)
            assert counts.tolist() == [4, 4, 4]
            assert not {-1, 5} & {*found}  # none, and a class of three


def test_as_many_batches_as_can_be_filled():
    """By brute force: of groups 2, 2, 1, 1, 7, 2 three a batch, no class twice in one."""
    sampler = PKSampler(LABELS, classes_per_batch=3, images_per_class=4)
    groups = [n // 4 for n in COUNTS if n >= 4]
    most = max(t for t in range(9) if sum(min(n, t) for n in groups) >= 3 * t)
    assert len(sampler) == most == 4


def test_passes_differ_and_are_drawn_by_seed_and_epoch():
    first, second = (PKSampler(LABELS, classes_per_batch=2, images_per_class=3) for _ in range(2))
    passes = [list(first), list(first)]
    assert passes[0] != passes[1]
    second.epoch = 1
    assert list(second) == passes[1]
    other = PKSampler(LABELS, classes_per_batch=2, images_per_class=3, seed=1)
    assert list(other) != passes[0]


def test_a_plain_loop_with_a_loss():
    rows = TensorDataset(torch.randn(len(LABELS), 6), torch.from_numpy(LABELS))
    sampler = PKSampler(LABELS, classes_per_batch=3, images_per_class=4)
    layer = torch.nn.Linear(6, 4)
    for images, labels in DataLoader(rows, batch_sampler=sampler):
        TripletLoss(margin=0.2)(layer(images), labels).backward()
    assert layer.weight.grad.abs().sum() > 0


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(UserError, match=r"classes_per_batch = 9: 6 classes have 4 images"):
        PKSampler(LABELS, classes_per_batch=9, images_per_class=4)
    with pytest.raises(UserError, match=r"labels must be integers \(N,\), not float64"):
        PKSampler(LABELS * 0.5, classes_per_batch=2, images_per_class=4)
    with pytest.raises(TypeError, match="takes no p; it takes"):
        PKSampler(LABELS, p=2)
