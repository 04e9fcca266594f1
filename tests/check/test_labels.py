"""A data set with labels is told which recipe uses them."""

import shutil

import pytest

from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT, write_recipe


@pytest.mark.parametrize(("classes", "labelled"), [(4, True), (3, True), (12, True), (4, False)])
def test_check_names_the_labelled_recipe_where_classes_can_teach(
    call, tmp_path, monkeypatch, classes, labelled
):
    data = write_dataset(tmp_path / "data", (64,), classes=classes, labelled=labelled)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    _, errors = call("check", write_recipe(tmp_path), "--data", data)
    named = [line for line in errors.splitlines() if "my_images_mobile" in line]
    if not labelled or classes < 4:
        assert not named
        return
    (line,) = named
    assert f"{classes} classes" in line
    assert str(data) in line
    _, errors = call("shards", "stats", data.parent)
    assert any(f"{classes} classes" in line for line in errors.splitlines())


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        (["pairs.positive=thing"], True),
        (["pairs.positive=['thing', 'day']"], False),  # together no classes
        (["pairs.positive=thing", "pairs.time=day", "pairs.within=2"], False),
        ([], False),
    ],
)
def test_check_names_the_labelled_recipe_by_the_column_that_pairs(
    call, tmp_path, monkeypatch, pairs, named
):
    data = write_dataset(tmp_path / "data", (64,), labelled=False)
    add_columns(data, thing=[f"t{n // 3}" for n in range(64)], day=[n % 2 for n in range(64)])
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    _, errors = call("check", write_recipe(tmp_path), *pairs, "--data", data)
    lines = [line for line in errors.splitlines() if "my_images_mobile" in line]
    assert len(lines) == named
    if named:
        assert "22 values of thing" in lines[0]
        assert " sampler.column=thing " in lines[0]
        # the command is one that works, with the batch that 22 values of 3 images make
        words = lines[0][lines[0].index("check ") :].split()
        words = ["" if word == "--init" else word for word in words if "timm/NAME" not in word]
        small = ["backbone={kind='small_resnet'}", "tune={}"]
        call(*filter(None, words), *small, "steps=2", "run.keep=last", "run.patience=0")
