"""The sheet of doubtful pairs: those near to the limit alone, in their order."""

from contextlib import closing

import numpy as np
import pytest

from sslpipe.curate.duplicates import Doubt
from sslpipe.curate.scan import scan_pictures
from sslpipe.curate.sheet import CELL_PX, MARGIN_PX, doubt_sheet


@pytest.fixture(scope="module")
def samples():
    pictures = [np.full((32, 32, 3), 40 * k, np.uint8) for k in range(5)]
    found = scan_pictures(pictures)
    with closing(found.pictures.thumbs):
        yield found


def doubt(*rests):
    """Pairs 0-1, 1-2 ... with these rests, of a limit of 0.0125."""
    pairs = np.array([(k, k + 1) for k in range(len(rests))], np.int64).reshape(-1, 2)
    score = 1 - np.array(rests, np.float32)
    distance = np.log(np.array(rests, np.float32) / 0.0125)
    return Doubt(pairs, score, distance <= 0, distance)


def test_pairs_that_nobody_doubts_are_not_drawn(samples):
    both = doubt_sheet(samples, doubt(0.02, 0.001, 1.0, 0.6))
    one = doubt_sheet(samples, doubt(0.9, 0.2))
    assert both.size[0] == 2 * (2 * CELL_PX + 2) + 10 + 2 * MARGIN_PX
    assert one.size[0] == 2 * CELL_PX + 2 + 2 * MARGIN_PX
    middle = MARGIN_PX + CELL_PX // 2
    assert [one.getpixel((middle + side, middle))[0] for side in (0, CELL_PX)] == [40, 80]
    assert doubt_sheet(samples, doubt(0.9, 1.0)) is None
    assert doubt_sheet(samples, doubt()) is None
