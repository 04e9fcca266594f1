"""DIET: a float64 loop, several processes, and what it asks of a recipe."""

import math

import pytest
import torch
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError
from sslpipe.losses import DietLoss
from sslpipe.run.log import read_metrics
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.runs import (
    assert_same_weights,
    kill_over,
    train_in_rank,
    train_over,
    write_recipe,
)
from tests.losses.loops import assert_same, pair, value_and_grad
from tests.losses.test_processes import SPLITS, assert_whole, of_share

IDS = [3, 0, 10, 3, 7, 1, 2, 9, 5]
ONE_LAYER = ("projector.num_layers=1", "projector.batchnorm=false")
LOSS = "loss={kind='diet'}"


def loop(z_a: Tensor, z_b: Tensor, smoothing: float) -> Tensor:
    terms = []
    for view in (z_a, z_b):
        for row, own in zip(view, IDS, strict=True):
            whole = torch.stack([value.exp() for value in row]).sum().log()
            for image, value in enumerate(row):
                share = smoothing / len(row) + (1 - smoothing) * (image == own)
                terms.append(share * (whole - value))
    return torch.stack(terms).sum() / (2 * len(IDS))


@pytest.mark.parametrize("smoothing", [0.0, 0.8])
def test_it_equals_a_loop(smoothing: float) -> None:
    z_a, z_b = pair(9, 11)
    objective = DietLoss(label_smoothing=smoothing)
    exact = value_and_grad(loop(z_a, z_b, smoothing), z_a, z_b)
    assert_same(value_and_grad(objective(z_a, z_b, ids=torch.tensor(IDS)), z_a, z_b), exact)
    right = [int(row.argmax()) == own for z in (z_a, z_b) for row, own in zip(z, IDS, strict=True)]
    assert objective.stats() == {"named_right": pytest.approx(sum(right) / 18)}


def _rank(process: Rank) -> list[list[Tensor]]:
    batch, splits = pair(9, 11), SPLITS[process.world_size]
    return [of_share(DietLoss(), process, s, batch, ids=torch.tensor(IDS)) for s in splits]


def test_processes_of_unequal_shares_give_the_loss_and_gradient_of_one() -> None:
    z_a, z_b = pair(9, 11)
    exact = value_and_grad(loop(z_a, z_b, 0.8), z_a, z_b)
    for answers in zip(*run_processes(_rank, 2), strict=True):
        assert_whole(list(answers), *exact, views=2)


def test_a_run_learns_to_name_images_and_logs_no_health_of_outputs(tmp_path, data):
    sharp = "loss={kind='diet',label_smoothing=0}", "optim.kind=adamw", "optim.peak_lr=0.02"
    fits = (*sharp, *ONE_LAYER, "projector.out_dim=128", "steps=60", "optim.weight_decay=0")
    ((last, _),) = train_over(1, write_recipe(tmp_path), data, tmp_path / "run", *fits)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert last == 60
    assert lines[0]["loss"] == pytest.approx(math.log(128), abs=0.3)
    epochs = [sum(line["loss"] for line in lines[k : k + 7]) / 7 for k in (0, 53)]
    assert epochs[1] < epochs[0] - 0.1
    assert 0 <= lines[-1]["named_right"] <= 1
    assert not {"alignment", "effective_rank"} & lines[-1].keys()


def test_out_dim_0_is_an_output_an_image_over_processes_and_when_it_resumes(tmp_path, data):
    recipe, own = write_recipe(tmp_path), (LOSS, *ONE_LAYER, "steps=4", "run.save_steps=2")
    train_over(1, recipe, data, tmp_path / "given", *own, "projector.out_dim=128")
    train_over(1, recipe, data, tmp_path / "whole", *own, "projector.out_dim=0")
    kill_over(1, "train.step:3", recipe, data, tmp_path / "cut", *own, "projector.out_dim=0")
    train_over(1, recipe, data, tmp_path / "cut", *own, "projector.out_dim=0")
    for name in ("given", "cut"):
        assert_same_weights(tmp_path / "whole", tmp_path / name)
    train_over(2, recipe, data, tmp_path / "two", *own, "projector.out_dim=0")
    one, two = (read_metrics(tmp_path / name)[0]["loss"] for name in ("whole", "two"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ((LOSS,), r"each of the split's 128 images; set projector\.num_layers=1 projector\.batch"),
        ((LOSS, *ONE_LAYER, "projector.out_dim=127"), r"128 images; .* projector\.out_dim=0$"),
        (
            (LOSS, *ONE_LAYER, "projector.out_dim=128", "pairs.positive=icon"),
            r"loss\.kind = 'diet' names each view by its own image",
        ),
        (("loss={kind='diet',label_smoothing=1}",), "label_smoothing = 1"),
    ],
)
def test_what_it_cannot_do_is_said_before_the_first_step(tmp_path, changes, text):
    manifest = write_dataset(tmp_path / "data", (40, 3, 60, 25))
    add_columns(manifest, icon=[n % 40 for n in range(128)])
    where = [str(path) for path in (write_recipe(tmp_path), manifest, tmp_path / "run")]
    with pytest.raises(RecipeError, match=text):
        train_in_rank(Rank(), *where, *changes)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
