"""Runs that have no negatives are refused before the first step, by `check` and by `train`."""

import pytest

from sslpipe.api import plan_from, train
from sslpipe.data.holdout import plan_order
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.kinds import run_kind
from sslpipe.plan import Pretraining
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import RECIPE as FINETUNE
from tests.helpers.runs import forget_accelerator, train_over, write_recipe


def check(plan):
    return run_kind(plan.recipe).check(plan)


MOCO = ("momentum.start=0.9", "loss.kind=moco", "loss.queue_rows=40")
ONE_CLASS = {
    "nt_xent": ("loss.mask_labels=true",),
    "dcl": ("loss.kind=dcl", "loss.mask_labels=true"),
    "dclw": ("loss.kind=dclw", "loss.mask_labels=true"),
    "hard_negatives": ("loss.kind=hard_negatives", "loss.mask_labels=true"),
    "sup_con": ("loss.kind=sup_con",),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images of one class; a column of one value, and two that no two samples both differ in."""
    manifest = write_dataset(tmp_path_factory.mktemp("one"), classes=1)
    rows = range(128)
    add_columns(
        manifest, camera=["a" for _ in rows], odd=[i % 2 for i in rows], even=[1 for _ in rows]
    )
    return manifest


def refused(data, tmp_path, *settings):
    """The error of `check`, which `train` repeats before it writes a checkpoint."""
    recipe = load_recipe(write_recipe(tmp_path), ["data.holdout=0", *settings])
    with pytest.raises(RecipeError) as checked:
        check(plan_from(recipe, load_index(data)))
    with pytest.raises(RecipeError) as trained:
        train(recipe, load_index(data), tmp_path / "run")
    forget_accelerator()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert str(trained.value) == str(checked.value)
    return str(checked.value)


@pytest.mark.parametrize("kind", ONE_CLASS)
def test_a_batch_of_one_image(data, tmp_path, kind):
    one = ("data.batch_size=1", "data.num_streams=1")
    settings = [each for each in ONE_CLASS[kind] if each != "loss.mask_labels=true"]
    said = refused(data, tmp_path, *one, *settings)
    assert "data.batch_size = 1" in said
    assert "use 2 or more" in said


@pytest.mark.parametrize("kind", ONE_CLASS)
def test_labels_of_one_class(data, tmp_path, kind):
    said = refused(data, tmp_path, *ONE_CLASS[kind])
    assert "loss.mask_labels = True" in said or "loss.kind = 'sup_con'" in said
    assert "two classes" in said


@pytest.mark.parametrize("key", ["positive", "never_negative"])
@pytest.mark.parametrize("kind", [(), MOCO], ids=["nt_xent", "moco"])
def test_a_pairs_column_of_one_value(data, tmp_path, key, kind):
    said = refused(data, tmp_path, f"pairs.{key}=camera", *kind)
    assert f"pairs.{key} = ('camera',)" in said
    assert "a column of several values" in said


def test_columns_that_together_mask_every_pair(data, tmp_path):
    said = refused(data, tmp_path, "pairs.never_negative=['odd','even']")
    assert "pairs.never_negative = ('odd', 'even')" in said


def test_two_processes_count_over_the_global_batch(data, tmp_path):
    """Each of two processes has one image of its own: together they have negatives."""
    two = ("data.batch_size=2", "data.num_streams=2", "data.holdout=0", "steps=2")
    train_over(2, write_recipe(tmp_path), data, tmp_path / "run", *two)
    assert [line["negatives_per_anchor"] for line in read_metrics(tmp_path / "run")] == [2, 2]


def test_a_first_batch_of_one_class_by_chance_is_trained(tmp_path):
    """Two images a batch, of two classes: half of the batches have no negative, here the first."""
    data = load_index(write_dataset(tmp_path / "data", classes=2))
    small = ["data.batch_size=2", "data.num_streams=1", "data.holdout=0", "loss.mask_labels=true"]
    path = write_recipe(tmp_path)
    recipes = (load_recipe(path, [*small, f"seed={seed}"]) for seed in range(100))
    alike = (
        recipe
        for recipe in recipes
        if len({*data.split("train").labels_of(plan_order(recipe, data).ids(0, range(1))[1])}) == 1
    )
    recipe = next(alike)
    check(plan_from(recipe, data))
    assert train(recipe, data, tmp_path / "run") == 12
    negatives = [line["negatives_per_anchor"] for line in read_metrics(tmp_path / "run")]
    assert negatives[0] == 0
    assert {*negatives} == {0, 2}


def test_check_counts_the_negatives_that_are_left(tmp_path):
    data = write_dataset(tmp_path / "data", classes=2)
    recipe = load_recipe(write_recipe(tmp_path), ["loss.mask_labels=true"])
    rows = dict(check(Pretraining.make(recipe, load_index(data))).rows)
    assert rows["negatives per anchor"].endswith("(at most 30)")
    assert 12 < float(rows["negatives per anchor"].split()[0]) < 18


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("loss.kind=sup_con",), "classes_per_batch = 1"),
        (("loss.kind=triplet", "loss.margin=0.2"), "classes_per_batch = 1"),
        (("loss.kind=sup_con", "queue.size=64"), ""),
        (("loss.kind=sup_con", "sampler.random_images=2"), ""),
        (("loss.kind=proxy_anchor",), ""),
    ],
)
def test_fine_tuning_on_batches_of_one_class(tmp_path, settings, says):
    path = tmp_path / "tiny.toml"
    path.write_text(FINETUNE.replace("scale = 8.0\n", ""))
    data = load_index(write_dataset(tmp_path / "data"))
    recipe = load_recipe(path, ["sampler.classes_per_batch=1", *settings])
    if not says:
        check(plan_from(recipe, data))
        return
    with pytest.raises(RecipeError, match=says):
        check(plan_from(recipe, data))
