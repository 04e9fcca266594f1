"""What images are: channels, depth, range; the units of views."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.index import Manifest, manifest_text

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
