"""Faults that are no other file's: tests/faults.md lists all of them with their tests."""

import contextlib
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sslpipe.run.checkpoint_files import checkpoint_names
from sslpipe.run.log import read_metrics
from sslpipe.run.reporter import RunLog
from tests.helpers.processes import run_processes, start_python
from tests.helpers.runs import (
    ROOT,
    assert_same_weights,
    at_each_step,
    command_line,
    faulty_in_rank,
    final_weights,
    train_in_rank,
    train_over,
    train_words,
    user_environment,
    write_recipe,
)

WATCHED = ("run.monitor_steps=3",)


def test_sigterm_while_evaluating_or_saving_is_heard_by_all_and_nothing_is_lost(
    data, straight, tmp_path
):
    """In a save it is heard after the next step: the one that is being written ends first."""
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    arguments = (train_in_rank, str(recipe), str(data), str(run_dir), *WATCHED)
    for fault, stopped_at in (
        ("train.monitor:1@1=term", 3),
        ("checkpoint.before_manifest:1@0=term", 6),
    ):
        done = [last for last, _ in run_processes(faulty_in_rank, 2, fault, *arguments)]
        assert done == [stopped_at] * 2
        assert (run_dir / "PREEMPTED").exists()
    train_over(2, recipe, data, run_dir, *WATCHED)
    assert_same_weights(straight / "2", run_dir)


@pytest.mark.slow
def test_sigterm_twice_to_a_launchers_whole_group_saves_and_stops_in_order(data, tmp_path):
    """As SLURM does it: launcher and ranks are signalled, and the launcher signals again."""
    command, run_dir = train_words(tmp_path, data), tmp_path / "run"
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch"]
    launcher += ["--config_file", str(ROOT / "launch/cpu2.yaml"), "-m", "sslpipe"]
    words = (*launcher, *command, "steps=100000")
    process = start_python(words, ROOT, user_environment({}), new_session=True)
    with contextlib.ExitStack() as stack:
        stack.callback(process.join)
        stack.callback(lambda: process.is_alive() and os.killpg(process.pid, signal.SIGKILL))
        deadline = time.monotonic() + 120
        while not read_metrics(run_dir) and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.05)
        process.join(60)
    step = int((run_dir / "PREEMPTED").read_text().split()[1])
    assert checkpoint_names(run_dir / "checkpoints")[-1] == f"step-{step:08d}"
    assert not (run_dir / "FAILED").exists()
    assert not (run_dir / "lock").exists()


def error_in_rank(process, *arguments):
    try:
        train_in_rank(process, *arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_a_run_directory_that_cannot_be_is_one_error_on_all_ranks(data, tmp_path):
    """chmod does not stop root; a file in a folder's place stops everybody."""
    (tmp_path / "file").touch()
    where = write_recipe(tmp_path), data, tmp_path / "file" / "run"
    for name, text in train_over(2, *where, by=error_in_rank):
        assert name == "UserError"
        assert re.search(r"run directory: .*Not a directory", text)


def vanishing_in_rank(process, *arguments):
    """Another program moves the run directory away before the second save."""

    def vanish(step, batch):
        if step == 6 and process.rank == 0:
            shutil.move(arguments[2], arguments[2] + ".away")

    at_each_step(vanish)
    return error_in_rank(process, *arguments)


def test_a_run_directory_that_vanishes_ends_all_ranks_with_its_name(data, tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    for name, text in train_over(2, recipe, data, run_dir, "steps=10", by=vanishing_in_rank):
        assert name == "CheckpointError"
        assert f"{run_dir} is gone" in text
        assert "free some space" not in text
    assert not run_dir.exists()  # not made again behind the user's back
    assert checkpoint_names(tmp_path / "run.away" / "checkpoints") == ["step-00000005"]


def full_in_rank(process, *arguments):
    """No file may grow beyond 8 kB: what a full disk does to a large file."""
    for stream in (1, 2):  # which pytest keeps in files
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
    return error_in_rank(process, *arguments)


def test_a_full_disk_costs_saves_not_the_run_and_the_same_command_resumes(data, straight, tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    for name, text in train_over(2, recipe, data, run_dir, *WATCHED, by=full_in_rank):
        assert name == "CheckpointError"
        assert re.search(r"step 12 was not written .*File too large; .*ulimit -f", text)
    assert checkpoint_names(run_dir / "checkpoints") == []
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))
    steps = [line["step"] for line in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))  # training continued over two failed saves
    train_over(2, recipe, data, run_dir, *WATCHED)
    assert_same_weights(straight / "2", run_dir)


def test_lines_that_a_full_disk_refused_come_with_the_next_one(tmp_path, capsys):
    log = RunLog(tmp_path, name="x", config={}, steps=100, first_step=0)
    numbers = {"loss": 1.0, "images_per_s": 1.0, "data_wait_percent": 0.0}
    log.train(1, numbers)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 20, hard))
    try:
        log.train(2, numbers)
        log.train(3, numbers)
        assert [line["step"] for line in read_metrics(tmp_path)] == [1]
        assert "cannot write metrics.jsonl" in capsys.readouterr().err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.train(4, numbers)
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_file_system_without_space_left_keeps_the_last_checkpoint(data, tmp_path):
    mounted = tmp_path / "disk"
    mounted.mkdir()
    reference = tmp_path / "reference"
    recipe = write_recipe(tmp_path)
    train_over(1, recipe, data, reference)
    (kept, _) = checkpoint_names(reference / "checkpoints")
    size = sum(p.stat().st_size for p in (reference / "checkpoints" / kept).iterdir())
    options = f"size={size * 3 // 2 + 100_000}"
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    try:
        command = ("train", str(recipe), "--data", str(data), "--run-dir", str(mounted / "run"))
        full = command_line(*command, status=2)
        assert "No space left" in full.stderr
        assert checkpoint_names(mounted / "run" / "checkpoints") == ["step-00000005"]
        subprocess.run(["mount", "-o", "remount,size=20m", mounted], check=True)
        again = command_line(*command, status=0)
        assert "resumed at step 5" in again.stderr
        assert_same_weights(reference, mounted / "run")
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_device_without_memory_is_reported_with_what_helps(data, tmp_path):
    command, run_dir = train_words(tmp_path, data), tmp_path / "run"
    result = command_line(*command, SSLPIPE_FAULT="train.step:7=memory", status=2)
    assert "Traceback" not in result.stderr
    for text in (result.stderr, (run_dir / "FAILED").read_text()):
        assert "the last checkpoint is step-00000005. The same command with more proc" in text
        assert "data.micro_batch" in text
    assert checkpoint_names(run_dir / "checkpoints") == ["step-00000005"]


def test_what_a_reading_thread_raises_ends_the_run_with_its_message(data, tmp_path):
    run_dir = tmp_path / "run"
    arguments = (train_in_rank, str(write_recipe(tmp_path)), str(data), str(run_dir))
    with pytest.raises(AssertionError, match=r"the fault storage\.read_range"):
        run_processes(faulty_in_rank, 2, "storage.read_range:7@1=full", *arguments)
    assert (run_dir / "FAILED").read_text().startswith("rank 1: ")


def test_a_spike_of_the_gradient_moves_no_weight_further_than_clip_norm_allows(data, tmp_path):
    """A temperature of 0.001 makes gradients of some hundreds; SGD moves by rate times norm."""
    recipe = write_recipe(tmp_path)
    sharp = ("loss.temperature=0.001", "optim.clip_norm=0.5", "optim.weight_decay=0.0")
    settings = ("optim.momentum=0.0", "optim.schedule=constant", "run.save_steps=1", "steps=2")
    train_over(1, recipe, data, tmp_path / "run", *sharp, *settings)
    assert min(line["grad_norm"] for line in read_metrics(tmp_path / "run")) > 5
    folder = tmp_path / "run" / "checkpoints"
    first, second = (load_file(p / "model.safetensors") for p in sorted(folder.glob("step-*")))
    moved = sum(
        float((second[key] - first[key]).double().square().sum())
        for key in first
        if "running" not in key and "num_batches" not in key
    )
    assert 0 < math.sqrt(moved) <= 0.05 * 0.5 * 1.001  # rate times clip_norm


def test_a_hint_or_a_clock_that_is_wrong_changes_nothing(data, tmp_path):
    """Which checkpoint is newest is in its name: neither `latest` nor a file's time counts."""
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    train_over(1, recipe, data, run_dir)
    folder = run_dir / "checkpoints"
    old, new = checkpoint_names(folder)
    (folder / "latest").write_text(old)
    os.utime(folder / new, (0, 0))
    os.utime(folder / old, (4e9, 4e9))
    before = final_weights(run_dir)
    [(done, seen)] = train_over(1, recipe, data, run_dir)
    assert (done, seen) == (12, [])  # it resumed from step 12, the last
    assert_same_weights(before, run_dir)


@pytest.mark.slow
def test_memory_does_not_grow_over_twenty_epochs(data, tmp_path):
    """Resident memory after epochs 5 and 20 of a run that decodes, logs, saves and monitors."""
    recipe = write_recipe(tmp_path)
    settings = ("steps=140", "run.monitor_steps=7", "run.save_steps=7")
    [sizes] = train_over(1, recipe, data, tmp_path / "run", *settings, by=measured_in_rank)
    early, late = max(sizes[28:35]), max(sizes[133:140])
    assert late < early + 16 * 2**20, f"{early / 2**20:.0f} MiB, later {late / 2**20:.0f} MiB"


def measured_in_rank(process, *arguments):
    sizes = []

    def measure(step, batch):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * resource.getpagesize())

    at_each_step(measure)
    train_in_rank(process, *arguments)
    return sizes
