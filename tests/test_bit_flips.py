"""One flipped bit, or a torn end, in any file of a run or export: right results, or one line."""

import os

import pytest

from tests.helpers.flips import Run, damaged_export, damaged_run
from tests.helpers.record import record

PLACES = max(2, min(20, int(os.environ.get("FUZZ", "1000")) // 250))  # of each file


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["pretrain", "finetune"])
def test_a_damaged_file_is_seen_or_changes_nothing(kind, tmp_path):
    run = Run(kind, tmp_path / "made")
    for name, check in (("run", damaged_run), ("export", damaged_export)):
        (tmp_path / name).mkdir()
        counts = check(run, PLACES, tmp_path / name)
        assert min(counts.values()) >= PLACES  # neither harmless nor hopeless
        record(f"bit_flips_{kind}_{name}", dict(counts))
