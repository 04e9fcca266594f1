"""Embeddings of several depths of a network: what each branch reads and what it trains."""

import copy

import pytest
import torch

from sslpipe.errors import RecipeError
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.transfer import copy_weights

TAPS = ["layer2", "layer3"]
NETWORKS = {
    "torchvision/resnet18": TAPS,
    "timm/resnet10t": TAPS,
    "timm/vit_tiny_patch16_224": ["blocks.3", "blocks.7"],
    "small_resnet": ["1", "3"],
}


def built(kind="torchvision/resnet18", taps=tuple(TAPS), dim=12, **arguments):
    torch.manual_seed(0)
    settings = {"embedding_dim": dim, "embedding_taps": list(taps), **arguments}
    return build_backbone(backbone_settings(kind, settings), crop_px=32)


def mean_of_positions(x):
    """(B, F): of a map (B, F, H, W) or of tokens (B, N, F), by loops."""
    if x.dim() == 4:
        positions = [x[:, :, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])]
    else:
        positions = [x[:, i] for i in range(x.shape[1])]
    return sum(positions) / len(positions)


@pytest.mark.parametrize("kind", NETWORKS)
def test_each_branch_is_a_layer_of_its_depth_and_the_last_one_of_the_whole_network(kind):
    taps = NETWORKS[kind]
    backbone, images, seen = built(kind, taps).eval(), torch.randn(2, 3, 32, 32), {}
    assert backbone.num_features == 12
    with torch.no_grad():
        features = backbone(images)
        assert not any(module._forward_hooks for module in backbone.modules())
        for name in taps:
            module = backbone.network.get_submodule(name)
            module.register_forward_hook(lambda *call, n=name: seen.update({n: call[2]}))
        whole = backbone.network(images)
        inputs = [*(mean_of_positions(seen[name]) for name in taps), whole]
        for k, (layer, x) in enumerate(zip(backbone.embedding.layers, inputs, strict=True)):
            expected = x @ layer.weight.T + layer.bias
            torch.testing.assert_close(features[:, 4 * k : 4 * k + 4], expected)


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_branch_trains_the_stages_before_it_alone(branch):
    backbone = built()
    features = backbone.raw(torch.randn(4, 3, 32, 32))
    features[:, 4 * branch : 4 * branch + 4].square().sum().backward()
    trained = {
        stage: any(
            p.grad is not None and bool(p.grad.any())
            for p in backbone.network.get_submodule(stage).parameters()
        )
        for stage in ("layer1", "layer2", "layer3", "layer4")
    }
    deepest = (2, 3, 4)[branch]
    assert trained == {f"layer{k}": k <= deepest for k in (1, 2, 3, 4)}


def test_a_copy_reads_its_own_network():
    backbone, images = built().eval(), torch.randn(2, 3, 32, 32)
    before = backbone(images)
    other = copy.deepcopy(backbone)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert torch.equal(backbone(images), before)
    assert not torch.allclose(other(images), before)
    backbone.load_state_dict(other.state_dict())
    assert torch.equal(backbone(images), other(images))


def test_weights_of_the_same_depths_are_copied_and_of_others_not():
    source = built()
    for taps, same in ((TAPS, True), (["layer1", "layer3"], False)):
        torch.manual_seed(1)
        settings = {"embedding_dim": 12, "embedding_taps": taps}
        target = build_backbone(backbone_settings("torchvision/resnet18", settings), crop_px=32)
        copy_weights(source, target, "torchvision/resnet18")
        last = target.embedding.layers[2].weight
        assert torch.equal(last, source.embedding.layers[2].weight) == same


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"taps": ["layre2"]}, "did you mean 'layer2'"),
        ({"taps": ["layer2", "layer2"]}, "names a module twice"),
        ({"dim": 13}, "embedding.dim = 13 .* 3 branches .* use 12"),
        ({"dim": None}, "embedding.dim = None .* 3 branches"),
        ({"kind": "small_resnet", "taps": ["1"], "dim": 7}, "embedding.dim = 7 .* use 6"),
    ],
)
def test_taps_that_cannot_be_are_one_error(arguments, said):
    with pytest.raises(RecipeError, match=said):
        built(**arguments)
