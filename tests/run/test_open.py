"""`hold_directory`: what a run says last. `open_run`: it trains the parts that it is given."""

import dataclasses
import time
from pathlib import Path

import pytest
from torch._inductor.exc import InvalidCxxCompiler

from sslpipe.data.index import load_index
from sslpipe.errors import DataError, UserError
from sslpipe.losses import NTXentLoss
from sslpipe.plan import Pretraining
from sslpipe.pretrain import pretrain
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.directory import hold_directory
from sslpipe.run.stop import MARKERS
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.runs import RECIPE, assert_same_weights, write_recipe


def ended_in_rank(process, recipe, run_dir, error):
    with hold_directory(load_recipe(recipe), Path(run_dir)):
        raise error


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("marker", [{"DONE": "step 12\n"}, {"FAILED": "rank 0: Hang: x\n"}])
def test_what_is_refused_before_it_continues_a_run_leaves_its_markers(tmp_path, marker, world):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "recipe.json").write_text("{}")
    for name, text in marker.items():
        (run_dir / name).write_text(text)
    with pytest.raises(AssertionError, match="DataError: wrong"):
        run_processes(ended_in_rank, world, str(recipe), str(run_dir), DataError("wrong"))
    there = {name: run_dir / name for name in MARKERS if (run_dir / name).exists()}
    assert {name: path.read_text() for name, path in there.items()} == marker


@pytest.mark.parametrize("name", [None, "PREEMPTED"])
def test_ctrl_c_before_the_first_step_says_so_and_fails_nothing(tmp_path, capfd, name):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    if name:
        (run_dir / name).write_text("step 5\n")
    with pytest.raises(KeyboardInterrupt):
        ended_in_rank(None, str(recipe), str(run_dir), KeyboardInterrupt())
    assert [each for each in MARKERS if (run_dir / each).exists()] == ([name] if name else [])
    assert "stopped before the first step; the same command starts it" in capfd.readouterr().err


def test_a_compiler_that_is_missing_is_one_error(tmp_path):
    """As in torch's runtime images, which have no g++: torch ends with a traceback."""
    recipe = write_recipe(tmp_path, RECIPE + 'compile = "default"\n')
    missing = InvalidCxxCompiler()
    with pytest.raises(UserError, match=r"run\.compile = 'default': .*No working C\+\+ .* 'off'"):
        ended_in_rank(None, str(recipe), str(tmp_path / "run"), missing)
    assert "run.compile = 'default'" in (tmp_path / "run" / "FAILED").read_text()


def refused_on_rank_0_alone(process, recipe, run_dir):
    failed = Path(run_dir) / "FAILED"
    with hold_directory(load_recipe(recipe), Path(run_dir)):
        if process.rank == 1:  # ends in another way, and leaves its marker first
            raise RuntimeError("lost the other rank")
        while not failed.is_file():
            time.sleep(0.01)
        raise DataError("wrong")


def test_a_refusal_leaves_the_marker_that_was_there_and_not_another_ranks(tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "recipe.json").write_text("{}")
    (run_dir / "DONE").write_text("step 12\n")
    with pytest.raises(AssertionError, match="DataError: wrong"):
        run_processes(refused_on_rank_0_alone, 2, str(recipe), str(run_dir))
    assert [name for name in MARKERS if (run_dir / name).exists()] == ["DONE"]
    assert (run_dir / "DONE").read_text() == "step 12\n"


def test_parts_that_are_handed_in_are_what_is_trained(tmp_path):
    """As a recipe that names them trains."""
    index = load_index(write_dataset(tmp_path / "data"))
    path = write_recipe(tmp_path)
    plan = Pretraining.make(load_recipe(path, ["steps=3"]), index)
    named = Pretraining.make(load_recipe(path, ["steps=3", "loss.temperature=0.9"]), index)
    parts = dataclasses.replace(plan.build(), loss=NTXentLoss(temperature=0.9))
    assert pretrain(plan, tmp_path / "handed", parts) == 3
    assert pretrain(named, tmp_path / "named") == 3
    assert_same_weights(tmp_path / "handed", tmp_path / "named")
    assert pretrain(plan, tmp_path / "plain") == 3
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "plain", tmp_path / "named")


def test_a_training_that_was_not_checked_says_that_its_warm_up_does_not_end(tmp_path, capfd):
    index = load_index(write_dataset(tmp_path / "data"))
    for warmup_steps in (2, 3):
        overrides = ["steps=3", f"optim.warmup_steps={warmup_steps}"]
        plan = Pretraining.make(load_recipe(write_recipe(tmp_path), overrides), index)
        pretrain(plan, tmp_path / str(warmup_steps))
        warned = "warning: optim.warmup_steps = 3 does not end" in capfd.readouterr().err
        assert warned == (warmup_steps == 3)
