"""A file that is damaged, hostile or of another network is one line, and nothing of it is run."""

import json
import os
import pickle
import re
import resource
import time

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file

from sslpipe.errors import UserError, WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.models import limits
from sslpipe.models.backbones import backbone_settings
from tests.helpers.hostile_weights import HOSTILE, small_resnet
from tests.helpers.weights import randomised, saved


@pytest.fixture(scope="module")
def state():
    return dict(randomised(torchvision.models.resnet18()).state_dict())


def refused(source, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_backbone(source, **options)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 4100
    return text


class Malice:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.promise(10)
@pytest.mark.parametrize("form", ["pickle", "torch", "torch, legacy", "inside a checkpoint"])
def test_a_pickle_that_runs_a_command_does_not_run_it(tmp_path, state, form):
    path, proof = tmp_path / "weights.pth", tmp_path / "was_here"
    malice = Malice(f"touch {proof}")
    if form == "pickle":
        path.write_bytes(pickle.dumps(malice))
    elif form == "inside a checkpoint":
        torch.save({"state_dict": state, "config": malice}, path)
    else:
        torch.save({"conv1.weight": malice}, path, _use_new_zipfile_serialization=form == "torch")
    text = refused(f"torchvision/resnet18@{path}")
    assert not proof.exists()
    said = ["weights.pth"]
    if form in ("torch", "inside a checkpoint"):
        said += ["system", "safetensors.torch.save_file"]  # what to do
    assert all(word in text for word in said)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".bin"])
def test_a_truncated_file_is_one_line(tmp_path, suffix):
    path, state = tmp_path / f"weights{suffix}", small_resnet()
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    raw = path.read_bytes()
    for size in (0, 7, 9, len(raw) // 3, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        assert path.name in refused(f"timm/test_resnet@{path}")


def changed(state, **changes):
    return {**state, **{key.replace("__", "."): value for key, value in changes.items()}}


MISFITS = {
    "a wrong shape": (
        lambda s: changed(s, layer1__0__conv1__weight=torch.ones(64, 32, 3, 3)),
        r"layer1\.0\.conv1\.weight is \(64, 32, 3, 3\), not \(64, 64, 3, 3\)",
    ),
    "a missing key": (
        lambda s: {k: t for k, t in s.items() if k != "layer3.1.bn2.bias"},
        r"has no 'layer3\.1\.bn2\.bias'",
    ),
    "an extra key": (
        lambda s: changed(s, layer5__0__weight=torch.ones(3)),
        r"the backbone has no 'layer5\.0\.weight'",
    ),
    "not finite": (lambda s: changed(s, bn1__bias=torch.full((64,), float("nan"))), "not finite"),
    "a negative variance": (
        lambda s: changed(s, bn1__running_var=torch.full((64,), -1.0)),
        "bn1.running_var has negative",
    ),
    "without values": (
        lambda s: changed(s, bn1__bias=torch.ones(64, device="meta")),
        "without its values, on the meta device",
    ),
    "integers": (lambda s: changed(s, bn1__bias=torch.ones(64, dtype=torch.int64)), "int64"),
    "other tensors": (lambda s: {"a": torch.ones(2), "b": torch.ones(3)}, r"'conv1\.weight'"),
    "no tensors": (lambda s: {"epoch": 3, "state_dict": {}}, "no table of tensors; it has 'epoch'"),
    "two networks": (
        lambda s: {"net": s, "other": {k: t + 1 for k, t in s.items()}},
        r"two such networks, '(net|other)' and '(net|other)'",
    ),
    "a list": (lambda s: [torch.ones(2)], "holds a list"),
}


@pytest.mark.promise(10)
@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_whole_is_refused(tmp_path, state, what):
    change, message = MISFITS[what]
    path = saved(change(state), tmp_path)
    text = refused(f"torchvision/resnet18@{path}")
    assert re.search(message, text), text


@pytest.mark.promise(10)
def test_a_larger_network_of_the_same_keys_is_not_cut(tmp_path, state):
    deeper = torchvision.models.resnet34().state_dict()
    text = refused(f"torchvision/resnet18@{saved(deeper, tmp_path)}")
    assert "the backbone has no 'layer1.2.conv1.weight'" in text
    inner = {"state_dict": {f"module.encoder_q.{key}": t for key, t in deeper.items()}}
    assert "does not fit" in refused(f"torchvision/resnet18@{saved(inner, tmp_path, 'moco.pth')}")


def test_an_architecture_that_nobody_names_is_asked_for(tmp_path):
    path = saved({"a.weight": torch.ones(2), "b.weight": torch.ones(3)}, tmp_path)
    text = refused(path)
    assert all(w in text for w in ("names no architecture", "'a.weight'", f"timm/resnet50@{path}"))


def test_a_small_stem_in_the_recipe_is_named_with_the_remedy(tmp_path, state):
    path = saved(state, tmp_path)
    for stem in ("auto", "small", "small_pool"):
        component = backbone_settings("torchvision/resnet18", {"stem": stem})
        text = refused(path, component=component, crop_px=32)
        assert "is 7x7" in text
        assert "set backbone.stem = 'imagenet'" in text
    component = backbone_settings("torchvision/resnet18", {"stem": "imagenet"})
    assert load_backbone(path, component=component, crop_px=32).view.crop_px == 32


def test_files_that_are_not_there_or_too_many_are_named(tmp_path, state):
    assert "there is no" in refused(tmp_path / "none.pth")
    (tmp_path / "rows.npz").write_bytes(b"PK")
    rows = {"features": torch.zeros(2, 3), "ids": torch.arange(2), "labels": torch.zeros(2)}
    save_file(rows, tmp_path / "rows.safetensors")
    for name in ("rows.npz", "rows.safetensors"):
        text = refused(tmp_path / name)
        assert "vectors, not weights" in text
        assert "sslpipe.rank_features(" in text
        (tmp_path / name).unlink()
    assert "there is no" in refused(f"timm/resnet18@{tmp_path}/none.pth")
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    for kind in ("", "timm/resnet18@"):
        assert "the weights that it was made from" in refused(f"{kind}{tmp_path}/model.onnx")
    for name in ("a.pth", "b.pth"):
        saved({}, tmp_path, name)
    assert "several files of weights (a.pth, b.pth)" in refused(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "neither an export nor a run" in refused(tmp_path / "empty")
    path = saved(state, tmp_path, "c.pth")
    assert "did you mean 'resnet18'" in refused(f"torchvision/resnet81@{path}")
    assert "did you mean" in refused(f"timm/resnet18.a1_in1kk@{path}")
    assert "checkpoint=" in refused(path, checkpoint="step-4")


def test_an_architecture_that_is_no_text_is_named(tmp_path, state):
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": 18}')
    assert "config.json: architecture = 18 is not the name" in refused(tmp_path)


def test_an_index_of_parts_reads_only_what_lies_beside_it(tmp_path, state):
    (tmp_path / "parts").mkdir()
    keys = sorted(state)
    halves = {"one.safetensors": keys[:60], "two.safetensors": keys[60:]}
    for name, part in halves.items():
        save_file({key: state[key] for key in part}, tmp_path / "parts" / name)
    weight_map = {key: name for name, part in halves.items() for key in part}
    index = tmp_path / "parts" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = load_backbone(f"torchvision/resnet18@{tmp_path / 'parts'}", crop_px=32)
    own = model.backbone.network.state_dict()
    assert all(torch.equal(own[key], state[key]) for key in own)
    for wrong in ("../one.safetensors", "none.safetensors", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": {"conv1.weight": wrong}}))
        assert "not beside it" in refused(f"torchvision/resnet18@{tmp_path / 'parts'}")
    index.write_text("{}")
    assert "weight_map is missing" in refused(f"torchvision/resnet18@{tmp_path / 'parts'}")


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "raw", "text"),
    [
        ("a.pth", b"text", "a.pth"),
        ("b.safetensors", b"{}", "b.safetensors"),
        ("c.bin", b"\0" * 100, "c.bin"),
        ("model.safetensors", LFS.encode(), "run: git lfs pull"),
        ("pytorch_model.bin", LFS.encode(), "run: git lfs pull"),
    ],
)
def test_a_wrong_kind_of_file_is_one_line(tmp_path, name, raw, text):
    (tmp_path / name).write_bytes(raw)
    assert text in refused(tmp_path)
    assert text in refused(f"torchvision/resnet18@{tmp_path / name}")


# --- files of the generator


SLOWEST_S = 30.0  # of a busy machine: a quiet one takes a tenth
MOST_GROWTH_KIB = 2 * 2**20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_at_once_in_little_memory(name, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_MODULES", 1000)  # so many take seconds less
    source = HOSTILE[name](tmp_path)
    begin_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(source)
    assert time.monotonic() - begin_s < SLOWEST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KIB


def test_a_part_of_a_run_or_an_export_is_refused_with_the_whole(tmp_path):
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-00000003"
    step.mkdir(parents=True)
    (run / "recipe.json").write_text("{}")
    save_file({"backbone.network.conv1.weight": torch.ones(2)}, step / "model.safetensors")
    (run / "checkpoints" / "latest").write_text("step-00000003")
    for part in (step, step / "model.safetensors"):
        with pytest.raises(WeightsError, match=rf"the run, {run}, .*step-00000003"):
            load_backbone(part)
    for part in (run / "checkpoints", run / "checkpoints" / "latest"):
        with pytest.raises(WeightsError, match=rf"name the run, {run}$"):
            load_backbone(part)
    (step / "SHA256SUMS").touch()
    (step / "config.json").touch()
    export = (run / "checkpoints").rename(tmp_path / "export") / "step-00000003"
    with pytest.raises(WeightsError, match=rf"its folder, {export}$"):
        load_backbone(export / "model.safetensors")


def test_formats_that_hold_no_tensors_for_torch_are_named_with_what_reads_them(tmp_path):
    class Sum(torch.nn.Module):
        def forward(self, x):
            return x + 1

    torch.export.save(torch.export.export(Sum(), (torch.ones(2),)), tmp_path / "model.pt2")
    np.savez(tmp_path / "jax.npz", cls=np.ones(3))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__0_0.distcp").touch()
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"lora_A.weight": torch.zeros(2, 2)}, tmp_path / "lora/adapter_model.safetensors")
    for name, remedy in (
        ("lora", "merge_and_unload"),
        ("model.pt2", "torch.export"),
        ("jax.npz", "checkpoint_path"),
        ("parts", "dcp_to_torch"),
    ):
        with pytest.raises(WeightsError, match=remedy):
            load_backbone(f"timm/resnet18@{tmp_path / name}")
