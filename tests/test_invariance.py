"""The recipe decides the run; the machine does not: 1, 2 and 4 processes train the same weights."""

import math
from functools import partial

import pytest
import torch

from sslpipe.export.load import load_run
from sslpipe.run.log import read_metrics
from tests.helpers import runs
from tests.helpers.runs import (
    NUMBERS,
    assert_same_numbers,
    assert_same_weights,
    final_weights,
    train_on_equal_views,
    write_recipe,
)

train_over = partial(runs.train_over, by=train_on_equal_views)
FP64 = ("optim.precision=fp64", "steps=5", "run.monitor_steps=5")
OPTIMIZERS = {
    "sgd": ("optim.kind=sgd", "optim.peak_lr=0.05", "optim.nesterov=true"),
    "lars": ("optim.kind=lars", "optim.peak_lr=0.5"),
}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # weights, with BatchNorm's statistics; in float64


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """Optimizer name -> run directory and what one process saw."""
    folder = tmp_path_factory.mktemp("one")
    recipe = write_recipe(folder)
    return {
        name: (folder / name, train_over(1, recipe, data, folder / name, *FP64, *settings))
        for name, settings in OPTIMIZERS.items()
    }


@pytest.mark.promise(1)
@pytest.mark.parametrize(("world", "optimizer"), [(4, "sgd"), (2, "lars")])
def test_processes_change_neither_samples_nor_draws_nor_numbers(
    data, one_process, tmp_path, world, optimizer
):
    run_dir, [(_, whole)] = one_process[optimizer]
    recipe = write_recipe(tmp_path)
    ranks = train_over(world, recipe, data, tmp_path / "run", *FP64, *OPTIMIZERS[optimizer])
    for step, (ids, params) in enumerate(whole):
        parts = [seen[step] for _, seen in ranks]
        assert torch.equal(torch.cat([part[0] for part in parts]), ids)
        rows = len(ids) // world
        for number, tensor in enumerate(params):  # (2B, ...): all first views, then all second
            first = torch.cat([part[1][number][:rows] for part in parts])
            second = torch.cat([part[1][number][rows:] for part in parts])
            assert torch.equal(torch.cat([first, second]), tensor)
    assert_same_run(run_dir, tmp_path / "run", [2 * 16 - 2] * 5)
    assert_same_numbers(run_dir, tmp_path / "run", ("uniformity",), 1e-6)
    assert any("running_var" in key for key in final_weights(run_dir))
    evals = [read_metrics(folder, "eval")[-1] for folder in (run_dir, tmp_path / "run")]
    assert evals[0]["holdout_knn"] == evals[1]["holdout_knn"]


MICRO = (*FP64, *OPTIMIZERS["lars"], "data.micro_batch=4", "optim.warmup_steps=2")
MOCO = ("momentum.start=0.9", "loss.kind=moco", "loss.queue_rows=40")


@pytest.fixture(scope="module")
def micro_batches(data, tmp_path_factory):
    """Run directory of one process that takes four micro-batches a step."""
    folder = tmp_path_factory.mktemp("micro")
    train_over(1, write_recipe(folder), data, folder / "run", *MICRO)
    return folder / "run"


def assert_same_run(expected_dir, found_dir, negatives):
    lines = assert_same_numbers(expected_dir, found_dir, NUMBERS)
    assert [line["negatives_per_anchor"] for line in lines] == negatives
    assert_same_weights(expected_dir, found_dir, **CLOSE)


@pytest.mark.promise(4)
def test_processes_change_nothing_with_micro_batches_either(data, micro_batches, tmp_path):
    train_over(2, write_recipe(tmp_path), data, tmp_path / "run", *MICRO)
    assert_same_run(micro_batches, tmp_path / "run", [2 * 16 - 2] * 5)  # not those of a part


@pytest.mark.promise(1)
def test_nor_where_the_first_steps_have_views_of_half_the_size(data, micro_batches, tmp_path):
    recipe = write_recipe(tmp_path)
    half = (*MICRO, "augment.half_size_share=0.6")  # three of five steps
    for world, workers in ((1, 0), (2, 2)):
        settings = (*half, f"run.num_workers={workers}")
        train_over(world, recipe, data, tmp_path / str(world), *settings)
    assert_same_run(tmp_path / "1", tmp_path / "2", [2 * 16 - 2] * 5)
    first, other = (read_metrics(each)[0]["loss"] for each in (micro_batches, tmp_path / "1"))
    assert first != other  # they are other views


@pytest.mark.promise(1)
def test_nor_with_a_momentum_encoder_and_a_queue(data, tmp_path):
    recipe = write_recipe(tmp_path)
    for world in (1, 2):
        train_over(world, recipe, data, tmp_path / str(world), *MICRO, *MOCO)
    assert_same_run(tmp_path / "1", tmp_path / "2", [0, 16, 32, 40, 40])
    # what is evaluated and exported is the trained backbone, not the one that follows it
    weights, exported = final_weights(tmp_path / "1"), load_run(tmp_path / "1").backbone
    trained, following = (
        [torch.equal(value, weights[prefix + key].to(value.dtype))
         for key, value in exported.state_dict().items()]
        for prefix in ("backbone.", "momentum.backbone.")
    )  # fmt: skip
    assert all(trained)
    assert not all(following)


def test_micro_batches_change_neither_samples_nor_rate_nor_the_first_loss_much(
    data, one_process, micro_batches, tmp_path
):
    """The rate is a function of the step alone: not of micro-batches, nor (above) of processes."""
    without = tmp_path / "run"
    settings = (*MICRO, "data.micro_batch=16")  # one micro-batch: the whole batch
    [(_, seen)] = train_over(1, write_recipe(tmp_path), data, without, *settings)
    expected, actual = read_metrics(without), read_metrics(micro_batches)
    peak = 0.5  # the recipe's, not scaled by anything
    rates = [0, peak / 2, *(peak * (1 + math.cos(math.pi * k / 3)) / 2 for k in range(3))]
    assert [line["lr"] for line in actual] == [line["lr"] for line in expected]
    assert [line["lr"] for line in actual] == pytest.approx(rates, rel=1e-12, abs=0)
    for (ids, _), (other, _) in zip(seen, one_process["lars"][1][0][1], strict=True):
        assert torch.equal(ids, other)
    # only BatchNorm sees less: close, but not the same number
    assert actual[0]["loss"] != expected[0]["loss"]
    assert actual[0]["loss"] == pytest.approx(expected[0]["loss"], rel=0.15)
    counted = [key for key in final_weights(without) if key.endswith("num_batches_tracked")]
    for key in counted:  # once a step
        assert int(final_weights(micro_batches)[key]) == int(final_weights(without)[key]) == 5


# those of a line do not meet
@pytest.mark.promise(1)
@pytest.mark.parametrize(
    "settings",
    [
        ("run.num_workers=0", "run.log_steps=3"),
        *(("run.cache=memory",), ("run.cache=device",)),
    ],
    ids=str,
)
def test_settings_of_run_change_no_weight(data, one_process, tmp_path, settings):
    run_dir, _ = one_process["sgd"]
    recipe = write_recipe(tmp_path)
    train_over(1, recipe, data, tmp_path / "run", *FP64, *OPTIMIZERS["sgd"], *settings)
    assert_same_weights(run_dir, tmp_path / "run")
