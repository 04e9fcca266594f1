"""What data.validation_classes = "auto" holds out of data of many shapes."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from sslpipe.data.index import Split, load_index
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
    split = Mock(spec=Split, labels=labels, index=index)
    split.name = "train"
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
        (4, 20, [5, 6, 7], False, 20),  # a batch of three leaves one
        (50, 20, [50], True, 100),  # as without new classes
    ],
)
def test_of_few_classes_some_are_held_out_where_new_ones_are_tested(
    classes, size, tested, whole, held
):
    batch = ("sampler.classes_per_batch=3", "sampler.neighbours=0")
    assert held_out_of(classes, size, tested, *batch) == (held, whole)


def values(folder: Path, classes: int, tested: str):
    """Data with values of a column to train on, of twelve images each, and one to test."""
    write_dataset(folder, (12 * classes,), px=2)
    data = write_dataset(folder, (8,), px=2, split="test")
    add_columns(data, "train", kind=[f"k{number % classes}" for number in range(12 * classes)])
    return add_columns(data, "test", kind=[tested] * 8)


def planned(index, *settings: str):
    """The plan of the shipped recipe, and its remarks."""
    given = ["sampler.column=kind", 'tune={batchnorm="train"}']
    made = Finetuning.make(load_recipe(RECIPE, [*given, *settings]), index)
    return made, made.remarks(made.build())


@pytest.mark.parametrize(("tested", "whole"), [("a", True), ("k3", False)])
def test_values_of_a_column_are_compared_by_what_they_are(tmp_path, tested, whole):
    """The value "a" has the number 0 in its split, as "k0" in the other."""
    index = values(tmp_path, 5, tested)
    batch = ("sampler.column=kind", "sampler.classes_per_batch=3", "sampler.neighbours=0")
    recipe = load_recipe(RECIPE, batch)
    split, names = labelled_split(recipe, index)
    assert held_out(recipe, split, names).whole_classes == whole


def test_a_split_whose_labels_cannot_be_read_is_named(tmp_path):
    write_dataset(tmp_path, (60,), px=2, classes=5)
    index = load_index(write_dataset(tmp_path, (8,), px=2, classes=5, split="test"))
    (tmp_path / "test-000000.offsets.npy").unlink()
    recipe = load_recipe(RECIPE, ["sampler.classes_per_batch=3", "sampler.neighbours=0"])
    with pytest.raises(DataError, match=r"validation_classes.*test-000000[.]offsets[.]npy"):
        held_out(recipe, *labelled_split(recipe, index))
    # a batch of all classes leaves none to hold out: the other split decides nothing
    batch = ("sampler.classes_per_batch=4", 'tune={batchnorm="train"}')
    made = Finetuning.make(load_recipe(RECIPE, batch), index)
    assert not made.held_out.whole_classes
    assert any("of the classes that are trained on" in each for each in made.remarks(made.build()))


@pytest.mark.parametrize(
    ("classes", "tested", "batch", "held"),
    [
        (3, "k0", (), 9),
        (3, "a", (), 9),
        (5, "a", (), 24),
        (8, "a", ("sampler.images_per_class=12", "sampler.classes_per_batch=8"), 24),
    ],
)
def test_what_is_advised_for_few_classes_works(tmp_path, classes, tested, batch, held):
    """The shipped recipe's batch is of 16 classes, in groups of four."""
    index = values(tmp_path, classes, tested)
    with pytest.raises(UserError, match="; set sampler") as refused:
        planned(index, *batch)
    advised = str(refused.value).partition("; set ")[2].split()
    made, _ = planned(index, *advised)
    assert len(made.held_out.ids) == held


@pytest.mark.parametrize(
    ("classes", "batch"), [(16, ()), (17, ()), (5, ("sampler.classes_per_batch=4",))]
)
def test_a_batch_that_leaves_no_class_is_watched_by_images_and_the_way_out_works(
    tmp_path, classes, batch
):
    """New classes are tested: the remark has settings by which some are watched."""
    index = values(tmp_path, classes, "a")
    made, remarks = planned(index, *batch)
    assert (len(made.held_out.ids), made.held_out.whole_classes) == (3 * classes, False)
    assert len(made.order.classes) == classes
    (remark,) = (text for text in remarks if "if yours will be others, set sampler" in text)
    advised = remark.partition("others, set ")[2].partition(", or")[0].split()
    made, remarks = planned(index, *advised)
    assert made.held_out.whole_classes
    assert not [text for text in remarks if "if yours will be others" in text]


def test_labels_of_other_splits_are_read_once_for_all_batches_that_are_tried(tmp_path, monkeypatch):
    index = values(tmp_path, 5, "a")
    opened = []
    column = Split._read_column
    monkeypatch.setattr(
        Split,
        "_read_column",
        lambda split, name: opened.append(split.name) or column(split, name),
    )
    with pytest.raises(UserError, match="; set sampler"):
        planned(index)
    assert opened.count("test") == 1


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ((), ["run.monitor_steps=80"]),
        (
            ("sampler.classes_per_batch=4", "sampler.images_per_class=12"),
            ["sampler.classes_per_batch=3", "run.monitor_steps=80"],
        ),
    ],
)
def test_all_that_run_keep_lacks_is_named_at_once(tmp_path, settings, advised):
    index = values(tmp_path, 5, "a")
    batch = ("sampler.classes_per_batch=3", "sampler.neighbours=0", "run.monitor_steps=0")

    def refused(*more: str) -> list[str]:
        try:
            planned(index, *batch, *settings, *more)
        except UserError as error:
            return str(error).partition("; set ")[2].partition(", or")[0].split()
        return []

    assert refused() == advised
    assert refused(*advised) == []
