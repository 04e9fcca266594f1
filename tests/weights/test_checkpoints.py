"""Checkpoints of self-supervised programs: their encoder is found, whole, and said which."""

import argparse
import json
from collections import OrderedDict

import pytest
import timm
import torch
import torchvision
from torch import nn

from sslpipe.errors import WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.recipe.base import Component
from tests.helpers.weights import difference, equals, randomised, saved


def prefixed(prefix, network, but=()):
    state = network.state_dict()
    return {f"{prefix}{key}": t for key, t in state.items() if not key.startswith(but)}


def resnet(seed=0, **options):
    return randomised(torchvision.models.resnet18(**options), seed)


HEAD = {"0.weight": torch.ones(4, 512), "0.bias": torch.ones(4)}


def head(prefix):
    return {f"{prefix}{key}": t for key, t in HEAD.items()}


def children(network):
    """A ResNet as lightly takes it apart."""
    return nn.Sequential(*list(network.children())[:-1])


def two(own, copy="", *beside, take=lambda network: network):
    """A checkpoint of an encoder, of its copy if any, and of heads."""

    def layout(online, momentum):
        tree = prefixed(own, take(online), "fc")
        tree |= prefixed(copy, take(momentum), "fc") if copy else {}
        for prefix in beside:
            tree |= head(prefix)
        return {"epoch": 3, "state_dict": OrderedDict(tree)}

    return layout


def moco(online, momentum):
    tree = two("module.encoder_q.", "module.encoder_k.", "module.encoder_q.fc.")(online, momentum)
    tree["state_dict"] |= {"module.queue": torch.ones(4, 8), "module.queue_ptr": torch.zeros(1)}
    return {**tree, "arch": "resnet18", "optimizer": {"param_groups": []}}


def dino(online, momentum):
    student = {**prefixed("module.backbone.", online, "fc"), **head("module.head.mlp.")}
    teacher = {**prefixed("backbone.", momentum, "fc"), **head("head.mlp.")}
    return {"student": student, "teacher": teacher, "args": argparse.Namespace(arch="resnet18")}


def vissl(online, momentum):
    model = {"trunk": prefixed("_feature_blocks.", online, "fc"), "heads": head("0.clf.")}
    return {"classy_state_dict": {"base_model": {"model": model}}}


def wrapped(online, momentum):
    """As DistributedDataParallel and torch.compile, in either order, name what they wrap."""
    prefixes = ("module._orig_mod.", "_orig_mod.module.")
    state = online.state_dict().items()
    return {f"{prefixes[n % 2]}{key}": tensor for n, (key, tensor) in enumerate(state)}


LIGHTLY = two("backbone.", "backbone_momentum.", "projection_head.layers.", take=children)
LIGHTLY_DINO = two("student_backbone.", "teacher_backbone.", "student_head.layers.", take=children)
# program -> layout, format in the report, whether the momentum encoder is taken, word of the note
PROGRAMS = {
    "MoCo v2": (moco, "MoCo", False, "encoder_k is its momentum copy"),
    "MoCo v3": (
        two("module.base_encoder.", "module.momentum_encoder.", "module.predictor."),
        *("MoCo v3", False, "momentum_encoder is its momentum copy"),
    ),
    "DINO": (dino, "DINO", True, "teacher is taken"),
    "VISSL": (vissl, "VISSL", False, "trunk"),
    "solo-learn": (
        two("backbone.", "momentum_backbone.", "projector.", "classifier."),
        *("solo-learn", False, "momentum_backbone is its momentum copy"),
    ),
    "solo-learn before 2022": (two("encoder.", "", "projector."), "solo-learn", False, ""),
    "lightly": (LIGHTLY, "lightly", False, "backbone_momentum is its momentum copy"),
    "lightly, DINO": (LIGHTLY_DINO, "lightly", True, "teacher is taken"),
    "Barlow Twins": (two("module.backbone.", "", "module.projector."), "solo-learn", False, ""),
    "a script after PyTorch's tutorial": (
        lambda online, momentum: {"epoch": 3, "model_state_dict": online.state_dict()},
        *("state dict", False, ""),
    ),
    "a module of one's own": (two("model."), "part of a larger model", False, ""),
    "timm, averaged": (
        lambda online, momentum: {
            "state_dict": online.state_dict(),
            "state_dict_ema": momentum.state_dict(),
        },
        *("timm", True, "averaged weights"),
    ),
    "wrappers of training": (wrapped, "state dict", False, ""),
    "an export's weights alone": (
        lambda online, momentum: prefixed("network.", online, "fc"),
        *("sslpipe", False, ""),
    ),
}


@pytest.fixture(scope="module")
def encoders():
    return resnet(seed=1), resnet(seed=2)


@pytest.mark.promise(10)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_encoder_is_found_and_said(tmp_path, encoders, program):
    layout, name, of_momentum, word = PROGRAMS[program]
    model = load_backbone(saved(layout(*encoders), tmp_path, "checkpoint.pth.tar"), crop_px=32)
    assert equals(model, encoders[of_momentum])
    assert not equals(model, encoders[not of_momentum])
    assert model.config.backbone == Component(kind="torchvision/resnet18", stem="imagenet")
    init = model.config.facts["init"]
    assert (init["format"], init["loaded"], init["missing"]) == (name, 120, [])
    notes = " ".join(init["notes"])
    assert word in notes
    assert "torchvision/resnet18" in notes  # nobody named it
    copies = ("momentum", "student", "encoder_k")
    assert all("layer1" not in key or any(c in key for c in copies) for key in init["unexpected"])


def test_a_vit_of_moco_v3_is_timms(tmp_path):
    network = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=0))
    layout = two("module.base_encoder.", "module.momentum_encoder.", "module.base_encoder.head.")
    path = saved(layout(network, network), tmp_path)
    model = load_backbone(f"timm/vit_tiny_patch16_224@{path}")
    assert equals(model, network)
    assert model.config.facts["init"]["format"] == "MoCo v3"
    # the view is ImageNet's: timm's own weights of this name have another one
    assert model.view.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    tagged = load_backbone(f"timm/vit_tiny_patch16_224.augreg_in21k@{path}")
    assert tagged.view.mean.tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_a_tag_that_timm_has_not_is_refused_of_a_file_and_of_a_folder(tmp_path):
    name, tag = "vit_tiny_patch16_224", "augreg_in21k"
    path = saved(timm.create_model(name, num_classes=0).state_dict(), tmp_path)
    known = f"did you mean '{tag}'\\?; tags of {name}: {tag}, aug"
    with pytest.raises(WeightsError, match=f"no weights {name}.augreg_in21; {known}"):
        load_backbone(f"timm/{name}.augreg_in21@{path}")
    # a folder has its own view, and the tag is checked all the same
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "weights.pth")
    for cfg, said in (
        ({"crop_pct": 1}, "augreg_in21; did you mean"),
        ({"tag": tag}, f"are '{tag}', not 'augreg_in21'; leave the tag"),
    ):
        config = {"architecture": name, "pretrained_cfg": cfg}
        (folder / "config.json").write_text(json.dumps(config))
        load_backbone(f"timm/{name}.{tag}@{folder}")
        with pytest.raises(WeightsError, match=said):
            load_backbone(f"timm/{name}.augreg_in21@{folder}")


def test_a_small_stem_is_taken_where_the_program_tells(tmp_path):
    small = resnet()
    small.conv1, small.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    small.fc = nn.Identity()
    path = saved(PROGRAMS["solo-learn"][0](small, small), tmp_path)
    model = load_backbone(path, crop_px=32)
    assert model.config.backbone.arguments == {"stem": "small"}
    assert difference(model, small, 32) <= 1e-5
    # a bare state dict does not say whether there was a max-pool
    bare = saved(small.state_dict(), tmp_path, "bare.pth")
    with pytest.raises(WeightsError, match=r"3x3.*max-pool"):
        load_backbone(f"torchvision/resnet18@{bare}", crop_px=32)
