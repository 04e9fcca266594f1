"""Activation checkpointing: the same weights to the last bit, for less memory."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import ConvNeXt, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.swin_transformer import SwinTransformerBlockV2

from sslpipe.errors import RecipeError
from sslpipe.models.backbones import Backbone, backbone_settings, build_backbone
from sslpipe.models.checkpointing import checkpoint_activations, checkpointed_blocks
from sslpipe.parts import build_model
from sslpipe.planning.memory import checkpointed_bytes, estimate_memory, saved_bytes
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from tests.helpers import finetunes, runs
from tests.helpers.runs import assert_same_weights, train_on_equal_views

TINY_VIT = {"embed_dim": 16, "depth": 3, "num_heads": 2, "patch_size": 8}
DINO = {
    "model_type": "dinov2",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.3,
}


def convnext():
    last = CNBlockConfig(16, None, 3)
    return ConvNeXt([CNBlockConfig(8, 16, 3), last], stochastic_depth_prob=0.5)


def swin(block=None):
    return SwinTransformer(
        [2, 2], 16, [2, 3], [2, 4], [4, 4], stochastic_depth_prob=0.5, block=block
    )


# kind -> a small network of it
NETWORKS = {
    "timm/vit_tiny_patch16_224": {**TINY_VIT, "proj_drop_rate": 0.3},
    "timm/convnext_atto": {"dims": [8, 8, 16, 16], "drop_path_rate": 0.5},
    "transformers": {"config": DINO},
    "torchvision/vit": partial(VisionTransformer, 32, 8, 3, 2, 16, 32, dropout=0.3),
    "torchvision/swin": swin,
    "torchvision/swin_v2": partial(swin, SwinTransformerBlockV2),
    "torchvision/convnext": convnext,
}


def built(kind):
    network = NETWORKS[kind]
    torch.manual_seed(0)
    if not isinstance(network, dict):
        return Backbone(network(), 1000).double().train()
    if kind == "transformers":
        pytest.importorskip("transformers")
    return build_backbone(backbone_settings(kind, network), crop_px=32).double().train()


@pytest.mark.parametrize("kind", NETWORKS)
def test_gradients_are_equal_to_the_last_bit_and_fewer_bytes_are_kept(kind):
    backbone = built(kind)
    images = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    keys = [*backbone.state_dict()]
    counted = partial(saved_bytes, crop_px=32, precision="fp64")
    count = partial(counted, rows=4)

    def gradients():
        torch.manual_seed(1)  # of dropout
        backbone.zero_grad()
        backbone(images).square().sum().backward()
        return {
            name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None
        }

    plain = gradients()
    plain_bytes = count(backbone)
    checkpoint_activations(backbone, kind)
    checkpoint_activations(backbone, kind)  # once more changes nothing
    blocks = checkpointed_blocks(backbone)
    assert len(blocks) >= 3
    assert_same_weights(plain, gradients())
    assert [*backbone.state_dict()] == keys
    kept = count(backbone)
    assert kept < plain_bytes / 2
    assert checkpointed_bytes(backbone, partial(counted, backbone), rows=4) > kept
    assert count(backbone) == kept  # counting leaves it switched on
    with torch.inference_mode():
        backbone.eval()(images)
    checkpoint_activations(backbone.train(), kind, enabled=False)
    assert count(backbone) == plain_bytes
    # backward makes one block's again: with what is kept, that is what a step needs
    largest = count(backbone, largest_of=blocks)
    assert plain_bytes / len(blocks) / 2 < largest < plain_bytes
    checkpoint_activations(backbone, kind)
    assert checkpointed_bytes(backbone, partial(counted, backbone), rows=4) == kept + largest


class NoBlocks(nn.Module):
    def forward(self, images):
        return images.mean((2, 3))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("small_resnet", "BatchNorm"),
        ("torchvision/resnet18", "BatchNorm"),
        ("timm/xcit_nano_12_p16_224", "BatchNorm"),
        ("timm/twins_svt_small", "no row of blocks"),
        ("ours", "no row of blocks"),
    ],
)
def test_a_network_that_cannot_is_refused_by_the_settings_name(kind, reason):
    if kind == "ours":
        backbone = build_backbone(backbone_settings("small_resnet", {"widths": [3]}), crop_px=32)
        backbone.network = NoBlocks()
    else:
        backbone = build_backbone(backbone_settings(kind), crop_px=32)
    with pytest.raises(RecipeError, match=reason) as refused:
        checkpoint_activations(backbone, kind)
    assert str(refused.value).startswith("run.activation_checkpointing = true: ")
    assert repr(kind) in str(refused.value)
    assert "data.micro_batch" in str(refused.value)


SETTINGS = (
    "steps=3",
    "optim.precision=fp64",
    "run.monitor_steps=2",
    "backbone.kind=timm/vit_tiny_patch16_224",
    *(f"backbone.{key}={value}" for key, value in TINY_VIT.items()),
    "backbone.proj_drop_rate=0.3",
)
ON = "run.activation_checkpointing=true"


@pytest.fixture(scope="module")
def vit_recipe(tmp_path_factory):
    text = runs.RECIPE.replace('kind = "small_resnet"\nwidths = [8, 16, 16]\n', 'kind = "timm/x"\n')
    return runs.write_recipe(tmp_path_factory.mktemp("vit"), text)


@pytest.mark.parametrize(
    ("world", "settings"),
    [(1, ()), (1, ("data.micro_batch=4",)), (2, ()), (2, ("data.micro_batch=8",))],
    ids=["whole", "micro-batches", "two-processes", "both"],
)
def test_a_run_trains_the_same_weights_with_it(data, vit_recipe, tmp_path, world, settings):
    for name, more in (("plain", ()), ("less", (ON,))):
        runs.train_over(
            world, vit_recipe, data, tmp_path / name, *SETTINGS, *settings, *more,
            by=train_on_equal_views,
        )  # fmt: skip
    assert_same_weights(tmp_path / "plain", tmp_path / "less")
    scores = [read_metrics(tmp_path / name, "eval")[-1] for name in ("plain", "less")]
    assert scores[0]["holdout_knn"] == scores[1]["holdout_knn"]


def test_a_fine_tuning_trains_the_same_weights_with_it_and_may_begin_it_later(data, tmp_path):
    """It is no part of the digest: a run that met a full memory resumes with it."""
    text = finetunes.RECIPE.replace(
        'kind = "small_resnet"\nwidths = [8, 16]\n', 'kind = "timm/x"\n'
    )
    recipe = finetunes.write_recipe(tmp_path, text)
    small = ("steps=4", "run.save_steps=2", "sampler.classes_per_batch=2")
    settings = (*small, *SETTINGS[1:2], *SETTINGS[3:])
    arguments = (recipe, data, tmp_path / "less")
    by = finetunes.finetune_in_rank
    finetunes.finetune_over(1, recipe, data, tmp_path / "plain", *settings)
    runs.kill_over(1, "train.step:3", *arguments, None, *settings, by=by)
    finetunes.finetune_over(1, *arguments, *settings, ON)
    assert_same_weights(tmp_path / "plain", tmp_path / "less")


def test_the_estimate_of_a_step_counts_it(vit_recipe):
    kept = []
    for more in ((), (ON,)):
        recipe = load_recipe(vit_recipe, (*SETTINGS, *more))
        model = build_model(recipe, 16)
        memory = estimate_memory(model, recipe, crop_px=16, precision="fp64")
        kept.append(memory.activations)
    assert kept[1] < kept[0] / 1.5
