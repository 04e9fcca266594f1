"""Settings drawn from each field's own type: accepted and sane, or refused in one line."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.record import record
from tests.helpers.runs import ROOT

SLOW_COUNT = int(os.environ.get("FUZZ", "1000"))


def outcomes(count: int, first: int, tmp_path) -> dict[str, int]:
    """In a process of its own: a setting may crash it or take all memory, and must not."""
    progress = tmp_path / "setting"
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.random_settings", str(count), str(first)],
        env={**os.environ, "FUZZ_PROGRESS": str(progress), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    reached = progress.read_text() if progress.exists() else "none"
    assert done.returncode == 0, f"{reached}: status {done.returncode}\n{done.stderr[-3000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["faults"], json.dumps(result["faults"], indent=1)
    return result["outcomes"]


def test_random_settings_are_accepted_and_sane_or_refused_in_one_line(tmp_path):
    found = outcomes(18, 0, tmp_path)
    assert sum(found.values()) == 18
    assert min(found["accepted"], found["refused"]) > 2  # neither harmless nor hopeless


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_settings_are_accepted_and_sane_or_refused_in_one_line(tmp_path):
    found = outcomes(SLOW_COUNT, 1_000_000, tmp_path)
    assert sum(found.values()) == SLOW_COUNT
    record("random_settings", found)
