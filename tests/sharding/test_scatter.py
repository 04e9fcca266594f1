"""scatter and png: the stated ranges, nothing clipped, pixels right, bytes fixed."""

import hashlib
import io
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from sslpipe.sharding.members import encode_png, png_bytes
from sslpipe.sharding.scatter import Placement, draw_placement, place


def blob(seed: int, size: int = 28) -> NDArray[np.uint8]:
    """A smooth bright patch of random place and size on black, (size, size, 1)."""
    random = np.random.default_rng(seed)
    x, y = random.uniform(6, size - 6, 2)
    w, h = random.uniform(2, 6, 2)
    rows, columns = np.mgrid[:size, :size] + 0.5
    shape = 250 * np.exp(-(((columns - x) / w) ** 2) - ((rows - y) / h) ** 2)
    return np.where(shape > 2, shape, 0).astype(np.uint8)[:, :, None]


def centroid(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """(x, y) of the mass, px from the frame's centre."""
    mass = pixels[:, :, 0].astype(float)
    rows, columns = np.mgrid[: mass.shape[0], : mass.shape[1]] + 0.5
    centre = np.array([mass.shape[1] / 2, mass.shape[0] / 2])
    return np.array([(mass * columns).sum(), (mass * rows).sum()]) / mass.sum() - centre


def test_parameters_are_uniform_in_their_stated_ranges() -> None:
    small = np.zeros((28, 28, 1), np.uint8)
    small[10:18, 10:18] = 255  # fits at every angle and scale
    draws = np.array([draw_placement(small, 5, "train", i) for i in range(4000)])
    for column, low, high in ((0, 0.55, 1.0), (1, -20.0, 20.0), (2, 0.5, 1.0)):
        values = draws[:, column]
        assert low <= values.min()
        assert values.max() <= high
        # false alarm once in 10^4 seeds; the seed is fixed
        assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 1e-4


def test_a_full_frame_is_made_small_enough_for_its_angle() -> None:
    full = np.full((28, 28, 1), 255, np.uint8)
    for i in range(300):
        params = draw_placement(full, 0, "train", i)
        angle = math.radians(abs(params.degrees))
        assert 0.55 <= params.scale <= 1 / (math.cos(angle) + math.sin(angle)) + 1e-12


def test_no_article_is_clipped_and_none_of_its_mass_is_lost() -> None:
    """Mass scales by scale^2 * brightness: 1 % for sampling, one level of rounding a pixel."""
    for i in range(300):
        pixels = blob(i)
        pixels[[0, -1]] = pixels[:, [0, -1]] = 0  # past an image's own edge nothing is blurred
        params = draw_placement(pixels, 0, "train", i)
        wide = np.pad(pixels, ((28, 28), (28, 28), (0, 0)))
        moved, free = place(pixels, params), place(wide, params)
        outside = free.copy()
        outside[28:56, 28:56] = 0
        assert outside.max() == 0
        assert np.abs(moved.astype(int) - free[28:56, 28:56]).max() <= 1
        expected = pixels.sum(dtype=float) * params.scale**2 * params.brightness
        assert moved.sum(dtype=float) == pytest.approx(
            expected, rel=0.01, abs=float((moved > 0).sum())
        )


def test_the_centroid_moves_as_the_placement_says() -> None:
    for i in range(100):
        pixels = blob(i)
        params = draw_placement(pixels, 1, "train", i)._replace(brightness=1.0)
        x, y = centroid(pixels)
        angle = math.radians(params.degrees)  # counter-clockwise, y down
        rotated = (
            x * math.cos(angle) + y * math.sin(angle),
            y * math.cos(angle) - x * math.sin(angle),
        )
        expected = params.scale * np.array(rotated) + (params.dx, params.dy)
        np.testing.assert_allclose(centroid(place(pixels, params)), expected, atol=0.15)


def test_the_unit_placement_changes_nothing_but_a_half_pixel_blur() -> None:
    flat = np.full((9, 12, 3), (10, 200, 90), np.uint8)
    np.testing.assert_array_equal(place(flat, Placement(1.0, 0.0, 1.0, 0.0, 0.0)), flat)
    dim = place(flat, Placement(1.0, 0.0, 0.5, 0.0, 0.0))
    np.testing.assert_array_equal(dim, np.broadcast_to([5, 100, 45], flat.shape))


def test_scattered_bytes_are_these_on_every_machine() -> None:
    digest = hashlib.sha256()
    for i in range(50):
        pixels = np.arange(28 * 28, dtype=np.uint32).reshape(28, 28, 1) * (i + 3) % 251
        patch = np.where((np.indices((28, 28)).sum(0) > 20)[:, :, None], pixels, 0).astype(np.uint8)
        digest.update(encode_png(place(patch, draw_placement(patch, 0, "train", i))))
    assert digest.hexdigest() == (
        "3afdac91f61c4818c2d64e47be631d234322cf103b32924dcb85c924cd271224"
    )


@pytest.mark.parametrize("shape", [(1, 1), (28, 28, 1), (5, 7, 3), (300, 400, 3)])
def test_png_is_lossless_and_of_the_stated_length(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    raw = encode_png(pixels)
    image = Image.open(io.BytesIO(raw))
    image.load()
    assert image.mode == ("RGB" if shape[-1] == 3 and len(shape) == 3 else "L")
    np.testing.assert_array_equal(
        np.asarray(image), pixels.squeeze(2) if 1 in shape[2:] else pixels
    )
    assert len(raw) == png_bytes(shape[0], shape[1], shape[2] if len(shape) == 3 else 1)
