"""A console that fails loses text; the run and its files are as with one that works."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sslpipe.run.console import lasting_streams
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT, assert_same_weights, command_line, write_recipe

FULL = Path("/dev/full")  # a device whose writes fail as on a full disk


def shell(words: str, into: str = "") -> subprocess.CompletedProcess[str]:
    """Run `sslpipe WORDS` in bash, its output redirected; the status is the program's own."""
    line = f"{sys.executable} -m sslpipe {words} {into}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "SSLPIPE_NEXT": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a finished run, `good`, and the words of a training up to its --run-dir."""
    folder = tmp_path_factory.mktemp("console")
    data, recipe = write_dataset(folder / "data"), write_recipe(folder)
    words = f"{recipe} --data {data} --run-dir"
    result = command_line("train", *words.split(), str(folder / "good"))
    assert result.returncode == 0, result.stderr
    return folder, words


INTO = {"gone": "2>&1 | head -n 1", "full": "> /dev/full 2>&1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTO)
def test_a_training_runs_to_its_end_whatever_becomes_of_its_console(given, name):
    if name == "full" and not FULL.exists():
        pytest.skip("this system has no /dev/full")
    folder, words = given
    run, good = folder / name, folder / "good"
    result = shell(f"train {words} {run}", INTO[name])
    assert (result.returncode, result.stderr) == (0, "")
    assert (run / "DONE").read_text() == (good / "DONE").read_text()
    assert_same_weights(good, run)
    numbers = [{m["step"]: m["loss"] for m in read_metrics(r)} for r in (good, run)]
    assert numbers[0] == numbers[1]


def test_other_commands_end_quietly_when_nobody_reads_on(given):
    result = shell(f"slurm {given[1]} new", "| true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line_and_status_2(given):
    result = shell(f"slurm {given[1]} new", "> /dev/full")
    assert result.returncode == 2
    assert result.stderr.startswith("error: the output could not be written: ")
    assert "No space left on device" in result.stderr
    assert result.stderr.count("\n") == 1


class _Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_what_is_lost_is_known_and_the_streams_come_back(monkeypatch):
    monkeypatch.setattr(sys, "stdout", _Gone())
    monkeypatch.setattr(sys, "stderr", good := io.StringIO())
    before = sys.stdout
    with lasting_streams() as (out, err):
        print("nobody reads this")
        print("somebody this", file=sys.stderr)
        assert isinstance(out.error, BrokenPipeError)
        assert err.error is None
        assert sys.stderr.getvalue() == "somebody this\n"  # what is not ours is the stream's
        with lasting_streams() as inner:
            assert inner == [out, err]
    assert sys.stdout is before
    assert sys.stderr is good


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", r"caf\xe9 \u2013 \u0434"),
        ("latin-1", r"café \u2013 \u0434"),
        ("cp1252", r"café – \u0434"),
        ("utf-8", "café – д"),
    ],
)
def test_letters_that_a_terminal_does_not_know_are_escaped(monkeypatch, encoding, shown):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with lasting_streams():
        print("café – д", flush=True)
    assert raw.getvalue().decode(encoding) == f"{shown}\n"


def test_an_object_in_place_of_a_stream_needs_to_write_and_flush_alone(monkeypatch):
    class Tee:  # as programs keep a copy of their output
        def __init__(self):
            self.kept = ""

        def write(self, text):
            self.kept += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", tee := Tee())
    with lasting_streams():
        print("café – д")
    assert tee.kept == "café – д\n"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no terminals")
def test_a_closed_terminal_saves_and_leaves_preempted(given):
    """In a terminal of its own; from the hang-up on, writing to it fails."""
    folder, words = given
    run = folder / "hung-up"
    ours, theirs = os.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    process = subprocess.Popen(
        [sys.executable, "-m", "sslpipe", "train", *words.split(), str(run), "steps=100000"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    signal.signal(signal.SIGHUP, before)
    os.close(theirs)
    try:
        try:
            while not read_metrics(run):
                os.read(ours, 10**6)
                assert process.poll() is None
        finally:
            os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    step = int((run / "PREEMPTED").read_text().split()[1])
    assert (run / "checkpoints" / f"step-{step:08d}").is_dir()
