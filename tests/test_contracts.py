"""Every entry of every table honours its signature: whoever adds a line is held to it here."""

import inspect

import pytest
import torch

from sslpipe.augment.params import draws
from sslpipe.augment.two_views import AUGMENTS
from sslpipe.data.pipeline import Batch
from sslpipe.losses import LOSSES, TeacherFeatures
from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.heads import HEADS
from sslpipe.models.backbones import BACKBONES, build_backbone
from sslpipe.recipe.base import Component
from sslpipe.registry import build

SMALL = {
    "small_resnet": Component(kind="small_resnet"),
    "torchvision": Component(kind="torchvision/resnet18"),
    "timm": Component(kind="timm/resnet18"),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_gives_one_finite_feature_vector_an_image(name):
    torch.manual_seed(0)
    backbone = build_backbone(SMALL[name], crop_px=32)  # a new table entry needs a line in SMALL
    images = torch.rand(4, 3, 32, 32)
    features = backbone(images)
    assert features.shape == (4, backbone.num_features)
    assert bool(torch.isfinite(features).all())
    features.square().mean().backward()
    # DDP waits for ever for a parameter that takes no part
    assert not [key for key, p in backbone.named_parameters() if p.grad is None]


SMALL_LOSSES = {  # where the defaults do not fit below
    "moco": {"dim": 5, "queue_rows": 16},
    "distill": {"teacher": TeacherFeatures(torch.eye(12), torch.arange(12))},
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_objective_takes_two_views_ids_and_labels_and_gives_one_number(name):
    objective = LOSSES[name](**SMALL_LOSSES.get(name, {}))
    names = list(inspect.signature(objective.forward).parameters)
    assert names == ["z_a", "z_b", "ids", "labels", "groups"]
    torch.manual_seed(0)
    width = 12 if name == "diet" else 5  # an output for each id
    objective(*torch.randn(2, 6, width), ids=torch.arange(6, 12), labels=torch.full((6,), -1))
    saved = {key: value.clone() for key, value in objective.state_dict().items()}
    objective.eval()  # from here on a call changes no buffer
    z_a, z_b = torch.randn(2, 6, width, requires_grad=True).unbind()
    ids, labels = torch.arange(6), torch.tensor([0, 0, 1, 1, -1, -1])
    loss = objective(z_a, z_b, ids=ids, labels=labels)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (z_a, z_b), allow_unused=True)
    for gradient in gradients[: 1 if name == "moco" else 2]:  # its keys take none
        assert bool(torch.isfinite(gradient).all())
        assert bool(gradient.any(1).all())
    order = torch.randperm(6)
    shuffled = objective(z_a[order], z_b[order], ids=ids[order], labels=labels[order])
    torch.testing.assert_close(shuffled, loss)  # rows have no order
    if objective.embeds:
        scaled = objective(3 * z_a, 3 * z_b, ids=ids, labels=labels)
        torch.testing.assert_close(scaled, loss)  # nor has z a length
    if objective.negatives_per_anchor(6):
        assert objective.last_negatives > 0
        assert objective.masked_pairs == 0
    torch.testing.assert_close(objective.state_dict(), saved, rtol=0, atol=0)


@pytest.mark.parametrize("name", AUGMENTS)
def test_an_augment_gives_two_normalised_views_in_order(name):
    augment = AUGMENTS[name](preset="simclr_small", crop_px=16, mean=(0.5,) * 3, std=(0.25,) * 3)
    torch.manual_seed(0)
    ids, sizes = torch.arange(5), torch.full((5, 2), 20)
    images = torch.randint(0, 256, (5, 3, 20, 20), dtype=torch.uint8)
    batch = Batch(images, sizes, torch.full((5,), -1), ids, ids, 0)
    views = augment(batch, draws(0, 0, ids, sizes, augment.specs))
    assert views.shape == (10, 3, 16, 16)
    assert views.dtype == torch.float32
    assert not views.requires_grad
    assert float(views.min()) >= -2.001
    assert float(views.max()) <= 2.001  # [0, 1] less 0.5 over 0.25
    again = augment(batch, draws(0, 0, ids, sizes, augment.specs))
    assert torch.equal(views, again)
    for row in range(5):  # row i and row B + i are views of image i: alone they are the same
        one = Batch(*(part[row : row + 1] for part in batch[:5]), 0)
        alone = augment(one, draws(0, 0, ids[row : row + 1], sizes[row : row + 1], augment.specs))
        torch.testing.assert_close(views[[row, 5 + row]], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [k for k in (*METRIC_LOSSES, *HEADS) if k != "pml"])
def test_a_metric_loss_takes_labelled_rows_and_gives_one_number(name):
    torch.manual_seed(0)
    table = {**METRIC_LOSSES, **HEADS}
    loss_fn = build(table, Component(kind=name), section="loss", num_classes=3, dim=9)
    names = list(inspect.signature(loss_fn.forward).parameters)
    assert names == ["embeddings", "labels", "ids", "ref", "miner", "counts"]
    x = torch.randn(9, 9, requires_grad=True)
    labels, ids = torch.arange(9) % 3, torch.arange(9)
    loss = loss_fn(x, labels, ids=ids)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, x)
    assert bool(gradient.isfinite().all())
    assert bool(gradient.any())
