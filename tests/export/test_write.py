"""An export is the trained backbone or nothing: written whole, proved in a clean process."""

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torchvision
import torchvision.transforms.v2.functional as tv
from safetensors.torch import load_file, save_file
from torch import nn

import sslpipe
from sslpipe.errors import ExportError
from sslpipe.export import verify, write
from sslpipe.export.load import load_backbone
from sslpipe.export.write import FORMATS, export_backbone
from sslpipe.portable import sha256_of
from tests.helpers.exports import features, trained, tree

pytestmark = pytest.mark.usefixtures("proved_here")


def test_a_format_that_ends_the_clean_process_is_an_error_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\ntorch.export.load = lambda path: os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(write, "read_outputs", verify.read_outputs)
    with pytest.raises(ExportError, match=r"format pt2: .* could not load it: it ended with -9"):
        export_backbone(trained(), tmp_path / "out", ["safetensors", "pt2"])
    assert not (tmp_path / "out").exists()


@pytest.mark.promise(7)
def test_an_export_in_both_formats_gives_the_features_of_the_model_in_memory(tmp_path):
    model = trained("torchvision/resnet18", stem="imagenet")
    out = tmp_path / "deep" / "export"
    written = export_backbone(model, out, ["safetensors", "torchvision"])
    of_torchvision = "torchvision/resnet18.safetensors"
    files = ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]
    assert tree(out) == [*files, "torchvision", of_torchvision]
    assert [*written.values()] == [out / files[-1], out / of_torchvision]
    assert os.listdir(out.parent) == ["export"]

    again = sslpipe.load_backbone(out)
    assert torch.equal(features(again), features(model))
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    assert again.config == model.config

    # torchvision alone, as a user of it would
    network = torchvision.models.resnet18(num_classes=10)
    result = network.load_state_dict(load_file(out / of_torchvision), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["fc.weight", "fc.bias"], [])
    network.fc = nn.Identity()
    torch.testing.assert_close(features(network.eval()), features(model), rtol=0, atol=1e-5)
    images = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    pixels = tv.center_crop(tv.resize(images / 255, [32], antialias=True), [32, 32])
    pixels = tv.normalize(pixels, [0.4, 0.5, 0.6], [0.2, 0.2, 0.3])
    torch.testing.assert_close(again.encode(images), network(pixels), rtol=1e-4, atol=1e-5)

    names = [name for name in tree(out) if (out / name).is_file() and name != "SHA256SUMS"]
    sums = [f"{sha256_of(out / name)}  {name}" for name in names]
    assert (out / "SHA256SUMS").read_text().splitlines() == sums
    card = (out / "README.md").read_text()
    assert all(text in card for text in ("torchvision/resnet18`", "512 features", "7 steps"))


def test_the_stem_that_auto_chose_is_written_so_that_another_rule_changes_nothing(tmp_path):
    model = trained("torchvision/resnet18")
    export_backbone(model, tmp_path / "out", ["safetensors"])
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["backbone"] == {"kind": "torchvision/resnet18", "stem": "small"}
    assert torch.equal(features(load_backbone(tmp_path / "out")), features(model))


def break_format(monkeypatch, name: str, damage) -> None:
    """Have a format written, then `damage(path, model)` done to it."""
    write_whole = FORMATS[name].write

    def broken(model, folder):
        path = write_whole(model, folder)
        damage(path)
        return path

    monkeypatch.setitem(FORMATS, name, dataclasses.replace(FORMATS[name], write=broken))


def flip_a_convolution(path) -> None:
    tensors = load_file(path)
    key = next(k for k, tensor in tensors.items() if tensor.ndim == 4)
    save_file({**tensors, key: -tensors[key]}, path, metadata={"format": "pt"})


@pytest.mark.promise(7)
def test_a_format_that_a_clean_process_cannot_load_is_an_error_and_leaves_no_file(
    tmp_path, monkeypatch
):
    def in_this_process(command, **options):
        verify.main(*map(str, command[3:]))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(verify.subprocess, "run", in_this_process)
    monkeypatch.setattr(write, "read_outputs", verify.read_outputs)
    break_format(monkeypatch, "safetensors", flip_a_convolution)
    message = "a clean process could not load it: .*not those that config.json names"
    with pytest.raises(ExportError, match=message):
        export_backbone(trained(), tmp_path / "out", ["safetensors"])
    assert tree(tmp_path) == []


def test_a_failed_export_leaves_the_one_before_it_as_it_was(tmp_path):
    out = tmp_path / "out"
    export_backbone(trained(), out, ["safetensors"])
    before = {name: (out / name).read_bytes() for name in tree(out)}
    with pytest.raises(ExportError, match="exists"):
        export_backbone(trained(), out, ["safetensors"])
    with pytest.MonkeyPatch.context() as patch:
        break_format(patch, "safetensors", flip_a_convolution)
        with pytest.raises(ExportError, match="safetensors"):
            export_backbone(trained(), out, ["safetensors"], overwrite=True)
    assert {name: (out / name).read_bytes() for name in tree(out)} == before
    assert os.listdir(tmp_path) == ["out"]
    export_backbone(trained(widths=[8, 16]), out, ["safetensors"], overwrite=True)
    assert load_backbone(out).num_features == 16
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("folder", ["a run", "an export with notes", "a file"])
def test_what_no_export_wrote_is_not_replaced_by_one(tmp_path, folder):
    out = tmp_path / "out"
    if folder == "an export with notes":
        export_backbone(trained(RESNET, **IMAGENET), out, ["safetensors", "timm"])
    if folder == "a file":
        out.write_text("mine")
    else:
        (out / "checkpoints/step-00000003").mkdir(parents=True)
        (out / "checkpoints/step-00000003/model.safetensors").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    named = "out holds out" if folder == "a file" else "checkpoints/step-00000003/model.safetensors"
    with pytest.raises(ExportError, match=named):
        export_backbone(trained(), out, ["safetensors"], overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_export_that_a_desktop_looked_at_is_replaced(tmp_path):
    out = tmp_path / "out"
    export_backbone(trained(), out, ["safetensors"])
    (out / ".DS_Store").write_bytes(b"\0")
    export_backbone(trained(), out, ["safetensors"], overwrite=True)
    assert not (out / ".DS_Store").exists()


RESNET, IMAGENET = "torchvision/resnet18", {"stem": "imagenet"}


@pytest.mark.parametrize(
    ("kind", "arguments", "formats", "message"),
    [
        (RESNET, {"stem": "small"}, ["torchvision"], "small-image stem 'small'"),
        (
            RESNET,
            {"stem": "small_pool"},
            ["timm"],
            "small-image stem 'small_pool'.*stem=\"imagenet\"",
        ),
        ("timm/resnet18", {}, ["timm"], "small-image stem 'small'"),
        ("torchvision/shufflenet_v2_x0_5", {}, ["timm"], "nor a ResNet"),
        ("torchvision/vit_b_32", {}, ["torchvision"], "another position table"),
        (RESNET, {**IMAGENET, "embedding_dim": 8}, ["torchvision"], "embedding layer of 8"),
        (RESNET, {**IMAGENET, "normalize": True}, ["torchvision"], "length 1"),
        (RESNET, {**IMAGENET, "pool": "max"}, ["timm"], "backbone.pool = 'max'"),
        ("small_resnet", {}, ["timm", "safetensors"], "this backbone can have safetensors"),
        ("small_resnet", {}, ["torchvision"], "not one of torchvision's"),
        ("small_resnet", {}, ["safetensor"], "did you mean 'safetensors'"),
        ("small_resnet", {}, [], "no format"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, kind, arguments, formats, message
):
    with pytest.raises(ExportError, match=message):
        export_backbone(trained(kind, **arguments), tmp_path / "out", formats)
    assert tree(tmp_path) == []


def test_what_a_killed_export_left_beside_its_folder_goes_with_the_next_one(tmp_path):
    for name in (".backbone.exporting", ".others.exporting"):
        (tmp_path / name / "export").mkdir(parents=True)
    export_backbone(trained(), tmp_path / "backbone", ("safetensors",))
    assert sorted(os.listdir(tmp_path)) == [".others.exporting", "backbone"]


def test_pickled_weights_are_never_read(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    (tmp_path / "out").mkdir()
    FORMATS["safetensors"].write(trained(), tmp_path / "out")
    torch.save({"weights": Trap()}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ExportError):
        load_backbone(tmp_path / "out")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_exports_into_one_folder_at_once_one_is_there_and_whole(tmp_path, overwrite):
    """Without --overwrite the second is refused; with it, it replaces the first."""
    out = tmp_path / "out"
    models = [trained("timm/resnet10t", embedding_dim=width) for width in (8, 16, 24)]

    def export(model):
        try:
            export_backbone(model, out, ["safetensors", "timm"], overwrite=overwrite)
        except ExportError as error:
            return str(error)
        return "written"

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(export, models))
    assert said.count("written") == (3 if overwrite else 1)
    assert all("exists" in text for text in said if text != "written")
    assert load_backbone(out).num_features in (8, 16, 24)
    assert load_backbone(out / "timm").config == load_backbone(out).config
    assert os.listdir(tmp_path) == ["out"]
