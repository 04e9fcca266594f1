"""The sheet of doubtful pairs: in their order, red where refused."""

from contextlib import closing

import numpy as np
import pytest

from sslpipe.curate.duplicates import Doubt
from sslpipe.curate.results import doubt_sheet
from sslpipe.curate.scan import scan_pictures
from sslpipe.sharding.show import CELL_PX, GAP_PX, MARGIN_PX


@pytest.fixture(scope="module")
def samples():
    pictures = [np.full((32, 32, 3), 40 * k, np.uint8) for k in range(5)]
    found = scan_pictures(pictures)
    with closing(found.thumbs):
        yield found


def doubt(count):
    """Pairs 0-1, 1-2 ..., each second one accepted."""
    pairs = np.array([(k, k + 1) for k in range(count)], np.int64).reshape(-1, 2)
    return Doubt(pairs, np.full(count, 0.8, np.float32), np.arange(count) % 2 == 1)


def test_doubtful_pairs_are_drawn_in_their_order(samples):
    both, one = doubt_sheet(samples, doubt(2)), doubt_sheet(samples, doubt(1))
    assert both.size[0] == 2 * (2 * CELL_PX + 2) + GAP_PX + 2 * MARGIN_PX
    assert one.size[0] == 2 * CELL_PX + 2 + 2 * MARGIN_PX
    middle = MARGIN_PX + CELL_PX // 2
    assert [one.getpixel((middle + side, middle))[0] for side in (0, CELL_PX)] == [0, 40]
    words = np.asarray(one)[MARGIN_PX + CELL_PX + 1 :]
    assert (words[..., 0].astype(int) - words[..., 1] > 100).any()
    assert doubt_sheet(samples, doubt(2), most=1).size == one.size
    assert doubt_sheet(samples, doubt(0)) is None
