"""Images as sensors give them: each format, depth and order, against the reader library alone."""

import io
import math
import sys
import tarfile
from collections.abc import Callable
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
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.sharding.scenes import content
from sslpipe.sharding.sensors import Pages, open_planes
from tests.sharding.test_shards import error_of, run

RNG = np.random.default_rng(0)


def numbers(*shape: int, dtype: str = "u2") -> np.ndarray:
    if dtype.startswith("f"):
        return RNG.normal(size=shape).astype(dtype)
    return RNG.integers(0, 2 ** min(31, 8 * int(dtype[1])) // 2, shape).astype(dtype)


def tif(pixels: np.ndarray, **options) -> Callable[[Path], np.ndarray]:
    """Writer of a TIFF; gives what tifffile itself reads of it."""

    def write(folder: Path) -> np.ndarray:
        path = folder / "a.tif"
        tifffile.imwrite(path, pixels, **{"photometric": "minisblack", **options})
        return tifffile.imread(path)

    return write


def saved(name: str, write: Callable[[Path], object], read: Callable[[Path], np.ndarray]):
    def both(folder: Path) -> np.ndarray:
        write(folder / name)
        return read(folder / name)

    return both


def npy(array: np.ndarray):
    return saved("a.npy", lambda path: np.save(path, array), np.load)


def png(pixels: np.ndarray):
    def write(path: Path) -> None:
        path.write_bytes(imagecodecs.png_encode(np.ascontiguousarray(pixels)))

    return saved("a.png", write, lambda path: imagecodecs.png_decode(path.read_bytes()))


def nifti(array: np.ndarray, name: str = "a.nii", slope: float | None = None):
    def write(path: Path) -> None:
        image = nibabel.Nifti1Image(array, np.eye(4))
        if slope is not None:
            image.header.set_slope_inter(slope, 3)
        image.to_filename(path)

    return saved(name, write, lambda path: np.asanyarray(nibabel.load(path).dataobj))


def dicom(name: str):
    """A file that ships with pydicom, by pydicom's own functions."""

    def read(path: Path) -> np.ndarray:
        dataset = pydicom.dcmread(path)
        return pydicom.pixels.apply_rescale(pydicom.pixels.pixel_array(path), dataset)

    def write(path: Path) -> None:
        path.write_bytes(Path(get_testdata_file(name, download=False)).read_bytes())

    return saved("a.dcm", write, read)


YXS, SYX, CS = (0, 1, 2, 3), (0, 2, 3, 1), ("--pages", "channels")
ONE = ("--pages", "samples")
F4 = {"compression": "deflate", "predictor": True}
ZSTD = {"compression": "zstd", "tile": (32, 16)}
GIVEN = {"planarconfig": "separate"}

# writer, options, what the reader's array is -> (images, h, w, C)
FORMATS = {
    "tiff grey": (tif(numbers(40, 50)), (), lambda a: a[None, :, :, None]),
    "tiff uint8": (
        tif(numbers(40, 50, 4, dtype="u1"), planarconfig="contig"),
        (),
        lambda a: a[None],
    ),
    "tiff strips": (
        tif(numbers(45, 50, 5), compression="lzw", rowsperstrip=16, planarconfig="contig"),
        (),
        lambda a: a[None],
    ),
    "tiff separate": (tif(numbers(5, 40, 50), **GIVEN), (), lambda a: a.transpose(1, 2, 0)[None]),
    "tiff separate tiles": (
        tif(numbers(5, 40, 50), **GIVEN, **ZSTD),
        (),
        lambda a: a.transpose(1, 2, 0)[None],
    ),
    "tiff pages are channels": (
        tif(numbers(7, 40, 50), **ZSTD),
        CS,
        lambda a: a.transpose(1, 2, 0)[None],
    ),
    "tiff pages are images": (tif(numbers(7, 40, 50)), ONE, lambda a: a[..., None]),
    "ome-tiff": (
        tif(numbers(2, 3, 40, 50), ome=True, metadata={"axes": "CZYX"}),
        ONE,
        lambda a: a.transpose(1, 2, 3, 0),
    ),
    "imagej": (
        tif(numbers(3, 2, 40, 50), imagej=True, metadata={"axes": "ZCYX"}),
        ONE,
        lambda a: a.transpose(0, 2, 3, 1),
    ),
    "all axes are channels": (
        tif(numbers(2, 3, 40, 50), ome=True, metadata={"axes": "CZYX"}),
        CS,
        lambda a: a.reshape(6, 40, 50).transpose(1, 2, 0)[None],
    ),
    "bigtiff big-endian": (
        tif(numbers(40, 50), bigtiff=True, byteorder=">", compression="zstd"),
        (),
        lambda a: a[None, :, :, None],
    ),
    "tiff float": (tif(numbers(40, 50, dtype="f4"), **F4), (), lambda a: a[None, :, :, None]),
    "tiff float64": (tif(numbers(40, 50, dtype="f8")), (), lambda a: a[None, :, :, None]),
    "tiff int16": (tif(numbers(40, 50, dtype="i2") - 99), (), lambda a: a[None, :, :, None]),
    "tiff jpeg": (
        tif(numbers(40, 48, 3, dtype="u1"), photometric="rgb", compression="jpeg", tile=(16, 16)),
        (),
        lambda a: a[None],
    ),
    "png 16 grey": (png(numbers(40, 50)), (), lambda a: a[None, :, :, None]),
    "png 16 rgb": (png(numbers(40, 50, 3)), (), lambda a: a[None]),
    "png 16 rgba": (png(numbers(40, 50, 4)), (), lambda a: a[None]),
    "png 8 grey": (png(numbers(40, 50, dtype="u1")), (), lambda a: a[None, :, :, None]),
    "npy": (npy(numbers(40, 50, 6)), (), lambda a: a[None]),
    "npy fortran": (npy(np.asfortranarray(numbers(40, 50, 2, dtype="f8"))), (), lambda a: a[None]),
    "npy big-endian": (npy(numbers(40, 50).astype(">u2")), (), lambda a: a[None, :, :, None]),
    "npy pages": (npy(numbers(3, 40, 50)), CS, lambda a: a.transpose(1, 2, 0)[None]),
    "npy images": (npy(numbers(3, 40, 50, 2)), ONE, lambda a: a),
    "npz": (
        saved(
            "a.npz",
            lambda path: np.savez_compressed(path, pixels=numbers(3, 40, 50)),
            lambda path: np.load(path)["pixels"],
        ),
        ONE,
        lambda a: a[..., None],
    ),
    "dicom rescaled": (dicom("CT_small.dcm"), (), lambda a: a[None, :, :, None]),
    "dicom": (dicom("MR_small.dcm"), (), lambda a: a[None, :, :, None]),
    "dicom rle": (dicom("MR_small_RLE.dcm"), (), lambda a: a[None, :, :, None]),
    "dicom colours": (dicom("examples_jpeg2k.dcm"), (), lambda a: a[None]),
    "nifti": (nifti(numbers(20, 30, 4, dtype="i2")), (), lambda a: a.transpose(2, 0, 1)[..., None]),
    "nifti axis 0": (
        nifti(numbers(4, 30, 20)),
        ("--slice-axis", "0"),
        lambda a: a[..., None],
    ),
    "nifti scaled": (
        nifti(numbers(20, 30, 4, dtype="i2"), slope=0.25),
        (),
        lambda a: a.transpose(2, 0, 1)[..., None],
    ),
    "nifti volumes are channels": (
        nifti(numbers(20, 30, 4, 3), "a.nii.gz"),
        CS,
        lambda a: a.transpose(2, 0, 1, 3),
    ),
    "nifti volumes are images": (
        nifti(numbers(20, 30, 4, 3), "a.nii.gz"),
        ONE,
        lambda a: a.transpose(3, 2, 0, 1).reshape(12, 20, 30, 1),
    ),
}


def stored(array: np.ndarray) -> np.ndarray:
    """What a data set holds: uint8 and uint16 as they are, all else as float32."""
    keeps = array.dtype.newbyteorder("=") in (np.uint8, np.uint16)
    return array.astype(array.dtype.newbyteorder("<") if keeps else "<f4")


def members(out: Path, split: str = "train") -> dict[str, np.ndarray]:
    """Arrays of the shards by key, read by numpy alone."""
    arrays = {}
    for path in sorted(out.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if suffix == "npy":
                    arrays[key] = np.load(io.BytesIO(tar.extractfile(member).read()))
    return dict(sorted(arrays.items()))


def names(count: int) -> str:
    return ",".join(f"c{k}" for k in range(count))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_stored_as_its_reader_gives_it_bit_for_bit(tmp_path, name):
    write, options, arrange = FORMATS[name]
    (tmp_path / "in").mkdir()
    expected = stored(arrange(write(tmp_path / "in")))
    words = ["--root", tmp_path / "in", "--channels", names(expected.shape[3]), *options]
    assert run("build", tmp_path / "out", *words) == 0
    found = list(members(tmp_path / "out").values())
    assert len(found) == len(expected)
    for image, wanted in zip(found, expected, strict=True):
        assert image.dtype == wanted.dtype
        np.testing.assert_array_equal(image, wanted)
    assert run("verify", tmp_path / "out") == 0
    # tiles of the same, which are read by windows
    tiles = ["--tile", "16", "--stride", "12"]
    assert run("build", tmp_path / "tiles", *words, *tiles) == 0
    index = load_index(tmp_path / "tiles")
    split = index.split("train")
    columns = {key: split.column(key).values for key in ("x", "y")}
    pages = split.column("page").values if "page" in index.manifest.columns else 0 * columns["x"]
    by_key = members(tmp_path / "tiles")
    places = sorted(zip(pages.tolist(), columns["y"].tolist(), columns["x"].tolist(), strict=True))
    height = expected.shape[1]
    assert {y for _, y, _ in places} == {*range(0, height - 16, 12), height - 16}
    for (page, y, x), tile in zip(places, by_key.values(), strict=True):
        np.testing.assert_array_equal(tile, expected[page, y : y + 16, x : x + 16])


def scans(folder: Path, count: int = 6, channels: int = 5) -> np.ndarray:
    folder.mkdir(parents=True)
    images = RNG.integers(200, 3000, (count, 40, 40, channels)).astype("u2")
    images[..., 1] *= 20
    for k, image in enumerate(images):
        np.save(folder / f"scan{k}.npy", image)
    return images


def test_range_mean_and_std_are_those_of_the_pixels(tmp_path, capsys):
    images = scans(tmp_path / "in")
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", "--channels", names(5)) == 0
    manifest = load_index(tmp_path / "out").manifest
    flat = images.reshape(-1, 5).astype(np.float64)
    for k, (low, high) in enumerate(zip(manifest.image.low, manifest.image.high, strict=True)):
        wanted = np.percentile(flat[:, k], [0.1, 99.9], method="inverted_cdf")
        assert (low, high) == tuple(wanted)
        scaled = (flat[:, k] - low) / (high - low)
        assert math.isclose(manifest.mean[k], scaled.mean(), abs_tol=1e-6)
        assert math.isclose(manifest.std[k], scaled.std(), abs_tol=1e-6)
    assert run("show", tmp_path / "out", "--out", tmp_path / "sheet.png") == 0
    said = capsys.readouterr().out
    assert "5 channels of uint16" in said
    assert f"c1: {manifest.image.low[1]:g} to {manifest.image.high[1]:g}" in said
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[0] > 100


@pytest.mark.parametrize("dtype", ["u2", "f4"])
def test_a_constant_or_sparse_channel_has_a_range(tmp_path, capsys, dtype):
    image = np.zeros((40, 40, 2), dtype)
    image[..., 0] = 7
    image[3, 4, 1] = 9
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", image)
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", "--channels", "a,b") == 0
    assert "channel a is constant: 7 in all of them" in capsys.readouterr().out
    image = load_index(tmp_path / "out").manifest.image
    assert (image.low, image.high) == ((7, 0), (8, 9))


def test_a_given_range_and_the_window_of_dicom_files_are_taken(tmp_path):
    (tmp_path / "in").mkdir()
    dicom("MR_small.dcm")(tmp_path / "in")
    words = ["--root", tmp_path / "in", "--channels", "mr"]
    assert run("build", tmp_path / "a", *words) == 0
    assert run("build", tmp_path / "b", *words, "--range", "-5,4000") == 0
    image = load_index(tmp_path / "a").manifest.image
    assert (image.low, image.high) == ((-200,), (1400,))  # centre 600, width 1600
    image = load_index(tmp_path / "b").manifest.image
    assert (image.low, image.high) == ((-5,), (4000,))


def test_files_of_one_sample_are_its_channels_by_name(tmp_path):
    (tmp_path / "in").mkdir()
    expected = {}
    for well in "AB":
        for channel in ("gfp", "dapi", "bright"):
            expected[well, channel] = pixels = numbers(20, 30)
            tifffile.imwrite(tmp_path / "in" / f"{well}_{channel}_s1.tif", pixels)
    words = ["--root", tmp_path / "in", "--channels", "dapi,gfp", "--name-pattern"]
    pattern = r"(?P<well>[A-Z])_(?P<channel>[a-z]+)_s1[.]tif"
    assert run("build", tmp_path / "out", *words, pattern) == 0
    for well, found in zip("AB", members(tmp_path / "out").values(), strict=True):
        wanted = [expected[well, channel] for channel in ("dapi", "gfp")]
        np.testing.assert_array_equal(found, np.stack(wanted, axis=2))
    assert set(load_index(tmp_path / "out").manifest.columns) == {"well"}


def test_the_low_byte_reaches_the_batch_and_channels_are_selected(tmp_path):
    images = scans(tmp_path / "in")
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", "--channels", names(5)) == 0
    index = load_index(tmp_path / "out")
    kind = index.image_type
    for wanted in (None, ("c3", "c1")):
        chosen = index.with_channels(wanted)
        (batch,) = one_pass(chosen.split("train"), num_workers=0)
        places = range(5) if wanted is None else (3, 1)
        assert chosen.image_type.channels == tuple(f"c{k}" for k in places)
        assert chosen.manifest.mean == tuple(index.manifest.mean[k] for k in places)
        assert chosen.sha256 == index.sha256
        order = [int(key[:8]) for key in _keys(tmp_path / "out")]
        for row, number in enumerate(order):
            for channel, k in enumerate(places):
                low, high = kind.low[k], kind.high[k]
                exact = (images[number, :, :, k].astype(np.float64) - low) * 255 / (high - low)
                np.testing.assert_allclose(batch.images[row, channel], exact, atol=1e-4)


def _keys(out: Path) -> list[str]:
    with tarfile.open(out / "train-000000.tar") as tar:
        return [name.partition(".")[0] for name in tar.getnames() if name.endswith(".npy")]


# --- tiles


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_tiles_of_8_bit_rgb_scenes_are_pngs_of_their_pixels(tmp_path, suffix):
    (tmp_path / "in").mkdir()
    rough = RNG.integers(0, 255, (12, 10, 3)).astype("u1")
    scene = Image.fromarray(rough).resize((100, 90))
    scene.save(tmp_path / "in" / f"scene.{suffix}")
    pixels = np.asarray(Image.open(tmp_path / "in" / f"scene.{suffix}"))
    words = ["--tile", "32", "--stride", "24"]
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", *words) == 0
    index = load_index(tmp_path / "out")
    assert index.manifest.image is None
    split = index.split("train")
    (batch,) = one_pass(split, num_workers=0)
    x, y = split.column("x").values, split.column("y").values
    assert sorted(set(x.tolist())) == [0, 24, 48, 68]
    for row in range(len(split)):
        tile = pixels[y[row] : y[row] + 32, x[row] : x[row] + 32]
        np.testing.assert_array_equal(batch.images[row].permute(1, 2, 0), tile)


@pytest.mark.parametrize("empty", [0, 60000])
def test_tiles_without_content_are_skipped_on_dark_and_on_light(tmp_path, capsys, empty):
    scene = np.full((64, 128), empty, "u2")
    scene += RNG.integers(0, 3, scene.shape).astype("u2")
    scene[:, 64:96] = RNG.integers(10_000, 50_000, (64, 32))
    (tmp_path / "in").mkdir()
    tifffile.imwrite(tmp_path / "in" / "a.tif", scene, tile=(32, 32), compression="zstd")
    words = ["--channels", "grey", "--tile", "32", "--min-content", "0.1"]
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", *words) == 0
    assert "6 of 8 tiles skipped" in capsys.readouterr().out
    x = load_index(tmp_path / "out").split("train").column("x").values
    assert x.tolist() == [64, 64]


def test_content_is_the_share_of_blocks_that_vary():
    tile = np.zeros((64, 64, 1))
    tile[:16, :32] = RNG.normal(size=(16, 32, 1))
    assert content(tile, np.array([1.0])) == 2 / 16
    assert content(tile, np.array([1000.0])) == 0
    tile[0, 0] = np.nan
    assert content(tile, np.array([1.0])) == 1 / 16


def test_tiles_of_a_scene_are_all_in_train_or_all_in_test(tmp_path):
    scans(tmp_path / "in")
    words = ["--channels", names(5), "--tile", "16", "--test-fraction", "0.3"]
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", *words) == 0
    index = load_index(tmp_path / "out")
    parents = [
        {split.column("parent").strings[code] for code in split.column("parent").values.tolist()}
        for split in (index.split("train"), index.split("test"))
    ]
    assert not parents[0] & parents[1]
    assert len(parents[0] | parents[1]) == 6


def test_a_build_of_tiles_that_was_stopped_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    from sslpipe.sharding import writer

    scans(tmp_path / "in")
    words = ["--root", tmp_path / "in", "--channels", names(5), "--tile", "16", "--stride", "12"]
    words += ["--samples-per-shard", "10", "--workers", "1", "--name", "x"]
    assert run("build", tmp_path / "whole", *words) == 0
    written = writer._write_shard

    def stop_at_two(folder, shard, *rest):
        if shard == 2:
            raise KeyboardInterrupt
        return written(folder, shard, *rest)

    monkeypatch.setattr(writer, "_write_shard", stop_at_two)
    run("build", tmp_path / "out", *words)
    assert not (tmp_path / "out" / "dataset.json").exists()
    monkeypatch.setattr(writer, "_write_shard", written)
    assert run("build", tmp_path / "out", *words) == 0
    for part in ("1/2", "2/2"):
        assert run("build", tmp_path / "parts", *words, "--part", part) == 0
    assert run("merge", tmp_path / "parts") == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("[!.]*.*")}
    for other in ("out", "parts"):
        for name, raw in whole.items():
            assert (tmp_path / other / name).read_bytes() == raw, (other, name)


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that were decoded as a whole, once for each time."""
    from sslpipe.sharding import scenes

    names, opened = [], scenes.open_planes

    def counted(path, pages):
        planes = opened(path, pages)

        def load():
            names.append(path.name)
            return planes.load()

        return planes._replace(load=planes.load and load)

    monkeypatch.setattr(scenes, "open_planes", counted)
    return names


def test_volumes_that_are_channels_are_decoded_once(tmp_path, decoded):
    (tmp_path / "in").mkdir()
    volumes = {c: RNG.normal(size=(20, 18, 7)).astype("f4") for c in ("t1", "t2")}
    for name, volume in volumes.items():
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "in" / f"a_{name}.nii.gz")
    words = ["--channels", "t1,t2", "--name-pattern", r"a_(?P<channel>\w+)[.]nii[.]gz"]
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", *words) == 0
    assert sorted(decoded) == ["a_t1.nii.gz", "a_t2.nii.gz"]
    split = load_index(tmp_path / "out").split("train")
    pages = split.column("page").values.tolist()
    arrays = members(tmp_path / "out")
    stored = np.stack([arrays[key] for key in _keys(tmp_path / "out")], axis=2)
    wanted = np.stack([*volumes.values()], axis=-1)[:, :, pages]
    np.testing.assert_array_equal(stored, wanted)


def test_a_part_decodes_the_scenes_that_it_needs_and_a_resume_those_that_are_left(
    tmp_path, decoded
):
    (tmp_path / "in").mkdir()
    for number in range(4):
        np.savez_compressed(tmp_path / "in" / f"{number}.npz", numbers(32, 32))
    words = ["--root", tmp_path / "in", "--channels", "grey", "--tile", "16", "--workers", "1"]
    words += ["--samples-per-shard", "4", "--group-by", "parent", "--name", "x"]
    for part in range(1, 5):
        for _ in range(2):  # the second finds it finished
            assert run("build", tmp_path / "parts", *words, "--part", f"{part}/4") == 0
            assert len(decoded) == len({*decoded}) == part
    assert run("merge", tmp_path / "parts") == 0
    assert run("build", tmp_path / "whole", *words) == 0
    for path in (tmp_path / "whole").glob("[!.]*.*"):
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()


def test_tars_of_others_are_indexed_and_measured(tmp_path, capsys):
    scans(tmp_path / "in")
    words = ["--root", tmp_path / "in", "--channels", names(5)]
    assert run("build", tmp_path / "built", *words) == 0
    (tmp_path / "tars").mkdir()
    raw = (tmp_path / "built" / "train-000000.tar").read_bytes()
    (tmp_path / "tars" / "train-000000.tar").write_bytes(raw)
    assert "--channels" in error_of(capsys, "index", tmp_path / "tars")
    assert run("index", tmp_path / "tars", "--channels", names(5)) == 0
    one, other = (load_index(tmp_path / name).manifest for name in ("built", "tars"))
    assert (one.image, one.mean, one.std) == (other.image, other.mean, other.std)
    assert run("index", tmp_path / "tars") == 0  # again, as dataset.json says
    assert load_index(tmp_path / "tars").manifest == other


# --- bad input


def bad(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        tifffile.imwrite(folder / "good.tif", numbers(20, 30))
        write(folder)

    return both


def claims(folder: Path) -> None:
    """A TIFF of 100 bytes that says it has 2^31 x 2^31 px."""
    path = folder / "z.tif"
    tifffile.imwrite(path, numbers(8, 8), compression="zstd")
    raw = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        for name in ("ImageWidth", "ImageLength"):
            tag = file.pages[0].tags[name]
            size = 2 if tag.dtype == 3 else 4
            raw[tag.valueoffset : tag.valueoffset + 4] = (
                2**31 - 1 if size == 4 else 65535
            ).to_bytes(4, "little")
            raw[tag.offset + 2 : tag.offset + 4] = (4).to_bytes(2, "little")
            raw[tag.valueoffset : tag.valueoffset + 4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(raw)


def looped(folder: Path) -> None:
    path = folder / "z.tif"
    tifffile.imwrite(path, numbers(8, 8))
    with tifffile.TiffFile(path) as file:
        first = file.pages[0].offset
    raw = bytearray(path.read_bytes())
    count = int.from_bytes(raw[first : first + 2], "little")
    raw[first + 2 + 12 * count :][:4] = b""
    at = first + 2 + 12 * count
    raw[at : at + 4] = first.to_bytes(4, "little")
    path.write_bytes(raw)


def cut_short(folder: Path) -> None:
    tif(numbers(100, 100), compression="zstd", tile=(32, 32))(folder)
    raw = (folder / "a.tif").read_bytes()
    (folder / "a.tif").write_bytes(raw[: len(raw) // 2])


def cut_dicom(folder: Path) -> None:
    dicom("MR_truncated.dcm")
    raw = Path(get_testdata_file("MR_truncated.dcm", download=False)).read_bytes()
    (folder / "z.dcm").write_bytes(raw)


def shipped(name: str) -> Callable[[Path], object]:
    """A file that ships with pydicom."""
    return lambda folder: (folder / "z.dcm").write_bytes(
        Path(get_testdata_file(name, download=False)).read_bytes()
    )


def cut_volume(folder: Path) -> None:
    volume = RNG.normal(size=(20, 30, 9)).astype("f4")
    (folder / "good.tif").unlink()
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / "z.nii.gz")
    raw = (folder / "z.nii.gz").read_bytes()
    (folder / "z.nii.gz").write_bytes(raw[: len(raw) // 2])


def many_pages(folder: Path) -> None:
    """A TIFF of 70,001 pages: one header again and again."""
    tifffile.imwrite(folder / "z.tif", numbers(1, 1), metadata=None)
    raw = bytearray((folder / "z.tif").read_bytes())
    first, start = int.from_bytes(raw[4:8], "little"), len(raw)
    end = first + 2 + 12 * int.from_bytes(raw[first : first + 2], "little")
    header, size = bytes(raw[first:end]), end - first + 4
    raw[end : end + 4] = start.to_bytes(4, "little")
    places = [start + size * k for k in range(1, 70_000)] + [0]
    raw += b"".join(header + place.to_bytes(4, "little") for place in places)
    (folder / "z.tif").write_bytes(raw)


def bomb(folder: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_2_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**20)}
    )
    import zipfile

    with zipfile.ZipFile(folder / "z.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header.getvalue() + bytes(2**20))


def nan(folder: Path) -> None:
    (folder / "good.tif").unlink()
    array = numbers(20, 30, dtype="f4")
    array[3, 4:7] = np.nan
    np.save(folder / "a.npy", array)


BAD = {
    "depths": (
        bad(lambda f: np.save(f / "z.npy", numbers(9, 9, dtype="f4"))),
        "float32: a data set",
    ),
    "channels": (bad(lambda f: np.save(f / "z.npy", numbers(9, 9, 2))), "good.tif has 1 channels"),
    "truncated": (bad(cut_short), "is truncated"),
    "claims 2^31 px": (bad(claims), "z.tif: "),
    "looped pages": (bad(looped), "z.tif: "),
    "zip bomb": (bad(bomb), "more than the limit of 1 GiB"),
    "nan": (bad(nan), "3 of 600 values are NaN or infinite; give --nan VALUE"),
    "objects": (
        bad(lambda f: np.save(f / "z.npy", np.array([[{}]]), allow_pickle=True)),
        "z.npy: ",
    ),
    "complex": (bad(lambda f: np.save(f / "z.npy", np.ones((3, 3), "c8"))), "neither integers nor"),
    "integers": (bad(lambda f: np.save(f / "z.npy", np.full((3, 3), 2**30, "u4"))), "float32"),
    "palette": (
        bad(lambda f: Image.fromarray(numbers(9, 9, dtype="u1")).convert("P").save(f / "z.tif")),
        "its colours are PALETTE",
    ),
    "text": (bad(lambda f: (f / "z.tif").write_text("no image")), "not an image of a known format"),
    "truncated volume": (bad(cut_volume), "z.nii-page"),
    "lossy dicom": (
        bad(shipped("JPEGLSNearLossless_16.dcm")),
        "cannot decode DICOM's JPEG-LS Lossy",
    ),
    "deflated dicom": (bad(shipped("image_dfl.dcm")), "deflated as a whole"),
    "page bomb": (bad(many_pages), "more than 65536 pages"),
    "truncated dicom": (bad(cut_dicom), "z.dcm"),
    "rgb": (bad(lambda f: Image.new("P", (9, 9)).save(f / "z.png")), "Pillow's mode P"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(tmp_path, capsys, name):
    write, reason = BAD[name]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    words = ["build", tmp_path / "out", "--root", tmp_path / "in", "--channels", "grey"]
    message = error_of(capsys, *words)
    assert reason in message
    assert len(message.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_bad_files_are_skipped_and_nan_replaced_where_that_is_asked_for(tmp_path, capsys):
    array = numbers(20, 30, dtype="f4")
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "good.npy", array)
    array[3, 4:7] = np.nan
    np.save(tmp_path / "in" / "holes.npy", array)
    (tmp_path / "in" / "text.tif").write_text("no image")
    words = ["--root", tmp_path / "in", "--channels", "grey", "--skip-bad"]
    assert run("build", tmp_path / "a", *words) == 0
    said = capsys.readouterr().err
    assert "skipped: holes.npy: 3 of 600 values" in said
    assert "skipped: text.tif: not an image of a known format: it starts with b'no image'" in said
    assert len(members(tmp_path / "a")) == 1
    assert run("build", tmp_path / "b", *words, "--nan", "-9") == 0
    assert "1 of 2 images have NaN or infinite values, replaced" in capsys.readouterr().out
    holes = members(tmp_path / "b")["00000001-holes"]
    np.testing.assert_array_equal(holes[..., 0], np.where(np.isnan(array), np.float32(-9), array))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--pages", "samples"), "--pages needs --channels or --tile"),
        (("--stride", "9"), "--stride needs --tile"),
        (("--range", "0,1"), "--range needs --channels"),
        (("--channels", "a,a"), "names one twice"),
        (("--channels", "a", "--range", "3,3"), "is no LOW,HIGH"),
        (("--channels", "a", "--scatter"), "--scatter changes 8-bit RGB pictures"),
        (("--tile", "16"), "name its channels with --channels"),
        (("--channels", "a,b"), "good.tif has 1 channels, and --channels names 2: a, b"),
    ],
)
def test_a_mistake_of_the_command_is_one_line(tmp_path, capsys, words, reason):
    tifffile.imwrite(tmp_path / "good.tif", numbers(20, 30))
    assert reason in error_of(capsys, "build", tmp_path / "out", "--root", tmp_path, *words)


def test_a_scene_that_claims_endless_tiles_is_refused(tmp_path, capsys):
    side = 2**16
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "u1", (side, side)).flush()  # a hole
    words = ["build", tmp_path / "out", "--root", tmp_path, "--channels", "grey", "--tile", "32"]
    assert "4194304 tiles of 65536 x 65536 px" in error_of(capsys, *words)


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
        pixels = pydicom.pixels.pixel_array(path)
        pixels = pydicom.pixels.apply_rescale(pixels, pydicom.dcmread(path))
        wanted = pixels.ravel().astype(planes.dtype)
        np.testing.assert_array_equal(np.stack(own).ravel(), wanted, err_msg=path.name)
        equal += 1
    assert equal >= 40  # some need decoders that may be missing


def test_a_missing_library_names_the_extra(tmp_path, capsys, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", numbers(20, 30))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    words = ["build", tmp_path / "out", "--root", tmp_path, "--channels", "grey"]
    assert 'pip install "sslpipe[sensors]"' in error_of(capsys, *words)


def test_other_splits_have_the_same_type(tmp_path, capsys):
    scans(tmp_path / "in")
    tifffile.imwrite(tmp_path / "rgb.tif", numbers(20, 30, 3, dtype="u1"), photometric="rgb")
    words = ["--channels", names(5), "--root", tmp_path / "in"]
    assert run("build", tmp_path / "out", *words) == 0
    assert run("build", tmp_path / "out", *words, "--split", "val") == 0
    other = ["--root", tmp_path, "--split", "test", "--no-labels"]
    (tmp_path / "only").mkdir()
    (tmp_path / "rgb.tif").rename(tmp_path / "only" / "rgb.tif")
    other[1] = tmp_path / "only"
    message = error_of(capsys, "build", tmp_path / "out", *other)
    assert "a data set has one type" in message


def test_a_build_of_another_type_replaces_the_one_before(tmp_path, capsys):
    for number in range(6):
        folder = tmp_path / "img" / f"c{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers(8, 8, dtype="u1")).save(folder / f"{number}.png")
    build = ("build", tmp_path / "out", "--root", tmp_path / "img", "--test-fraction", "0.4")
    assert run(*build, "--channels", "grey") == 0
    assert run(*build, "--overwrite") == 0
    assert load_index(tmp_path / "out").image_type.is_rgb8


@pytest.mark.parametrize(
    ("array", "more", "told"),
    [
        (np.zeros((4, 4, 1), np.int16), (), "images of int16; store uint8, uint16, float32"),
        (np.zeros((4, 4, 1), np.uint32), (), "images of uint32"),
        (np.full((4, 4, 1), np.nan, np.float32), (), "nothing but NaN"),
        (np.full((4, 4, 1), 20000, np.uint16), ("--range", "0,1"), "far outside of the range"),
        (np.zeros((4, 4, 1), np.uint8), ("--range", "0,9"), "--range is for 16 bits"),
    ],
)
def test_tars_of_others_that_cannot_be_measured_are_one_line(array, more, told, tmp_path, capsys):
    raw = io.BytesIO()
    np.save(raw, array)
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        entry = tarfile.TarInfo("a.npy")
        entry.size = len(raw.getvalue())
        tar.addfile(entry, io.BytesIO(raw.getvalue()))
    assert told in error_of(capsys, "index", tmp_path, "--channels", "a", *more)
    assert "--channels names" in error_of(capsys, "index", tmp_path, "--range", "0,1")
