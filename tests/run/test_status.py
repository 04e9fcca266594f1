"""`sslpipe status` reads a run directory, living or dead, and says what it finds there."""

import json
import os
import subprocess
import sys
import time

import pytest

from sslpipe.run.lock import RunLock
from sslpipe.run.log import read_metrics
from sslpipe.run.records import append_records
from sslpipe.run.status import render, status
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import command_line, train_over, write_recipe


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("status")
    data = write_dataset(folder / "data", broken={5: b"junk"})
    settings = ("data.holdout=0", "steps=8", "run.monitor_steps=0", "run.save_steps=3")
    train_over(1, write_recipe(folder), data, folder / "run", *settings)
    return folder / "run"


def rows_of(summary) -> dict[str, str]:
    """The table as it is shown."""
    names, texts = ([str(cell) for cell in c.cells] for c in render(summary).renderables[0].columns)
    return dict(zip(names, texts, strict=True))


def test_a_finished_run_is_reported_as_its_files_have_it(run_dir):
    actual = status(run_dir)
    last = read_metrics(run_dir)[-1]
    assert (actual["state"], actual["detail"]) == ("done", "step 8")
    assert (actual["step"], actual["steps"], actual["restarts"]) == (8, 8, 0)
    assert actual["images_per_s"] == last["images_per_s"]
    assert actual["health"]["loss"] == last["loss"]
    assert (actual["quarantined"], actual["eta_s"]) == (1, None)
    checkpoint = actual["checkpoint"]
    assert (checkpoint["name"], checkpoint["kept"]) == ("step-00000008", 2)
    (beat,) = actual["ranks"]
    assert (beat["rank"], beat["step"], beat["phase"]) == (0, 8, "ended")


def test_it_is_read_without_torch_which_takes_a_second_to_import(run_dir):
    code = (
        "import sys; from pathlib import Path; from sslpipe.run.status import render, status; "
        "render(status(Path(sys.argv[1]))); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(run_dir)]
    assert subprocess.check_output(command, text=True, timeout=120) == "False\n"


def test_the_time_to_go_is_the_steps_left_at_the_recent_speed(run_dir, tmp_path):
    for name in ("recipe.json", "heartbeat"):
        os.symlink(run_dir / name, tmp_path / name)
    line = {"kind": "train", "restart": 1, "loss": 1.0}
    lines = [{**line, "step": 2, "wall": 50.0, "restart": 0}]  # of the start before: not counted
    lines += [{**line, "step": step, "wall": 100.0 + 4 * step} for step in (3, 5, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    lock = RunLock(tmp_path)
    actual = status(tmp_path)
    assert (actual["state"], actual["eta_s"], actual["restarts"]) == ("running", 8.0, 1)
    assert f"process {os.getpid()}" in actual["detail"]
    lock.release()
    assert status(tmp_path)["state"] == "lost"
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)  # saved after the last line
    actual = status(tmp_path)
    assert actual["step"] == 7
    assert rows_of(actual)["progress"] == "step 7 of 8 (87.5 %), restarted once"
    (tmp_path / "FAILED").write_text("rank 0: DataError: x\n")
    actual = status(tmp_path)
    assert (actual["state"], actual["detail"]) == ("failed", "rank 0: DataError: x")


def test_steps_skipped_after_the_last_log_line_are_counted(run_dir, tmp_path):
    for name in ("recipe.json", "heartbeat"):
        os.symlink(run_dir / name, tmp_path / name)
    append_records(tmp_path / "metrics.jsonl", [{"step": 2, "kind": "train", "skipped_steps": 1}])
    # of two processes, which write the same steps; step 5 twice: a resume came to it again
    for rank in (0, 1):
        steps = [{"step": step, "ids": [rank]} for step in (1, 5, 4, 5)]
        append_records(tmp_path / f"bad_steps.{rank}.jsonl", steps)
    actual = status(tmp_path)
    assert actual["health"]["skipped_steps"] == 3
    assert (actual["first_skipped"], actual["last_skipped"]) == (2, 6)
    where = f'"step" 1 to 5 in {tmp_path}/bad_steps.*.jsonl'
    assert rows_of(actual)["skipped steps"] == f"3, steps 2 to 6; their samples: {where}"
    # of a run without any, nothing
    assert status(run_dir)["last_skipped"] is None
    assert "skipped steps" not in rows_of(status(run_dir))


def test_the_command_prints_it_for_people_and_for_programs(run_dir, tmp_path):
    actual = json.loads(command_line("status", str(run_dir), "--json").stdout)
    now = status(run_dir)
    actual["checkpoint"]["age_s"] = now["checkpoint"]["age_s"]
    assert actual == now
    text = command_line("status", str(run_dir)).stdout
    assert "never restarted" in text
    for words in ("done: step 8", "step 8 of 8 (100.0 %)", "1 quarantined", "step-00000008"):
        assert words in text
    nothing = command_line("status", str(tmp_path))
    assert nothing.returncode == 2
    assert "holds no run" in nothing.stderr


def test_a_silent_rank_of_a_running_run_is_pointed_out(run_dir):
    beat = {"host": "h", "step": 3, "phase": "training", "since_s": 1.0}
    actual = {**status(run_dir), "state": "running"}
    actual["ranks"] = [
        {**beat, "rank": rank, "wall": time.time() - age_s} for rank, age_s in ((1, 100), (2, 0))
    ]
    rows = rows_of(actual)
    assert "no heartbeat for 100 s" in rows["rank 1"]
    assert rows["rank 2"] == "step 3, training, 1 s since this step or phase began, on h"
    done = rows_of({**actual, "state": "preempted"})
    assert done["rank 2"] == "last heartbeat: step 3, training, on h"
