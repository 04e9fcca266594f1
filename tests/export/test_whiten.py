"""A whitening inside an export: at every instant of its writing the export is whole."""

import os
import re
import shutil
from pathlib import Path

import onnx
import pytest
import torch

import sslpipe
from sslpipe.errors import ExportError, UserError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export import verify
from sslpipe.export.load import load_backbone
from sslpipe.export.whitening import flatten_backbone, whiten
from sslpipe.export.write import export_backbone
from sslpipe.portable import sha256_of
from tests.helpers.exports import trained, tree

pytestmark = pytest.mark.usefixtures("proved_here")
IMAGES = torch.randint(0, 256, (3, 3, 40, 40), generator=torch.Generator().manual_seed(0)).byte()


class Killed(BaseException): ...


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """An export, and a features file of its own."""
    folder = tmp_path_factory.mktemp("whiten")
    export_backbone(trained(), folder / "out", ["safetensors"])
    config = load_backbone(folder / "out").config
    rows = torch.randn(50, config.num_features, generator=torch.Generator().manual_seed(0))
    facts = {"backbone_sha256": config.weights_sha256, "view": config.view}
    ids = torch.arange(50)
    save_embeddings(folder / "train.safetensors", Embeddings(rows, ids % 2, ids), facts)
    return folder / "out", folder / "train.safetensors"


def encoded(folder: Path) -> torch.Tensor:
    return load_backbone(folder).encode(IMAGES)


@pytest.mark.parametrize(("power", "used"), [(0.0, 0.0), (0.5, 0.5), (None, 0.25)])
def test_a_power_also_one_chosen_on_train_flattens_what_the_export_encodes(
    export, tmp_path, power, used
):
    (out, train), said = export, []
    shutil.copytree(out, tmp_path / "out")
    whiten(tmp_path / "out", train, power=power, say=said.append)
    if power is None:  # of two classes
        chosen = "power 0.25, as labels cannot choose: 2 classes have two images or more"
        assert said.pop(0).startswith(chosen)
    assert said[0].startswith("50 rows are few for 128 features")
    expected = fit_whitening(load_embeddings(train)[0], power=used).apply(encoded(out))
    torch.testing.assert_close(encoded(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whitened_before", [False, True])
def test_a_whitening_that_is_killed_leaves_the_export_before_or_the_one_after(
    export, tmp_path, monkeypatch, whitened_before
):
    out, train = export
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(out, before)
    if whitened_before:
        whiten(before, train, power=0.5)
    shutil.copytree(before, after)
    whiten(after, train, dims=5)
    known = [encoded(before), encoded(after)]
    assert known[1].shape == (3, 5)

    # killed before each file that is put in its place, and then begun again
    real, seen = os.replace, []
    for last in range(10):
        folder, left = tmp_path / f"killed-{last}", last
        shutil.copytree(before, folder)

        def replace(source, target):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(Path, "replace", replace)
        try:
            whiten(folder, train, dims=5)
        except Killed:
            pass
        else:
            break
        finally:
            monkeypatch.undo()
        actual = encoded(folder)
        seen.append([torch.equal(actual, features) for features in known])
        whiten(folder, train, dims=5)
        assert tree(folder) == tree(after)
        assert all((folder / p).read_bytes() == (after / p).read_bytes() for p in tree(after))
    assert seen == [[True, False]] * 3 + [[False, True]] * 3


@pytest.mark.parametrize("form", ["embeddings", "tensor", "array", "file"])
def test_python_flattens_an_export_by_features_of_any_form(export, tmp_path, form):
    out, train = export
    shutil.copytree(out, tmp_path / "out")
    rows, _ = load_embeddings(train)
    given = {"embeddings": rows, "tensor": rows.features, "array": rows.features.numpy()}
    fitted = sslpipe.whiten(str(tmp_path / "out"), given.get(form, str(train)), power=0.5, dims=7)
    expected = fit_whitening(rows, power=0.5, dims=7).apply(encoded(out))
    torch.testing.assert_close(encoded(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)
    assert "-> 7 features" in repr(fitted)
    if form != "file":
        with pytest.raises(UserError, match="flattens its features already"):
            sslpipe.whiten(tmp_path / "out", rows)
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(out, tmp_path / "out")
        with pytest.raises(UserError, match="has 9 features a row"):
            sslpipe.whiten(tmp_path / "out", torch.ones(30, 9))
    with pytest.raises(UserError, match="dims = 999"):
        sslpipe.whiten(out, train, dims=999)


def flattened_by_the_card(folder: Path, features: torch.Tensor) -> torch.Tensor:
    """What the lines of README.md make of features."""
    section = (folder / "README.md").read_text().partition("## Flattening")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("## Measured")[0], re.DOTALL)
    known = {"features": features}
    exec(code.replace("FOLDER", str(folder)), known)
    return known["features"]


def test_programs_hold_the_flattening_as_their_last_layer(tmp_path):
    model = trained(widths=[8, 16])
    with torch.no_grad():
        views = model.view(IMAGES, torch.tensor([[40, 40]] * 3))
        network = model(views)
        noise = model(torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    rows = Embeddings(noise, torch.arange(60) % 2, torch.arange(60))
    fitted = fit_whitening(rows, dims=5, power=1)
    flatten_backbone(model, fitted)
    written = export_backbone(model, tmp_path / "out", ["all"])
    assert list(written) == ["safetensors", "onnx", "pt2"]
    expected = (network.double() - fitted.mean) @ fitted.projection  # (3, 5)
    for name in ("onnx", "pt2"):
        (program,) = verify.read(name, tmp_path / "out")
        error = (program(views) - expected).abs().max() / expected.abs().max()
        assert float(error) <= verify.TOLERANCE, name
    torch.testing.assert_close(encoded(tmp_path / "out").double(), expected, rtol=1e-5, atol=1e-5)
    stated = {each.key: each.value for each in onnx.load(written["onnx"]).metadata_props}
    assert stated["features"] == "(batch, 5) float32, flattened"
    # what is the network's own is flattened by the lines of the card
    card = (tmp_path / "out" / "README.md").read_text()
    assert "(B, 5), flattened" in card
    torch.testing.assert_close(flattened_by_the_card(tmp_path / "out", network), expected)


def test_a_program_without_the_flattening_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    model = trained(widths=[8])
    rows = torch.randn(60, model.num_features, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(60)
    flatten_backbone(model, fit_whitening(Embeddings(rows, ids, ids), power=0.5))
    monkeypatch.setattr(type(model), "flattened", property(lambda self: self.backbone))
    with pytest.raises(ExportError, match=r"format pt2: features in a clean process differ"):
        export_backbone(model, tmp_path / "out", ["pt2"])
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_whitened_export_flattens_what_was_written_before(export, tmp_path):
    out, train = export
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "model.onnx").touch()
    for dims in (7, 5):  # the second replaces the section of the first
        if dims == 5:
            with pytest.raises(UserError, match=r"model.onnx may hold the flattening"):
                whiten(tmp_path / "out", train, dims=dims)
            (tmp_path / "out" / "model.onnx").unlink()
        whiten(tmp_path / "out", train, dims=dims)
        backbone = load_backbone(tmp_path / "out")
        network = backbone(backbone.view(IMAGES, torch.tensor([[40, 40]] * 3)))
        rows = flattened_by_the_card(tmp_path / "out", network).float()
        assert rows.shape == (3, dims)
        torch.testing.assert_close(rows, encoded(tmp_path / "out"), rtol=1e-5, atol=1e-5)
        card = (tmp_path / "out" / "README.md").read_text()
        assert re.findall("^## .*", card, re.MULTILINE) == [
            "## Loading", "## Flattening", "## Measured"
        ]  # fmt: skip
        sums = dict(
            line.split("  ")[::-1]
            for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
        )
        assert sums["README.md"] == sha256_of(tmp_path / "out" / "README.md")


def test_a_folder_of_another_program_is_not_whitened(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "test_resnet"}')
    with pytest.raises(UserError, match="write an export of it with `sslpipe export` first"):
        whiten(tmp_path, tmp_path / "train.safetensors")
    assert (tmp_path / "config.json").read_text() == '{"architecture": "test_resnet"}'
