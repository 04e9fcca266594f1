"""Generalised means against loops in float64, in every place where a network averages."""

import pytest
import torch

from sslpipe.errors import RecipeError
from sslpipe.export.load import load_run
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.pooling import POOLS, GeM, MaxPool
from sslpipe.models.transfer import copy_weights
from sslpipe.models.tuning import block_names, block_of, freeze_layers
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import final_weights, train_over, write_recipe

PLACES = {  # a network, its side, and the module whose output is the last map
    "small_resnet": (32, "network.5"),
    "torchvision/resnet18": (64, "network.layer4"),
    "torchvision/efficientnet_b0": (64, "network.features"),
    "torchvision/mobilenet_v3_small": (64, "network.features"),
    "torchvision/regnet_y_400mf": (64, "network.trunk_output"),
    "timm/resnet10t": (64, "network.layer4"),
    "timm/efficientnet_b0": (64, "network.bn2"),
    "timm/densenet121": (64, "network.features"),
}


def component(kind, **arguments):
    return backbone_settings(kind, arguments)


def maps(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64).to(dtype)


def generalised_mean(positions, p):
    """The p-th root of the mean of p-th powers, one number at a time."""
    return (sum(x**p for x in positions) / len(positions)) ** (1 / p)


RULES = {
    "avg": lambda xs: generalised_mean(xs, 1),
    "gem": lambda xs: generalised_mean([max(x, 1e-6) for x in xs], 3.0),
    "max": max,
}


def looped(pool, x):
    return torch.tensor(
        [[RULES[pool](channel.flatten().tolist()) for channel in image] for image in x.double()],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("pool", ["gem", "max"])
def test_a_pooling_equals_loops_at_any_scale_and_of_negative_features(pool, scale):
    x = maps().abs() * scale
    if pool == "gem":
        x = x.clamp_min(1e-6)  # smaller ones count as this
    actual = POOLS[pool]()(x.float())
    assert actual.shape == (2, 3, 1, 1)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.flatten(1).double(), looped(pool, x), rtol=1e-6, atol=0)
    torch.testing.assert_close(POOLS[pool]()(maps()).flatten(1), looped(pool, maps()))


@pytest.mark.parametrize("p", [0.7, 1.0, 3.0, 12.0])
def test_gradients_of_features_and_power_are_those_of_differences(p):
    x = (maps().abs() + 0.05).requires_grad_()
    pool = GeM(p).double()
    assert torch.autograd.gradcheck(lambda x, _: pool(x), (x, pool.pooling_p))
    plain = (x**pool.pooling_p).mean((2, 3), keepdim=True) ** (1 / pool.pooling_p)
    torch.testing.assert_close(pool(x), plain)
    for actual, expected in zip(
        torch.autograd.grad(pool(x).square().sum(), (x, pool.pooling_p)),
        torch.autograd.grad(plain.square().sum(), (x, pool.pooling_p)),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pool", [GeM(), GeM(20.0), MaxPool()])
def test_maps_of_zeros_and_of_large_numbers_stay_finite_in_every_dtype(pool, dtype):
    for value in (0.0, 1e4):
        x = torch.full((1, 2, 3, 3), value, dtype=dtype, requires_grad=True)
        out = pool(x)
        assert out.dtype == dtype
        torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-2, atol=1e-5)
        assert bool(torch.autograd.grad(out.sum(), x)[0].isfinite().all())


@pytest.mark.parametrize("power", [1.0, 2.0, 2.5])
def test_a_set_power_is_a_generalised_mean_and_nothing_is_learned(power):
    pool, x = GeM(power, learnable=False), maps().abs() + 0.05
    assert not pool.state_dict()
    expected = [[generalised_mean(c.flatten().tolist(), power) for c in image] for image in x]
    torch.testing.assert_close(pool(x).flatten(1), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(pool, x.requires_grad_())
    torch.manual_seed(0)
    set_to = build_backbone(component("small_resnet", pool="gem", pool_power=power), crop_px=32)
    torch.manual_seed(0)
    plain = build_backbone(component("small_resnet"), crop_px=32)
    assert set_to.state_dict().keys() == plain.state_dict().keys()
    images, seen = torch.randn(2, 3, 32, 32), []
    set_to.get_submodule("network.5").register_forward_hook(lambda *call: seen.append(call[2]))
    features = set_to.eval()(images)
    torch.testing.assert_close(features, GeM(power)(seen[0]).flatten(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pool": "avg", "pool_power": 2},
        {"pool": "gem", "pool_power": 0},
        {"pool": "max", "pool_power": 3},
        {"pool": "gem", "pool_power": "two"},
    ],
)
def test_a_power_that_cannot_be_is_one_error(wrong):
    with pytest.raises(RecipeError, match=r"backbone\.pool_power"):
        build_backbone(component("small_resnet", **wrong), crop_px=32)


def test_a_power_of_nothing_is_refused():
    with pytest.raises(ValueError, match="must be above 0"):
        GeM(p=0)


@pytest.mark.parametrize("pool", ["gem", "max"])
@pytest.mark.parametrize("kind", PLACES)
def test_a_backbone_pools_its_last_map_so_and_is_else_the_same_network(kind, pool):
    side, place = PLACES[kind]
    built = []
    for arguments in ({}, {"pool": pool}):
        torch.manual_seed(0)
        built.append(build_backbone(component(kind, **arguments), crop_px=side).eval())
    plain, ours = built
    weights = {k: v for k, v in ours.state_dict().items() if not k.endswith("pooling_p")}
    assert len(ours.state_dict()) - len(weights) == (pool == "gem")
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(v, weights[k]) for k, v in plain.state_dict().items())
    seen = []
    ours.get_submodule(place).register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        features = ours(torch.randn(2, 3, side, side))
        expected = POOLS[pool]()(seen[0]).flatten(1)
        if kind == "torchvision/mobilenet_v3_small":
            expected = plain.network.classifier(expected)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kind", "pool", "message"),
    [
        ("timm/vit_tiny_patch16_224", "gem", "no average pooling that could be replaced"),
        ("torchvision/vit_b_16", "gem", "no average pooling that could be replaced"),
        ("torchvision/densenet121", "max", "'torchvision/densenet121' has no average pooling"),
        ("torchvision/mobilenet_v2", "gem", "backbone.pool = 'gem'"),
        ("small_resnet", "gen", "did you mean 'gem'"),
        ("small_resnet", 3, "backbone.pool = 3: input should be 'avg'"),
    ],
)
def test_a_pool_that_cannot_be_is_one_clear_error(kind, pool, message):
    with pytest.raises(RecipeError, match=message):
        build_backbone(component(kind, pool=pool), crop_px=32)


@pytest.mark.parametrize("kind", ["small_resnet", "torchvision/resnet18", "timm/regnety_002"])
def test_a_learned_power_belongs_to_the_last_block(kind):
    backbone, plain = (
        build_backbone(component(kind, pool=pool), crop_px=32) for pool in ("gem", "avg")
    )
    names = block_names(backbone.network)
    assert names == block_names(plain.network)
    (power,) = [n for n, _ in backbone.network.named_parameters() if n.endswith("pooling_p")]
    assert block_of(power, names) == len(names) - 1
    freeze_layers(backbone, frozen=False, last_blocks=1, batchnorm=False)
    trained = [n for n, p in backbone.network.named_parameters() if p.requires_grad]
    assert len(trained) > 1
    assert power in trained
    freeze_layers(backbone, frozen=True, last_blocks=None, batchnorm=False)
    assert not any(p.requires_grad for p in backbone.parameters())


@pytest.mark.parametrize(("source", "target"), [("avg", "gem"), ("gem", "avg"), ("gem", "gem")])
def test_pretrained_weights_fit_any_pool(source, target):
    ours, theirs = (
        build_backbone(component("small_resnet", pool=p), crop_px=16) for p in (target, source)
    )
    if source == "gem":
        theirs.network[-2].pooling_p.data += 1
    copy_weights(theirs, ours, "small_resnet")
    state = theirs.state_dict()
    for key, value in ours.state_dict().items():
        if key in state:
            assert torch.equal(value, state[key]), key
        else:
            assert value.tolist() == [3.0]


def test_a_run_with_a_learned_power_trains_it_and_is_loaded_with_it(tmp_path):
    data, recipe = write_dataset(tmp_path / "data", (40, 40)), write_recipe(tmp_path)
    train_over(1, recipe, data, tmp_path / "run", 'backbone.pool="gem"', "steps=3")
    actual = final_weights(tmp_path / "run")
    (key,) = [key for key in actual if key.endswith("pooling_p")]
    assert float(actual[key]) != 3.0
    loaded = load_run(tmp_path / "run")
    assert loaded.config.backbone.arguments["pool"] == "gem"
    assert torch.equal(loaded.backbone.state_dict()[key.removeprefix("backbone.")], actual[key])
