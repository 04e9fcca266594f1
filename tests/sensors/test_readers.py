"""Images as sensors give them: each format, depth and order, against the reader library alone."""

import io
import math
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import imagecodecs
import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image
from pydicom.data import get_testdata_file

from sslpipe.data.decode import BadSample
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.loader import one_pass
from sslpipe.errors import install
from sslpipe.sensors import scenes
from sslpipe.sensors.readers import Pages, directions_of, open_planes
from sslpipe.sensors.scenes import content
from tests.helpers.shards import error_of, report_of, run

RNG = np.random.default_rng(0)


def numbers(*shape: int, dtype: str = "u2") -> np.ndarray:
    if dtype.startswith("f"):
        return RNG.normal(size=shape).astype(dtype)
    return RNG.integers(0, 2 ** min(31, 8 * int(dtype[1])) // 2, shape).astype(dtype)


Both = Callable[[Path], np.ndarray]  # writes a file into a folder; gives what its reader reads


def saved(name: str, write: Callable[[Path], object], read: Callable[[Path], np.ndarray]) -> Both:
    def both(folder: Path) -> np.ndarray:
        write(folder / name)
        return read(folder / name)

    return both


def tif(pixels: np.ndarray, **options) -> Both:
    options = {"photometric": "minisblack", **options}
    return saved("a.tif", lambda path: tifffile.imwrite(path, pixels, **options), tifffile.imread)


def npy(array: np.ndarray) -> Both:
    return saved("a.npy", lambda path: np.save(path, array), np.load)


def npz(array: np.ndarray) -> Both:
    return saved("a.npz", partial(np.savez_compressed, pixels=array), lambda _: array)


def png(pixels: np.ndarray) -> Both:
    raw = imagecodecs.png_encode(np.ascontiguousarray(pixels))
    return saved("a.png", lambda path: path.write_bytes(raw), lambda _: pixels)


def nifti(array: np.ndarray, name: str = "a.nii", slope: float | None = None) -> Both:
    image = nibabel.Nifti1Image(array, np.eye(4))
    if slope is not None:
        image.header.set_slope_inter(slope, 3)
    return saved(name, image.to_filename, lambda path: np.asanyarray(nibabel.load(path).dataobj))


def by_pydicom(path: Path) -> np.ndarray:
    pixels = pydicom.pixels.pixel_array(path)
    return pydicom.pixels.apply_rescale(pixels, pydicom.dcmread(path))


def shipped(name: str) -> Callable[[Path], object]:
    """Copy a file that ships with pydicom."""
    source = get_testdata_file(name, download=False)
    return lambda folder: shutil.copy(source, folder / "z.dcm")


def dicom(name: str) -> Both:
    return lambda folder: by_pydicom(shipped(name)(folder))


def appended(*images: np.ndarray, **options) -> Both:
    """A TIFF to which a program adds an image at a time, so that each is a series of its own."""

    def write(path: Path) -> None:
        for pixels in images:
            tifffile.imwrite(path, pixels, append=True, photometric="minisblack", **options)

    return saved("a.tif", write, lambda _: np.stack(images))


def positions(*images: np.ndarray) -> Both:
    """An OME-TIFF of several fields of view."""

    def write(path: Path) -> None:
        with tifffile.TiffWriter(path, ome=True) as writer:
            for pixels in images:
                writer.write(pixels, metadata={"axes": "CYX"})

    return saved("a.ome.tif", write, lambda _: np.stack(images))


CS, ONE = ("--pages", "channels"), ("--pages", "samples")
ZSTD = {"compression": "zstd", "tile": (32, 16)}
GIVEN, CONTIG = {"planarconfig": "separate"}, {"planarconfig": "contig"}
LZW = {"compression": "lzw", "rowsperstrip": 16}
JPEG = {"photometric": "rgb", "compression": "jpeg", "tile": (16, 16)}
OME, IMAGEJ = ({kind: True, "metadata": {"axes": axes}} for kind, axes in (
    ("ome", "CZYX"), ("imagej", "ZCYX")))  # fmt: skip
BIG = {"bigtiff": True, "byteorder": ">", "compression": "zstd"}
FLOATS = {"compression": "deflate", "predictor": True}

# writer; what dimensions the reader's array has: y, x, channels, images by 1 and then 2; options
FORMATS: dict[str, tuple[Both, str, tuple[str, ...]]] = {
    "tiff grey": (tif(numbers(40, 50)), "yx", ()),
    "tiff uint8": (tif(numbers(40, 50, 4, dtype="u1"), **CONTIG), "yxc", ()),
    "tiff strips": (tif(numbers(45, 50, 5), **LZW, **CONTIG), "yxc", ()),
    "tiff separate": (tif(numbers(5, 40, 50), **GIVEN), "cyx", ()),
    "tiff separate tiles": (tif(numbers(5, 40, 50), **GIVEN, **ZSTD), "cyx", ()),
    "tiff pages are channels": (tif(numbers(7, 40, 50), **ZSTD), "cyx", CS),
    "tiff pages are images": (tif(numbers(7, 40, 50)), "1yx", ONE),
    "ome-tiff": (tif(numbers(2, 3, 40, 50), **OME), "c1yx", ONE),
    "ome-tiff tiles": (tif(numbers(2, 3, 40, 50), **OME, **ZSTD), "c1yx", ONE),
    "tiff appended": (appended(*numbers(3, 40, 50)), "1yx", ONE),
    "tiff appended tiles": (appended(*numbers(3, 40, 50), **ZSTD), "cyx", CS),
    "ome-tiff positions": (positions(*numbers(3, 2, 40, 50)), "1cyx", ONE),
    "imagej": (tif(numbers(3, 2, 40, 50), **IMAGEJ), "1cyx", ONE),
    "all axes are channels": (tif(numbers(2, 3, 40, 50), **OME), "ccyx", CS),
    "bigtiff big-endian": (tif(numbers(40, 50), **BIG), "yx", ()),
    "tiff float": (tif(numbers(40, 50, dtype="f4"), **FLOATS), "yx", ()),
    "tiff float64": (tif(numbers(40, 50, dtype="f8")), "yx", ()),
    "tiff int16": (tif(numbers(40, 50, dtype="i2") - 99), "yx", ()),
    "tiff jpeg": (tif(numbers(40, 48, 3, dtype="u1"), **JPEG), "yxc", ()),
    "png 16 grey": (png(numbers(40, 50)), "yx", ()),
    "png 16 rgb": (png(numbers(40, 50, 3)), "yxc", ()),
    "png 16 rgba": (png(numbers(40, 50, 4)), "yxc", ()),
    "png 8 grey": (png(numbers(40, 50, dtype="u1")), "yx", ()),
    "npy": (npy(numbers(40, 50, 6)), "yxc", ()),
    "npy fortran": (npy(np.asfortranarray(numbers(40, 50, 2, dtype="f8"))), "yxc", ()),
    "npy big-endian": (npy(numbers(40, 50).astype(">u2")), "yx", ()),
    "npy pages": (npy(numbers(3, 40, 50)), "cyx", CS),
    "npy images": (npy(numbers(3, 40, 50, 2)), "1yxc", ONE),
    "npy pages of channels": (npy(numbers(3, 40, 50, 2)), "cyxc", CS),
    "npz": (npz(numbers(3, 40, 50)), "1yx", ONE),
    "dicom rescaled": (dicom("CT_small.dcm"), "yx", ()),
    "dicom": (dicom("MR_small.dcm"), "yx", ()),
    "dicom rle": (dicom("MR_small_RLE.dcm"), "yx", ()),
    "dicom colours": (dicom("examples_jpeg2k.dcm"), "yxc", ()),
    "dicom frames": (dicom("SC_rgb_rle_16bit_2frame.dcm"), "1yxc", ()),
    "nifti": (nifti(numbers(20, 30, 4, dtype="i2")), "yx1", ()),
    "nifti axis 0": (nifti(numbers(4, 30, 20)), "1yx", ("--slice-axis", "0")),
    "nifti axis 1": (nifti(numbers(20, 4, 30)), "y1x", ("--slice-axis", "1")),
    "nifti scaled": (nifti(numbers(20, 30, 4, dtype="i2"), slope=0.25), "yx1", ()),
    "nifti volumes are channels": (nifti(numbers(20, 30, 4, 3), "a.nii.gz"), "yx1c", CS),
    "nifti volumes are images": (nifti(numbers(20, 30, 4, 3), "a.nii.gz"), "yx21", ONE),
}


def arranged(array: np.ndarray, axes: str) -> np.ndarray:
    """(images, h, w, C)."""
    order = sorted(range(len(axes)), key=lambda k: "12yxc".index(axes[k]))
    count = math.prod(array.shape[k] for k in range(len(axes)) if axes[k] in "12")
    sides = array.shape[axes.index("y")], array.shape[axes.index("x")]
    return array.transpose(order).reshape(count, *sides, -1)


def stored(array: np.ndarray) -> np.ndarray:
    """What a data set holds: uint8 and uint16 as they are, all else as float32."""
    keeps = array.dtype.newbyteorder("=") in (np.uint8, np.uint16)
    return array.astype(array.dtype.newbyteorder("<") if keeps else "<f4")


def members(out: Path) -> dict[str, np.ndarray]:
    """Arrays of the shards by key, in their order, read by numpy alone."""
    arrays = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {m.name.removesuffix(".npy"): m for m in tar if m.name.endswith(".npy")}
            for key, member in files.items():
                arrays[key] = np.load(io.BytesIO(tar.extractfile(member).read()))
    return arrays


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def build(root: Path, *options: object, out: str = "out") -> DatasetIndex:
    assert run("build", root.parent / out, "--root", root, *options, group="sensors") == 0
    return load_index(root.parent / out)


def names(count: int) -> str:
    return ",".join(f"c{k}" for k in range(count))


FIVE = ("--channels", names(5))


@pytest.mark.promise(16)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_stored_as_its_reader_gives_it_bit_for_bit(tmp_path, root, name):
    write, axes, options = FORMATS[name]
    expected = stored(arranged(write(root), axes))
    words = ["--channels", names(expected.shape[3]), *options]
    build(root, *words)
    found = [image for _, image in sorted(members(tmp_path / "out").items())]
    for image, wanted in zip(found, expected, strict=True):
        assert image.dtype == wanted.dtype
        np.testing.assert_array_equal(image, wanted)
    if name in ("tiff grey", "npy", "dicom rescaled"):
        assert run("verify", tmp_path / "out") == 0
    # tiles of the same, which are read by windows
    index = build(root, *words, "--tile", 16, "--stride", 12, out="tiles")
    split = index.split("train")
    columns = {key: split.column(key).values for key in ("x", "y")}
    pages = split.column("page").values if "page" in index.manifest.columns else 0 * columns["x"]
    tiles = [tile for _, tile in sorted(members(tmp_path / "tiles").items())]
    places = sorted(zip(pages.tolist(), columns["y"].tolist(), columns["x"].tolist(), strict=True))
    height = expected.shape[1]
    assert {y for _, y, _ in places} == {*range(0, height - 16, 12), height - 16}
    for (page, y, x), tile in zip(places, tiles, strict=True):
        np.testing.assert_array_equal(tile, expected[page, y : y + 16, x : x + 16])


def scans(folder: Path) -> np.ndarray:
    images = RNG.integers(200, 3000, (6, 40, 40, 5)).astype("u2")
    images[..., 1] *= 20
    for k, image in enumerate(images):
        np.save(folder / f"scan{k}.npy", image)
    return images


def test_range_mean_and_std_are_those_of_the_pixels(tmp_path, root, capsys):
    flat = scans(root).reshape(-1, 5).astype(np.float64)
    manifest = build(root, *FIVE).manifest
    low, high = (np.array(ends) for ends in (manifest.image.low, manifest.image.high))
    wanted = np.percentile(flat, [0.1, 99.9], method="inverted_cdf", axis=0)
    np.testing.assert_array_equal([low, high], wanted)
    scaled = (flat - low) / (high - low)
    np.testing.assert_allclose(manifest.mean, scaled.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(manifest.std, scaled.std(axis=0), atol=1e-6)
    assert run("show", tmp_path / "out", "--out", tmp_path / "sheet.png") == 0
    said = capsys.readouterr().out
    assert "5 channels of uint16" in said
    assert f"c1: {low[1]:g} to {high[1]:g}" in said


@pytest.mark.parametrize("dtype", ["u2", "f4"])
def test_a_constant_or_sparse_channel_has_a_range(root, capsys, dtype):
    image = np.zeros((40, 40, 2), dtype)
    image[..., 0] = 7
    image[3, 4, 1] = 9
    np.save(root / "a.npy", image)
    image = build(root, "--channels", "a,b").manifest.image
    assert "channel a is constant: 7 in all of them" in capsys.readouterr().out
    assert (image.low, image.high) == ((7, 0), (8, 9))


def test_a_given_range_and_the_window_of_dicom_files_are_taken(root):
    dicom("MR_small.dcm")(root)
    image = build(root, "--channels", "mr", out="a").manifest.image
    assert (image.low, image.high) == ((-200,), (1400,))  # centre 600, width 1600
    image = build(root, "--channels", "mr", "--range", "-5,4000", out="b").manifest.image
    assert (image.low, image.high) == ((-5,), (4000,))


@pytest.mark.promise(16)
def test_values_that_mean_white_or_nothing_are_doubted_where_they_are_few(root, tmp_path):
    """Mammograms are of both kinds; -9999 makes everything else of a height map one grey."""
    dicom("MR_small.dcm")(root)
    inverted = pydicom.dcmread(root / "z.dcm")
    inverted.PhotometricInterpretation = "MONOCHROME1"
    inverted.save_as(root / "b.dcm")
    build(root, "--channels", "mr", out="scans")
    heights = tmp_path / "heights"
    heights.mkdir()
    pixels = np.full((20, 20), -9999, "f4")
    pixels[4:] = numbers(16, 20)
    for k, tags in enumerate(
        ([(42113, "s", 0, "-9999", True)], [], [(42113, "s", 0, "nan", True)])
    ):
        photometric = "miniswhite" if k == 1 else "minisblack"
        tifffile.imwrite(heights / f"{k}.tif", pixels, extratags=tags, photometric=photometric)
    build(heights, "--channels", "height", out="heights-out")
    said = [
        [doubt for doubt in report_of(out).doubts if "files" in doubt]
        for out in (tmp_path / "scans", tmp_path / "heights-out")
    ]
    assert [len(own) for own in said] == [1, 2]
    assert said[0][0].startswith("1 of 2 files are MONOCHROME1")
    assert said[1][0].startswith("1 of 3 files state the no-data value -9999")
    assert said[1][1].startswith("1 of 3 files are MINISWHITE")


def test_arrays_whose_channels_come_first_are_told_the_option(tmp_path, root, capsys):
    np.save(root / "a.npy", numbers(3, 20, 30))
    message = error_of(
        capsys, "build", tmp_path / "out", "--root", root, "--channels", names(3), group="sensors"
    )
    assert "has 30 channels, and --channels names 3" in message
    assert "--pages=channels" in message
    build(root, "--channels", names(3), "--pages", "channels")


def test_padding_of_dicom_files_without_a_window_is_doubted(root, tmp_path):
    """It is far below all that was measured, so that the range would begin there."""
    dicom("CT_small.dcm")(root)
    header = pydicom.dcmread(root / "z.dcm")
    header.PixelPaddingValue = -2000
    for name in ("WindowCenter", "WindowWidth"):
        header.pop(name, None)
    header.save_as(root / "z.dcm")
    build(root, "--channels", "ct", out="a")
    (doubt,) = (doubt for doubt in report_of(tmp_path / "a").doubts if "files" in doubt)
    value = -2000 * header.RescaleSlope + header.RescaleIntercept
    assert doubt.startswith(f"1 of 1 files state the padding value {value:g}")
    header.WindowCenter = 40
    header.WindowWidth = 400
    header.save_as(root / "z.dcm")
    build(root, "--channels", "ct", out="b")
    assert not [doubt for doubt in report_of(tmp_path / "b").doubts if "files" in doubt]


def test_volumes_that_lie_differently_are_doubted(root, tmp_path):
    """Slices along one axis are then mirrored, or of another plane."""
    volume = numbers(9, 8, 7, dtype="i2")
    nibabel.Nifti1Image(volume, np.eye(4)).to_filename(root / "a.nii.gz")
    nibabel.Nifti1Image(volume, np.diag([2, 3, 4, 1])).to_filename(root / "c.nii")
    build(root, "--channels", "mr", out="alike")
    assert not any("axes" in doubt for doubt in report_of(tmp_path / "alike").doubts)
    upright = nibabel.Nifti1Image(volume, np.diag([-1, -1, 1, 1]))
    upright.to_filename(root / "b.nii")
    build(root, "--channels", "mr", out="other")
    (doubt,) = (each for each in report_of(tmp_path / "other").doubts if "axes" in each)
    assert "LPS in 1, RAS in 2" in doubt
    assert directions_of(np.full((4, 4), np.nan)) == ""


def test_files_of_one_sample_are_its_channels_by_name(tmp_path, root):
    expected = {}
    for well in "AB":
        for channel in ("gfp", "dapi", "bright"):
            expected[well, channel] = pixels = numbers(20, 30)
            tifffile.imwrite(root / f"{well}_{channel}_s1.tif", pixels)
    pattern = r"(?P<well>[A-Z])_(?P<channel>[a-z]+)_s1[.]tif"
    index = build(root, "--channels", "dapi,gfp", "--name-pattern", pattern)
    for well, (_, found) in zip("AB", sorted(members(tmp_path / "out").items()), strict=True):
        wanted = [expected[well, channel] for channel in ("dapi", "gfp")]
        np.testing.assert_array_equal(found, np.stack(wanted, axis=2))
    assert set(index.manifest.columns) == {"well"}


def test_files_of_one_sample_with_codes_of_their_own_are_told_what_to_rename(root, capsys):
    """As a microscope names them: A01_w1 and 02C922AF, A01_w2 and 5D10F3B2."""
    for name in ("A01_w102C922AF", "A01_w25D10F3B2"):
        tifffile.imwrite(root / f"{name}.tif", numbers(20, 30))
    pattern = r"(?P<well>A\d+)_(?P<channel>w\d)[0-9A-F]{8}[.]tif"
    words = ("--channels", "w1,w2", "--name-pattern", pattern)
    assert run("build", root.parent / "out", "--root", root, *words, group="sensors") == 2
    assert "differ in the group `channel` alone: rename others" in capsys.readouterr().err


# --- tiles


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_tiles_of_8_bit_rgb_scenes_are_pngs_of_their_pixels(root, suffix):
    rough = RNG.integers(0, 255, (12, 10, 3)).astype("u1")
    scene = Image.fromarray(rough).resize((100, 90))
    scene.save(root / f"scene.{suffix}")
    pixels = np.asarray(Image.open(root / f"scene.{suffix}"))
    index = build(root, "--tile", 32, "--stride", 24)
    assert index.manifest.image is None
    split = index.split("train")
    (batch,) = one_pass(split, num_workers=0)
    x, y = split.column("x").values, split.column("y").values
    assert sorted(set(x.tolist())) == [0, 24, 48, 68]
    for row in range(len(split)):
        tile = pixels[y[row] : y[row] + 32, x[row] : x[row] + 32]
        np.testing.assert_array_equal(batch.images[row].permute(1, 2, 0), tile)


@pytest.mark.parametrize("empty", [0, 60000])
def test_tiles_without_content_are_skipped_on_dark_and_on_light(root, capsys, empty):
    scene = np.full((64, 128), empty, "u2")
    scene += RNG.integers(0, 3, scene.shape).astype("u2")
    scene[:, 64:96] = RNG.integers(10_000, 50_000, (64, 32))
    tifffile.imwrite(root / "a.tif", scene, tile=(32, 32), compression="zstd")
    index = build(root, "--channels", "grey", "--tile", 32, "--min-content", 0.1)
    assert "6 of 8 tiles skipped" in capsys.readouterr().out
    assert index.split("train").column("x").values.tolist() == [64, 64]


def test_content_is_the_share_of_blocks_that_vary():
    tile = np.zeros((64, 64, 1))
    tile[:16, :32] = RNG.normal(size=(16, 32, 1))
    assert content(tile, np.array([1.0])) == 2 / 16
    assert content(tile, np.array([1000.0])) == 0
    tile[0, 0] = np.nan
    assert content(tile, np.array([1.0])) == 1 / 16


def test_tiles_of_a_scene_are_all_in_train_or_all_in_test(root):
    scans(root)
    index = build(root, *FIVE, "--tile", 16, "--test-fraction", 0.3)
    splits = (index.split("train"), index.split("test"))
    parents = [{*split.column("parent").show(range(len(split)))} for split in splits]
    assert not parents[0] & parents[1]
    assert len(parents[0] | parents[1]) == 6


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that were decoded as a whole, once for each time."""
    names, opened = [], scenes.open_planes

    def counted(path, pages):
        planes = opened(path, pages)

        def load():
            names.append(path.name)
            return planes.load()

        return planes._replace(load=planes.load and load)

    monkeypatch.setattr(scenes, "open_planes", counted)
    return names


def test_volumes_that_are_channels_are_decoded_once(tmp_path, root, decoded):
    volumes = {c: RNG.normal(size=(20, 18, 7)).astype("f4") for c in ("t1", "t2")}
    for name, volume in volumes.items():
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), root / f"a_{name}.nii.gz")
    pattern = r"a_(?P<channel>\w+)[.]nii[.]gz"
    index = build(root, "--channels", "t1,t2", "--name-pattern", pattern)
    assert sorted(decoded) == ["a_t1.nii.gz", "a_t2.nii.gz"]
    pages = index.split("train").column("page").values.tolist()
    found = np.stack([*members(tmp_path / "out").values()], axis=2)
    np.testing.assert_array_equal(found, np.stack([*volumes.values()], axis=-1)[:, :, pages])


# --- bad input


def changed(change: Callable[[bytearray, int, int], object], **options) -> Callable[[Path], object]:
    """A TIFF whose bytes are changed, given its header's first byte and the byte after its tags."""

    def write(folder: Path) -> None:
        tifffile.imwrite(folder / "z.tif", numbers(8, 8), metadata=None, **options)
        raw = bytearray((folder / "z.tif").read_bytes())
        first = int.from_bytes(raw[4:8], "little")
        change(raw, first, first + 2 + 12 * int.from_bytes(raw[first : first + 2], "little"))
        (folder / "z.tif").write_bytes(raw)

    return write


def claims(raw: bytearray, first: int, end: int) -> None:
    """Say that it has 2^31 - 1 px a side."""
    for tag in range(first + 2, end, 12):
        if int.from_bytes(raw[tag : tag + 2], "little") in (256, 257):
            raw[tag + 2 : tag + 12] = struct.pack("<HII", 4, 1, 2**31 - 1)


def loops(raw: bytearray, first: int, end: int) -> None:
    """Say that the first page follows."""
    raw[end : end + 4] = first.to_bytes(4, "little")


def has_many_pages(raw: bytearray, first: int, end: int) -> None:
    """Say 70,000 times that the same page follows."""
    header, size, start = bytes(raw[first:end]), end - first + 4, len(raw)
    raw[end : end + 4] = start.to_bytes(4, "little")
    places = [start + size * k for k in range(1, 70_000)] + [0]
    raw += b"".join(header + place.to_bytes(4, "little") for place in places)


def halved(name: str, write: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(folder: Path) -> None:
        write(folder)
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[: len(raw) // 2])

    return both


def bomb(folder: Path) -> None:
    shape = {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**20)}
    np.lib.format.write_array_header_2_0(header := io.BytesIO(), shape)
    with zipfile.ZipFile(folder / "z.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header.getvalue() + bytes(2**20))


def holed(shape: tuple[int, ...] = (20, 30)) -> np.ndarray:
    array = numbers(*shape, dtype="f4")
    array[3, 4:7] = np.nan
    return array


def array(pixels: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / "z.npy", pixels, allow_pickle=True)


def palette(name: str) -> Callable[[Path], object]:
    return lambda folder: Image.new("P", (9, 9)).save(folder / name)


def of_sizes(folder: Path) -> None:
    for height in (8, 9):
        tifffile.imwrite(folder / "z.tif", numbers(height, 8), append=True)


TILED = tif(numbers(100, 100), compression="zstd", tile=(32, 32))
VOLUME = nifti(numbers(20, 30, 9, dtype="f4"), "z.nii.gz")
# what is written beside good.tif, unless that is of another type; what is said
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "depths": (array(numbers(9, 9, dtype="f4")), "float32: a data set"),
    "channels": (array(numbers(9, 9, 2)), "good.tif has 1 channel"),
    "truncated": (halved("a.tif", TILED), "is truncated"),
    "claims 2^31 px": (changed(claims, compression="zstd"), "z.tif: "),
    "looped pages": (changed(loops), "z.tif: "),
    "page bomb": (changed(has_many_pages), "more than 65536 pages"),
    "zip bomb": (bomb, "more than the limit of 1.0 GiB"),
    "nan": (
        array(holed()),
        "values are NaN or infinite; give a number in place of them, as --nan 0",
    ),
    "objects": (array(np.array([[{}]])), "z.npy: "),
    "complex": (array(np.ones((3, 3), "c8")), "neither integers nor"),
    "integers": (array(np.full((3, 3), 2**30, "u4")), "float32"),
    "palette": (palette("z.tif"), "its colours are PALETTE"),
    "sizes": (of_sizes, "save each kind in a file of its own"),
    "appended": (appended(numbers(20, 30), numbers(20, 30)), "say what they are: --pages"),
    "text": (lambda f: (f / "z.tif").write_text("no image"), "not an image of a known format"),
    "truncated volume": (halved("z.nii.gz", VOLUME), "z.nii-page"),
    "lossy dicom": (
        shipped("JPEGLSNearLossless_16.dcm"),
        "cannot decode DICOM's JPEG-LS Lossy",
    ),
    "deflated dicom": (shipped("image_dfl.dcm"), "deflated as a whole"),
    "truncated dicom": (shipped("MR_truncated.dcm"), "z.dcm"),
    "mode": (palette("z.png"), "Pillow's mode P"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(tmp_path, root, capsys, name):
    write, reason = BAD[name]
    if name not in ("nan", "truncated volume"):
        tifffile.imwrite(root / "good.tif", numbers(20, 30))
    write(root)
    words = ["build", tmp_path / "out", "--root", root, "--channels", "grey"]
    assert reason in error_of(capsys, *words, group="sensors")
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_shards_build_refuses_bands_without_lines_of_pillow(tmp_path):
    """As of bands of a satellite, where Pillow logs each file."""
    (tmp_path / "in").mkdir()
    bands = np.zeros((13, 8, 8), np.uint16)
    tifffile.imwrite(tmp_path / "in" / "1.tif", bands, planarconfig="separate")
    words = ["shards", "build", str(tmp_path / "out"), "--root", str(tmp_path / "in")]
    command = [sys.executable, "-m", "sslpipe", *words]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ")


def test_bad_files_are_skipped_and_nan_replaced_where_that_is_asked_for(tmp_path, root, capsys):
    holes = holed()
    np.save(root / "good.npy", numbers(20, 30, dtype="f4"))
    np.save(root / "holes.npy", holes)
    (root / "text.tif").write_text("no image")
    words = ["--channels", "grey", "--skip-bad"]
    build(root, *words, out="a")
    said = capsys.readouterr().err
    assert "skipped: holes.npy: 3 of 600 values" in said
    assert "skipped: text.tif: not an image of a known format: it starts with b'no image'" in said
    assert len(members(tmp_path / "a")) == 1
    build(root, *words, "--nan", -9, out="b")
    assert "NaN or infinite values, replaced: 1 of 2" in capsys.readouterr().out
    found = members(tmp_path / "b")["00000001-holes"][..., 0]
    np.testing.assert_array_equal(found, np.where(np.isnan(holes), np.float32(-9), holes))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--pages", "samples"), "--pages needs --channels or --tile"),
        (("--stride", "9"), "--stride needs --tile"),
        (("--range", "0,1"), "--range needs --channels"),
        (("--channels", "a,a"), "names one twice"),
        (("--channels", "a", "--range", "3,3"), "is no LOW,HIGH"),
        (("--tile", "16"), "name its channels with --channels"),
        (("--channels", "a,b"), "good.tif has 1 channel, and --channels names 2: a, b"),
    ],
)
def test_a_mistake_of_the_command_is_one_line(tmp_path, capsys, words, reason):
    tifffile.imwrite(tmp_path / "good.tif", numbers(20, 30))
    assert reason in error_of(
        capsys, "build", tmp_path / "out", "--root", tmp_path, *words, group="sensors"
    )


def test_a_scene_that_claims_endless_tiles_is_refused(tmp_path, capsys):
    side = 2**16
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "u1", (side, side)).flush()  # a hole
    words = ["build", tmp_path / "out", "--root", tmp_path, "--channels", "grey", "--tile", "32"]
    assert "4194304 tiles of 65536 x 65536 px" in error_of(capsys, *words, group="sensors")


def test_a_scene_too_large_to_be_read_has_to_be_of_the_others_type_too(tmp_path, capsys):
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "u1", (20_000, 20_000)).flush()  # a hole
    np.save(tmp_path / "b.npy", numbers(20, 30))
    words = ["build", tmp_path / "out", "--root", tmp_path, "--channels", "grey", "--skip-bad"]
    assert "b.npy has 1 channel of uint16" in error_of(capsys, *words, group="sensors")


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_each_file_that_ships_with_pydicom_is_read_as_it_does_or_refused():
    folder = Path(get_testdata_file("CT_small.dcm", download=False)).parent
    equal = 0
    for path in sorted(folder.glob("*.dcm")):
        try:
            planes = open_planes(path, Pages())
            own = [planes.read(k, slice(None), slice(None)) for k in range(planes.total)]
        except BadSample:
            continue
        wanted = by_pydicom(path).ravel().astype(planes.dtype)
        np.testing.assert_array_equal(np.stack(own).ravel(), wanted, err_msg=path.name)
        equal += 1
    assert equal >= 40  # some need decoders that may be missing


def test_a_missing_library_names_the_extra(tmp_path, capsys, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", numbers(20, 30))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    words = ["build", tmp_path / "out", "--root", tmp_path, "--channels", "grey"]
    assert install("sensors") in error_of(capsys, *words, group="sensors")


def test_other_splits_have_the_same_type(tmp_path, root, capsys):
    scans(root)
    build(root, *FIVE)
    build(root, *FIVE, "--split", "val")
    (tmp_path / "rgb").mkdir()
    tif(numbers(20, 30, 3, dtype="u1"), photometric="rgb")(tmp_path / "rgb")
    other = ["--root", tmp_path / "rgb", "--split", "test", "--no-labels"]
    assert "a data set has one type" in error_of(
        capsys, "build", tmp_path / "out", *other, group="shards"
    )


def test_a_build_of_another_type_replaces_the_one_before(root):
    for number in range(6):
        folder = root / f"c{number % 2}" / str(number)
        folder.mkdir(parents=True)
        png(numbers(8, 8, dtype="u1"))(folder)
    build(root, "--test-fraction", 0.4, "--channels", "grey")
    words = ("build", root.parent / "out", "--root", root, "--test-fraction", 0.4, "--overwrite")
    assert run(*words) == 0
    assert load_index(root.parent / "out").image_type.is_rgb8
