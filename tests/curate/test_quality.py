"""Measures of pictures against cleanvision's own numbers, and each limit against a planted case."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sslpipe.curate.outliers import checks, fineness, measure

# by cleanvision 0.3.7: BlurrinessProperty with its parameters, calc_percentile_brightness
CLEANVISION = {
    "waves": (0.4654014539747292, 0.06148339, 0.80870744),
    "gradient": (0.2831970429188667, 0.13333333, 0.81176471),
    "night": (0.3894277431832326, 0.0074582, 0.10892929),
    "small": (0.34439601422126376, 0.0788063, 0.8087201),
}


def pictures():
    rows, cols = np.mgrid[:96, :128]
    waves = (np.sin(rows / 3) + np.cos(cols / 2) + 2) / 4
    coloured = np.stack([255 * waves, 200 * waves, 90 * waves], 2).astype(np.uint8)
    night = np.stack([20 * waves, 30 * waves, 40 * waves], 2).astype(np.uint8)
    gradient = np.stack([rows + cols] * 3, 2).astype(np.uint8)
    return {"waves": coloured, "gradient": gradient, "night": night, "small": coloured[:20, :30]}


@pytest.mark.parametrize("name", CLEANVISION)
def test_measures_are_those_of_cleanvision(name):
    pixels = pictures()[name]
    found = measure(np.ascontiguousarray(pixels), *pixels.shape[:2])
    sharpness, darkest, brightest = CLEANVISION[name]
    assert found["blurred"] == pytest.approx(sharpness, rel=1e-6)
    assert found["bright"] == pytest.approx(darkest, abs=1e-7)
    assert found["dark"] == pytest.approx(brightest, abs=1e-7)


def reasons(pixels, tiny_px=8):
    found = measure(pixels, *pixels.shape[:2])
    return {check.reason for check in checks(tiny_px) if check.doubts(found[check.reason])}


def noise(height=64, width=64, low=0, high=256):
    return np.random.default_rng(0).integers(low, high, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (noise(), set()),
        (noise(high=60), {"dark"}),
        (noise(low=246), {"bright", "constant"}),
        (np.full((64, 64, 3), 128, np.uint8), {"constant"}),
        (pictures()["gradient"], {"blurred", "no fine detail"}),
        (noise(6, 12), {"tiny"}),
        (noise(20, 64), {"odd aspect"}),
    ],
    ids=["noise", "dark", "bright", "constant", "blurred", "tiny", "odd aspect"],
)
def test_a_planted_fault_has_its_reason_and_no_other(pixels, expected):
    assert reasons(pixels) == expected


def drawing(side=200):
    """Rectangles of many sizes on each other, as edges and tones of a photograph lie."""
    rng = np.random.default_rng(3)
    pixels = np.full((side, side, 3), 120, np.uint8)
    for size in np.sort(rng.integers(3, side // 2, 400))[::-1]:
        row, col = rng.integers(-size, side, 2).clip(0)
        pixels[row : row + size, col : col + size] = rng.integers(0, 256, 3)
    return pixels


def test_a_blurred_picture_of_much_contrast_is_found():
    sharp = Image.fromarray(drawing())
    blurred = np.asarray(sharp.filter(ImageFilter.GaussianBlur(8)))
    assert reasons(drawing()) == set()
    assert measure(blurred, 200, 200)["blurred"] > 0.29, "cleanvision's score passes it"
    assert reasons(blurred) == {"no fine detail"}


def test_fineness_is_the_share_of_what_is_lost_in_blocks():
    # stripes of 1 px are all lost, steps of 8 px are not: of equal variance, one half of the square
    rows, cols = np.mgrid[:256, :256]
    fine, coarse = 40 * (cols % 2 * 2 - 1), 40 * np.sign(np.sin(rows / 256 * 2 * np.pi + 0.01))
    both = np.stack([128 + fine + coarse] * 3, 2).astype(np.uint8)
    assert fineness(Image.fromarray(both)) == pytest.approx(0.5**0.5, abs=0.01)
    assert fineness(Image.new("RGB", (9, 5), "gray")) == 1
    ends = [(1, 1), (1, 300), (255, 3), (4, 4), (13, 7)]
    assert all(0 < fineness(Image.fromarray(noise(*shape))) <= 1.2 for shape in ends[1:])
    assert fineness(Image.fromarray(noise(*ends[0]))) == 1
