"""Each file of the generator ends as one line, soon, in little memory; nothing hangs."""

import resource
import time

import pytest

from sslpipe.errors import UserError
from sslpipe.export.load import load_backbone
from tests.helpers.hostile_weights import HOSTILE

SLOWEST_S = 30.0  # of a busy machine: a quiet one takes a tenth
MOST_GROWTH_KIB = 2 * 2**20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_at_once_in_little_memory(name, tmp_path):
    source = HOSTILE[name](tmp_path)
    begin_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as caught:
        load_backbone(source)
    assert time.monotonic() - begin_s < SLOWEST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KIB
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 4100
    print(text)
