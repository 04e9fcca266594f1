"""Outliers: planted ones are found, by brute force and by a formula."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from scipy.stats import median_abs_deviation

from sslpipe.curate.outliers import (
    NO_NEIGHBOUR,
    UNREADABLE,
    bad_pictures,
    checks,
    far_from_all,
    fineness,
    measure,
    neighbour_distances,
    upper_limit,
)
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from tests.helpers.dataset import png, write_dataset


def embeddings(features):
    """Rows whose ids are not their numbers."""
    ids = 2 * torch.arange(len(features))
    return Embeddings(torch.as_tensor(features).float(), torch.full_like(ids, -1), ids)


def blobs(size):
    """Two of so many rows."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(2, 16))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    return centres.repeat(size, 0) + 0.1 * rng.normal(size=(2 * size, 16))


def test_distances_are_those_of_brute_force():
    features = blobs(30)
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    expected = 1 - np.sort(cosines, axis=1)[:, -5:].mean(axis=1)
    np.testing.assert_allclose(neighbour_distances(embeddings(features), 5), expected, atol=2e-6)


def test_the_limit_is_that_of_the_modified_z_score():
    values = np.random.default_rng(0).lognormal(size=500)
    logs = np.log(values)
    spread = median_abs_deviation(logs, scale=0.6745)
    assert upper_limit(values, 3.5) == pytest.approx(np.exp(np.median(logs) + 3.5 * spread))


def test_lone_rows_and_a_small_group_of_equals_are_found():
    rng = np.random.default_rng(1)
    strange = np.concatenate([rng.normal(size=(3, 16)), np.repeat(rng.normal(size=(1, 16)), 4, 0)])
    found = far_from_all(embeddings(np.concatenate([blobs(150), strange])))
    assert {one.id for one in found} == set(range(600, 614, 2))
    assert {one.reason for one in found} == {NO_NEIGHBOUR}
    values = [one.value for one in found]
    assert values == sorted(values, reverse=True)
    assert values[-1] > found[0].limit


def test_equal_pictures_are_no_outliers_and_more_neighbours_than_rows_are_refused():
    assert far_from_all(embeddings(np.ones((50, 4)))) == []
    with pytest.raises(DataError, match="k = 10: each of the 5 rows has 4 others"):
        far_from_all(embeddings(np.eye(5)))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.arange(96), np.arange(128))
    planted = {
        3: np.full((64, 64, 3), 255),  # constant
        5: np.full((64, 64, 3), 128),
        6: np.stack([smooth] * 3, 2),  # blurred
        8: rng.integers(0, 256, (7, 12, 3)),  # tiny
        9: rng.integers(0, 256, (20, 64, 3)),
    }
    files = {i: png(pixels.astype(np.uint8)) for i, pixels in planted.items()} | {10: b"no image"}
    folder = tmp_path_factory.mktemp("data")
    return load_index(write_dataset(folder, (8, 8), px=64, broken=files)).split("train")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_pictures_have_their_reasons(split, num_workers):
    done = []
    found = bad_pictures(split, tiny_px=8, num_workers=num_workers, progress=done.append)
    assert [(one.reason, one.id) for one in found] == [
        (UNREADABLE, 10),
        ("constant", 3),
        ("constant", 5),
        ("blurred", 6),
        ("tiny", 8),
        ("odd aspect", 9),
    ]
    assert sum(done) == 16
    assert [one.key for one in found] == [f"train{one.id:06d}" for one in found]
    assert "not a JPEG, PNG or WebP" in found[0].detail
    assert (found[-2].value, found[-2].limit) == (7, 8)


def test_a_large_picture_is_judged_by_its_own_size(tmp_path):
    file = io.BytesIO()
    Image.fromarray(noise(100, 1000)).save(file, "JPEG")
    data = write_dataset(tmp_path, (1,), broken={0: file.getvalue()})
    found = bad_pictures(load_index(data).split("train"), tiny_px=101, num_workers=0)
    assert {(one.reason, one.value) for one in found} == {("tiny", 100), ("odd aspect", 0.1)}


def reasons(pixels, tiny_px=8):
    found = measure(pixels, *pixels.shape[:2])
    return {reason for reason, limit, _ in checks(tiny_px) if found[reason] < limit}


def grey(pixels):
    return Image.fromarray(pixels).convert("L")


def noise(height=64, width=64, low=0, high=256):
    return np.random.default_rng(0).integers(low, high, (height, width, 3)).astype(np.uint8)


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
    assert reasons(drawing()) == reasons(noise()) == set()
    assert reasons(noise(low=246)) == {"constant"}
    assert reasons(blurred) == {"blurred"}


def test_fineness_is_the_share_of_what_is_lost_in_blocks():
    # stripes of 1 px are all lost, steps of 8 px are not: of equal variance, one half of the square
    rows, cols = np.mgrid[:256, :256]
    fine, coarse = 40 * (cols % 2 * 2 - 1), 40 * np.sign(np.sin(rows / 256 * 2 * np.pi + 0.01))
    both = np.stack([128 + fine + coarse] * 3, 2).astype(np.uint8)
    assert fineness(grey(both)) == pytest.approx(0.5**0.5, abs=0.01)
    assert fineness(Image.new("L", (9, 5), 128)) == fineness(grey(noise(1, 1))) == 1
    shapes = ((1, 300), (255, 3), (4, 4), (13, 7))
    assert all(0 < fineness(grey(noise(*shape))) <= 1.2 for shape in shapes)
