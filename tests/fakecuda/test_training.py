"""Whole runs on "cuda": torch's CUDA code takes every step's calls, and the numbers are right."""

import os
from pathlib import Path

import pytest
import torch

from sslpipe.run.session import Run
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import final_weights, train_over, write_recipe

pytestmark = needs_fakecuda

Tiny = tuple[Path, Path]
# a small rate: views that differ in their last bits would be driven apart
OVERRIDES = ("steps=3", "run.log_steps=3", "run.save_steps=3", "optim.peak_lr=0.002")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    return write_recipe(folder), write_dataset(folder / "data")


def train_and_count(recipe: Path, data: Path, run_dir: Path, *overrides: str):
    """Train as a launcher's process would; the last step done, and the counts of each step."""
    from sslpipe.data.index import load_index
    from sslpipe.recipe import load_recipe
    from sslpipe.train import train
    from tests.fakecuda.runtime import counts, events, mark

    def marked(run, *args, **kwargs):
        for step, batch in all_steps(run, *args, **kwargs):
            mark(f"step {step}")
            yield step, batch
            mark("between steps")

    all_steps, Run.steps = Run.steps, marked
    done = train(load_recipe(recipe, overrides), load_index(data), run_dir)
    return done, counts(events())


SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


# two ranks: with the BatchNorm of both, and with half of all weights on each
@pytest.mark.parametrize(("ranks", "launcher"), [(1, {}), (2, {}), (2, SHARDED)])
def test_the_tiny_recipe_trains_to_the_weights_of_a_cpu(ranks, launcher, tiny, tmp_path):
    run = tmp_path / "run"
    trained = run_on_cuda(train_and_count, *tiny, run, *OVERRIDES, ranks=ranks, env=launcher)
    for done, table in trained:
        assert done == 3
        assert table["step 1"]["operations"] > 100
        assert ("collectives" in table["step 1"]) == (ranks > 1)
    assert (run / "DONE").is_file()
    train_over(ranks, *tiny, tmp_path / "cpu", *OVERRIDES, "run.device=cpu")
    expected = final_weights(tmp_path / "cpu")
    for name, weight in final_weights(run).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)


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
    from sslpipe.run.launch import seed_torch

    device, found = torch.device("cuda", 0), []
    for own in (False, True):
        torch.manual_seed(0)
        if own:
            seed_torch(device, 1, 2, 3)
        else:
            torch.manual_seed(int(hash_integers(1, 2, 3) >> 1))
        found += [torch.rand(4), torch.cuda.get_rng_state(device)]
    return found


def test_the_generators_are_seeded_as_torch_does():
    ((host, device, own_host, own_device),) = run_on_cuda(_seeded)
    assert own_host.equal(host)
    assert own_device.equal(device)
