"""Distillation against loops over single pairs of views, in several processes, in a training."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.errors import DataError, RecipeError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import save_embeddings
from sslpipe.export.load import load_run
from sslpipe.losses import DistillLoss, NTXentLoss, TeacherFeatures
from sslpipe.parts import build_loss, open_teacher
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.runs import RECIPE, assert_same_weights, kill_over, train_over, write_recipe
from tests.losses.loops import assert_same, pair, unit, value_and_grad
from tests.losses.test_processes import assert_whole, of_share

# the samples of both views: one stands in the batch twice, one row shows two
IDS = torch.tensor([[7, 7], [3, 3], [5, 11], [3, 3], [11, 11], [0, 0], [20, 20]])
KNOWN = torch.tensor([0, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 20])
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3, "teacher_temperature": 0.2},
    {"nt_xent": 0.5},
    {"match": "features"},
)


def teacher(width: int = 4) -> TeacherFeatures:
    """The row of a sample is not its number."""
    features = torch.randn(len(KNOWN), width, generator=torch.Generator().manual_seed(1))
    return TeacherFeatures(features, KNOWN)


def loop(
    z_a: Tensor,
    z_b: Tensor,
    *,
    match: str = "cosines",
    temperature: float = 0.1,
    teacher_temperature: float = 0.05,
    nt_xent: float = 0.0,
) -> Tensor:
    rows = {int(i): unit(row.double()) for i, row in zip(KNOWN, teacher().features, strict=True)}
    views = [
        (unit(z[row]), int(IDS[row, view]))
        for view, z in enumerate((z_a, z_b))
        for row in range(len(IDS))
    ]
    total = z_a.new_zeros(())
    for z, name in views:
        if match == "features":
            total = total + 1 - z @ rows[name]
            continue
        others = [(y, rows[other]) for y, other in views if other != name]
        p = [math.exp(float(rows[name] @ t) / teacher_temperature) for _, t in others]
        s = [z @ y / temperature for y, _ in others]
        log_sum = torch.logsumexp(torch.stack(s), 0)
        total = total - sum(w / sum(p) * (each - log_sum) for w, each in zip(p, s, strict=True))
    return total / len(views) + nt_xent * NTXentLoss(temperature=temperature)(z_a, z_b, ids=IDS)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradient_are_those_of_the_loops(settings: dict[str, Any]) -> None:
    z_a, z_b = pair(7, 4)
    loss_fn = DistillLoss(teacher=teacher(), **settings)
    actual = value_and_grad(loss_fn(z_a, z_b, ids=IDS), z_a, z_b)
    assert_same(actual, value_and_grad(loop(z_a, z_b, **settings), z_a, z_b))


def test_a_student_with_the_teachers_cosines_agrees_and_an_image_alone_has_no_loss() -> None:
    loss_fn, ids = DistillLoss(teacher=teacher(), temperature=0.05), torch.tensor([0, 3, 7, 20])
    z = teacher().of(ids).requires_grad_()
    loss = loss_fn(z, z, ids=ids)
    assert loss_fn.stats() == {"teacher_agreement": 1.0}
    assert loss_fn(z.roll(1, 0), z.roll(1, 0), ids=ids) > loss
    alone = loss_fn(z[:1], z[:1], ids=ids[:1])
    (grad,) = torch.autograd.grad(loss + alone, z)
    torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-5, rtol=0)
    assert alone == 0


def _in_rank(process: Rank, split: tuple[int, ...]) -> list[list[Tensor]]:
    objectives = [DistillLoss(teacher=teacher(), **settings) for settings in SETTINGS]
    return [of_share(each, process, split, pair(7, 4), True, ids=IDS) for each in objectives]


@pytest.mark.parametrize("split", [(7, 0), (2, 1, 4)], ids=str)
def test_several_processes_have_the_loss_and_gradient_of_one(split: tuple[int, ...]) -> None:
    z_a, z_b = pair(7, 4)
    ranks = run_processes(_in_rank, len(split), split)
    for number, settings in enumerate(SETTINGS):
        exact = value_and_grad(loop(z_a, z_b, **settings), z_a, z_b)
        assert_whole([rank[number] for rank in ranks], *exact, views=2)


def test_what_a_call_cannot_use_is_refused() -> None:
    z_a, z_b = pair(7, 4)
    with pytest.raises(ValueError, match="ids are needed"):
        DistillLoss(teacher=teacher())(z_a, z_b)
    with pytest.raises(DataError, match="no features of sample 4;"):
        DistillLoss(teacher=teacher())(z_a[:1], z_b[:1], ids=torch.tensor([4]))
    with pytest.raises(ValueError, match=r"projector.out_dim = 9"):
        DistillLoss(teacher=teacher(9), match="features")(z_a, z_b, ids=IDS)
    for settings, words in (({"match": "rows"}, "match"), ({"nt_xent": -1.0}, "nt_xent")):
        with pytest.raises(ValueError, match=words):
            DistillLoss(teacher=teacher(), **settings)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, dataset.json), and features of the data's train split at teacher.safetensors."""
    folder = tmp_path_factory.mktemp("teacher")
    data = write_dataset(folder / "data")
    write_teacher(folder / "teacher.safetensors", data)
    text = RECIPE.replace('kind = "nt_xent"\ntemperature = 0.2', 'kind = "distill"')
    path = json.dumps(str(folder / "teacher.safetensors"))
    return write_recipe(folder, f"{text}\n[teacher]\nfeatures = {path}\n"), data


def write_teacher(
    path: Path, data: Path, *, rows: int = 128, split: str = "train", seed: int = 2
) -> None:
    features = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    embeddings = Embeddings(features, torch.arange(rows) % 4, torch.arange(rows))
    facts = {"data_sha256": load_index(str(data)).sha256, "split": split, "left_out": []}
    save_embeddings(path, embeddings, facts)


def test_a_distillation_logs_its_agreement_and_resumes_with_its_teacher_wherever_it_is(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe, data = tiny
    settings = ("steps=4", "run.save_steps=2", "projector.num_layers=0", "projector.out_dim=16")
    train_over(1, recipe, data, tmp_path / "whole", *settings)
    assert [line["step"] for line in read_metrics(tmp_path / "whole")] == [1, 2, 3, 4]
    assert all("teacher_agreement" in line for line in read_metrics(tmp_path / "whole"))
    kill_over(1, "train.step:3", recipe, data, tmp_path / "cut", *settings)
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((recipe.parent / "teacher.safetensors").read_bytes())
    settings += (f"teacher.features={moved}",)
    train_over(1, recipe, data, tmp_path / "cut", *settings)
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert load_run(tmp_path / "cut").config.facts["step"] == 4
    write_teacher(moved, data, seed=3)  # another one
    with pytest.raises(AssertionError, match=r"teacher\.sha256"):
        train_over(1, recipe, data, tmp_path / "cut", *settings)


def test_what_no_training_can_use_is_refused_before_the_first_step(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    path, data = tiny
    recipe, index = load_recipe(path), load_index(str(data))
    other = tmp_path / "other.safetensors"

    def named(file: Path) -> Any:
        return load_recipe(path, [f"teacher.features={file}"])

    smaller = write_dataset(tmp_path / "data", sizes=(16, 16))
    strange = "was not embedded from split 'train' of this data set"
    for source, given, text in (
        (data, {"rows": 127}, "no row of 1 of the split's samples, the first with id 127"),
        (data, {"split": "test"}, strange),
        (smaller, {"rows": 32}, strange),
    ):
        write_teacher(other, source, **given)
        with pytest.raises(DataError, match=text):
            open_teacher(named(other), index)
    with pytest.raises(RecipeError, match=r"set teacher\.features"):
        build_loss(recipe.model_copy(update={"teacher": None}))
    with pytest.raises(RecipeError, match=r"makes no use of \[teacher\]"):
        build_loss(load_recipe(path, ["loss.kind=nt_xent"]))
    opened, _ = open_teacher(recipe, index)
    assert open_teacher(opened, index)[0] == opened
    features = load_recipe(path, ["loss.match=features"])
    with pytest.raises(RecipeError, match=r"projector\.out_dim = 6"):
        build_loss(features, open_teacher(features, index)[1])
    wide = load_recipe(path, ["loss.match=features", "projector.out_dim=6"])
    assert build_loss(wide, open_teacher(wide, index)[1]).match == "features"
    forged = opened.teacher.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(RecipeError, match="name that file"):
        open_teacher(opened.model_copy(update={"teacher": forged}), index)
