"""`sslpipe check --within`, then a training, its results and its report: all say what was done."""

import json

import pytest

from sslpipe.check import pretraining
from sslpipe.errors import UserError
from sslpipe.run.log import logged_step_s
from sslpipe.run.records import seal
from tests.helpers.photos import write_photos
from tests.helpers.runs import write_recipe

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_a_short_run_is_marked_wherever_its_numbers_are_shown(call, tmp_path, monkeypatch):
    monkeypatch.setenv("SSLPIPE_NEXT", "0")  # on a slow machine a line would come first
    write_photos(tmp_path / "photos")
    data = tmp_path / "data"
    split = ("--test-fraction", "0.3")
    assert call("shards", "build", data, "--root", tmp_path / "photos", *split)[0] == 0
    recipe = write_recipe(tmp_path)  # 12 steps
    where = ("--data", data)
    monkeypatch.setattr(pretraining, "step_seconds", lambda *arguments: ("fp32", 0.5))

    # the timing is given: 12 steps of half a second
    status, out, err = call("check", recipe, *where, "--within", "6")
    assert (status, out) == (0, "\n"), err
    assert "--within 6: the whole recipe takes no longer" in err
    status, out, err = call("check", recipe, *where, "--within", "2", "optim.warmup_steps=3")
    assert (status, out) == (0, "steps=4 run.full_steps=12 optim.warmup_steps=1\n")
    assert "--within 2: settings for `train`, on stdout" in err
    status, timed, _ = call(
        "check", recipe, *where, "--within", "2", "--timed-by", tmp_path / "nowhere"
    )
    assert (status, timed) == (2, "")
    assert "estimates" in err  # the tables

    # the whole recipe may take longer than a shortened one
    words = ("check", recipe, *where, "--whole-within", "6")
    assert call(*words, "--within", "2")[:2] == (0, "\n")
    refusal = "--whole-within is for --within; give both"
    status, _, err = call(*words)
    assert (status, refusal in err) == (2, True), err

    run_dir, overrides = tmp_path / "run", out.split()
    mark = "trained 4 of 12 steps, as this machine is slow"
    status, _, err = call("train", recipe, *where, "--run-dir", run_dir, *overrides)
    assert status == 0, err
    assert err.startswith(mark)
    status, out, err = call(
        "evaluate", "suite", run_dir, *where, "--out", run_dir / "eval.json", "--no-baselines"
    )
    assert status == 0, err
    assert mark in " ".join(out.split())
    assert json.loads((run_dir / "eval.json").read_text())["facts"]["shortened"].startswith(mark)
    assert call("report", run_dir)[0] == 0
    assert (run_dir / "report.html").read_text().count(mark.capitalize()) == 1


def test_a_run_of_a_few_steps_times_the_others(tmp_path):
    lines = [
        {"step": step, "kind": "train", "loss": 1.0, "wall": wall, "restart": 0}
        for step, wall in ((4, 100.0), (8, 103.0), (12, 105.0), (16, 155.0), (20, 157.0), (24, 159))
    ]  # the first steps warm up, and once the machine did something else
    (tmp_path / "metrics.jsonl").write_text("".join(seal(line) + "\n" for line in lines))
    assert logged_step_s(tmp_path) == 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(seal(line) + "\n" for line in lines[:3]))
    with pytest.raises(UserError, match="too few steps"):
        logged_step_s(tmp_path)


def test_only_a_pretraining_of_so_many_steps_can_be_shortened(call, tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", "epochs = 2", 1))
    status, out, err = call("check", recipe, "--within", "60")
    assert (status, out) == (2, "")
    assert "--within shortens a pretraining whose length is given in steps" in err
