"""A data set with labels is told which recipe uses them."""

import shutil

import pytest

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
