"""Steps of registration against their formulas, with nothing made faster."""

import numpy as np
import pytest

from sslpipe.curate.candidates import similarities
from sslpipe.curate.register import (
    COARSE_PX,
    EDGE,
    LARGEST_BOX,
    SMALLEST_BOX,
    cut,
    laplacian,
    register,
)
from sslpipe.curate.thumbnails import EVEN, FULL, GRID_PX, LEVELS, VIEWS, WIDTH, resampling

GRIDS = pytest.mark.parametrize("px", [COARSE_PX, GRID_PX])


def pictures(count, px, seed=0):
    return np.random.default_rng(seed).uniform(0, 255, (count, px, px)).astype(np.float32)


def boxes(count, seed=1):
    """Left, top, width and height as shares, inside of the picture or all of it."""
    size = np.random.default_rng(seed).uniform(SMALLEST_BOX, 1, (count, 2))
    corner = np.random.default_rng(seed + 1).uniform(0, 1 - size)
    return np.concatenate([np.concatenate([corner, size], 1), [[0, 0, 1, 1]]]).astype(np.float32)


def triangles(start, size, px):
    """Weights of each of 2 px pixels in each of px, (px, 2 px), whose centres stay inside."""
    centres = np.clip(2 * px * start + size * 2 * (np.arange(px) + 0.5), 0.5, 2 * px - 0.5)
    far = np.abs(np.arange(2 * px) + 0.5 - centres[:, None])
    weights = np.maximum(0, 1 - far / (2 * size))
    return weights / weights.sum(1, keepdims=True)


@GRIDS
def test_a_box_is_cut_out_by_the_triangles_of_resampling(px):
    box = boxes(20)
    whole = pictures(len(box), 2 * px)
    found = cut(whole, box)
    for shown, grid, (left, top, width, height) in zip(whole, found, box, strict=True):
        rows = resampling(top, height, px, 2 * px).astype(np.float64)
        columns = resampling(left, width, px, 2 * px)
        np.testing.assert_allclose(grid, rows @ shown @ columns.T, atol=2e-3)
    channels = np.stack([whole, whole[::-1]], 1)
    np.testing.assert_array_equal(cut(channels, box)[:, 0], found)


@GRIDS
def test_edges_are_repeated_where_a_box_reaches_beyond_the_picture(px):
    whole = pictures(4, 2 * px)
    corners = [(-0.03, 0.01), (0.01, -0.03), (0.0, 0.0), (-0.01, -0.01)]
    box = np.array([(*corner, LARGEST_BOX, LARGEST_BOX) for corner in corners], np.float32)
    for shown, grid, corner in zip(whole, cut(whole, box), corners, strict=True):
        columns, rows = (triangles(start, LARGEST_BOX, px) for start in corner)
        np.testing.assert_allclose(grid, rows @ shown @ columns.T, atol=2e-3)


@GRIDS
def test_the_laplacian_is_the_sum_of_four_neighbours_less_four_times_the_pixel(px):
    grid = pictures(3, px)
    edge = EDGE * px // GRID_PX
    places = range(edge, px - edge)
    wanted = [
        [
            [g[y - 1, x] + g[y + 1, x] + g[y, x - 1] + g[y, x + 1] - 4 * g[y, x] for x in places]
            for y in places
        ]
        for g in grid.astype(np.float64)
    ]
    np.testing.assert_allclose(laplacian(grid), wanted, atol=1e-3)


@GRIDS
def test_a_step_explains_what_least_squares_explain(px):
    box = boxes(10)
    whole, part = pictures(len(box), 2 * px), pictures(len(box), px, seed=5)
    part = (0.5 * part + cut(whole, box)).astype(np.float32)
    _, alike = register(whole, part, box, [0.0])
    edge = EDGE * px // GRID_PX
    own = slice(edge, px - edge)
    axis = ((np.arange(px) + 0.5) / px)[own]
    for shown, target, found in zip(cut(whole, box).astype(np.float64), part, alike, strict=True):
        down, right = np.gradient(shown)
        down, right, wanted = down[own, own], right[own, own], target[own, own].ravel()
        sharp = laplacian(shown[None])[0]
        terms = [shown[own, own], right, down, right * axis, down * axis[:, None], sharp]
        terms = np.stack([term.ravel() for term in [*terms, np.ones_like(sharp)]], 1)
        rest = wanted - terms @ np.linalg.lstsq(terms, wanted.astype(np.float64), rcond=None)[0]
        assert found == pytest.approx(1 - rest.var() / wanted.var(), abs=1e-3)


def test_views_are_as_similar_as_the_sums_of_their_frequencies_say():
    rng = np.random.default_rng(0)
    descriptors = rng.integers(-LEVELS, LEVELS + 1, (5, VIEWS, WIDTH)).astype(np.int8)
    even, odd = similarities(descriptors, np.array([0, 1, 4]), np.array([2, 3, 4]))
    products = (
        descriptors[[0, 1, 4]].astype(int) * descriptors[[2, 3, 4], FULL].astype(int)[:, None]
    )
    for found, own in ((even, EVEN), (odd, ~EVEN)):
        np.testing.assert_array_equal(
            found, np.float32(products[:, :, own].sum(2)) / np.float32(LEVELS**2)
        )
