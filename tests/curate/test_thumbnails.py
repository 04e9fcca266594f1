"""What is kept of pictures on the disk, and read by rows."""

from contextlib import closing

import numpy as np

from sslpipe.curate.thumbnails import ThumbFile


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
