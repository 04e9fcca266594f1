"""`sslpipe preview` and `check` of a run: its recorded recipe, as the run had it."""

import numpy as np
import pytest
from PIL import Image

from sslpipe.recipe.reading import apply_overrides
from tests.helpers.photos import write_photos
from tests.helpers.runs import write_recipe

CHANGED = ("steps=2", "seed=7", "data.batch_size=16")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data(call, tmp_path):
    write_photos(tmp_path / "photos")
    call("shards", "build", "data", "--root", "photos")
    return ("--data", "data")


def pixels(path):
    with Image.open(path) as image:
        return image.size, image.tobytes()


def digest(shown):
    return next(line for line in shown.splitlines() if line.strip().startswith("digest")).split()


def test_a_run_is_shown_and_checked_as_it_was_trained(call, data, tmp_path):
    recipe = write_recipe(tmp_path)
    _, err = call("train", recipe, *CHANGED, *data, "--run-dir", "run")

    def views(*words):
        words = (*words, *data, "--out", "views.png", "--ids", "4, 1,5")
        shown, err = call("preview", *words)
        lines = [line.partition(":")[0] for line in shown.splitlines()]
        assert lines[:3] == ["id 1", "id 4", "id 5"]
        assert lines[3].startswith("3 images and their views")
        return pixels("views.png"), err

    wanted, _ = views(recipe, *CHANGED)
    for name in ("run", "run/recipe.json"):
        shown, err = views(name)
        assert shown == wanted
        assert err.endswith("Next: sslpipe status run\n")
    assert views(recipe)[0] != wanted
    assert views("run", "seed=0")[0] == views(recipe)[0]

    of_recipe = call("check", recipe, *CHANGED, *data)
    of_run = call("check", "run", *data)
    assert digest(of_run[0]) == digest(of_recipe[0])
    assert "Next: sslpipe preview run --data data --out views.png" in of_run[1]

    # who needs a recipe says what it was given
    for name in ("run", "run/recipe.json"):
        _, err = call("train", name, *data, "--run-dir", "other", status=2)
        assert f"error: {name} is what a run has recorded, not a recipe: name the TOML" in err


def test_an_epoch_that_is_asked_for_is_shown_alone(call, data, tmp_path):
    recipe = write_recipe(tmp_path)

    def views(*words):
        call("preview", recipe, *data, "--out", "views.png", "--ids", "1", *words)
        with Image.open("views.png") as image:
            return np.asarray(image.convert("RGB")).astype(int)

    both, first, second = views(), views("--epoch", "0"), views("--epoch", "1")
    step = (both.shape[1] - first.shape[1]) // 2  # of a column: the image, then two an epoch
    top = 40  # of the rows, under the titles

    def of_epoch(page, number):
        begin = first.shape[1] - 2 * step + 2 * number * step
        return page[top : first.shape[0], begin : begin + 2 * step - 20]

    np.testing.assert_array_equal(of_epoch(both, 0), of_epoch(first, 0))
    height = min(len(both), len(second)) - top  # texts of other lengths
    np.testing.assert_array_equal(of_epoch(both, 1)[:height], of_epoch(second, 0)[:height])
    assert (of_epoch(first, 0)[:100] != of_epoch(second, 0)[:100]).any()


def test_an_override_takes_the_place_of_a_section_that_was_not_there():
    recorded = {"momentum": None, "optim": {"a": None}, "steps": 3, "epochs": None}
    apply_overrides(recorded, ["momentum.decay=0.9", "optim.a.b=0.5", "epochs=2"])
    assert recorded == {"momentum": {"decay": 0.9}, "optim": {"a": {"b": 0.5}}, "epochs": 2}
