"""What the tests of exports share."""

import pytest

from sslpipe.export import write
from tests.helpers.exports import read_here


@pytest.fixture(scope="module")
def proved_here():
    """Written formats are read in this process, for a whole module: for its fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "read_outputs", read_here)
        yield


@pytest.fixture
def in_this_process(monkeypatch):
    """Written formats are read in this process, where the test is not about the clean one."""
    monkeypatch.setattr(write, "read_outputs", read_here)
