"""Images of other channels and depths through a whole run: trained, scored, exported, used."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import sslpipe
from sslpipe.api import train
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import embed
from sslpipe.export.start import fit_channels
from sslpipe.export.write import export_backbone
from sslpipe.recipe.reading import parse_recipe
from sslpipe.sharding.show import CELL_PX, MARGIN_PX
from tests.helpers.channels import RECIPE, accuracy, recipe, run_on_five, sslpipe_run
from tests.helpers.exports import trained

pytestmark = pytest.mark.usefixtures("proved_here")
RNG = np.random.default_rng(0)
CONTIG = {"photometric": "minisblack", "planarconfig": "contig"}


def embedded(model, *folders: Path) -> list[torch.Tensor]:
    """Features of the test split of some data sets, each in the range of its own."""
    found = [(model.matched(load_index(data).split("test"))) for data in folders]
    return [embed(own.backbone, own.view, split).features for own, (split,) in found]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return run_on_five(tmp_path_factory.mktemp("five"))


@pytest.mark.promise(16)
def test_a_run_knows_its_channels_from_the_data_to_the_export(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    assert model.backbone.channels == 5
    assert model.image_type == load_index(five / "data").image_type
    assert accuracy(model, five / "data") > 0.8
    export_backbone(model, tmp_path / "out", ("safetensors", "onnx"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["image"]["channels"] == ["a", "b", "c", "d", "e"]
    assert "uint16" in (tmp_path / "out" / "README.md").read_text()
    again, image = sslpipe.load_backbone(tmp_path / "out"), np.load(five / "img/class0/0.npy")
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    wanted = model.encode(image)
    for given in (tensor, tensor[None], image, [image], [tensor]):
        torch.testing.assert_close(again.encode(given), wanted)


def test_images_of_another_kind_are_refused_by_name(five):
    model = sslpipe.load_backbone(five / "run")
    for given, told in (
        (torch.zeros(5, 28, 28, dtype=torch.uint8), r"torch.uint8 of shape \(5, 28, 28\)"),
        (torch.zeros(3, 28, 28).to(torch.uint16), "uint16 in 5 channels"),
        (np.zeros((28, 28, 3), np.uint16), "ndarray of uint16"),
        (Image.new("RGB", (28, 28)), "Image"),
    ):
        with pytest.raises(UserError, match=told):
            model.encode(given)


def test_a_path_is_refused_where_nothing_reads_such_files(five, monkeypatch):
    monkeypatch.setattr("sslpipe.export.model.offered", lambda name: ())
    with pytest.raises(UserError, match=r"0\.npy .*give arrays"):
        sslpipe.load_backbone(five / "run").encode(five / "img/class0/0.npy")


def test_another_range_of_the_data_changes_no_feature(five):
    """The same pixels, in a data set of another stated range; a run's start, a join of two."""
    folders = five / "data", five / "wide"
    model = sslpipe.load_backbone(five / "run")
    own, other = embedded(model, *folders)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    start = fit_channels(model, load_index(five / "wide"))  # of a run that continues it
    split = load_index(five / "wide").split("test")
    torch.testing.assert_close(embed(start.backbone, start.view, split).features, other)
    joined = sslpipe.load_backbone(f"{five}/run+{five}/run@32")
    torch.testing.assert_close(*embedded(joined, *folders), rtol=1e-4, atol=1e-4)


def test_an_export_whitened_on_data_of_another_range_encodes_as_before(five, tmp_path):
    """Whitening to all axes with power 0 only turns and centres: distances stay."""
    model, out, rows = sslpipe.load_backbone(five / "run"), tmp_path / "out", tmp_path / "rows"
    export_backbone(model, out, ("safetensors",))
    sslpipe_run("embed", out, "--data", five / "wide", "--split", "train", "--out", rows)
    sslpipe_run("whiten", out, rows, "--power", "0")
    images = [np.load(path) for path in sorted((five / "img").rglob("*.npy"))[:6]]
    before, after = (each.encode(images) for each in (model, sslpipe.load_backbone(out)))
    torch.testing.assert_close(torch.cdist(after, after), torch.cdist(before, before))


def test_pictures_say_which_channels_they_show(five, tmp_path):
    image = load_index(five / "data").image_type
    names = [f"{c} ({image.low[k]:g} to {image.high[k]:g})" for k, c in enumerate("abc")]
    caption = f"{names[0]} as red, {names[1]} as green, {names[2]} as blue"
    sslpipe_run("report", five / "run", "--data", five / "data", "--out", tmp_path / "a.html")
    assert f"Pictures show {caption}." in (tmp_path / "a.html").read_text()
    out = tmp_path / "strip.png"
    words = ("shards", "show", five / "data", "--ids", "3,5", "--all-channels", "--out", out)
    assert f"pictures show {caption}" in sslpipe_run(*words)
    raw = Reader(load_index(five / "data").split("train")).one(3).image
    units = decode(raw, 28, image_type=image)
    sheet, first = np.asarray(Image.open(out)), MARGIN_PX
    for grey in units.round().clip(0, 255).repeat(CELL_PX // 28, 1).repeat(CELL_PX // 28, 2):
        cell = sheet[MARGIN_PX : MARGIN_PX + len(grey), first : first + len(grey)]
        np.testing.assert_array_equal(cell, grey[..., None].repeat(3, 2))
        first += CELL_PX + 2


def test_some_channels_are_trained_on_and_found_again_by_name(five, tmp_path):
    picked = recipe(data={**RECIPE["data"], "channels": ["e", "b"]}, steps=15)
    train(picked, five / "data", tmp_path / "run")
    model = sslpipe.load_backbone(tmp_path / "run")
    assert model.image_type.channels == ("e", "b")
    assert accuracy(model, five / "data") > 0.5  # the split has all five
    with pytest.raises(UserError, match="takes images of uint8"):
        trained().matched(load_index(five / "data").split("test"))


@pytest.mark.parametrize(
    ("channels", "kernels"), [(None, [0, 1, 2, 0, 1]), (["e", "b", "a"], [0, 1, 2])]
)
def test_rgb_weights_begin_with_a_first_layer_for_the_data(five, tmp_path, channels, kernels):
    start = trained(widths=[16, 32])
    tree = {**RECIPE, "steps": 4, "tune": {"layer_decay": 0.9}, "run": {"save_steps": 2}}
    del tree["backbone"]
    tree["data"] = {**RECIPE["data"], **({"channels": channels} if channels else {})}
    chosen = parse_recipe(tree, "a test")
    train(chosen, five / "data", tmp_path / "run", init=start)
    kept = sslpipe.load_backbone(tmp_path / "run" / "init")
    own, first = start.backbone.state_dict(), kept.backbone.state_dict()
    key = "network.0.weight"
    torch.testing.assert_close(first[key], own[key][:, kernels] * 3 / len(kernels))
    assert all(torch.equal(own[name], first[name]) for name in own if name != key)
    longer = parse_recipe({**tree, "steps": 6}, "a test")
    assert sslpipe.load_backbone(tmp_path / "run").backbone.channels == len(kernels)
    with pytest.raises(UserError, match="steps"):  # another run: nothing is silently resumed
        train(longer, five / "data", tmp_path / "run", init=start)
    assert train(chosen, five / "data", tmp_path / "run", init=start) == 4


def test_channels_that_the_data_have_not_are_refused(five):
    for changes, told in (
        ({"backbone": {**RECIPE["backbone"], "channels": 4}}, "backbone.channels = 4"),
        ({"augment": {**RECIPE["augment"], "hue": 0.1}}, "hue"),
        ({"data": {**RECIPE["data"], "channels": ["x"]}}, "no channel 'x'"),
    ):
        with pytest.raises(UserError, match=told):
            train(recipe(**changes), five / "data", five / "refused")


def test_weights_of_others_for_as_many_channels_start_a_run_and_other_data_are_refused(
    five, tmp_path
):
    torch.manual_seed(0)
    theirs = timm.create_model("resnet10t", in_chans=5, num_classes=7).eval()
    save_file(theirs.state_dict(), tmp_path / "five.safetensors")
    source = f"timm/resnet10t@{tmp_path}/five.safetensors"
    own = recipe(backbone={"kind": "timm/resnet10t"}, steps=2)
    train(own, five / "data", tmp_path / "run", init=source)
    start = sslpipe.load_backbone(tmp_path / "run" / "init")
    assert start.image_type == load_index(five / "data").image_type
    images = torch.randn(2, 5, 32, 32)
    wanted = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    torch.testing.assert_close(start(images), wanted, rtol=1e-4, atol=1e-5)
    picked = recipe(
        backbone={"kind": "timm/resnet10t"}, data={**RECIPE["data"], "channels": ["e", "b"]}
    )
    with pytest.raises(UserError, match=r"sees 5 channels, and the data have 2 \(e, b\)"):
        train(picked, five / "data", tmp_path / "other", init=source)
    with pytest.raises(UserError, match="sees 5 channels, and nothing says which"):
        sslpipe.load_backbone(source).encode(torch.zeros(3, 32, 32, dtype=torch.uint8))
    with pytest.raises(UserError, match="sees 5 channels, and nothing says which"):
        sslpipe.load_backbone(source).matched(load_index(five / "data").split("test"))
