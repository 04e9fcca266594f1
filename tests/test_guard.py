"""A non-finite step leaves weights and buffers of all ranks as they were, and the run goes on."""

import json

import pytest
import torch

from sslpipe.augment.two_views import FusedViews
from sslpipe.log import read_metrics
from tests.dataset import write_dataset
from tests.processes import run_processes
from tests.runs import final_weights, train_in_rank, write_recipe


def poisoned_in_rank(shard, steps, *arguments):
    """At the given steps, the views of the last rank alone are NaN."""
    original, calls = FusedViews.forward, []

    def poisoned(self, batch, drawn):
        views = original(self, batch, drawn)
        if len(calls) in steps and shard.rank == shard.world - 1:
            views = views * float("nan")
        calls.append(1)
        return views

    FusedViews.forward = poisoned  # this process ends with the call
    return train_in_rank(shard, *arguments)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("world", [1, 2])
def test_a_nan_step_changes_nothing_and_is_counted(data, tmp_path, world):
    recipe = write_recipe(tmp_path)
    settings = ("steps=3", "run.save_steps=1", "run.keep_checkpoints=3")
    arguments = (str(recipe), str(data), str(tmp_path / "run"), *settings)
    ranks = run_processes(poisoned_in_rank, world, (1,), *arguments)
    assert [done for done, _ in ranks] == [3] * world
    from safetensors.torch import load_file

    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    first, second, third = (load_file(folder / "model.safetensors") for folder in folders)
    for key, value in first.items():
        assert torch.equal(second[key], value), key  # weights and running statistics
    assert any(not torch.equal(third[key], value) for key, value in first.items())
    assert all(bool(torch.isfinite(value).all()) for value in third.values())
    assert [line["skipped_steps"] for line in read_metrics(tmp_path / "run")] == [0, 1, 1]
    for rank in range(world):
        (line,) = (tmp_path / "run" / f"bad_steps.{rank}.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 1
        assert json.loads(line)["ids"] == ranks[rank][1][1][0].tolist()


def test_too_many_in_a_row_stop_the_run_with_a_remedy(data, tmp_path):
    recipe = write_recipe(tmp_path)
    arguments = (str(recipe), str(data), str(tmp_path / "run"), "run.max_bad_steps=3")
    with pytest.raises(AssertionError, match=r"3 steps in a row had a non-finite loss"):
        run_processes(poisoned_in_rank, 1, (6, 7, 8), *arguments)
    assert "UserError: 3 steps in a row" in (tmp_path / "run" / "FAILED").read_text()
    assert all(bool(torch.isfinite(v).all()) for v in final_weights(tmp_path / "run").values())
