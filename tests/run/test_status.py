"""`sslpipe status` and `runs` read run directories, living or dead, and say what they find."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time

import pytest

import sslpipe
from sslpipe.cli import terminal
from sslpipe.evaluation.suite_file import content_sha256
from sslpipe.files import append_lines
from sslpipe.run.lock import RunLock
from sslpipe.run.log import read_metrics
from sslpipe.run.status import curves, follow, list_runs, render, sparkline, status
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
    called = sslpipe.status(str(run_dir))
    assert called["checkpoint"]["age_s"] >= actual["checkpoint"]["age_s"]
    called["checkpoint"]["age_s"] = actual["checkpoint"]["age_s"]  # it went on growing
    assert called == actual
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
    append_lines(tmp_path / "metrics.jsonl", [{"step": 2, "kind": "train", "skipped_steps": 1}])
    # of two processes, which write the same steps; step 5 twice: a resume came to it again
    for rank in (0, 1):
        steps = [{"step": step, "ids": [rank]} for step in (1, 5, 4, 5)]
        append_lines(tmp_path / f"bad_steps.{rank}.jsonl", steps)
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
    assert "holds no run" in command_line("status", str(tmp_path), status=2).stderr


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


# curves, and all runs under a folder

IDENTITY = {"digest": "0", "recipe": {}, "index_sha256": "0"}


def write_run(folder, steps=20, evals=(), name="made up", checkpoints=()):
    """A run's directory as its files say it: a line every 2 steps of 0.5 s each."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"name": name, "steps": 20}))
    append(folder, range(2, steps + 1, 2))
    line = {"kind": "eval", "wall": 0.0, "restart": 0}
    lines = [{"step": step, **line, **values} for step, values in evals]
    append_lines(folder / "metrics.jsonl", lines)
    for checkpoint in checkpoints:
        (folder / "checkpoints" / checkpoint).mkdir()
        (folder / "checkpoints" / checkpoint / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


def append(folder, steps):
    line = {"kind": "train", "restart": 0}
    lines = [{"step": step, **line, "loss": 9.0 - step, "wall": step / 2} for step in steps]
    append_lines(folder / "metrics.jsonl", lines)


def test_a_sparkline_has_the_lowest_and_the_highest_and_averages_what_does_not_fit():
    assert sparkline([0, 7, 3.4, 3.6]) == "▁█▄▅"
    assert sparkline([5.0]) == "▁"
    assert sparkline([2, 2, 2]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([0, 2, 10, 12, 4, 6], width=3) == "▁█▄"  # means 1, 11 and 5
    assert len(sparkline(range(1001), width=50)) == 50


def test_curves_are_the_numbers_of_the_log(tmp_path):
    evals = [(4, {"holdout_knn": 0.5, "holdout_rankme": 3.0}), (8, {"holdout_knn": 0.7})]
    found = curves(write_run(tmp_path / "run", 10, evals))
    assert found == {"loss": [7, 5, 3, 1, -1], "holdout_knn": [0.5, 0.7], "steps/s": [2] * 4}
    unlabelled = curves(write_run(tmp_path / "other", 0, [(4, {"holdout_rankme": 3.0})]))
    assert unlabelled == {"holdout_rankme": [3.0]}
    assert curves(write_run(tmp_path / "new", 0)) == {}


def test_it_is_followed_until_it_ends(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 2)
    lock, seen, steps = RunLock(run), [], [4, 6]

    def train(seconds):  # between two looks, until there are no more steps
        if steps:
            append(run, [steps.pop(0)])
        else:
            lock.release()
            (run / "DONE").write_text("step 6")

    monkeypatch.setattr(time, "sleep", train)
    last = follow(run, lambda summary: seen.append((summary["state"], summary["step"])))
    assert seen == [("running", 2), ("running", 4), ("running", 6), ("done", 6)]
    assert last["state"] == "done"


def test_the_command_draws_a_run_that_has_ended_and_ends_itself(tmp_path):
    run = write_run(tmp_path / "run", 10, [(4, {"holdout_knn": 0.5})])
    shown = command_line("status", str(run), "--follow", status=0).stdout
    assert "█▆▅▃▁  7 to -1" in shown
    both = command_line("status", str(run), "--follow", "--json", status=2)
    assert "--follow draws for people" in both.stderr


@pytest.mark.parametrize(
    ("measure", "others"),
    [
        ("holdout_map_at_r", {"holdout_knn": 0.9, "holdout_recall_at_1": 0.95}),
        ("validation_map_at_r", {"validation_recall_at_1": 0.95}),
        ("holdout_view_recall", {"holdout_rankme": 30.0}),
    ],
)
def test_a_runs_best_is_of_what_it_watches(tmp_path, measure, others):
    """Of two measures the larger number is not the better one."""
    evals = [(4, {**others, measure: 0.3}), (8, {**others, measure: 0.5})]
    write_run(tmp_path / "a", 10, evals)
    (one,) = list_runs(tmp_path)
    assert sslpipe.list_runs(str(tmp_path)) == [one]
    assert (one["best"], one["best_of"]) == (0.5, measure)


def test_runs_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no line is folded
    evals = [(4, {"holdout_knn": 0.9}), (8, {"holdout_knn": 0.6})]
    names = ("step-00000004", "step-00000008", "bad-step-00000006")
    first = write_run(tmp_path / "a" / "deep", 10, evals, "one", names)
    second = write_run(tmp_path / "b", 10, checkpoints=names)
    damaged = write_run(tmp_path / "c")
    (damaged / "recipe.json").write_text("{")
    lock = RunLock(second)
    found = {each["run"]: each for each in list_runs(tmp_path)}
    lock.release()
    assert list(found) == [str(first), str(second), str(damaged)]
    one = found[str(first)]
    assert (one["recipe"], one["state"], one["step"], one["steps"]) == ("one", "lost", 10, 20)
    assert (one["best"], one["best_of"]) == (0.9, "holdout_knn")
    assert one["bytes"] == sum(p.stat().st_size for p in first.rglob("*") if p.is_file())
    assert found[str(second)]["state"] == "running"
    assert found[str(damaged)]["state"] == "damaged"
    assert "recipe.json is damaged" in found[str(damaged)]["detail"]

    row = {"features": "ssl", "whitened": False, "protocol": "p", "metric": "top1", "queries": 9}
    row |= {"value": 0.625, "interval95": [0.5, 0.75], "column": "kNN", "bank": 9, "details": {}}
    rows = [row, {**row, "whitened": True, "value": 0.9}, {**row, "features": "random"}]
    suite = {"schema_version": 1, "facts": {}, "columns": ["kNN"], "rows": rows, "left_out": []}
    suite["sha256"] = content_sha256(suite)
    (first / "eval.json").write_text(json.dumps(suite))
    (second / "eval.json").write_text("{}")
    of_first, of_second, _ = list_runs(tmp_path)
    assert [of_first[key] for key in ("measure", "value")] == ["kNN", 0.625]
    assert of_second["value"] is None

    shown = command_line("runs", str(tmp_path), status=0).stdout
    for text in ("holdout_knn 0.9", "kNN 62.5", "10 of 20"):
        assert text in shown
    for name in ("eval.json", "recipe.json"):
        assert f"{name} is damaged" in shown
    assert json.loads(command_line("runs", str(tmp_path), "--json").stdout)[2]["steps"] is None
    for folder, said in ((first / "checkpoints", "holds no run"), (tmp_path / "x", "not a folder")):
        none = command_line("runs", str(folder), status=2)
        assert said in none.stderr
        assert none.stdout == ""


@pytest.mark.parametrize("columns", ["80", "400"])
def test_the_paths_of_listed_runs_can_be_copied_on_any_terminal(tmp_path, columns):
    names = ["photos", "photographs-of-the-second-camera-with-diet-at-224px-seed-1"]
    runs = [str(write_run(tmp_path / name, 10, [(4, {"holdout_knn": 0.9})])) for name in names]
    terminal = {"COLUMNS": columns, "FORCE_COLOR": "1"}
    shown = command_line("runs", str(tmp_path), status=0, **terminal).stdout
    lines = shown.splitlines()
    assert [sum(run in line for line in lines) for run in runs] == [1, 1]
    for text in ("holdout_knn 0.9", "10 of 20", "made up"):
        assert shown.count(text) == 2
    together = [line for line in lines if runs[1] in line and "10 of 20" in line]
    assert len(together) == (columns == "400")


def test_a_status_on_a_narrow_terminal_cuts_no_path(run_dir, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    long = f"/data/{'x' * 200}/[red]"
    summary = status(run_dir) | {"first_skipped": 3, "last_skipped": 4, "run": long}
    summary["health"] = {**summary["health"], "skipped_steps": 2}
    with (text := io.StringIO()), contextlib.redirect_stdout(text):
        terminal.show(render(summary))
        shown = "".join(line.strip() for line in text.getvalue().splitlines())
    assert long in shown
