"""Files of sensors through a whole run: built, trained on, and found again by their paths."""

import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from pydicom.data import get_testdata_file

import sslpipe
from sslpipe.api import train
from sslpipe.cli.inputs import find_images
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import embed
from sslpipe.export.write import export_backbone
from tests.helpers.channels import RECIPE, accuracy, recipe, run_on_five, spots, sslpipe_run
from tests.helpers.runs import command_line
from tests.helpers.shards import tree

pytestmark = pytest.mark.usefixtures("proved_here")
RNG = np.random.default_rng(0)
CONTIG = {"photometric": "minisblack", "planarconfig": "contig"}


def build(out: Path, root: Path, *options: object) -> None:
    sslpipe_run("sensors", "build", out, "--root", root, *options)


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return run_on_five(tmp_path_factory.mktemp("five"))


@pytest.mark.promise(16)
def test_what_only_the_low_byte_shows_is_learned_and_is_lost_in_8_bits(tmp_path):
    for number in range(120):
        folder = tmp_path / "img" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image = 0x3200 + 200 * spots(number % 2, number)  # the high byte is 0x32 everywhere
        Image.fromarray(image.astype(np.uint16)).save(folder / f"{number}.png")
    found = {}
    for name, words in {
        "deep": ("sensors", "build", "--channels", "grey"),
        "8 bit": ("shards", "build"),
    }.items():
        data, run_dir = tmp_path / name / "data", tmp_path / name / "run"
        sslpipe_run(*words, data, "--root", tmp_path / "img", "--test-fraction", "0.4")
        train(recipe(steps=18), data, run_dir)
        found[name] = accuracy(sslpipe.load_backbone(run_dir), data)
    # 48 test images of two classes: chance is 0.5, and beyond 0.73 in 1 of 1,000 cases
    assert found["deep"] > 0.9
    assert found["8 bit"] < 0.73


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


def test_files_are_encoded_as_their_pixels_are(five, tmp_path):
    model, path = sslpipe.load_backbone(five / "run"), five / "img/class0/0.npy"
    image = np.load(path)
    tifffile.imwrite(tmp_path / "a.tif", image, **CONTIG)
    for given in (path, tmp_path / "a.tif"):
        torch.testing.assert_close(model.encode(given), model.encode(image))


def test_a_network_of_chosen_channels_takes_files_of_all(five, tmp_path):
    picked = recipe(data={**RECIPE["data"], "channels": ["e", "b"]}, steps=2)
    train(picked, five / "data", tmp_path / "run")
    export_backbone(sslpipe.load_backbone(tmp_path / "run"), tmp_path / "out", ("safetensors",))
    image = np.load(five / "img/class0/0.npy")
    np.save(tmp_path / "two.npy", image[:, :, [4, 1]])
    for model in map(sslpipe.load_backbone, (tmp_path / "run", tmp_path / "out")):
        wanted = model.encode(image[:, :, [4, 1]])
        torch.testing.assert_close(model.encode(five / "img/class0/0.npy"), wanted)
        with pytest.raises(UserError, match=r"two\.npy .*in 2 channels.*files of a, b, c, d, e"):
            model.encode(tmp_path / "two.npy")


def test_files_of_another_kind_are_refused_by_name(five, tmp_path):
    model = sslpipe.load_backbone(five / "run")
    np.save(tmp_path / "three.npy", np.zeros((9, 9, 3), np.uint16))
    np.save(tmp_path / "bytes.npy", np.zeros((9, 9, 5), np.uint8))
    tifffile.imwrite(tmp_path / "pages.tif", np.zeros((2, 5, 9, 9), np.uint16))
    for name, told in (
        ("three.npy", "uint16 in 3"),
        ("bytes.npy", "uint8 in 5"),
        ("pages.tif", "pages"),
    ):
        with pytest.raises(UserError, match=told):
            model.encode(tmp_path / name)


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
        with pytest.raises(UserError, match=rf"{name} .*an array \(h, w, C\).*sensors build"):
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
    assert ".dcm" in command_line(*map(str, words), status=2).stderr.replace("\n", " ")


def test_folders_of_a_network_that_is_not_known_are_searched_for_all_formats(tmp_path):
    for name in ("a.jpg", "b.npy", "c.nii.gz", "d.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in find_images(tmp_path, RGB8)] == ["a.jpg"]
    assert [path.name for path in find_images(tmp_path)] == ["a.jpg", "b.npy", "c.nii.gz"]


def test_python_and_the_command_build_the_same_data_set(tmp_path):
    for number in range(12):
        folder = tmp_path / "img" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        stack = RNG.integers(0, 4096, (24, 30, 3)).astype(np.uint16)
        tifffile.imwrite(folder / f"{number}.tif", stack, **CONTIG)
    words = ("--channels", "a,b,c", "--range", "0,4095", "--tile", 12)
    build(tmp_path / "theirs" / "set", tmp_path / "img", *words, "--test-fraction", 0.25)
    files = sslpipe.SensorFiles(channels=["a", "b", "c"], range=(0, 4095), tile=12)
    built = sslpipe.build_dataset(
        tmp_path / "ours" / "set", files, root=str(tmp_path / "img"), test_fraction=0.25
    )
    assert tree(tmp_path / "ours" / "set") == tree(tmp_path / "theirs" / "set")
    assert built.manifest == load_index(tmp_path / "theirs" / "set").manifest
    with pytest.raises(UserError, match="range needs channels"):
        sslpipe.SensorFiles(tile=12, range=(0, 1))
    with pytest.raises(UserError, match="stride needs tile"):
        sslpipe.SensorFiles(channels="a", stride=4)
    for name, value in {"resize_px": 8, "background": "white"}.items():
        with pytest.raises(UserError, match=f"{name} = .* has no effect on files of sensors"):
            sslpipe.build_dataset(tmp_path / "x", files, root=tmp_path / "img", **{name: value})
