"""What images are: channels, depth, range; the units of views."""

import io
import json
import random
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sslpipe.data.decode import BadSample, decode, decode_picture, header_size
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.index import Manifest, load_index, manifest_text
from sslpipe.errors import DataError, RecipeError
from sslpipe.recipe.identity import identity
from sslpipe.recipe.reading import load_recipe
from sslpipe.report.pictures import thumbnails
from sslpipe.sharding.index_tars import index_tars
from tests.helpers.batches import FIELDS, take
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.fuzz import NUMBERS, mutated

SPLITS = {"train": ()}


def deep(**changes):
    fields = {"channels": ("nir", "red"), "dtype": "uint16", "low": (0, 100), "high": (4095, 1100)}
    return ImageType.model_validate(fields | changes)


def test_units_are_0_at_low_255_at_high_and_keep_the_lowest_bit():
    pixels = np.array([[[0, 100], [4095, 1100], [65535, 0], [2000, 600], [2001, 601]]], np.uint16)
    units = deep().in_units(pixels)
    assert units.dtype == np.float32
    exact = (pixels.astype(np.float64) - [0, 100]) * 255 / [4095, 1000]
    np.testing.assert_allclose(units, exact, rtol=1e-6, atol=1e-4)
    assert (units[0, 4] > units[0, 3]).all()  # one level apart
    assert RGB8.in_units(rgb := np.zeros((2, 2, 3), np.uint8)) is rgb


@pytest.mark.parametrize(("low", "high"), [(-3e38, 3e38), (0, 1e-37), (1e6, 1e6 + 4), (0.1, 0.3)])
def test_units_of_any_range_of_floats(low, high):
    kind = deep(channels=("a",), dtype="float32", low=(low,), high=(high,))
    pixels = np.linspace(low, high, 7).astype(np.float32).reshape(1, 7, 1)
    exact = (pixels.astype(np.float64) - low) * 255 / (high - low)
    np.testing.assert_allclose(kind.in_units(pixels), exact, rtol=1e-6, atol=1e-4)


def test_people_see_red_green_and_blue_wherever_they_are_else_the_first():
    five = ImageType(
        channels=("nir", "blue", "green", "red", "ir"), dtype="uint8", low=(0,) * 5, high=(255,) * 5
    )
    units = np.arange(5, dtype=np.uint8)[:, None, None].repeat(2, 1)
    assert five.picture(units)[0, 0].tolist() == [3, 2, 1]
    assert deep().picture(np.float32([[[-3]], [[9]]])).tolist() == [[[0, 0, 0]]]
    parts = ("red (0 to 255) as red", "green (0 to 255) as green", "blue (0 to 255) as blue")
    assert five.caption == "pictures show " + ", ".join(parts)
    assert deep().caption == "pictures show nir (0 to 4095) as grey"
    assert RGB8.caption == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"channels": ("a", "a")}, "one twice"),
        ({"low": (0,)}, "2 numbers"),
        ({"high": (0, 100)}, "low is not below high"),
        ({"high": (1, float("nan"))}, "high"),
        ({"dtype": "uint8"}, "0 and 255"),
        ({"channels": tuple(f"c{n}" for n in range(65))}, "64"),
        ({"channels": ("../x", "b")}, "pattern"),
    ],
)
def test_types_that_cannot_be_are_refused(changes, told):
    with pytest.raises(ValidationError, match=told):
        deep(**changes)


def test_only_a_manifest_of_other_images_mentions_them():
    def manifest(version, **settings):
        return Manifest(schema_version=version, name="a", splits=SPLITS, **settings)

    assert "image" not in json.loads(manifest_text(manifest(1)))
    other = manifest(3, image=deep(), mean=(0.5, 0.4), std=(0.1, 0.2))
    tree = json.loads(manifest_text(other))
    assert tree["schema_version"] == 3
    assert Manifest.model_validate(tree) == other
    with pytest.raises(ValidationError, match="mean has 3 numbers, and an image 2 channels"):
        manifest(3, image=deep())


CHANNELS = ("nir", "red", "green", "blue")
COUNT = 64


def kind(dtype, channels=4):
    low, high = (0.0, 255.0) if dtype == "uint8" else (100.0, 1124.0)
    names = tuple(f"c{k}" for k in range(channels))
    return ImageType(channels=names, dtype=dtype, low=(low,) * channels, high=(high,) * channels)


def raw_of(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [1, 2, 5, 64])
def test_an_array_is_decoded_to_units_by_channel(dtype, channels):
    array = np.random.default_rng(1).integers(0, 250, (20, 30, channels)).astype(dtype)
    own = kind(dtype, channels)
    found = decode(raw_of(array), 64, image_type=own)
    assert found.shape == (channels, 20, 30)
    assert found.strides[0] == found.itemsize  # channels last
    exact = array.astype(np.float64)
    if dtype != "uint8":
        exact = (exact - 100) * 255 / 1024
    assert found.dtype == (np.uint8 if dtype == "uint8" else np.float32)
    np.testing.assert_allclose(found.transpose(1, 2, 0), exact, atol=1e-4)
    if channels == 1:  # grey may lack its last dimension
        np.testing.assert_array_equal(decode(raw_of(array[:, :, 0]), 64, image_type=own), found)
    assert header_size(raw_of(array)) == (30, 20)
    some = decode(raw_of(array), 64, image_type=own, channels=(channels - 1, 0))
    np.testing.assert_array_equal(some, found[[channels - 1, 0]])
    # reduced as torch reduces what the whole image is in units
    small = decode(raw_of(array), 10, image_type=own)
    whole = torch.from_numpy(found.copy())[None]
    wanted = torch.nn.functional.interpolate(whole, (7, 10), mode="bilinear", antialias=True)[0]
    np.testing.assert_allclose(small, wanted.numpy(), atol=1 if dtype == "uint8" else 1e-3)


GOOD = raw_of(np.zeros((4, 4, 2), np.uint16))
BAD = {
    "a picture": (b"\xff\xd8\xff\xe0" + bytes(40), "not a .npy file"),
    "empty": (b"", "not a"),
    "truncated": (GOOD[:-1], "63 bytes of pixels, and (4, 4, 2) uint16 in the header"),
    "truncated header": (GOOD[:20], "damaged"),
    "other depth": (raw_of(np.zeros((4, 4, 2), np.uint8)), "2 channels of uint8, but the data"),
    "other channels": (raw_of(np.zeros((4, 4, 3), np.uint16)), "3 channels of uint16, but"),
    "big-endian": (raw_of(np.zeros((4, 4, 2), ">u2")), "store little-endian"),
    "fortran": (raw_of(np.asfortranarray(np.zeros((4, 4, 2), np.uint16))), "Fortran order"),
    "objects": (GOOD.replace(b"'<u2'", b"'|O' "), "a .npy"),
    "records": (raw_of(np.zeros((4, 4), "u2,u2")), "a .npy header that is damaged"),
    "code": (GOOD.replace(b"(4, 4, 2)", b"f(4,4,2)"), "damaged"),
    "four dimensions": (raw_of(np.zeros((1, 4, 4, 2), np.uint16)), "shape (1, 4, 4, 2)"),
    "huge": (
        GOOD.replace(b"(4, 4, 2), }" + b" " * 9, b"(400000, 99999, 2), }"),
        "99999 x 400000 px is more than the limit",
    ),
    # a pattern that tries all ways to part them would not end
    "digits": (GOOD.replace(b"(4, 4, 2), }" + b" " * 50, b"(" + b"1" * 58 + b"x)}"), "damaged"),
    "no pixels": (raw_of(np.zeros((0, 4, 2), np.uint16)), "4 x 0 px"),
    "not finite": (raw_of(np.float32([[[np.nan, 1], [0, np.inf]]])), "2 values are NaN or infin"),
}


@pytest.mark.parametrize("name", BAD)
def test_another_array_is_a_bad_sample(name):
    raw, reason = BAD[name]
    with pytest.raises(BadSample) as error:
        decode(raw, 64, image_type=kind("float32" if name == "not finite" else "uint16", 2))
    assert reason in str(error.value)
    with pytest.raises(BadSample):
        decode(GOOD, 64)  # where 8-bit RGB is wanted


def test_damaged_arrays_are_bad_samples_or_arrays():
    rng, good = random.Random(0), 0
    for _ in range(2000):
        with suppress(BadSample):
            good += decode(mutated(GOOD, rng, NUMBERS), 64, image_type=kind("uint16", 2)).ndim == 3
    assert 0 < good < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """COUNT images of four channels, uint16, each of its own size, one of them bad."""
    folder = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(2)
    for shard in range(2):
        with tarfile.open(folder / f"train-{shard:06d}.tar", "w") as tar:
            for number in range(shard * COUNT // 2, (shard + 1) * COUNT // 2):
                array = rng.integers(0, 4000, (24 + number % 5, 28, 4)).astype(np.uint16)
                files = {"npy": raw_of(array)[: -1 if number == 9 else None], "cls": b"1"}
                for suffix, content in files.items():
                    info = tarfile.TarInfo(f"s{number:03d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    index_tars(folder, split="train", channels=CHANNELS, range=(0.0, 4000.0))
    return folder


def test_resident_batches_are_those_that_are_read(folder):
    index = load_index(folder)
    bad = []
    read = take(index, 6, bad=bad)
    resident = take(index, 6, run={"cache": "device"})
    assert {record.id for record in bad} == {9}
    assert "bytes of pixels" in bad[0].reason
    for one, other in zip(read, resident, strict=True):
        assert one.images.dtype == torch.float32
        assert one.images.is_contiguous(memory_format=torch.channels_last)
        for field in FIELDS[1:]:
            assert torch.equal(getattr(one, field), getattr(other, field))
        height, width = one.images.shape[2:]
        assert torch.equal(one.images, other.images[:, :, :height, :width])


def test_channels_are_selected_in_every_place_that_reads(folder):
    index = load_index(folder)
    whole = take(index, 1)[0]
    chosen = index.with_channels(["green", "nir"])
    assert torch.equal(take(chosen, 1)[0].images, whole.images[:, [2, 0]])
    assert chosen.with_channels(["green", "nir"]).manifest == chosen.manifest
    rgb = index.with_channels(["red", "green", "blue"])
    assert rgb.image_type.is_rgb
    assert not rgb.image_type.is_rgb8
    with pytest.raises(DataError, match=r"no channel 'gren'; did you mean 'green'\?.* nir, red"):
        index.with_channels(["gren"])


def test_channels_of_8_bit_rgb_are_selected_too(tmp_path):
    index = load_index(write_dataset(tmp_path, (32,) * 2))
    batch = take(index.with_channels(["blue"]), 1)[0]
    assert batch.images.dtype == torch.uint8
    for row, number in enumerate(batch.source_ids.tolist()):
        np.testing.assert_array_equal(batch.images[row, 0], picture(number)[:, :, 2])


def test_people_see_red_green_and_blue(folder):
    index = load_index(folder)
    split = index.split("train")
    raw = (folder / "train-000000.tar").read_bytes()[512:]
    size = int((folder / "train-000000.tar").read_bytes()[124:135], 8)  # of the first member
    shown = decode_picture(raw[:size], 64, index.image_type)
    stored = np.load(io.BytesIO(raw[:size]))[:, :, 1:]
    np.testing.assert_allclose(shown, stored.astype(np.float64) * 255 / 4000, atol=0.51)
    assert len(thumbnails(split, [0, 1, 9])) == 2


def test_data_channels_are_in_the_digest_only_where_they_are_set():
    path = Path(__file__).parents[2] / "recipes" / "demo.toml"
    plain, chosen = load_recipe(path), load_recipe(path, ['data.channels=["red","nir"]'])
    assert chosen.data.channels == ("red", "nir")
    assert identity(plain, "a" * 64, 1)["digest"] != identity(chosen, "a" * 64, 1)["digest"]
    assert plain.model_dump(mode="json")["data"]["channels"] is None
    with pytest.raises(RecipeError, match="'red' is named twice"):
        load_recipe(path, ['data.channels=["red","red"]'])
