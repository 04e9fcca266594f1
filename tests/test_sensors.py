"""Images of other channels and depths through a whole run: trained, scored, exported, used."""

import copy
import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image
from pydicom.data import get_testdata_file
from safetensors.torch import save_file

import sslpipe
from sslpipe.api import train
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.knn import knn_results
from sslpipe.export.start import fit_channels
from sslpipe.export.write import export_model
from sslpipe.recipe import parse_recipe
from sslpipe.sharding.show import CELL_PX, MARGIN_PX
from tests.helpers.exports import trained
from tests.helpers.runs import command_line

pytestmark = pytest.mark.usefixtures("proved_here")
RNG = np.random.default_rng(0)
CONTIG = {"photometric": "minisblack", "planarconfig": "contig"}
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
    return parse_recipe(copy.deepcopy(RECIPE) | changes, "a test")


def sslpipe_run(*words: object) -> str:
    """What a command prints on stdout; raises where it fails."""
    return command_line(*map(str, words), status=0).stdout


def build(out: Path, root: Path, *options: object) -> None:
    sslpipe_run("shards", "build", out, "--root", root, *options)


def embedded(model, *folders: Path) -> list[torch.Tensor]:
    """Features of the test split of some data sets, each in the range of its own."""
    found = [(model.matched(load_index(data).split("test"))) for data in folders]
    return [embed(own.backbone, own.view, split).features for own, (split,) in found]


FIVE = ("--channels", "a,b,c,d,e")


def spots(kind: int, seed: int) -> np.ndarray:
    """(28, 28) in 0..1: few large or many small spots."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:28, :28]
    count, radius = ((3, 5.0), (20, 1.2))[kind]
    places = rng.uniform(2, 26, (count, 2))
    near = (np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * radius**2)) for a, b in places)
    return sum(near).clip(0, 1)


def accuracy(model, data: Path) -> float:
    """kNN of the test split by the train split."""
    index = load_index(data)
    matched, splits = model.matched(index.split("train"), index.split("test"))
    bank, queries = (embed(matched.backbone, matched.view, split) for split in splits)
    (result,) = knn_results(bank, queries, k=(5,))
    return result.value


@pytest.mark.promise(16)
def test_what_only_the_low_byte_shows_is_learned_and_is_lost_in_8_bits(tmp_path):
    for number in range(120):
        folder = tmp_path / "img" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image = 0x3200 + 200 * spots(number % 2, number)  # the high byte is 0x32 everywhere
        Image.fromarray(image.astype(np.uint16)).save(folder / f"{number}.png")
    found = {}
    for name, options in {"deep": ("--channels", "grey"), "8 bit": ()}.items():
        data, run_dir = tmp_path / name / "data", tmp_path / name / "run"
        build(data, tmp_path / "img", "--test-fraction", "0.4", *options)
        train(recipe(steps=18), data, run_dir)
        found[name] = accuracy(sslpipe.load_backbone(run_dir), data)
    # 48 test images of two classes: chance is 0.5, and beyond 0.73 in 1 of 1,000 cases
    assert found["deep"] > 0.9
    assert found["8 bit"] < 0.73


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
    build(folder / "data", folder / "img", "--test-fraction", "0.25", *FIVE)
    build(folder / "wide", folder / "img", "--test-fraction", "0.25", *FIVE, "--range", "0,9000")
    train(recipe(), folder / "data", folder / "run")
    return folder


@pytest.mark.promise(16)
def test_a_run_knows_its_channels_from_the_data_to_the_export(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    assert model.backbone.channels == 5
    assert model.image_type == load_index(five / "data").image_type
    assert accuracy(model, five / "data") > 0.8
    export_model(model, tmp_path / "out", ("safetensors", "onnx"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["format_version"] == 2
    assert config["image"]["channels"] == ["a", "b", "c", "d", "e"]
    assert "uint16" in (tmp_path / "out" / "README.md").read_text()
    again, image = sslpipe.load_backbone(tmp_path / "out"), np.load(five / "img/class0/0.npy")
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    wanted = model.encode(five / "img/class0/0.npy")
    tifffile.imwrite(tmp_path / "a.tif", image, **CONTIG)
    paths = (five / "img/class0/0.npy", tmp_path / "a.tif")
    for given in (tensor, tensor[None], image, [image], [tensor], *paths):
        torch.testing.assert_close(again.encode(given), wanted)


def test_images_and_files_of_another_kind_are_refused_by_name(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    np.save(tmp_path / "three.npy", np.zeros((9, 9, 3), np.uint16))
    np.save(tmp_path / "bytes.npy", np.zeros((9, 9, 5), np.uint8))
    tifffile.imwrite(tmp_path / "pages.tif", np.zeros((2, 5, 9, 9), np.uint16))
    for given, told in (
        (torch.zeros(5, 28, 28, dtype=torch.uint8), r"torch.uint8 of shape \(5, 28, 28\)"),
        (torch.zeros(3, 28, 28).to(torch.uint16), "uint16 in 5 channels"),
        (np.zeros((28, 28, 3), np.uint16), "ndarray of uint16"),
        (Image.new("RGB", (28, 28)), "Image"),
        (tmp_path / "three.npy", "uint16 in 3"),
        (tmp_path / "bytes.npy", "uint8 in 5"),
        (tmp_path / "pages.tif", "pages"),
    ):
        with pytest.raises(UserError, match=told):
            model.encode(given)


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
    export_model(model, out, ("safetensors",))
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


def test_dicom_files_are_trained_on_and_found(tmp_path):
    """From files that ship with pydicom to a search by one of them."""
    (tmp_path / "img").mkdir()
    for name in ("CT_small", "JPEG2000", "MR_small"):
        raw = Path(get_testdata_file(f"{name}.dcm", download=False)).read_bytes()
        (tmp_path / "img" / f"{name}.dcm").write_bytes(raw)
    data, run_dir, rows = tmp_path / "data", tmp_path / "run", tmp_path / "rows"
    build(data, tmp_path / "img", "--channels", "intensity", "--tile", 64)
    assert load_index(data).image_type.dtype == "float32"
    train(recipe(steps=4), data, run_dir)
    sslpipe_run("embed", run_dir, "--data", data, "--split", "train", "--out", rows)
    query = tmp_path / "img" / "MR_small.dcm"  # 64 x 64 px: a tile of its own
    found = sslpipe_run("search", rows, query, "--model", run_dir, "--data", data)
    assert "MR_small" in found.splitlines()[0]


@pytest.mark.parametrize("kind", ["pages", "volumes", "axis", "npy", "nan"])
def test_a_file_of_which_a_data_set_was_built_finds_itself(kind, tmp_path):
    """What pages, slices and NaN are is known of the build, to `encode`, search and gallery."""
    images, data, run_dir, rows = (tmp_path / name for name in ("img", "data", "run", "rows"))
    options = ["--pages", "channels"]
    for label in (0, 1):
        (images / f"kind{label}").mkdir(parents=True)
        for number in range(4):
            pixels = RNG.integers(0, 4000, (3, 28, 28)).astype("u2")
            path = images / f"kind{label}" / f"{label}{number}"
            if kind == "pages":
                tifffile.imwrite(path.with_suffix(".tif"), pixels, photometric="minisblack")
            elif kind == "npy":
                np.save(path.with_suffix(".npy"), pixels)
            elif kind == "volumes":  # a series of three volumes of one slice
                volume = pixels.transpose(1, 2, 0)[:, :, None].astype("f4")
                nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path.with_suffix(".nii.gz"))
            elif kind == "axis":  # its one slice lies along the first dimension
                options = ["--slice-axis", 0]
                volume = pixels[:1].astype("f4")
                nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path.with_suffix(".nii"))
            else:
                options = ["--nan", 7]
                array = pixels.transpose(1, 2, 0).astype("f4")
                array[:9, :9] = np.nan
                np.save(path.with_suffix(".npy"), array)
    names = "a" if kind == "axis" else "a,b,c"
    build(data, images, "--channels", names, *options)
    train(recipe(steps=2, data={**RECIPE["data"], "batch_size": 8}), data, run_dir)
    split = load_index(data).split("train")
    model = sslpipe.load_backbone(run_dir)
    assert model.image_type == split.image_type
    stored = embed(model.backbone, model.view, split)
    paths = sorted(path for path in images.rglob("*") if path.is_file())
    distances = torch.cdist(model.encode(paths), stored.features)  # (files, samples)
    keys = [Reader(split).one(sample).key for sample in stored.ids.tolist()]
    for path, row in zip(paths, distances, strict=True):
        assert path.name.partition(".")[0] in keys[int(row.argmin())]
        assert float(row.min()) < 1e-4
    if kind == "pages":
        sslpipe_run("embed", run_dir, "--data", data, "--split", "train", "--out", rows)
        found = sslpipe_run("search", rows, paths[3], "--model", run_dir, "--data", data)
        assert paths[3].stem in found.splitlines()[0]
        movie = tmp_path / "movie.npy"
        np.save(movie, np.zeros((2, 28, 28, 3, 1), "u2"))
        with pytest.raises(UserError, match=r"movie\.npy"):
            model.encode(movie)


def test_a_file_of_several_images_is_refused_with_what_to_give_instead(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    tifffile.imwrite(tmp_path / "pages.tif", np.zeros((2, 9, 9), np.uint16))
    nibabel.save(nibabel.Nifti1Image(np.zeros((9, 9, 4), "f4"), np.eye(4)), tmp_path / "volume.nii")
    for name in ("pages.tif", "volume.nii"):
        with pytest.raises(UserError, match=rf"{name} .*an array \(h, w, C\).*shards build"):
            model.encode(tmp_path / name)


def test_folders_whose_files_were_read_in_several_ways_can_be_joined(tmp_path):
    pixels = RNG.integers(0, 4000, (2, 3, 28, 28)).astype("u2")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tifffile.imwrite(tmp_path / "a" / "a.tif", pixels[0], photometric="minisblack")
    np.save(tmp_path / "b" / "b.npy", pixels[1].transpose(1, 2, 0))
    options = ("--channels", "a,b,c", "--range", "0,4095")
    build(tmp_path / "data_a", tmp_path / "a", *options, "--pages", "channels")
    build(tmp_path / "data_b", tmp_path / "b", *options)
    sslpipe_run(
        "shards", "index", tmp_path / "data_a", tmp_path / "data_b", "--out", tmp_path / "data"
    )
    index = load_index(tmp_path / "data")
    assert len(index.split("train")) == 2
    assert index.image_type == load_index(tmp_path / "data_b").image_type


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


def test_a_gallery_finds_files_of_other_formats_in_folders(five, tmp_path):
    gallery = tmp_path / "gallery.safetensors"
    for number, image in enumerate(sorted((five / "img").rglob("*.npy"))[:40]):
        folder = tmp_path / "known" / image.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        if number % 2:
            shutil.copy(image, folder)
        else:
            tifffile.imwrite(folder / f"{image.stem}.tif", np.load(image), **CONTIG)
    sslpipe_run("gallery", "enrol", gallery, tmp_path / "known", "--model", five / "run")
    words = ("gallery", "identify", gallery, tmp_path / "known", "--model", five / "run")
    rows = [line.split("\t") for line in sslpipe_run(*words).splitlines() if "\t" in line]
    assert len(rows) == 40
    assert all(Path(path).parent.name == name for path, name, *_ in rows)
    (tmp_path / "none").mkdir()
    words = ("gallery", "identify", gallery, tmp_path / "none", "--model", five / "run")
    assert ".tif, .npy" in command_line(*map(str, words), status=2).stderr.replace("\n", " ")


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
