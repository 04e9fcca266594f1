"""Fine-tuning by a column: its values are the classes of batches, losses and validation."""

from pathlib import Path

import pytest

from sslpipe.data.index import load_index
from sslpipe.errors import DataError, RecipeError
from sslpipe.metric_learning.classes import labelled_split, trained_labels
from sslpipe.metric_learning.fitting import plan_batches
from sslpipe.recipe.reading import load_recipe
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import finetune_over, write_recipe
from tests.helpers.runs import assert_same_weights

SIZES = (40, 3, 60, 25)
SKU = [None if i % 9 == 0 else f"sku-{i % 6}" for i in range(128)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manifest = write_dataset(tmp_path_factory.mktemp("data"), SIZES)
    add_columns(manifest, sku=SKU, weight=[i / 7 for i in range(128)])
    return manifest


def recipe_with(folder: Path, *overrides: str):
    return load_recipe(write_recipe(folder), ("sampler.column=sku", *overrides))


def test_a_batch_is_k_images_of_p_values_and_nobody_without_one(data, tmp_path):
    index = load_index(data)
    order = plan_batches(recipe_with(tmp_path), index)
    split, names = labelled_split(recipe_with(tmp_path), index)
    assert list(names) == [f"sku-{k}" for k in range(6)]
    for step in range(20):
        values = [SKU[i] for i in order.ids(step).tolist()]
        assert all(values[3 * k] == values[3 * k + 1] == values[3 * k + 2] for k in range(4))
        assert len(set(values)) == 4
        assert None not in values
    validation = {f"sku-{k}" for k in range(6)} - {names[c] for c in order.classes.tolist()}
    assert len(validation) == 2  # data.validation_classes
    trained = {i % 4 for i in range(128) if SKU[i] is not None and SKU[i] not in validation}
    assert trained_labels(order, split) == sorted(trained)


def test_validation_classes_are_named_by_value(data, tmp_path):
    index, named = load_index(data), "data.validation_classes=['sku-2', 'sku-5']"
    order = plan_batches(recipe_with(tmp_path, named), index)
    assert order.classes.tolist() == [0, 1, 3, 4]
    wrong = recipe_with(tmp_path, "data.validation_classes=['sku-9']")
    with pytest.raises(RecipeError, match="'sku-9', which is no class"):
        plan_batches(wrong, index)


@pytest.mark.parametrize(
    ("column", "message"), [("skv", "did you mean 'sku'"), ("weight", "holds floats")]
)
def test_a_column_that_makes_no_classes_is_named(data, tmp_path, column, message):
    recipe = load_recipe(write_recipe(tmp_path), (f"sampler.column={column}",))
    with pytest.raises(DataError, match=message):
        plan_batches(recipe, load_index(data))


@pytest.mark.promise(11)
def test_it_trains_what_the_same_labels_would(tmp_path):
    """Labels i % 4 as a column: bitwise the weights of the labels themselves."""
    manifest = write_dataset(tmp_path / "data", SIZES)
    add_columns(manifest, kind=[i % 4 for i in range(128)])
    settings = ("sampler.classes_per_batch=2", "data.validation_classes=1", "steps=3")
    for name, more in (("labels", ()), ("column", ("sampler.column=kind",))):
        finetune_over(1, write_recipe(tmp_path), manifest, tmp_path / name, *settings, *more)
    assert_same_weights(tmp_path / "labels", tmp_path / "column")
