"""What data.validation_classes = "auto" holds out of data of many shapes."""

from types import SimpleNamespace

import numpy as np
import pytest

from sslpipe.metric_learning.classes import held_out
from sslpipe.recipe.reading import load_recipe
from tests.helpers.runs import ROOT


def held_out_of(classes: int, size: int):
    """Held-out images, and whether they are whole classes, of so many classes of `size` images."""
    sampler = f"sampler.images_per_class={min(size, 4)}"
    recipe = load_recipe(ROOT / "recipes" / "metric" / "my_images_mobile.toml", [sampler])
    labels = np.repeat(np.arange(classes), size)
    split = SimpleNamespace(name="train", labels=labels)
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
    held, whole = held_out_of(classes, size)
    assert whole == (images is not None)
    assert held == (images or 500)
