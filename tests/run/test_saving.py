"""Of which data a run is: a column that is computed from the images later changes nothing."""

import pytest
from torch import nn

from sslpipe.data.index import DERIVED_COLUMN, load_index
from sslpipe.distributed import Rank
from sslpipe.errors import CheckpointError
from sslpipe.recipe import load_recipe
from sslpipe.recipe.identity import digest, index_sha256s
from sslpipe.run.checkpoint_files import read_state
from sslpipe.run.saving import RunCheckpoints
from tests.helpers.columns import add_columns, as_built
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import write_recipe

BY_COLUMN = ("data.keep=duplicate_group first", "pairs.never_negative=['duplicate_group']")


@pytest.fixture
def data(tmp_path):
    return as_built(write_dataset(tmp_path / "data", (16,)))


def checkpoints(tmp_path, data, *overrides, run="run"):
    """The checkpoints of a run as it is opened on the data set of today."""
    recipe, index = load_recipe(write_recipe(tmp_path), overrides), load_index(data)
    hashes = index_sha256s(recipe, index, DERIVED_COLUMN)
    folder = tmp_path / run
    folder.mkdir(exist_ok=True)
    parts = {"model": nn.Linear(2, 2)}
    return RunCheckpoints(folder, recipe, hashes, 1, Rank(), parts, {})


def test_a_column_that_a_run_does_not_use_may_come_change_and_go(tmp_path, data):
    before = load_index(data)
    checkpoints(tmp_path, data).save(3, needed=True)
    for values in ([0, 0, *[None] * 14], [None] * 14 + [5, 5]):
        index = add_columns(data, duplicate_group=values)
        print(index.sha256, before.sha256)
        assert index.sha256 == before.sha256 == before.file_sha256 != index.file_sha256
        assert index.has_sha256(before.sha256)
        opened = checkpoints(tmp_path, data)
        assert opened.restore() == 3
        assert opened.index_sha256 == before.sha256
    # one begun with the column there, and none later, too
    checkpoints(tmp_path, data, run="other").save(4, needed=True)
    assert checkpoints(tmp_path, data, run="other").index_sha256 == before.sha256
    # any other column is part of the data
    add_columns(data, camera=["a"] * 16)
    with pytest.raises(CheckpointError, match="the data set is not the one"):
        checkpoints(tmp_path, data).restore()


@pytest.mark.parametrize("use", BY_COLUMN)
def test_a_run_that_uses_the_column_records_its_values(tmp_path, data, use):
    index = add_columns(data, duplicate_group=[0, 0, *[None] * 14])
    first = checkpoints(tmp_path, data, use)
    assert first.index_sha256 == index.file_sha256
    first.save(3, needed=True)
    assert checkpoints(tmp_path, data, use).restore() == 3
    add_columns(data, duplicate_group=[None] * 14 + [5, 5])
    with pytest.raises(CheckpointError, match="the data set is not the one"):
        checkpoints(tmp_path, data, use).restore()


def test_a_run_that_recorded_the_whole_file_keeps_that(tmp_path, data):
    """Earlier versions recorded the sha256 of dataset.json, whatever the run used."""
    index = add_columns(data, duplicate_group=[0, 0, *[None] * 14])
    recipe = load_recipe(write_recipe(tmp_path))
    (tmp_path / "run").mkdir()
    parts = {"model": nn.Linear(2, 2)}
    whole = [index.file_sha256]
    RunCheckpoints(tmp_path / "run", recipe, whole, 1, Rank(), parts, {}).save(3, needed=True)
    opened = checkpoints(tmp_path, data)
    assert opened.restore() == 3
    assert opened.index_sha256 == index.file_sha256
    opened.save(5, needed=True)
    state = read_state(tmp_path / "run" / "checkpoints" / "step-00000005")
    assert state["identity"]["digest"] == digest(recipe, index.file_sha256, 1)
