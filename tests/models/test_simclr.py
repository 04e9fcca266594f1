"""The projector is the MLP its docstring says, and h is what comes before it."""

import torch
import torch.nn.functional as F
from torch import nn

from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.simclr import SimCLR, build_projector
from sslpipe.recipe.pretrain import Projector


def make(**projector: object) -> SimCLR:
    torch.manual_seed(0)
    backbone = build_backbone(backbone_settings(kind="small_resnet"), crop_px=28)
    return SimCLR(backbone, Projector.model_validate(projector))


def test_two_layers_with_batchnorm_equal_the_formula():
    model = make(hidden_dim=32, out_dim=16).double()
    h = torch.randn(12, 128, dtype=torch.float64)
    first, last = model.projector[0], model.projector[3]
    assert first.bias is None
    assert last.bias is None

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()

    expected = normalised(F.relu(normalised(h @ first.weight.T)) @ last.weight.T)
    torch.testing.assert_close(model.projector(h), expected, rtol=0, atol=1e-12)


def test_without_batchnorm_the_layers_have_biases_and_nothing_between_but_relu():
    layers = [type(layer) for layer in build_projector(8, Projector(num_layers=3, batchnorm=False))]
    assert layers == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert build_projector(8, Projector(batchnorm=False))[0].bias is not None


def test_z_is_the_projector_of_h_and_not_normalised():
    model, views = make(hidden_dim=32, out_dim=16, num_layers=3).eval(), torch.randn(6, 3, 28, 28)
    h, z = model.backbone(views), model(views)
    assert h.shape == (6, 128)
    assert torch.equal(model.projector(h), z)
    assert not torch.allclose(z.norm(dim=1), torch.ones(6), atol=1e-2)
