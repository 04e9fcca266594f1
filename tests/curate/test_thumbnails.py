"""What is kept of pictures on the disk, and read by rows."""

from contextlib import closing

import numpy as np
import pytest

from sslpipe.curate.thumbnails import ThumbFile, describe, thumbnail, thumbnails

SIZES = [(28, 28), (64, 64), (64, 30), (30, 64), (1, 1), (2, 5), (63, 2), (9, 64)]


def random_pictures(*channels):
    """Two of every size and number of channels, (h, w, 3) uint8, sizes mixed."""
    rng = np.random.default_rng(0)
    return [
        np.broadcast_to(rng.integers(0, 256, (*size, some), np.uint8), (*size, 3))
        for some in channels
        for size in SIZES * 2
    ]


@pytest.mark.parametrize("channels", [(1,), (3,), (3, 1)])
def test_thumbnails_made_together_are_those_that_pillow_makes_of_each(channels):
    pictures = random_pictures(*channels)
    found = thumbnails(pictures)
    assert found.shape == (len(pictures), 64, 64, max(channels))
    for thumb, pixels in zip(found, pictures, strict=True):
        assert np.array_equal(np.broadcast_to(thumb, (64, 64, 3)), thumbnail(pixels))


def test_two_equal_channels_are_not_grey():
    pixels = np.zeros((28, 28, 3), np.uint8)
    pixels[3:9, 4:20, 2] = 200
    for order in ([0, 1, 2], [0, 2, 1], [2, 1, 0]):
        shown = pixels[:, :, order]
        assert np.array_equal(thumbnails([shown])[0], thumbnail(shown))


def test_grey_in_one_channel_is_kept_and_described_as_in_three():
    one = thumbnails(random_pictures(1))
    three = np.repeat(one, 3, axis=3)
    assert np.array_equal(describe(one), describe(three))
    every = np.arange(len(one))
    with closing(ThumbFile()) as file, closing(ThumbFile()) as expected:
        file.append(one)
        expected.append(three)
        assert np.array_equal(file.read(every), three)
        assert np.array_equal(file.read_grids(every), expected.read_grids(every))
        assert not file.coloured(every).any()


def test_rows_are_read_as_written_with_their_luma_on_a_grid():
    thumbs = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8)
    thumbs[2] = thumbs[2, :, :, :1]  # grey
    rows = np.array([4, 2, 2, 0])
    with closing(ThumbFile()) as file:
        file.append(thumbs[:3])
        file.append(thumbs[3:])
        assert len(file) == 5
        assert np.array_equal(file.read(rows), thumbs[rows])
        grids = file.read_grids(rows)
        assert file.coloured(rows).tolist() == [True, False, False, True]
        assert file.read([]).shape == (0, 64, 64, 3)
    luma = thumbs[rows].astype(np.float64) @ [0.299, 0.587, 0.114]
    # triangles four pixels of the thumbnail wide, at the edges without what is beyond
    places = np.arange(64) + 0.5
    weights = np.maximum(0, 1 - np.abs(places - 2 * np.arange(32)[:, None] - 1) / 2)
    weights /= weights.sum(1, keepdims=True)
    assert grids.dtype == np.float32
    np.testing.assert_allclose(grids, weights @ luma @ weights.T, atol=1e-3)
