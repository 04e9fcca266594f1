"""Of which data a run is: a column that is computed from the images later changes nothing."""

import pytest
from torch import nn

from sslpipe.data.index import DERIVED_COLUMN, load_index
from sslpipe.distributed import Rank
from sslpipe.errors import CheckpointError
from sslpipe.recipe import load_recipe
from sslpipe.recipe.identity import digest, identity, run_identities
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.checkpoint_files import read_state
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
    return opened(tmp_path / run, run_identities(recipe, index, DERIVED_COLUMN, 1))


def opened(folder, identities):
    folder.mkdir(exist_ok=True)
    return Checkpointer(folder, keep=2, identities=identities, process=Rank(), warn=print)


def parts():
    return {"model": nn.Linear(2, 2), "optimizer": nn.Module()}


def test_a_column_that_a_run_does_not_use_may_come_change_and_go(tmp_path, data):
    before = load_index(data)
    checkpoints(tmp_path, data).save(3, parts(), {})
    for values in ([0, 0, *[None] * 14], [None] * 14 + [5, 5]):
        index = add_columns(data, duplicate_group=values)
        assert index.sha256 == before.sha256 == before.file_sha256 != index.file_sha256
        assert index.has_sha256(before.sha256)
        again = checkpoints(tmp_path, data)
        assert again.restore(parts()) == 3
        assert again.identity["index_sha256"] == before.sha256
    # one begun with the column there, and none later, too
    checkpoints(tmp_path, data, run="other").save(4, parts(), {})
    assert checkpoints(tmp_path, data, run="other").identity["index_sha256"] == before.sha256
    # any other column is part of the data
    add_columns(data, camera=["a"] * 16)
    with pytest.raises(CheckpointError, match="the data set is not the one"):
        checkpoints(tmp_path, data).restore(parts())


@pytest.mark.parametrize("use", BY_COLUMN)
def test_a_run_that_uses_the_column_records_its_values(tmp_path, data, use):
    index = add_columns(data, duplicate_group=[0, 0, *[None] * 14])
    first = checkpoints(tmp_path, data, use)
    assert first.identity["index_sha256"] == index.file_sha256
    first.save(3, parts(), {})
    assert checkpoints(tmp_path, data, use).restore(parts()) == 3
    add_columns(data, duplicate_group=[None] * 14 + [5, 5])
    with pytest.raises(CheckpointError, match="the data set is not the one"):
        checkpoints(tmp_path, data, use).restore(parts())


def test_a_run_that_recorded_the_whole_file_keeps_that(tmp_path, data):
    """Earlier versions recorded the sha256 of dataset.json, whatever the run used."""
    index = add_columns(data, duplicate_group=[0, 0, *[None] * 14])
    recipe = load_recipe(write_recipe(tmp_path))
    key = recipe, index.file_sha256, 1
    whole = {"digest": digest(*key), **identity(*key)}
    opened(tmp_path / "run", [whole]).save(3, parts(), {})
    again = checkpoints(tmp_path, data)
    assert again.restore(parts()) == 3
    assert again.identity["index_sha256"] == index.file_sha256
    again.save(5, parts(), {})
    state = read_state(tmp_path / "run" / "checkpoints" / "step-00000005")
    assert state["identity"]["digest"] == digest(recipe, index.file_sha256, 1)
