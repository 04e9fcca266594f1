"""Advice that can be followed: what is printed once is enough, and undoes nothing."""

import re

import pytest

from sslpipe.errors import UserError
from sslpipe.plan import Pretraining
from sslpipe.recipe import load_recipe
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import write_recipe


def advice(recipe, index) -> tuple[list[str], bool]:
    """Overrides that an error or the remarks name, and whether it is an error."""
    try:
        plan = Pretraining.make(recipe, index)
        said = " ".join(plan.remarks(plan.build(compiled=False)))
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
