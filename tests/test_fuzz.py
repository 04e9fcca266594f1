"""Damaged recipes, indexes, shards and images are read or refused, whatever is in them."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.fuzz import READERS
from tests.helpers.record import record
from tests.helpers.runs import ROOT

SLOW_COUNT = int(os.environ.get("FUZZ", "1000"))


def fuzz(names: str, count: int, tmp_path, first: int = 0) -> dict[str, dict[str, int]]:
    """In a process of its own: a decoder may crash it, and must not."""
    progress = tmp_path / "number"
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fuzz", names, str(count), str(first)],
        env={**os.environ, "FUZZ_PROGRESS": str(progress), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    reached = progress.read_text() if progress.exists() else names
    assert done.returncode == 0, f"{reached}: status {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout)


def test_damaged_input_is_read_or_refused_by_the_clean_error(tmp_path):
    for name, outcomes in fuzz(",".join(READERS), 150, tmp_path).items():
        assert sum(outcomes.values()) == 150
        assert min(outcomes["read"], outcomes["refused"]) > 5, name  # not harmless, nor hopeless


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_much_damaged_input_is_read_or_refused_by_the_clean_error(name, tmp_path):
    outcomes = fuzz(name, SLOW_COUNT, tmp_path, first=1_000_000)[name]
    assert sum(outcomes.values()) == SLOW_COUNT
    record(f"fuzz_{name}", outcomes)


def test_a_crash_is_seen_and_names_its_input(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crash = "import os, sslpipe.data.decode as d\nd.decode = lambda *a: os.abort()\n"
    (tmp_path / "sitecustomize.py").write_text(crash)
    with pytest.raises(AssertionError, match=r"image 0: status -6"):
        fuzz("image", 3, tmp_path)
