"""Settings of views that no image can be made or normalised by are refused by name."""

import pytest

from sslpipe.augment.build import build_augment
from sslpipe.errors import RecipeError
from sslpipe.recipe import load_recipe
from tests.helpers.runs import write_recipe


@pytest.mark.parametrize(
    "override",
    [
        "augment.mean=[1, 2]",
        "augment.mean=[0.5, 0.5, 0.5, 0.5]",
        "augment.mean=0.5",
        "augment.mean=[true, 0, 0]",
        "augment.std=[0.5, 0.5, 0]",
        "augment.std=[0.5, 0.5, -1]",
        "augment.std=[0.5, 0.5, 1e9]",
        "augment.crop_px=65536",
        "augment.crop_px=true",
        "augment.contrast=1e300",
        "augment.crop_ratio=[1e-3, 1e300]",
        "augment.crop_area=[true, true]",
        "augment.blur_sigma=[1, 1e9]",
        "augment.normalize=3",
        "augment.preset=7",
    ],
)
def test_a_value_that_gives_no_views_is_one_line_that_names_the_key(tmp_path, override):
    recipe = load_recipe(write_recipe(tmp_path), [override])
    key = override.partition("=")[0].partition(".")[2]
    with pytest.raises(RecipeError, match=key):
        build_augment(recipe)


@pytest.mark.parametrize("override", ["augment.mean=[nan, 0, 0]", "augment.std=[1, 1, inf]"])
def test_what_is_not_finite_is_refused_when_the_recipe_is_read(tmp_path, override):
    with pytest.raises(RecipeError, match=r"augment: (mean|std) = .* not a finite number"):
        load_recipe(write_recipe(tmp_path), [override])
