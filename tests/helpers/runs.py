"""Whole trainings on the tiny data set, in 1 to 4 real gloo processes."""

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import sslpipe.api
import sslpipe.pretrain
from sslpipe.__main__ import main
from sslpipe.augment.two_views import FusedViews
from sslpipe.cli.app import app
from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.checkpoint_files import latest
from sslpipe.run.log import read_metrics
from sslpipe.run.run import Run
from tests.helpers.processes import free_port, run_processes, run_python

ROOT = Path(__file__).parents[2]

RECIPE = """
name = "tiny"
steps = 12
[data]
batch_size = 16
num_streams = 4
shuffle_window = 6
holdout = 16
canvas_px = 16
[augment]
kind = "fused"
preset = "simclr_small"
crop_px = 16
[backbone]
kind = "small_resnet"
widths = [8, 16, 16]
[projector]
hidden_dim = 16
out_dim = 8
[loss]
kind = "nt_xent"
temperature = 0.2
[optim]
kind = "sgd"
peak_lr = 0.05
precision = "fp32"
[run]
keep = "last"
log_steps = 1
save_steps = 5
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def train_words(folder: Path, data: Path) -> tuple[str, ...]:
    """The words behind `sslpipe` that train the tiny recipe in folder/run."""
    where = ("--data", str(data), "--run-dir", str(folder / "run"))
    return ("train", str(write_recipe(folder)), *where)


def train_in_rank(
    process: Rank,
    recipe: str,
    data: str,
    run_dir: str,
    *overrides: str,
    train: Callable[..., int] = sslpipe.api.train,
) -> Any:
    """What each process runs; records what every step saw: (ids, source ids, drawn numbers)."""
    seen = []

    def record(step, batch):
        draws = batch.plan.draws
        params = (draws.ids, draws.views, *draws.params.values())
        seen.append((batch.ids.clone(), [part.clone() for part in params]))

    original = at_each_step(record)
    try:
        done = train(load_recipe(recipe, overrides), load_index(data), Path(run_dir))
    finally:
        Run.steps = original
    return done, seen


def faulty_in_rank(process: Rank, fault: str, by: Callable[..., Any], *arguments: Any) -> Any:
    """As `by`, with a fault as SSLPIPE_FAULT names it."""
    os.environ["SSLPIPE_FAULT"] = fault
    return by(process, *arguments)


def at_each_step(call):
    """Have the loops of this process call it with each step and its batch; gives Run.steps as it
    was."""
    original = Run.steps

    def steps(self, *given, **named):
        for step, batch in original(self, *given, **named):
            call(step, batch)
            yield step, batch

    Run.steps = steps
    return original


def train_over(
    world: int, recipe: Path, data: Path, run_dir: Path, *rest: Any, by: Any = train_in_rank
) -> list[Any]:
    """Train in `world` processes; per rank what `by` gives: (last step done, what each step saw).

    rest: overrides, but what `by` takes before them.
    """
    return run_processes(by, world, str(recipe), str(data), str(run_dir), *rest)


def kill_over(
    world: int, fault: str, recipe: Path, data: Path, run_dir: Path, *rest: Any, by=train_in_rank
) -> None:
    """As `train_over`, until a fault, as SSLPIPE_FAULT names it, kills the processes."""
    arguments = (str(recipe), str(data), str(run_dir), *rest)
    with pytest.raises(AssertionError, match="ended without a word"):
        run_processes(faulty_in_rank, world, fault, by, *arguments)


def forget_accelerator():
    """Have the next training of this process make its own Accelerator."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


Weights = dict[str, torch.Tensor]
NUMBERS = ("loss", "grad_norm", "alignment", "effective_rank")


def final_weights(run_dir: Path) -> Weights:
    return load_file(latest(run_dir) / "model.safetensors")


def assert_same_weights(
    expected: Path | Weights, actual: Path | Weights, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Two runs, or their weights, have the same tensors; unless told otherwise, bit for bit."""
    theirs, ours = (each if isinstance(each, dict) else final_weights(each)
                    for each in (expected, actual))  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def assert_same_numbers(
    expected: Path, actual: Path, keys: tuple[str, ...], rtol: float = 1e-9
) -> list[dict[str, Any]]:
    """Two runs logged the same steps, rates and values of these keys; returns the lines."""
    theirs, ours = read_metrics(expected), read_metrics(actual)
    for a, b in zip(theirs, ours, strict=True):
        assert (b["step"], b["lr"]) == (a["step"], a["lr"])
        for key in keys:
            assert b[key] == pytest.approx(a[key], rel=rtol), (a["step"], key)
    return ours


def python(
    *words: str, cwd: Path = ROOT, status: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` as a user would run it, with its imports already done.

    status: what it must end with, if given.
    """
    done = run_python(words, cwd, user_environment(environment))
    assert status in (None, done.returncode), (done.returncode, words, done.stderr)
    return done


def user_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's variables and others, for one that finds this tree's package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "PET_"))}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]  # `make gpu NO_INSTALL=1` has one
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **environment}


def command_line(
    *arguments: str, cwd: Path = ROOT, status: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m sslpipe ...`: in this process, or in its own where variables are given.

    status: what it must end with, if given.
    """
    if environment:
        return python("-m", "sslpipe", *arguments, cwd=cwd, status=status, **environment)
    with (
        contextlib.chdir(cwd),
        patch.dict(os.environ),
        patch.object(sys, "argv", ["sslpipe", *arguments]),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        warnings.catch_warnings(action="default"),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    done = subprocess.CompletedProcess(
        ["sslpipe", *arguments], ended.value.code or 0, stdout.getvalue(), stderr.getvalue()
    )
    assert status in (None, done.returncode), (done.returncode, arguments, done.stderr)
    return done


def resolved(*words: str) -> tuple[Any, list[str]]:
    """The sub-command that words behind `sslpipe` name, and the words that are left for it."""
    command, rest = typer.main.get_command(app), list(words)
    while isinstance(command, typer.core.TyperGroup) and rest and not rest[0].startswith("-"):
        _, command, rest = command.resolve_command(command.make_context("x", [*rest]), [*rest])
    return command, rest


def parsed(*words: str) -> dict[str, object]:
    """What the program's own parser makes of words behind `sslpipe`; raises on unknown ones."""
    command, rest = resolved(*words)
    return command.make_context("x", rest).params


def launched(
    world: int, *arguments: str, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """`sslpipe ...` in `world` processes with a launcher's variables; what each rank ended with."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        return command_line(*arguments, **group, **mine, **environment)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, range(world)))


def feed_equal_views():
    """Views are made one image at a time: made together, they are equal to 1e-6 only, and tests of
    several process counts feed each the same. For the rest of this process."""
    original = FusedViews.forward

    def alone(self, batch, draws=None, dtype=torch.float32):
        params, count = self.plan_of(batch, draws).draws, len(batch.ids)
        views = []
        for row in range(count):
            of_row = params.rows(torch.arange(row, len(params.boxes), count))
            views.append(original(self, batch.rows(torch.tensor([row])), of_row, dtype))
        # all first views, then all second
        return torch.cat([torch.stack(views)[:, k] for k in range(len(views[0]))])

    FusedViews.forward = alone


def train_on_equal_views(process, *arguments):
    feed_equal_views()
    return train_in_rank(process, *arguments)


def train_from_in_rank(process: Rank, recipe, data, run_dir, *overrides, init: str | None):
    """As `sslpipe.train` with `init`; views are made image by image, see `feed_equal_views`."""
    feed_equal_views()
    return sslpipe.api.train(recipe, data, run_dir, init=init, overrides=overrides)


def train_from(world: int, init, recipe: Path, data: Path, run_dir: Path, *overrides: str):
    """Train in `world` processes from weights; per rank the last step done."""
    by = partial(train_from_in_rank, init=init and str(init))
    return train_over(world, recipe, data, run_dir, *overrides, by=by)
