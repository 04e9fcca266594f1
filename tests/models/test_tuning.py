"""What of a backbone that starts from weights is trained, when and how fast, against timm's."""

from types import SimpleNamespace

import pytest
import timm.optim
import torch
from torch import nn

from sslpipe.export.start import Start
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.libraries import TransformersTower
from sslpipe.models.tuning import (
    PREFIX,
    block_names,
    freeze_layers,
    learning_rate_scale,
)
from sslpipe.optim.optimizers import OPTIMIZERS
from sslpipe.optim.step import ramp_at, set_lr
from sslpipe.planning.rules import backbone_is_slowed
from sslpipe.recipe.reading import load_recipe
from sslpipe.recipe.sections import Tune
from sslpipe.run.run import ProjectorFirst
from tests.helpers.exports import trained
from tests.helpers.optimizers import build_optimizer
from tests.helpers.runs import ROOT, assert_same_weights


def small(**arguments):
    return backbone_settings("small_resnet", {"widths": [8, 16], **arguments})


FAMILIES = (  # a small member each
    "resnet18", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_lite0", "regnetx_002",
    "swin_tiny_patch4_window7_224", "densenet121", "mobilenetv4_conv_small", "maxvit_tiny_rw_224",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rates_of_a_timm_network_are_those_of_timms_own_groups(name):
    backbone = build_backbone(backbone_settings(kind=f"timm/{name}"), crop_px=224)
    groups = timm.optim.param_groups_layer_decay(backbone.network, layer_decay=0.5)
    expected = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scale = learning_rate_scale(backbone, backbone_lr=0.5, layer_decay=0.5)
    for key, parameter in backbone.network.named_parameters():
        assert scale(PREFIX + key) == 0.5 * expected[id(parameter)], key
    assert scale("projector.0.weight") == 1
    assert len({*expected.values()}) > 4


@pytest.mark.parametrize(
    ("kind", "crop_px", "count", "first", "last"),
    [
        ("torchvision/resnet18", 224, 2 + 8, "conv1", "layer4.1"),
        ("torchvision/vit_b_16", 224, 1 + 12 + 1, "conv_proj", "encoder.ln"),
        ("torchvision/convnext_tiny", 224, None, "features.0.0", None),
        ("timm/vit_tiny_patch16_224", 224, 1 + 12 + 1, "patch_embed", "norm"),
        ("timm/resnet18", 224, 2 + 8, "conv1", "layer4.1"),
        ("small_resnet", 28, 2 + 3, "0", "5"),
    ],
)
def test_blocks_are_the_architectures_own_in_forward_order(kind, crop_px, count, first, last):
    with torch.device("meta"):
        network = build_backbone(backbone_settings(kind=kind), crop_px=crop_px).network
    names, parameters = block_names(network), [n for n, _ in network.named_parameters()]
    assert names[0] == first
    assert count is None or len(names) == count
    assert last is None or names[-1] == last
    outside = [n for n in parameters if not n.startswith(tuple(f"{block}." for block in names))]
    assert all("token" in n or "pos_embed" in n for n in outside)


@pytest.mark.parametrize(
    ("model_type", "settings", "count"),
    [
        ("dinov2", {"num_hidden_layers": 3}, 1 + 3 + 1),
        ("vit", {"num_hidden_layers": 3}, 1 + 3 + 1),
        ("dinov3_vit", {"num_hidden_layers": 3}, 1 + 3 + 1),
        ("clip_vision_model", {"num_hidden_layers": 3}, 2 + 3 + 1),
        ("swin", {"depths": [1, 2], "num_heads": [1, 2], "embed_dim": 12}, None),
        ("resnet", {"depths": [1, 2], "hidden_sizes": [8, 16], "embedding_size": 4}, 1 + 3),
    ],
)
def test_blocks_of_transformers_models_are_their_layers(model_type, settings, count):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model(model_type, **settings)
        )
        names = block_names(TransformersTower(model, 224))
    assert count is None or len(names) == count
    if model_type == "swin":
        assert sum(".blocks." in name for name in names) == 3


def test_blocks_of_an_open_clip_tower_are_its_residual_blocks():
    open_clip = pytest.importorskip("open_clip")
    tower = open_clip.create_model("ViT-B-32").visual
    names = block_names(tower)
    assert [name for name in names if "resblocks" in name] == [
        f"transformer.resblocks.{n}" for n in range(12)
    ]


def test_layer_wise_rates_fall_towards_the_input_and_reach_every_parameter_once():
    backbone = build_backbone(small(embedding_dim=4), crop_px=16)
    task = nn.ModuleDict({"backbone": backbone, "losses": nn.ModuleList([nn.Linear(4, 3)])})
    scale = learning_rate_scale(backbone, backbone_lr=0.1, layer_decay=0.5, loss_lr=100.0)
    blocks = block_names(backbone.network)
    optimizer = build_optimizer(task, OPTIMIZERS["adamw"](peak_lr=1.0, weight_decay=0.1), scale)
    set_lr(optimizer, 2.0)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(list(task.parameters()))
    for name, p in task.named_parameters():
        expected = 2.0
        if name.startswith("losses"):
            expected = 200.0
        for number, block in enumerate(blocks):
            if name.startswith(f"backbone.network.{block}."):
                expected = 2.0 * 0.1 * 0.5 ** (len(blocks) - 1 - number)
        assert rates[id(p)] == pytest.approx(expected), name


def test_frozen_layers_have_neither_gradient_nor_moving_statistics():
    backbone = build_backbone(small(embedding_dim=4), crop_px=16).train()
    freeze_layers(backbone, frozen=True, last_blocks=None, batchnorm=False)
    trained = {n for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {"embedding.weight", "embedding.bias"}
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    backbone(torch.rand(4, 3, 16, 16))
    assert_same_weights(before, dict(backbone.state_dict()))

    backbone = build_backbone(small(), crop_px=16).train()
    freeze_layers(backbone, frozen=False, last_blocks=None, batchnorm=True)
    assert all(p.requires_grad for p in backbone.parameters())
    backbone(torch.rand(4, 3, 16, 16))
    assert not any(int(b) for n, b in backbone.named_buffers() if "num_batches" in n)


def test_the_ramp_begins_where_the_backbone_does_and_only_slows_pretrained_groups():
    tune = Tune(projector_first_steps=3, ramp_steps=4)
    assert [ramp_at(step, tune) for step in range(9)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert ramp_at(0, Tune()) == ramp_at(0, Tune(projector_first_steps=3)) == 1
    model = nn.ModuleDict({"backbone": nn.ModuleDict({"network": nn.Linear(2, 2)})})
    model["projector"] = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OPTIMIZERS["lars"](peak_lr=1.0), pretrained=PREFIX)
    assert set_lr(optimizer, 2.0, ramp=0.25) == 2.0
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for key, parameter in model.named_parameters():
        assert rates[id(parameter)] == (0.5 if key.startswith(PREFIX) else 2.0)


def test_a_network_is_frozen_in_the_first_steps_and_then_as_it_was():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.BatchNorm2d(4))
    network[3].eval()  # frozen for good, with its parameters
    network[3].requires_grad_(False)
    modes = [module.training for module in network.modules()]
    first = ProjectorFirst([network], 2)
    for step in range(4):
        first.begin(step)
        before = {key: value.clone() for key, value in network.state_dict().items()}
        out = network(torch.rand(2, 3, 4, 4))
        same = all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
        assert out.requires_grad == (not same) == (step >= 2)
    assert [module.training for module in network.modules()] == modes
    assert [p.requires_grad for p in network.parameters()] == [True] * 4 + [False] * 2


def test_steps_of_the_projector_alone_are_told_as_a_fact_and_warned_of_where_none_is_left():
    for steps, warned in ((21, False), (20, True)):
        recipe = load_recipe(ROOT / "recipes" / "adapt_mobile.toml", (f"steps={steps}",))
        recipe = recipe.model_copy(update={"init": "0" * 64})
        said = [*backbone_is_slowed(SimpleNamespace(recipe=recipe), None)]
        assert bool(said) == warned
        described = Start("named", trained()).describe(recipe.tune)
        assert described.endswith("frozen, its BatchNorms in eval mode, for the first 10 steps")
