"""Images of other channels and depths through a whole run: trained, scored, exported, used."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import sslpipe
import sslpipe.cli.embed
import sslpipe.cli.export
import sslpipe.cli.gallery
from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.knn import knn_accuracies
from sslpipe.export.initial import fit_channels
from sslpipe.export.write import export_model
from sslpipe.recipe import parse_recipe
from tests.helpers.exports import trained
from tests.sharding.test_shards import run

RNG = np.random.default_rng(0)
RECIPE = {
    "name": "sensors",
    "seed": 0,
    "steps": 30,
    "data": {"batch_size": 32, "num_streams": 8, "canvas_px": 32, "shuffle_window": 8},
    "augment": {"kind": "fused", "preset": "microscopy", "crop_px": 24, "noise_std": 0.0},
    "backbone": {"kind": "small_resnet", "widths": [16, 32]},
    "projector": {"hidden_dim": 32, "out_dim": 16},
    "loss": {"kind": "nt_xent", "temperature": 0.2},
    "optim": {"kind": "adamw", "peak_lr": 3e-3, "warmup_steps": 3, "precision": "fp32"},
    "run": {"save_steps": 15},
}


def recipe(**changes):
    tree = json.loads(json.dumps(RECIPE))
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return parse_recipe(tree, "a test")


def spots(kind: int, seed: int) -> np.ndarray:
    """(28, 28) in 0..1: few large or many small spots."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:28, :28]
    count, radius = ((3, 5.0), (20, 1.2))[kind]
    places = rng.uniform(2, 26, (count, 2))
    return sum(np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * radius**2)) for a, b in places).clip(
        0, 1
    )


def accuracy(model, data: Path) -> float:
    """kNN of the test split by the train split."""
    index = load_index(data)
    matched, splits = model.matched(index.split("train"), index.split("test"))
    bank, queries = (embed(matched.backbone, matched.view, split) for split in splits)
    (value,) = knn_accuracies(bank, queries, k=(5,)).values()
    return value


def test_what_only_the_low_byte_shows_is_learned_and_is_lost_in_8_bits(tmp_path):
    for number in range(160):
        folder = tmp_path / "img" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image = 0x3200 + 200 * spots(number % 2, number)  # the high byte is 0x32 everywhere
        Image.fromarray(image.astype(np.uint16)).save(folder / f"{number}.png")
    found = {}
    for name, options in {"deep": ("--channels", "grey"), "8 bit": ()}.items():
        data, run_dir = tmp_path / name / "data", tmp_path / name / "run"
        build = ("build", data, "--root", tmp_path / "img", "--test-fraction", "0.4", *options)
        assert run(*build) == 0
        train(recipe(), data, run_dir)
        found[name] = accuracy(sslpipe.load_backbone(run_dir), data)
    # 64 test images of two classes: chance is 0.5, and beyond 0.69 in 1 of 1,000 cases
    assert found["deep"] > 0.9
    assert found["8 bit"] < 0.69


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """A run on 16-bit images of five channels, whose classes differ in channels b and e."""
    folder = tmp_path_factory.mktemp("five")
    for number in range(96):
        kind = number % 2
        (folder / "img" / f"class{kind}").mkdir(parents=True, exist_ok=True)
        image = RNG.normal(3000, 100, (28, 28, 5))
        image[..., [1, 4]] += 2000 * spots(kind, number)[..., None]
        np.save(folder / "img" / f"class{kind}" / f"{number}.npy", image.astype(np.uint16))
    build = ("build", folder / "data", "--root", folder / "img", "--test-fraction", "0.25")
    assert run(*build, "--channels", "a,b,c,d,e") == 0
    train(recipe(), folder / "data", folder / "run")
    return folder


def test_a_run_knows_its_channels_from_the_data_to_the_export(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    assert model.backbone.channels == 5
    assert model.image_type == load_index(five / "data").image_type
    assert accuracy(model, five / "data") > 0.8
    export_model(model, tmp_path / "out", ("safetensors", "onnx"))  # proved in another process
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["format_version"] == 2
    assert config["image"]["channels"] == ["a", "b", "c", "d", "e"]
    assert "uint16" in (tmp_path / "out" / "README.md").read_text()
    again, image = sslpipe.load_backbone(tmp_path / "out"), np.load(five / "img/class0/0.npy")
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    wanted = model.encode(five / "img/class0/0.npy")
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="minisblack", planarconfig="contig")
    paths = (five / "img/class0/0.npy", tmp_path / "a.tif")
    for given in (tensor, tensor[None], image, [image], [tensor], *paths):
        torch.testing.assert_close(again.encode(given), wanted)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            torch.zeros(5, 28, 28, dtype=torch.uint8),
            r"torch.uint8 of shape \(5, 28, 28\)",
        ),
        (torch.zeros(3, 28, 28).to(torch.uint16), "uint16 in 5 channels"),
        (np.zeros((28, 28, 3), np.uint16), "ndarray of uint16"),
        (Image.new("RGB", (28, 28)), "Image"),
    ],
)
def test_images_of_another_kind_are_refused_by_name(five, given, told):
    with pytest.raises(UserError, match=told):
        sslpipe.load_backbone(five / "run").encode(given)


def test_files_of_another_kind_are_refused_by_name(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    np.save(tmp_path / "three.npy", np.zeros((9, 9, 3), np.uint16))
    np.save(tmp_path / "bytes.npy", np.zeros((9, 9, 5), np.uint8))
    tifffile.imwrite(tmp_path / "pages.tif", np.zeros((2, 5, 9, 9), np.uint16))
    for name, told in {"three": "uint16 in 3", "bytes": "uint8 in 5", "pages": "pages"}.items():
        (path,) = tmp_path.glob(f"{name}.*")
        with pytest.raises(UserError, match=told):
            model.encode(path)


def test_another_range_of_the_data_changes_no_feature(five, tmp_path):
    """The same pixels, in a data set of another stated range."""
    build = ("build", tmp_path / "data", "--root", five / "img", "--test-fraction", "0.25")
    assert run(*build, "--channels", "a,b,c,d,e", "--range", "0,9000") == 0
    model, rows = sslpipe.load_backbone(five / "run"), []
    for data in (five / "data", tmp_path / "data"):
        matched, (split,) = model.matched(load_index(data).split("test"))
        rows.append(embed(matched.backbone, matched.view, split).features)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)
    start = fit_channels(model, load_index(tmp_path / "data"))  # of a run that continues it
    split = load_index(tmp_path / "data").split("test")
    torch.testing.assert_close(embed(start.backbone, start.view, split).features, rows[1])
    joined, rows = sslpipe.load_backbone(f"{five}/run+{five}/run@32"), []
    for data in (five / "data", tmp_path / "data"):
        matched, (split,) = joined.matched(load_index(data).split("test"))
        rows.append(embed(matched.backbone, matched.view, split).features)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_an_export_whitened_on_data_of_another_range_encodes_as_before(five, tmp_path):
    """Whitening to all axes with power 0 only turns and centres: distances stay."""
    build = ("build", tmp_path / "data", "--root", five / "img", "--test-fraction", "0.25")
    assert run(*build, "--channels", "a,b,c,d,e", "--range", "0,9000") == 0
    model = sslpipe.load_backbone(five / "run")
    export_model(model, tmp_path / "out", ("safetensors",))
    rows = tmp_path / "train.safetensors"
    data = ["--data", str(tmp_path / "data"), "--split", "train"]
    for app, words in (
        (sslpipe.cli.embed.app, [str(tmp_path / "out"), *data, "--out", str(rows)]),
        (sslpipe.cli.export.app, ["whiten", str(tmp_path / "out"), str(rows), "--power", "0"]),
    ):
        assert CliRunner().invoke(app, words).exit_code == 0
    images = [np.load(path) for path in sorted((five / "img").rglob("*.npy"))[:6]]
    before, after = (
        each.encode(images) for each in (model, sslpipe.load_backbone(tmp_path / "out"))
    )
    torch.testing.assert_close(torch.cdist(after, after), torch.cdist(before, before))


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
    tree = {**RECIPE, "steps": 4, "tune": {"l2_to_init": 1e-3}, "run": {"save_steps": 2}}
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


def test_a_gallery_finds_files_of_other_formats_in_folders(five, tmp_path, capsys):
    for number, image in enumerate(sorted((five / "img").rglob("*.npy"))[:40]):
        folder = tmp_path / "known" / image.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.load(image)
        if number % 2:
            np.save(folder / image.name, pixels)
        else:
            tifffile.imwrite(
                folder / f"{image.stem}.tif",
                pixels,
                photometric="minisblack",
                planarconfig="contig",
            )
    words = [str(tmp_path / "gallery.safetensors"), str(tmp_path / "known")]
    words += ["--model", str(five / "run")]
    assert CliRunner().invoke(sslpipe.cli.gallery.app, ["enrol", *words]).exit_code == 0
    found = CliRunner().invoke(sslpipe.cli.gallery.app, ["identify", *words])
    rows = [line.split("\t") for line in found.stdout.splitlines() if "\t" in line]
    assert len(rows) == 40
    assert all(Path(path).parent.name == name for path, name, *_ in rows)
    (tmp_path / "none").mkdir()
    words[1] = str(tmp_path / "none")
    assert ".tif, .npy" in str(
        CliRunner().invoke(sslpipe.cli.gallery.app, ["identify", *words]).exception
    )


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
