"""`sslpipe check --within`, then a training, its results and its report: all say what was done."""

import json

import pytest

from sslpipe.check import pretraining, shorten
from sslpipe.errors import UserError
from sslpipe.recipe import load_recipe, shortened_note
from sslpipe.run.log import logged_step_s
from tests.helpers.photos import write_photos
from tests.helpers.runs import ROOT, write_recipe

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_a_short_run_is_marked_wherever_its_numbers_are_shown(call, tmp_path, monkeypatch):
    monkeypatch.setenv("SSLPIPE_NEXT", "0")  # on a slow machine a line would come first
    write_photos(tmp_path / "photos")
    data = tmp_path / "data"
    split = ("--test-fraction", "0.3")
    call("shards", "build", data, "--root", tmp_path / "photos", *split)
    recipe = write_recipe(tmp_path)  # 12 steps
    where = ("--data", data)
    monkeypatch.setattr(pretraining, "step_seconds", lambda *arguments: ("fp32", 0.5))

    # the timing is given: 12 steps of half a second
    out, err = call("check", recipe, *where, "--within", "6")
    assert out == "\n"
    assert "--within 6: the whole recipe takes no longer" in err
    out, err = call("check", recipe, *where, "--within", "2", "optim.warmup_steps=3")
    assert out == "steps=4 run.full_steps=12 optim.warmup_steps=1\n"
    assert "--within 2: settings for `train`, on stdout" in err
    assert "estimates" in err  # the tables
    words = ("check", recipe, *where, "--within", "2", "--timed-by", tmp_path / "nowhere")
    assert call(*words, status=2)[0] == ""

    # the whole recipe may take longer than a shortened one
    words = ("check", recipe, *where, "--whole-within", "6")
    assert call(*words, "--within", "2")[0] == "\n"
    _, err = call(*words, status=2)
    assert "--whole-within is for --within; give both" in err

    run_dir, overrides = tmp_path / "run", out.split()
    suite = ("evaluate", "suite", run_dir, *where, "--out", run_dir / "eval.json")
    mark = "trained 4 of 12 steps, as this machine is slow"
    _, err = call("train", recipe, *where, "--run-dir", run_dir, *overrides)
    assert err.startswith(mark)
    out, _ = call(*suite, "--no-baselines")
    assert mark in " ".join(out.split())
    assert json.loads((run_dir / "eval.json").read_text())["facts"]["shortened"].startswith(mark)
    call("report", run_dir)
    assert (run_dir / "report.html").read_text().count(mark.capitalize()) == 1


@pytest.mark.parametrize(
    ("step_s", "within_s", "whole_within_s", "steps", "warmup"),
    [
        *((step_s, 120, None, 600, 120) for step_s in (0.01, 0.2, 0.25)),  # 6, 120 and 150 s
        *((0.25, 60, 150, 600, 120), (0.251, 120, None, 478, 96), (0.65, 120, None, 184, 37)),
        # a slow machine: for less than the whole recipe may take
        *((0.251, 60, whole_within_s, 239, 48) for whole_within_s in (30, 75, 150)),
        *((120, 120, None, 1, 0), (500, 120, None, 1, 0)),
    ],
)
def test_a_slow_machine_trains_what_fits_with_the_same_shares_of_the_schedule(
    step_s, within_s, whole_within_s, steps, warmup
):
    recipe = load_recipe(ROOT / "recipes" / "demo.toml", ["tune.ramp_steps=60"])
    overrides = shorten(recipe, step_s, within_s, whole_within_s)
    short = load_recipe(ROOT / "recipes" / "demo.toml", ["tune.ramp_steps=60", *overrides])
    assert (short.steps, short.optim.warmup_steps) == (steps, warmup)
    assert (overrides == []) == (steps == 600) == (shortened_note(short.model_dump()) == "")
    if overrides:
        assert (short.run.full_steps, short.tune.ramp_steps) == (600, round(steps / 10))
        note = f"trained {steps} of 600 steps, as this machine is slow: the numbers are below"
        assert shortened_note(short.model_dump()).startswith(note)
    assert shortened_note({"run": None}) == ""


def test_a_run_of_a_few_steps_times_the_others(tmp_path):
    lines = [
        {"step": step, "kind": "train", "loss": 1.0, "wall": wall, "restart": 0}
        for step, wall in ((4, 100.0), (8, 103.0), (12, 105.0), (16, 155.0), (20, 157.0), (24, 159))
    ]  # the first steps warm up, and once the machine did something else
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert logged_step_s(tmp_path) == 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    with pytest.raises(UserError, match="too few steps"):
        logged_step_s(tmp_path)


def test_only_a_pretraining_of_so_many_steps_can_be_shortened(call, tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", "epochs = 2", 1))
    out, err = call("check", recipe, "--within", "60", status=2)
    assert out == ""
    assert "--within shortens a pretraining whose length is given in steps" in err
