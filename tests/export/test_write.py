"""An export is the trained backbone or nothing: each format against the model in memory."""

import dataclasses
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torchvision
import torchvision.transforms.v2.functional as tv
from safetensors.torch import load_file, save_file
from torch import nn

import sslpipe
import sslpipe.export
from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import ExportError, UserError
from sslpipe.export import verify
from sslpipe.export.load import FrozenBackbone, freeze
from sslpipe.export.verify import CleanProcess
from sslpipe.export.write import FORMATS, export_model, load_backbone
from sslpipe.models.backbones import build_backbone
from sslpipe.models.simclr import build_projector
from sslpipe.models.state import module_sha256
from sslpipe.portable import process_start
from sslpipe.recipe.base import Component
from sslpipe.recipe.pretrain import Projector

VIEW = EvalView(crop_px=32, resize_px=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))


def trained(
    kind: str = "small_resnet", *, projector: Projector | None = None, **arguments: object
) -> FrozenBackbone:
    """A backbone whose BatchNorm statistics are not those of a fresh one."""
    torch.manual_seed(0)
    component = Component.model_validate({"kind": kind, **arguments})
    backbone = build_backbone(component, crop_px=VIEW.crop_px)
    head = None if projector is None else build_projector(backbone.num_features, projector)
    for module in [*backbone.modules(), *(head or [])]:
        if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm1d)) and module.running_var is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    facts = {"name": "made up", "step": 7, "digest": "d" * 64}
    return freeze(backbone, component, VIEW, facts, head, projector)


def features(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return model(torch.randn(3, 3, 32, 32))


class ReadHere(AbstractContextManager):
    """`CleanProcess` without the process."""

    def __init__(self, folder: Path, images: torch.Tensor) -> None:
        self.folder, self.images, self.found = folder, images, {}

    def __exit__(self, *error: object) -> None: ...

    def start(self, name: str) -> None:
        try:
            with torch.no_grad():
                models = verify.read(name, self.folder)
                self.found[name] = [verify.outputs(model, self.images) for model in models]
        except UserError as error:
            raise ExportError(f"format {name}: {error}") from error

    def outputs(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        return self.found


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_the_package_gives_its_public_names_and_no_other():
    assert sslpipe.export.load_backbone is sslpipe.load_backbone is load_backbone
    assert sslpipe.export.export_model is export_model
    with pytest.raises(AttributeError, match="export_modle"):
        sslpipe.export.export_modle  # noqa: B018


def test_verify_runs_as_a_program_without_a_warning(tmp_path):
    model, images = trained(), torch.randn(3, 3, 32, 32)
    export_model(model, tmp_path / "export", ["safetensors"])
    (tmp_path / "out").mkdir()
    save_file({"images": images}, tmp_path / "out" / "images")
    program = [sys.executable, "-W", "error::RuntimeWarning", "-m", "sslpipe.export.verify"]
    result = subprocess.run(
        [*program, tmp_path / "export", tmp_path / "out"],
        input="safetensors\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert tree(tmp_path / "out") == ["images", "safetensors-0"]
    found = load_file(tmp_path / "out" / "safetensors-0")["features"]
    expected = verify.outputs(model, images)["features"]
    assert verify.relative_difference(found, expected) <= verify.TOLERANCE  # threads may differ


def test_each_format_is_read_without_what_another_left_behind(tmp_path):
    code = """
import os, sys, torch
from sslpipe.export import verify
os.cpu_count = lambda: 1  # one after the other
def look(folder):
    others = {"wave", "torchvision", "sslpipe.export.load"} & {*sys.modules}
    assert not others and not hasattr(torch, "left"), others
    import wave, sslpipe.export.load
    torch.left = True
    return [torch.nn.Flatten()]
def die(folder):
    os.kill(os.getpid(), 9)
verify.READERS.update(first=look, second=look, third=die, fourth=look)
verify.main(*sys.argv[1:])
assert "wave" not in sys.modules
"""
    (tmp_path / "out").mkdir()
    save_file({"images": torch.randn(3, 3, 4, 4)}, tmp_path / "out" / "images")
    subprocess.run(
        [sys.executable, "-c", code, tmp_path, tmp_path / "out"],
        input="first\nsecond\nthird\nfourth\n",
        text=True,
        check=True,
        timeout=120,
    )
    assert tree(tmp_path / "out") == ["first-0", "fourth-0", "images", "second-0", "third.error"]
    assert (tmp_path / "out" / "third.error").read_text() == "it ended with status -9"


def test_an_export_in_both_formats_gives_the_features_of_the_model_in_memory(tmp_path):
    model = trained("torchvision/resnet18", stem="imagenet")
    out = tmp_path / "deep" / "export"
    written = export_model(model, out, ["safetensors", "torchvision"])
    assert written == {
        "safetensors": out / "model.safetensors",
        "torchvision": out / "torchvision" / "resnet18.safetensors",
    }
    assert tree(out) == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "torchvision",
        "torchvision/resnet18.safetensors",
    ]
    assert os.listdir(out.parent) == ["export"]

    again = sslpipe.load_backbone(out)
    assert torch.equal(features(again), features(model))
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    assert again.view.config() == VIEW.config()
    assert again.config == model.config
    assert module_sha256(again.backbone) == module_sha256(model.backbone)

    # torchvision alone, as a user of it would
    network = torchvision.models.resnet18(num_classes=10)
    result = network.load_state_dict(load_file(written["torchvision"]), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["fc.weight", "fc.bias"], [])
    network.fc = nn.Identity()
    torch.testing.assert_close(features(network.eval()), features(model), rtol=0, atol=1e-5)

    for line in (out / "SHA256SUMS").read_text().splitlines():
        sha256, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == sha256
    assert len((out / "SHA256SUMS").read_text().splitlines()) == 4
    card = (out / "README.md").read_text()
    for message in (
        "torchvision/resnet18",
        "512 features",
        "torchvision/resnet18.safetensors",
        "7 st",
    ):
        assert message in card


def test_the_stem_that_auto_chose_is_written_so_that_another_rule_changes_nothing(
    tmp_path, in_this_process
):
    model = trained("torchvision/resnet18")
    export_model(model, tmp_path / "out", ["safetensors"])
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["backbone"] == {"kind": "torchvision/resnet18", "stem": "small"}
    assert torch.equal(features(load_backbone(tmp_path / "out")), features(model))


def test_a_clean_process_loads_an_export_and_encodes_uint8_images(tmp_path, in_this_process):
    model = trained()
    export_model(model, tmp_path / "out", ["safetensors"])
    images = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    save_file({"images": images}, tmp_path / "images")
    code = """
import sys, sslpipe
from safetensors.torch import load_file, save_file
model = sslpipe.load_backbone(sys.argv[1])
save_file({"features": model.encode(load_file(sys.argv[2])["images"])}, sys.argv[3])
"""
    paths = [str(tmp_path / name) for name in ("out", "images", "features")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=120)
    actual = load_file(tmp_path / "features")["features"]
    pixels = tv.resize(images / 255, [32], antialias=True)
    pixels = tv.center_crop(pixels, [32, 32])
    pixels = tv.normalize(pixels, [0.4, 0.5, 0.6], [0.2, 0.2, 0.3])
    with torch.no_grad():
        torch.testing.assert_close(actual, model(pixels), rtol=1e-4, atol=1e-5)


@pytest.fixture
def in_this_process(monkeypatch):
    """Read a written format here: where the test is not about the clean process, which takes
    seconds to start."""
    monkeypatch.setattr("sslpipe.export.write.CleanProcess", ReadHere)


def corrupted(write, damage):
    def corrupting(model: FrozenBackbone, folder: Path) -> Path:
        path = write(model, folder)
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        damage(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return path

    return corrupting


def flip_a_convolution(tensors: dict[str, torch.Tensor]) -> None:
    key = next(k for k, tensor in tensors.items() if tensor.ndim == 4)
    tensors[key] = -tensors[key]


def forget_running_statistics(tensors: dict[str, torch.Tensor]) -> None:
    for key in tensors:
        if key.endswith("running_var"):
            tensors[key] = torch.ones_like(tensors[key])


def drop_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(next(k for k in tensors if k.endswith("running_mean")))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("torchvision", flip_a_convolution, "differ by"),
        ("torchvision", forget_running_statistics, "differ by"),
        ("torchvision", drop_a_tensor, "missing"),
    ],
)
def test_a_damaged_format_is_an_error_and_leaves_no_file(
    tmp_path, monkeypatch, in_this_process, name, damage, message
):
    original = FORMATS[name]
    broken = dataclasses.replace(original, write=corrupted(original.write, damage))
    monkeypatch.setitem(FORMATS, name, broken)
    model = trained("torchvision/shufflenet_v2_x0_5")
    with pytest.raises(ExportError, match=message):
        export_model(model, tmp_path / "out", [name])
    assert tree(tmp_path) == []


def test_a_format_that_a_clean_process_cannot_load_is_an_error_and_leaves_no_file(
    tmp_path, monkeypatch
):
    original = FORMATS["safetensors"]
    broken = dataclasses.replace(original, write=corrupted(original.write, flip_a_convolution))
    monkeypatch.setitem(FORMATS, "safetensors", broken)
    message = "a clean process could not load it: .*not those that config.json names"
    with pytest.raises(ExportError, match=message):
        export_model(trained(), tmp_path / "out", ["safetensors"])
    assert tree(tmp_path) == []


def test_a_format_that_cannot_be_written_ends_the_proofs_of_the_others(tmp_path, monkeypatch):
    def fails(model: FrozenBackbone, folder: Path) -> Path:
        time.sleep(1)  # the clean process has begun
        raise ExportError("no room")

    started = []

    class Spied(CleanProcess):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            started.append(self._process)

    monkeypatch.setattr("sslpipe.export.write.CleanProcess", Spied)
    monkeypatch.setitem(FORMATS, "pt2", dataclasses.replace(FORMATS["pt2"], write=fails))
    with pytest.raises(ExportError, match="no room"):
        export_model(trained(), tmp_path / "out", ["safetensors", "pt2"])
    assert tree(tmp_path) == []
    assert started[0].returncode == -9


def test_a_failed_export_leaves_the_one_before_it_as_it_was(tmp_path, monkeypatch, in_this_process):
    out = tmp_path / "out"
    export_model(trained(), out, ["safetensors"])
    before = {name: (out / name).read_bytes() for name in tree(out)}
    with pytest.raises(ExportError, match="exists"):
        export_model(trained(), out, ["safetensors"])
    original = FORMATS["safetensors"]
    broken = dataclasses.replace(original, write=corrupted(original.write, drop_a_tensor))
    monkeypatch.setitem(FORMATS, "safetensors", broken)
    with pytest.raises(ExportError, match="safetensors"):
        export_model(trained(), out, ["safetensors"], overwrite=True)
    assert {name: (out / name).read_bytes() for name in tree(out)} == before
    assert os.listdir(tmp_path) == ["out"]
    monkeypatch.setitem(FORMATS, "safetensors", original)
    export_model(trained(widths=[8, 16]), out, ["safetensors"], overwrite=True)
    assert load_backbone(out).num_features == 16
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("kind", "arguments", "formats", "message"),
    [
        ("torchvision/resnet18", {"stem": "small"}, ["torchvision"], "small-image stem 'small'"),
        ("torchvision/resnet18", {"stem": "small_pool"}, ["timm"], "small-image stem 'small_pool'"),
        ("timm/resnet18", {}, ["timm"], "small-image stem 'small'"),
        ("torchvision/shufflenet_v2_x0_5", {}, ["timm"], "nor a ResNet"),
        ("torchvision/vit_b_32", {}, ["torchvision"], "another position table"),
        (
            "torchvision/resnet18",
            {"stem": "imagenet", "embedding_dim": 8},
            ["timm"],
            "embedding layer of 8",
        ),
        (
            "torchvision/resnet18",
            {"stem": "imagenet", "normalize": True},
            ["torchvision"],
            "length 1",
        ),
        ("small_resnet", {}, ["timm", "safetensors"], "can have safetensors, onnx, pt2, hf"),
        ("small_resnet", {}, ["torchvision"], "none of torchvision's"),
        ("timm/resnet10t", {}, ["torchvision"], "none of torchvision's"),
        ("small_resnet", {}, ["safetensor"], "did you mean 'safetensors'"),
        ("small_resnet", {}, [], "no format"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, kind, arguments, formats, message
):
    with pytest.raises(ExportError, match=message):
        export_model(trained(kind, **arguments), tmp_path / "out", formats)
    assert tree(tmp_path) == []


def test_features_that_are_not_finite_are_not_exported(tmp_path):
    model = trained()
    with torch.no_grad():
        model.backbone.network[0].weight.fill_(torch.nan)
    with pytest.raises(ExportError, match="not finite"):
        export_model(model, tmp_path / "out", ["safetensors"])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    FORMATS["safetensors"].write(trained(), out)
    return out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(format_version=2), "format_version"),
        (lambda c: c.update(extra=1), "extra"),
        (lambda c: c.pop("view"), "view"),
        (lambda c: c["backbone"].update(kind="small_resnt"), "did you mean"),
        (lambda c: c["backbone"].update(widths=[8]), "num_features = 128, but its backbone has 8"),
        (lambda c: c["view"].update(crop_px=99), "crop_px"),
        (lambda c: c.update(weights_sha256="0" * 64), "not those that config.json names"),
    ],
)
def test_a_config_that_does_not_fit_is_one_clear_error(exported, tmp_path, edit, message):
    config = json.loads((exported / "config.json").read_text())
    edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((exported / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=message):
        load_backbone(tmp_path)


def test_a_folder_without_an_export_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"neither an export nor a run: it has no .*config\.json"):
        load_backbone(tmp_path)


def test_pickled_weights_are_never_read(exported, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    torch.save({"weights": Trap()}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError):
        load_backbone(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_what_a_killed_export_left_beside_its_folder_goes_with_the_next_one(
    tmp_path, in_this_process
):
    """Not what another machine, a living process or another export's folder has there."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    host, dead = socket.gethostname(), f"{int(ended.stdout)}-1"
    left = tmp_path / f".backbone.{host}-{dead}.exporting"
    others = [
        tmp_path / f".backbone.elsewhere-{dead}.exporting",
        tmp_path / f".backbone.{host}-{os.getppid()}-{process_start(os.getppid())}.exporting",
        tmp_path / f".others.{host}-{dead}.exporting",
    ]
    for folder in (left, *others):
        (folder / "export").mkdir(parents=True)
    export_model(trained(), tmp_path / "backbone", ("safetensors",))
    assert set(tmp_path.iterdir()) == {tmp_path / "backbone", *others}
