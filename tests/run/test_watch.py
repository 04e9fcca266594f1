"""Curves of a run while it trains, and the list of runs under a folder."""

import json

from sslpipe.run import watch
from sslpipe.run.lock import RunLock
from sslpipe.run.records import append_records
from sslpipe.run.watch import curves, follow, list_runs, sparkline
from tests.helpers.runs import command_line

IDENTITY = {"digest": "0", "recipe": {}, "index_sha256": "0"}


def write_run(folder, steps=20, evals=(), name="made up", checkpoints=()):
    """A run's directory as its files say it: a line every 2 steps of 0.5 s each."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"name": name, "steps": 20}))
    append(folder, range(2, steps + 1, 2))
    line = {"kind": "eval", "wall": 0.0, "restart": 0}
    lines = [{"step": step, **line, **values} for step, values in evals]
    append_records(folder / "metrics.jsonl", lines)
    for checkpoint in checkpoints:
        (folder / "checkpoints" / checkpoint).mkdir()
        (folder / "checkpoints" / checkpoint / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


def append(folder, steps):
    line = {"kind": "train", "restart": 0}
    lines = [{"step": step, **line, "loss": 9.0 - step, "wall": step / 2} for step in steps]
    append_records(folder / "metrics.jsonl", lines)


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

    monkeypatch.setattr(watch.time, "sleep", train)
    last = follow(run, lambda summary: seen.append((summary["state"], summary["step"])))
    assert seen == [("running", 2), ("running", 4), ("running", 6), ("done", 6)]
    assert last["state"] == "done"


def test_the_command_draws_a_run_that_has_ended_and_ends_itself(tmp_path):
    run = write_run(tmp_path / "run", 10, [(4, {"holdout_knn": 0.5})])
    shown = command_line("status", str(run), "--follow", status=0).stdout
    assert "step 10 of 20, loss -1, holdout_knn 0.5, steps/s 2" in shown
    assert "█▆▅▃▁  7 to -1" in shown
    both = command_line("status", str(run), "--follow", "--json", status=2)
    assert "--follow draws for people" in both.stderr


def test_runs_are_listed_with_what_may_be_deleted(tmp_path):
    evals = [(4, {"holdout_knn": 0.9}), (8, {"holdout_knn": 0.6, "ema_holdout_knn": 0.7})]
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
    assert one["deletable"] == {
        str(first / "checkpoints" / name): 1000 for name in ("bad-step-00000006", "step-00000004")
    }
    assert one["bytes"] == sum(p.stat().st_size for p in first.rglob("*") if p.is_file())
    assert found[str(second)]["state"] == "running"
    assert found[str(second)]["deletable"] == {}  # it may be reading or writing them
    assert found[str(damaged)]["state"] == "damaged"
    assert "recipe.json is damaged" in found[str(damaged)]["detail"]

    (first / "checkpoints" / "step-00000008" / "state.json").write_text(
        json.dumps({"best": {"name": "step-00000004"}, "identity": IDENTITY})
    )
    (one, *_) = list_runs(first)
    assert [*one["deletable"]] == [str(first / "checkpoints" / "bad-step-00000006")]

    shown = command_line("runs", str(tmp_path), status=0).stdout
    for text in ("holdout_knn 0.9", "10 of 20", "recipe.json is damaged", "may be deleted: "):
        assert text in shown
    assert json.loads(command_line("runs", str(tmp_path), "--json").stdout)[2]["steps"] is None
    for folder, said in ((first / "checkpoints", "holds no run"), (tmp_path / "x", "no folder")):
        none = command_line("runs", str(folder), status=2)
        assert said in none.stderr
        assert none.stdout == ""
