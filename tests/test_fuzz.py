"""Damaged files are read or refused, and settings drawn from each field's own type are accepted and
sane, or refused in one line.
"""

import json
import os
from collections import Counter
from typing import Any

import pytest

from tests.helpers.fuzz import READERS
from tests.helpers.processes import run_python
from tests.helpers.record import record
from tests.helpers.runs import ROOT, user_environment

SLOW_COUNT = int(os.environ.get("FUZZ", "1000"))
MOST_BYTES = 8 * 2**30
SETTINGS_A_PROCESS = 500  # networks of all sizes, made and freed, leave the heap in pieces


def in_a_process(tmp_path, module: str, *words: object, before: str = "") -> Any:
    """What a helper prints, in a process of its own: an input may crash it, and must not."""
    progress = tmp_path / "number"
    environment = user_environment({"FUZZ_PROGRESS": str(progress)})
    # memory beyond MOST_BYTES is a fault of this input, and takes no test beside it along
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_DATA, ({MOST_BYTES},) * 2)"
    run = f"import runpy\nrunpy.run_module('tests.helpers.{module}', None, '__main__')"
    code = f"{limit}\n{before}\n{run}"
    done = run_python(("-c", code, *map(str, words)), ROOT, environment, timeout_s=7200)
    reached = progress.read_text() if progress.exists() else words[0]
    assert done.returncode == 0, f"{reached}: status {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def settings(count: int, first: int, tmp_path) -> dict[str, int]:
    outcomes: Counter[str] = Counter()
    faults = []
    for begin in range(first, first + count, SETTINGS_A_PROCESS):
        portion = min(SETTINGS_A_PROCESS, first + count - begin)
        result = in_a_process(tmp_path, "random_settings", portion, begin)
        outcomes.update(result["outcomes"])
        faults += result["faults"]
    assert not faults, json.dumps(faults, indent=1)
    assert sum(outcomes.values()) == count
    return dict(outcomes)


def test_damaged_input_is_read_or_refused_by_the_clean_error(tmp_path):
    for name, outcomes in in_a_process(tmp_path, "fuzz", ",".join(READERS), 150).items():
        assert sum(outcomes.values()) == 150
        assert min(outcomes["read"], outcomes["refused"]) > 5, name  # not harmless, nor hopeless


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_much_damaged_input_is_read_or_refused_by_the_clean_error(name, tmp_path):
    outcomes = in_a_process(tmp_path, "fuzz", name, SLOW_COUNT, 1_000_000)[name]
    assert sum(outcomes.values()) == SLOW_COUNT
    record(f"fuzz_{name}", outcomes)


def test_a_crash_is_seen_and_names_its_input(tmp_path):
    crash = "import os, sslpipe.data.decode as d\nd.decode = lambda *a: os.abort()"
    with pytest.raises(AssertionError, match=r"image 0: status -6"):
        in_a_process(tmp_path, "fuzz", "image", 3, before=crash)


def test_random_settings_are_accepted_and_sane_or_refused_in_one_line(tmp_path):
    found = settings(12, 0, tmp_path)
    assert min(found["accepted"], found["refused"]) > 2  # neither harmless nor hopeless


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_settings_are_accepted_and_sane_or_refused_in_one_line(tmp_path):
    record("random_settings", settings(SLOW_COUNT, 1_000_000, tmp_path))
