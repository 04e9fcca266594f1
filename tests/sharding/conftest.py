"""What the tests of this folder build from."""

from pathlib import Path

import pytest

from tests.helpers.shards import write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")
