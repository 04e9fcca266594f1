"""Checkpoints of self-supervised programs: their encoder is found, whole, and said which."""

import argparse
import ast
import datetime
import decimal
import json
import pathlib
import re
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

import sslpipe
from sslpipe.errors import WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.models.backbones import backbone_settings
from sslpipe.recipe.reading import load_recipe
from sslpipe.weights.files import read_tree
from sslpipe.weights.layouts import open_checkpoint
from sslpipe.weights.reader import read_weights
from sslpipe.weights.source import parse_source
from sslpipe.weights.views import usual_timm_view
from tests.helpers.runs import write_recipe
from tests.helpers.weights import difference, equals, randomised, saved


def prefixed(prefix, network, but=()):
    state = network.state_dict()
    return {f"{prefix}{key}": t for key, t in state.items() if not key.startswith(but)}


def resnet(seed=0, **options):
    return randomised(torchvision.models.resnet18(**options), seed)


PLAIN = {
    "numpy number": np.float64(3.0),
    "numpy bool": np.bool_(True),
    "numpy array": np.ones((2, 3)),
    "numpy array by columns": np.asfortranarray(np.ones((2, 3))),
    "numpy objects": np.array([1, "x"], dtype=object),
    "numpy records": np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    "numpy dtype": np.dtype("f4"),
    "numpy generator": np.random.RandomState(0),
    "numpy's newer generator": np.random.default_rng(0),
    "defaultdict": defaultdict(list, a=[1, 2]),
    "Counter": Counter("aab"),
    "deque": deque([1, 2]),
    "path": pathlib.Path("x"),
    "namespace": argparse.Namespace(lr=np.float32(3), out=pathlib.PurePosixPath("x")),
    "simple namespace": types.SimpleNamespace(a=1),
    "datetime": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "time span": datetime.timedelta(3),
    "decimal": decimal.Decimal("1.1"),
    "uuid": uuid.UUID(int=3),
    "set": {1, 2},
    "frozen set": frozenset([1]),
    "slice": slice(1, 2),
    "type": float,
}
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


def averaged(online, momentum):
    """As torch's AveragedModel and torchvision's references: a counter beside the tensors."""
    copy = {"n_averaged": torch.tensor(3), **prefixed("module.", momentum)}
    return {"model": online.state_dict(), "model_ema": copy, "epoch": 3}


def of_mmengine(online, momentum):
    """MMEngine swaps the two when it saves: state_dict is the average."""
    return {
        "meta": {"mmengine_version": "0.10.4", "epoch": 3},
        "state_dict": {**prefixed("backbone.", momentum, "fc"), **head("head.fc.")},
        "ema_state_dict": {"steps": torch.tensor(3), **prefixed("module.backbone.", online, "fc")},
    }


def checkpointed(online, momentum):
    """Activation checkpointing names a wrapper in the middle of keys, FSDP at several places."""
    state = {}
    for key, tensor in online.state_dict().items():
        key = key.replace("layer1.0.", "layer1.0._checkpoint_wrapped_module.")
        key = key.replace("layer2.", "_fsdp_wrapped_module.layer2._fsdp_wrapped_module.")
        state[f"module.model.{key}"] = tensor
    return {"state_dict": state, **{"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}}


def of_mmselfsup(online, momentum):
    student = prefixed("backbone.", online, "fc")
    return {"state_dict": {**student, **prefixed("target_generator.", momentum, "fc")}}


LIGHTLY = two("backbone.", "backbone_momentum.", "projection_head.layers.", take=children)
LIGHTLY_DINO = two("student_backbone.", "teacher_backbone.", "student_head.layers.", take=children)
EMPTY = "state_dict."
# program -> layout, prefix of the encoder, whether the momentum encoder is taken
PROGRAMS = {
    "MoCo v2": (moco, f"{EMPTY}encoder_q", False),
    "MoCo v3": (
        two("module.base_encoder.", "module.momentum_encoder.", "module.predictor."),
        *(f"{EMPTY}base_encoder", False),
    ),
    "DINO": (dino, "teacher.backbone", True),
    "iBOT and DINOv2": (
        lambda online, momentum: {
            "model": {
                **prefixed("student.backbone.", online, "fc"),
                **prefixed("teacher.backbone.", momentum, "fc"),
                **head("teacher.ibot_head.mlp."),
            }
        },
        *("model.teacher.backbone", True),
    ),
    "VISSL": (vissl, "classy_state_dict.base_model.model.trunk._feature_blocks", False),
    "solo-learn": (
        two("backbone.", "momentum_backbone.", "projector.", "classifier."),
        *(f"{EMPTY}backbone", False),
    ),
    "solo-learn before 2022": (two("encoder.", "", "projector."), f"{EMPTY}encoder", False),
    "lightly": (LIGHTLY, f"{EMPTY}backbone", False),
    "lightly, DINO": (LIGHTLY_DINO, f"{EMPTY}teacher_backbone", True),
    "Barlow Twins and VICReg": (
        two("module.backbone.", "", "module.projector."),
        *(f"{EMPTY}backbone", False),
    ),
    "SimCLR-PyTorch": (two("backbone.", "", "backbone.fc."), f"{EMPTY}backbone", False),
    "SimSiam": (
        two("module.encoder.", "", "module.encoder.fc.", "module.predictor."),
        *(f"{EMPTY}encoder", False),
    ),
    "SwAV": (two("module.", "", "module.projection_head.", "module.prototypes."), "state_dict", 0),
    "SupContrast": (two("encoder.module.", "", "head."), f"{EMPTY}encoder", False),
    "BYOL": (
        two("online_encoder.net.", "target_encoder.net.", "online_predictor.net."),
        *(f"{EMPTY}online_encoder.net", False),
    ),
    "Lightning": (two("model.backbone.", "", "model.head."), f"{EMPTY}model.backbone", False),
    "a linear probe": (two("", "", "linear."), "state_dict", False),
    "MMPretrain": (of_mmengine, f"{EMPTY}backbone", True),
    "MMSelfSup": (of_mmselfsup, f"{EMPTY}backbone", False),
    "a list of models": (
        lambda online, momentum: {"models": [prefixed("", online, "fc")], "epoch": 3},
        *("models.0", False),
    ),
    "a list, weights first": (lambda online, momentum: [prefixed("", online, "fc"), 3], "0", False),
    "a tuple": (lambda online, momentum: ("resnet", 3, online.state_dict()), "2", False),
    "DeepSpeed": (lambda online, momentum: {"module": online.state_dict()}, "", False),
    "a script after PyTorch's tutorial": (
        lambda online, momentum: {"epoch": 3, "model_state_dict": online.state_dict()},
        *("model_state_dict", False),
    ),
    "timm, averaged": (
        lambda online, momentum: {
            "state_dict": online.state_dict(),
            "state_dict_ema": momentum.state_dict(),
        },
        *("state_dict_ema", True),
    ),
    "torchvision, averaged": (averaged, "model_ema", True),
    "Megatron, gradients averaged": (
        lambda online, momentum: {
            "model": online.state_dict(),
            "optimizer": {"exp_avg": momentum.state_dict()},
        },
        *("model", False),
    ),
    "wrappers of training": (wrapped, "", False),
    "wrappers in the middle": (checkpointed, f"{EMPTY}model", False),
    "an export's weights alone": (
        lambda online, momentum: prefixed("network.", online, "fc"),
        *("network", False),
    ),
    "a run's checkpoint with an average": (
        lambda online, momentum: {
            **prefixed("backbone.network.", online, "fc"),
            **prefixed("ema.network.", momentum, "fc"),
        },
        *("ema.network", True),
    ),
}


@pytest.fixture(scope="module")
def encoders():
    return resnet(seed=1), resnet(seed=2)


@pytest.mark.promise(10)
@pytest.mark.parametrize("kind", ["torchvision/resnet18", "timm/resnet18"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_whole_encoder_is_found_and_what_lies_beside_it_is_listed(
    tmp_path, encoders, program, kind
):
    layout, prefix, of_momentum = PROGRAMS[program]
    tree = layout(*encoders)
    path = saved(tree, tmp_path, "checkpoint.pth.tar")
    model = load_backbone(f"{kind}@{path}", crop_px=32)
    assert equals(model, encoders[of_momentum])
    assert not equals(model, encoders[not of_momentum])
    assert model.config.backbone == backbone_settings(kind, {"stem": "imagenet"})
    init = model.config.facts["init"]
    assert (init["loaded"], init["missing"]) == (120, [])
    if prefix not in ("", "0", "2", "state_dict", "model_state_dict", "models.0"):
        assert repr(prefix) in " ".join(init["notes"])
    # each tensor is loaded or listed
    tables = open_checkpoint(read_tree(path)[0], "").tensors
    assert len(init["unexpected"]) == len(tables) - 120
    for key in init["unexpected"]:
        assert key in tables or f"{prefix}.{key}".strip(".") in tables


def test_the_network_that_a_file_names_need_not_be_named(tmp_path, encoders):
    for number, tree in enumerate(
        (
            moco(*encoders),
            {"args": argparse.Namespace(model="resnet18"), **two("encoder.")(*encoders)},
            {"hyper_parameters": {"arch": "resnet18"}, **two("backbone.")(*encoders)},
        )
    ):
        model = load_backbone(saved(tree, tmp_path, f"{number}.pth"), crop_px=32)
        assert model.config.backbone.kind == "torchvision/resnet18"
        assert equals(model, encoders[0])
        assert "'resnet18'" in model.config.facts["init"]["notes"][0]


def test_a_name_in_a_file_that_does_not_fit_is_no_network(tmp_path, encoders):
    for arch in ("resnet34", "vit_small", "nothing", 3):
        path = saved({"arch": arch, **two("encoder.")(*encoders)}, tmp_path)
        with pytest.raises(WeightsError, match=r"timm/resnet50@.*weights\.pth") as caught:
            load_backbone(path, crop_px=32)
        assert repr(arch) in str(caught.value) or arch == 3


def test_a_name_in_a_file_counts_where_the_same_tensors_compute_otherwise(tmp_path):
    """Those of TensorFlow pad otherwise; DeiT's network is that of timm's plain one."""
    network = randomised(timm.create_model("tf_efficientnet_lite0"))
    path = saved({"arch": "tf_efficientnet_lite0", "state_dict": network.state_dict()}, tmp_path)
    with pytest.raises(WeightsError, match=rf"write timm/tf_efficientnet_lite0@{path}"):
        load_backbone(f"timm/efficientnet_lite0@{path}")
    assert equals(load_backbone(f"timm/tf_efficientnet_lite0@{path}"), network)
    plain = randomised(timm.create_model("vit_tiny_patch16_224"))
    path = saved({"arch": "deit_tiny_patch16_224", "state_dict": plain.state_dict()}, tmp_path)
    assert equals(load_backbone(f"timm/vit_tiny_patch16_224@{path}"), plain)


@pytest.mark.parametrize("layout", ["bare", "in a table", "averaged", "wrapped"])
def test_a_whole_classifier_of_torchvision_needs_no_name(tmp_path, encoders, layout):
    online, momentum = encoders
    trees = {
        "bare": online.state_dict(),
        "in a table": {"epoch": 3, "state_dict": online.state_dict()},
        "averaged": averaged(momentum, online),
        "wrapped": wrapped(online, momentum),
    }
    model = load_backbone(saved(trees[layout], tmp_path), crop_px=32)
    assert model.config.backbone.kind == "torchvision/resnet18"
    assert equals(model, online)


def test_what_is_not_whole_by_itself_is_asked_for_and_then_read(tmp_path, encoders):
    """No architecture is guessed: without classifier, or with one of other classes."""
    online, _ = encoders
    other = resnet(num_classes=7)
    deit = randomised(timm.create_model("vit_tiny_patch16_224"))
    for tree, kind in (
        (prefixed("", online, "fc"), "torchvision/resnet18"),
        (other.state_dict(), "torchvision/resnet18"),
        (deit.state_dict(), "timm/vit_tiny_patch16_224"),
    ):
        path = saved(tree, tmp_path)
        with pytest.raises(WeightsError, match=rf"timm/resnet50@{path}"):
            load_backbone(path)
        assert load_backbone(f"{kind}@{path}").config.facts["init"]["missing"] == []


def test_two_encoders_of_one_rank_are_not_chosen_from(tmp_path, encoders):
    tree = {"left": encoders[0].state_dict(), "right": encoders[1].state_dict()}
    with pytest.raises(WeightsError, match=r"'left'.*'right'.*alone|'right'.*'left'.*alone"):
        load_backbone(f"torchvision/resnet18@{saved(tree, tmp_path)}")
    equal = {"left": encoders[0].state_dict(), "right": encoders[0].state_dict()}
    assert equals(load_backbone(f"torchvision/resnet18@{saved(equal, tmp_path)}"), encoders[0])
    # with and without a wrapper, too
    twice = {**encoders[0].state_dict(), **prefixed("module.", encoders[1])}
    with pytest.raises(WeightsError, match="twice, with other values"):
        load_backbone(f"torchvision/resnet18@{saved(twice, tmp_path)}")


def test_counters_of_batchnorm_are_no_fit(tmp_path, encoders):
    counters = {k: t for k, t in encoders[0].state_dict().items() if "num_batches" in k}
    tree = {"decoy": counters, "filler": torch.ones(12_000_000)}
    with pytest.raises(WeightsError, match="0 of 100 tensors do"):
        load_backbone(f"torchvision/resnet18@{saved(tree, tmp_path)}")


def test_a_wrapped_encoder_of_another_architecture_is_named(tmp_path, encoders):
    """As of lightly, by a name that it was not trained with."""
    tree = {"state_dict": prefixed("backbone.", encoders[0])}
    with pytest.raises(WeightsError, match=r"has '.*backbone\.conv1\.weight': was another archit"):
        load_backbone(f"torchvision/resnet50@{saved(tree, tmp_path)}")


@pytest.mark.parametrize("count", [1, 3, 5, 12])
@pytest.mark.parametrize("numbering", ["whole", "of each chunk"])
def test_blocks_in_chunks_are_numbered_through(tmp_path, count, numbering):
    """DINOv2 fills each chunk with nn.Identity up to its first block: numbers are the network's."""
    network = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=0))
    state = {}
    for key, tensor in network.state_dict().items():
        if key.startswith("blocks."):
            _, number, rest = key.split(".", 2)
            within = int(number) if numbering == "whole" else int(number) % count
            key = f"blocks.{int(number) // count}.{within}.{rest}"
        state[f"module.backbone.{key}"] = tensor
    state["module.dino_head.last_layer.weight"] = torch.ones(3, 3)
    path = saved({"teacher": state}, tmp_path)
    assert equals(load_backbone(f"timm/vit_tiny_patch16_224@{path}"), network)


@pytest.mark.parametrize("prefix", ["", "backbone.vit.", "encoder.backbone.module."])
def test_a_masked_autoencoder_is_its_encoder(tmp_path, prefix):
    network = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=0))
    tree = prefixed(prefix, network)
    tree |= {f"{prefix}mask_token": torch.ones(1, 1, 192)}
    tree |= {f"{prefix}masked_embed": torch.ones(1, 192)}  # iBOT's
    tree |= {
        f"{prefix}decoder_pos_embed": torch.ones(1, 197, 8),
        "decoder.norm.bias": torch.ones(8),
    }
    model = load_backbone(f"timm/vit_tiny_patch16_224@{saved({'model': tree}, tmp_path)}")
    assert equals(model, network)
    # it was not trained as timm's usual weights were
    assert model.view.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])


def test_a_norm_behind_the_average_makes_a_network_that_averages(tmp_path):
    """MAE's fine-tunings have fc_norm and no norm: MAE's models_vit.py, global_pool = True."""
    kind = "timm/vit_tiny_patch16_224"
    network = randomised(timm.create_model(kind[5:], num_classes=0, global_pool="avg"))
    tree = {**network.state_dict(), "head.weight": torch.ones(7, 192)}
    path = saved({"model": tree, "epoch": 3}, tmp_path)
    model = load_backbone(f"{kind}@{path}")
    assert equals(model, network)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # by hand: the blocks, the mean of the patches without the class token, the norm
        tokens = network.norm_pre(network._pos_embed(network.patch_embed(images)))
        for block in network.blocks:
            tokens = block(tokens)
        mean = tokens[:, 1:].mean(1)  # (B, 192)
        norm = network.fc_norm
        expected = nn.functional.layer_norm(mean, (192,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert "average" in " ".join(model.config.facts["init"]["notes"])
    # such a network is no release of timm's, whose view has a mean of 0.5
    assert model.view.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    recipes = backbone_settings(kind)
    with pytest.raises(WeightsError, match=r"backbone\.global_pool = 'avg'"):
        read_weights(parse_source(f"{kind}@{path}"), recipes, 224)


@pytest.mark.parametrize("extra", ["reg_token", "norm_pre.weight", "blocks.12.norm1.weight"])
def test_a_part_of_a_larger_network_is_no_part_beside_it(tmp_path, extra):
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    tree = {**network.state_dict(), extra: torch.ones(1, 4, 192)}
    with pytest.raises(WeightsError, match=rf"the backbone has no '{extra}'"):
        load_backbone(f"timm/vit_tiny_patch16_224@{saved(tree, tmp_path)}")


def test_no_student_is_taken_in_place_of_a_larger_teacher(tmp_path, encoders):
    larger = randomised(torchvision.models.resnet34())
    tree = {**prefixed("student.", encoders[0], "fc"), **prefixed("teacher.", larger, "fc")}
    with pytest.raises(WeightsError, match=r"the backbone has no 'layer1\.2\."):
        load_backbone(f"torchvision/resnet18@{saved(tree, tmp_path)}")
    smaller = prefixed("teacher.", randomised(timm.create_model("resnet10t")))
    tree = {**prefixed("student.", encoders[0], "fc"), **smaller}
    assert equals(load_backbone(f"torchvision/resnet18@{saved(tree, tmp_path)}"), encoders[0])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_beside_the_tensors_are_read(tmp_path, encoders, name, zipped):
    tree = {"state_dict": encoders[0].state_dict(), "extra": PLAIN[name]}
    path = tmp_path / "weights.pth"
    torch.save(tree, path, _use_new_zipfile_serialization=zipped)
    assert equals(load_backbone(path, crop_px=32), encoders[0])


def test_nothing_of_another_library_is_called_for_a_plain_value(tmp_path, encoders, monkeypatch):
    """An array that claims 8 TB, and a dtype that no NumPy makes, are read as what they are not."""

    class Claim:
        def __init__(self, function, *arguments):
            self.made = function, arguments

        def __reduce__(self):
            return self.made

    scalar, made = np.array(1.0).reshape(())[()].__reduce__()[0], np.ndarray((1,)).__reduce__()[0]
    for claim in (Claim(made, np.ndarray, (10**12,), b"d"), Claim(scalar, np.dtype("f8"), b"")):
        path = saved({"state_dict": encoders[0].state_dict(), "extra": claim}, tmp_path)
        assert equals(load_backbone(path, crop_px=32), encoders[0])


def test_a_vit_of_moco_v3_is_timms(tmp_path):
    network = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=0))
    layout = two("module.base_encoder.", "module.momentum_encoder.", "module.base_encoder.head.")
    path = saved(layout(network, network), tmp_path)
    model = load_backbone(f"timm/vit_tiny_patch16_224@{path}")
    assert equals(model, network)
    assert model.config.facts["init"]["format"] == "part of a larger model"
    # the view is ImageNet's: timm's own weights of this name have another one
    assert model.view.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    tagged = load_backbone(f"timm/vit_tiny_patch16_224.augreg_in21k@{path}")
    assert tagged.view.mean.tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_a_file_with_the_name_of_a_release_of_timm_has_its_view(tmp_path):
    kind = "vit_small_patch16_224"
    tensors = timm.create_model(kind, num_classes=0).half().state_dict()
    for name, mean in (("dino_deitsmall16_pretrain.pth", 0.485), ("mine.pth", 0.5)):
        model = load_backbone(f"timm/{kind}@{saved(tensors, tmp_path, name)}")
        assert float(model.view.mean[0]) == pytest.approx(mean)
        release = timm.get_pretrained_cfg(kind + ".dino" * (mean < 0.5))
        assert any(f"that of {kind}.{release.tag}" in note for note in model.notes)


def test_what_timm_says_of_its_weights_is_passed_on(tmp_path):
    """OpenAI's need QuickGELU, which no tensor shows, and timm has a network of its own for it."""
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    for kind, said in (
        ("vit_base_patch16_clip_224", True),
        ("vit_base_patch16_clip_quickgelu_224", False),
    ):
        network = timm.create_model(kind, num_classes=0, **small)
        folder = tmp_path / kind
        folder.mkdir()
        saved(network.state_dict(), folder, "pytorch_model.bin")
        stated = {"tag": "openai", "input_size": [3, 224, 224]}
        config = {"architecture": kind, "model_args": small, "pretrained_cfg": stated}
        (folder / "config.json").write_text(json.dumps(config))
        assert any("QuickGELU" in note for note in load_backbone(folder).notes) == said
        assert (
            any("QuickGELU" in note for note in usual_timm_view("x", kind, "openai").notes) == said
        )


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
    model = load_backbone(f"torchvision/resnet18@{path}", crop_px=32)
    assert model.config.backbone.arguments == {"stem": "small"}
    assert difference(model, small, 32) <= 1e-5
    # a bare state dict does not say whether there was a max-pool
    bare = saved(small.state_dict(), tmp_path, "bare.pth")
    source = f"torchvision/resnet18@{bare}"
    with pytest.raises(WeightsError, match=r"3x3.*max-pool") as refused:
        load_backbone(source, crop_px=32)
    # all remedies, as they are written
    (override,) = re.findall(r"'(backbone=.*?)'", str(refused.value))
    named = load_recipe(write_recipe(tmp_path), [override]).backbone
    (call,) = re.findall(
        r"sslpipe.models.backbones.backbone_settings([(].*?[)])", str(refused.value)
    )
    for component in (named, backbone_settings(*ast.literal_eval(call))):
        again = load_backbone(source, component=component, crop_px=32)
        assert difference(again, small, 32) <= 1e-5
    (export,) = re.findall(r"sslpipe.export_backbone[(].*[)]", str(refused.value))
    names = {"sslpipe": sslpipe, "SOURCE": source, "FOLDER": tmp_path / "backbone"}
    eval(export, names)
    assert difference(load_backbone(tmp_path / "backbone"), small, 32) <= 1e-5
