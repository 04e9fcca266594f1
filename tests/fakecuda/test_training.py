"""Whole runs on "cuda": torch's CUDA code takes every step's calls, and the numbers are right."""

import json
import os
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState

from sslpipe.run.log import read_metrics
from sslpipe.run.run import Run
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import (
    assert_same_weights,
    at_each_step,
    forget_accelerator,
    train_over,
    write_recipe,
)

pytestmark = needs_fakecuda

Tiny = tuple[Path, Path]
# a small rate: views that differ in their last bits would be driven apart
SMALL_RATE = "optim.peak_lr=0.002"
OVERRIDES = ("steps=3", "run.log_steps=3", "run.save_steps=3", SMALL_RATE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    return write_recipe(folder), write_dataset(folder / "data")


def train_and_count(recipe: Path, data: Path, run_dir: Path, *overrides: str):
    """Train as a launcher's process would; the last step done, and the counts of each step."""
    from sslpipe.api import train
    from sslpipe.data.index import load_index
    from sslpipe.recipe.reading import load_recipe
    from tests.fakecuda.runtime import counts, events, mark

    def marked(run, *args, **kwargs):
        for step, batch in all_steps(run, *args, **kwargs):
            mark(f"step {step}")
            yield step, batch
            mark("between steps")

    all_steps, Run.steps = Run.steps, marked
    done = train(load_recipe(recipe, overrides), load_index(data), run_dir)
    return done, counts(events())


def test_the_tiny_recipe_trains_on_two_ranks_to_the_weights_of_a_cpu(tiny, tmp_path):
    """With the BatchNorm of both."""
    train_over(2, *tiny, tmp_path / "cpu", *OVERRIDES, "run.device=cpu")
    run = tmp_path / "cuda"
    for done, table in run_on_cuda(train_and_count, *tiny, run, *OVERRIDES, ranks=2):
        assert done == 3
        assert table["step 1"]["operations"] > 100
        assert "collectives" in table["step 1"]
    assert (run / "DONE").is_file()
    assert_same_weights(tmp_path / "cpu", run, rtol=1e-4, atol=1e-5)


def _train_deterministically(recipe: Path, data: Path, run_dir: Path):
    """The settings that each step had; those behind the run."""
    seen, backward = [], Run.backward

    def recorded(run, loss):
        algorithms = torch.are_deterministic_algorithms_enabled()
        seen.append((algorithms, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        backward(run, loss)

    Run.backward = recorded
    done, _ = train_and_count(recipe, data, run_dir, *OVERRIDES, "run.deterministic=true")
    return done, seen, torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_run_has_only_such_algorithms_while_it_lasts(tiny, tmp_path):
    ((done, seen, after),) = run_on_cuda(_train_deterministically, *tiny, tmp_path / "run")
    assert done == 3
    assert seen == [(True, ":4096:8")] * 3
    assert not after


def _seeded() -> list[torch.Tensor]:
    from sslpipe.random import hash_integers
    from sslpipe.run.accelerator import seed_torch

    device, found = torch.device("cuda", 0), []
    for own in (False, True):
        torch.manual_seed(0)
        if own:
            seed_torch(device, (1, 2, 3))
        else:
            torch.manual_seed(int(hash_integers((1, 2, 3)) >> 1))
        found += [torch.rand(4), torch.cuda.get_rng_state(device)]
    return found


def test_the_generators_are_seeded_as_torch_does():
    ((host, device, own_host, own_device),) = run_on_cuda(_seeded)
    assert own_host.equal(host)
    assert own_device.equal(device)


# -- steps that are decided on the device leave the weights that a CPU's host decides --------------

EACH_STEP = ("steps=4", "run.log_steps=1", "run.save_steps=4", SMALL_RATE)
RUNS = {
    "lars": (
        *("optim.kind=lars", "optim.clip_norm=1"),
        *("loss.kind=hard_negatives", "loss.mask_labels=true"),
    ),
    "moco": ("loss.kind=moco", "loss.queue_rows=24", "momentum.start=0.9"),
    "micro-batches": ("data.micro_batch=8", "loss.kind=sup_con"),
}


def train_poisoned(recipe: Path, data: Path, folder: Path, device: str) -> None:
    """Train each of RUNS in turn; the views of a run's third step are NaN."""
    from sslpipe.api import train
    from sslpipe.augment.two_views import FusedViews
    from sslpipe.data.index import load_index
    from sslpipe.recipe.reading import load_recipe

    poisoned = False

    def poison(step, batch):
        nonlocal poisoned
        poisoned = step == 2

    def views(self, *args, **kwargs):
        made = make_views(self, *args, **kwargs)
        return made * float("nan") if poisoned else made

    at_each_step(poison)
    make_views, FusedViews.forward = FusedViews.forward, views
    for name, overrides in RUNS.items():
        settings = (*EACH_STEP, *overrides, f"run.device={device}")
        train(load_recipe(recipe, settings), load_index(data), folder / device / name)
        forget_accelerator()
        PartialState._reset_state()


@pytest.fixture(scope="module")
def poisoned(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for device in ("cuda", "cpu"):
        run_on_cuda(train_poisoned, *tiny, folder, device, timeout_s=600)
    return folder


@pytest.mark.parametrize("name", list(RUNS))
def test_a_bad_step_among_good_ones_gives_the_weights_of_a_cpu(name, poisoned):
    on_cuda, on_cpu = (poisoned / device / name for device in ("cuda", "cpu"))
    assert_same_weights(on_cpu, on_cuda, rtol=1e-4, atol=1e-5)
    for run in (on_cuda, on_cpu):
        lines = read_metrics(run)
        assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
        assert [line["loss"] is None for line in lines] == [False, False, True, False]
    records = [(run / "bad_steps.0.jsonl").read_text().splitlines() for run in (on_cuda, on_cpu)]
    assert json.loads(records[0][0])["ids"] == json.loads(records[1][0])["ids"]
