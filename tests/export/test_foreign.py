"""Weights that another program trained are exported with what is known of them, and exported on."""

import json

import pytest
import timm
import torch
from typer.testing import CliRunner

import sslpipe.cli.export
from sslpipe.errors import UserError
from sslpipe.export.load import load_backbone
from sslpipe.export.whiten import whiten_export
from sslpipe.portable import sha256_of
from tests.helpers.weights import randomised, saved


@pytest.fixture(scope="module")
def exported(tmp_path_factory, proved_here):
    """A file of timm's, its export in two formats, and that export's own."""
    folder = tmp_path_factory.mktemp("foreign")
    network = randomised(timm.create_model("mobilenetv3_small_050"))
    file = saved(network.state_dict(), folder)
    source = f"timm/mobilenetv3_small_050.lamb_in1k@{file}"
    for given, out, formats in (
        (source, "first", ("safetensors", "timm")),
        (str(folder / "first" / "timm"), "second", ("safetensors",)),
    ):
        words = ["export", given, "--out", str(folder / out)]
        words += [word for name in formats for word in ("--format", name)]
        result = CliRunner().invoke(sslpipe.cli.export.app, words)
        assert result.exit_code == 0, result.output
    return source, file, folder


def test_what_is_known_of_the_weights_goes_with_them(exported):
    source, file, folder = exported
    original = load_backbone(source)
    init = original.config.facts["init"]
    assert (init["source"], init["sha256"]) == (source, sha256_of(file))
    for place in (folder / "first", folder / "first" / "timm", folder / "second"):
        again = load_backbone(place)
        assert again.config.facts["init"] == init
        assert again.config.view == original.config.view
        assert again.config.view["interpolation"] == "bicubic"
        state = original.backbone.state_dict()
        assert all(torch.equal(t, state[key]) for key, t in again.backbone.state_dict().items())


def test_the_model_card_says_whose_weights_they_are(exported):
    _, file, folder = exported
    for place in ("first", "second"):
        card = (folder / place / "README.md").read_text()
        assert "another program trained" in card
        assert "self-supervised contrastive learning" not in card
        assert f"sha256 `{sha256_of(file)[:16]}`" in card
        assert "bicubic, antialiased" in card


def test_timms_own_config_has_the_weights_view(exported):
    folder = exported[2]
    stated = json.loads((folder / "first" / "timm" / "config.json").read_text())["pretrained_cfg"]
    view = load_backbone(folder / "first").view
    assert (stated["interpolation"], stated["crop_mode"]) == ("bicubic", "center")
    assert stated["input_size"] == [3, view.crop_px, view.crop_px]
    assert stated["mean"] == pytest.approx(view.mean.tolist())


def test_a_folder_of_another_program_is_not_whitened(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "test_resnet"}')
    with pytest.raises(UserError, match="write an export of it with `sslpipe export` first"):
        whiten_export(tmp_path, tmp_path / "train.safetensors")
    assert (tmp_path / "config.json").read_text() == '{"architecture": "test_resnet"}'
