"""What data.validation_classes = "auto" holds out of data of many shapes."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sslpipe.data.index import load_index
from sslpipe.errors import DataError, UserError
from sslpipe.metric_learning.classes import held_out, labelled_split
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.recipe.reading import load_recipe
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT

RECIPE = ROOT / "recipes" / "metric" / "my_images_mobile.toml"


def held_out_of(classes: int, size: int, tested: list[int], *settings: str):
    """Held-out images, and whether they are whole classes, of so many classes of `size` images.

    tested: the labels of another split.
    """
    sampler = f"sampler.images_per_class={min(size, 4)}"
    recipe = load_recipe(RECIPE, [sampler, *settings])
    labels = np.repeat(np.arange(classes), size)
    test = SimpleNamespace(name="test", labels=np.array(tested))
    manifest = SimpleNamespace(splits={"train": (), "test": ()})
    index = SimpleNamespace(manifest=manifest, split=lambda name: test)
    split = SimpleNamespace(name="train", labels=labels, index=index)
    found = held_out(recipe, split, [str(label) for label in range(classes)])
    assert len(np.unique(labels[found.ids])) * size == len(found.ids) or not found.whole_classes
    return len(found.ids), found.whole_classes


@pytest.mark.parametrize(
    ("classes", "size", "images"),
    [
        (50, 20, 100),  # a tenth
        (100, 15, 150),
        (30, 10, 80),  # of few images a quarter
        (100, 1000, None),  # half a class of 500: images of each class
        (400, 20, 500),  # 500 at most
        (1000, 4, 400),
        (600, 2, 120),
        (20_000, 5, 500),
    ],
)
def test_auto_holds_out_enough_classes_to_choose_by_and_no_more(classes, size, images):
    held, whole = held_out_of(classes, size, [0, 1, 2])
    assert whole == (images is not None)
    assert held == (images or 500)


@pytest.mark.parametrize(
    ("classes", "size", "tested", "whole", "held"),
    [
        (5, 20, [5, 6, 7], True, 40),  # two classes
        (9, 1000, [9], True, 2000),
        (14, 1000, [-1, 14, 15], True, 3000),  # a quarter, and no more than five
        (100, 1000, [100], True, 5000),
        (5, 20, [4, 5, 6], False, 25),  # one that is trained on: not of new classes alone
        (5, 20, [-1, -1], False, 25),  # no labels: nothing is known
        (3, 20, [5, 6, 7], False, 15),  # two of three leave one
        (50, 20, [50], True, 100),  # as without new classes
    ],
)
def test_of_few_classes_some_are_held_out_where_new_ones_are_tested(
    classes, size, tested, whole, held
):
    batch = ("sampler.classes_per_batch=3", "sampler.neighbours=0")
    assert held_out_of(classes, size, tested, *batch) == (held, whole)


def five_values(folder: Path, tested: str):
    """Data with five values of a column to train on, and one to test."""
    write_dataset(folder, (60,), px=2)
    data = write_dataset(folder, (8,), px=2, split="test")
    add_columns(data, "train", kind=[f"k{number % 5}" for number in range(60)])
    return add_columns(data, "test", kind=[tested] * 8)


@pytest.mark.parametrize(("tested", "whole"), [("a", True), ("k3", False)])
def test_values_of_a_column_are_compared_by_what_they_are(tmp_path, tested, whole):
    """The value "a" has the number 0 in its split, as "k0" in the other."""
    index = five_values(tmp_path, tested)
    batch = ("sampler.column=kind", "sampler.classes_per_batch=3", "sampler.neighbours=0")
    recipe = load_recipe(RECIPE, batch)
    split, names = labelled_split(recipe, index)
    assert held_out(recipe, split, names).whole_classes == whole


def test_a_split_whose_labels_cannot_be_read_is_named(tmp_path):
    write_dataset(tmp_path, (60,), px=2, classes=5)
    index = load_index(write_dataset(tmp_path, (8,), px=2, classes=5, split="test"))
    (tmp_path / "test-000000.offsets.npy").unlink()
    recipe = load_recipe(RECIPE, ["sampler.classes_per_batch=4"])
    with pytest.raises(DataError, match=r"validation_classes.*test-000000[.]offsets[.]npy"):
        held_out(recipe, *labelled_split(recipe, index))


@pytest.mark.parametrize(
    ("classes", "tested", "batch", "held"),
    [
        (3, "k0", (), 9),
        (5, "a", (), 24),
        (5, "a", ("sampler.classes_per_batch=4",), 24),  # which leaves nothing to choose by
    ],
)
def test_what_is_advised_for_few_classes_works(tmp_path, classes, tested, batch, held):
    """The shipped recipe's batch is of 16 classes, in groups of four."""
    write_dataset(tmp_path, (12 * classes,), px=2)
    data = write_dataset(tmp_path, (8,), px=2, split="test")
    add_columns(data, "train", kind=[f"k{number % classes}" for number in range(12 * classes)])
    index = add_columns(data, "test", kind=[tested] * 8)
    given = ["sampler.column=kind", 'tune={batchnorm="train"}']

    def planned(settings):
        made = Finetuning.make(load_recipe(RECIPE, [*given, *settings]), index)
        made.remarks(made.build())
        return made

    with pytest.raises(UserError, match="; set sampler") as refused:
        planned(batch)
    advised = str(refused.value).partition("; set ")[2].split()
    assert len(planned(advised).held_out.ids) == held


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ((), ["run.monitor_steps=80"]),
        (
            ("sampler.classes_per_batch=4", "sampler.neighbours=3"),
            ["sampler.classes_per_batch=3", "sampler.neighbours=0", "run.monitor_steps=80"],
        ),
    ],
)
def test_all_that_run_keep_lacks_is_named_at_once(tmp_path, settings, advised):
    index = five_values(tmp_path, "a")
    batch = ("sampler.column=kind", "sampler.classes_per_batch=3", "sampler.neighbours=0")
    given = [*batch, 'tune={batchnorm="train"}', "run.monitor_steps=0", *settings]

    def refused(*more: str) -> list[str]:
        plan = Finetuning.make(load_recipe(RECIPE, [*given, *more]), index)
        try:
            plan.remarks(plan.build())
        except UserError as error:
            return str(error).partition("; set ")[2].partition(", or")[0].split()
        return []

    assert refused() == advised
    assert refused(*advised) == []
