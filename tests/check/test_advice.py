"""Advice that can be followed: what is printed once is enough, and undoes nothing."""

import re

import pytest

from sslpipe.api import plan_from, train
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.kinds import run_kind
from sslpipe.plan import Pretraining
from sslpipe.recipe.reading import load_recipe
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import write_recipe as write_labelled_recipe
from tests.helpers.runs import write_recipe

# kind of data -> images of each shard, classes
SHAPES = {
    "12 images": ((12,), 0),
    "40 images": ((40,), 0),
    "160 images": ((100, 60), 0),
    "3 classes of 5": ((15,), 3),
    "7 classes of 3": ((21,), 7),
    "1,000 classes of 2": ((1000, 1000), 1000),
}


def advice(recipe, index) -> tuple[list[str], bool]:
    """Overrides that an error or the remarks name, and whether it is an error."""
    try:
        plan = Pretraining.make(recipe, index)
        said = " ".join(plan.remarks(plan.build()))
        refused = False
    except UserError as error:
        said = str(error)
        refused = True
    return re.findall(r"data[.]\w+=[^ ;,]+", said), refused


@pytest.mark.parametrize("count", [12, 30, 160])
@pytest.mark.parametrize("labels", ["none", "four classes", "pairs"])
@pytest.mark.parametrize(
    "given",
    [
        ("data.holdout=0",),
        ("data.holdout=500",),
        ("data.holdout=500", "data.holdout_by=patient"),
    ],
)
def test_what_one_check_names_makes_the_next_one_silent(tmp_path, count, labels, given):
    classes = {"none": 4, "four classes": 4, "pairs": count // 2}[labels]
    path = write_dataset(tmp_path, (count,), classes=classes, labelled=labels != "none")
    index = add_columns(path, patient=[f"p{number // 3}" for number in range(count)])
    recipe = write_recipe(tmp_path)
    overrides = ["data.batch_size=256", "data.num_streams=16", *given]
    overrides += ["run.monitor_steps=1", "run.keep=last"]
    advised, refused = advice(load_recipe(recipe, overrides), index)
    assert refused
    assert any(word.startswith("data.batch_size=") for word in advised)
    followed = load_recipe(recipe, [*overrides, *advised])
    again, refused = advice(followed, index)
    assert not refused
    assert again == []
    if len(given) == 2:
        assert followed.data.holdout_by == "patient"
    assert followed.data.batch_size <= count


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights that a run may start from."""
    folder = tmp_path_factory.mktemp("start")
    index = load_index(write_dataset(folder / "data", (32,)))
    train(load_recipe(write_recipe(folder), ["steps=1"]), index, folder / "run")
    return folder / "run"


def build(folder, shape):
    """A data set of SHAPES, whose column patient has 3 images each."""
    sizes, classes = SHAPES[shape]
    path = write_dataset(folder / "data", sizes, classes=classes or 4, labelled=classes > 0)
    return add_columns(path, patient=[f"p{number // 3}" for number in range(sum(sizes))])


def follow(recipe, index, given, init=None):
    """Check a recipe; follow what is named; check again, and train 2 steps of it."""
    words = "|".join(("data", "sampler", "run", "tune", "optim"))

    def look(overrides):
        try:
            plan = plan_from(load_recipe(recipe, overrides), index, init)
            said = run_kind(plan.recipe).check(plan).warnings
            refused = False
        except UserError as error:
            said = (str(error),)
            refused = True
        assert not any(re.search(r"\bset +([;,]|$)", text) for text in said)
        return re.findall(rf"(?:{words})[.]\w+=[^ ;,]+", " ".join(said)), refused

    advised, _ = look(given)
    followed = [*given, *advised]
    again, refused = look(followed)
    assert not refused
    assert again == []
    loaded = load_recipe(recipe, [*followed, "steps=2"])
    assert train(loaded, index, recipe.parent / "run", init=init) == 2
    return loaded, advised


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["as it comes", "patients together", "from weights"])
def test_the_overrides_that_a_check_names_train(tmp_path, start, shape, way):
    """A recipe for thousands of images, on few: one line of overrides is enough, and they fit."""
    index = build(tmp_path, shape)
    given = ["data.batch_size=256", "data.num_streams=16", "data.holdout=500", "run.keep=last"]
    given += ["run.monitor_steps=1"]
    if way == "patients together":
        given.append("data.holdout_by=patient")
    init = start if way == "from weights" else None
    loaded, advised = follow(write_recipe(tmp_path), index, given, init)
    assert advised
    if way == "patients together":
        assert loaded.data.holdout_by == "patient"


@pytest.mark.parametrize("shape", [shape for shape, (_, classes) in SHAPES.items() if classes])
@pytest.mark.parametrize("streams", [1, 8])
def test_the_overrides_that_a_check_of_a_labelled_recipe_names_train(tmp_path, shape, streams):
    index = build(tmp_path, shape)
    sampler = f"sampler={{classes_per_batch=16,images_per_class=4,num_streams={streams}}}"
    given = [sampler, "data.validation_classes=auto", "run.keep=best", "run.monitor_steps=1"]
    loaded, advised = follow(write_labelled_recipe(tmp_path), index, given)
    assert advised
    # 5 images of a class leave one to search for
    assert loaded.run.keep == ("last" if shape == "3 classes of 5" else "best")


def test_a_labelled_recipe_says_that_there_are_no_labels(tmp_path):
    index = build(tmp_path, "40 images")
    with pytest.raises(UserError, match=r"'train' has a label.*sampler[.]column"):
        plan_from(load_recipe(write_labelled_recipe(tmp_path)), index, None)
