import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.errors import CheckpointError
from sslpipe.recipe.identity import (
    differences,
    run_identity,
)
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.checkpoint_files import checkpoint_names, damage_of, latest, named
from tests.helpers.columns import add_columns, as_built
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.runs import write_recipe

IDENTITY = {"digest": "a", "recipe": {"loss": {"temperature": 0.1}}, "index_sha256": "x"}


def some_parts(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 5, 5)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "loss": nn.Module()}


def a_checkpointer(run_dir, warnings=None, identity=IDENTITY, **settings):
    warn = (warnings if warnings is not None else []).append
    settings = {"keep": 2, "identity": identity, "process": Rank(), "warn": warn, **settings}
    return Checkpointer(run_dir, **settings)


@pytest.mark.promise(2)
def test_everything_comes_back_bit_for_bit(tmp_path):
    parts, others = some_parts(), some_parts(seed=1)
    assert a_checkpointer(tmp_path).restore(others) == 0
    a_checkpointer(tmp_path).save(7, parts, {"world": 1})
    assert a_checkpointer(tmp_path).restore(others) == 7
    for name in ("model", "optimizer"):
        theirs, ours = (each[name].state_dict() for each in (parts, others))
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0)


def test_buffers_that_lie_in_one_memory_are_saved_alone(tmp_path):
    block = torch.arange(10_000, dtype=torch.int32)
    loss = nn.Module()
    loss.register_buffer("queue", block[:6].view(torch.float32).view(2, 3).T)
    loss.register_buffer("place", block[6:8].view(torch.int64))
    a_checkpointer(tmp_path).save(7, {**some_parts(), "loss": loss}, {})
    path = latest(tmp_path) / "parts.pt"
    assert path.stat().st_size < block.nbytes
    saved = torch.load(path, weights_only=True)["loss"]
    assert saved["queue"].equal(loss.queue)
    assert saved["place"].equal(loss.place)


def test_the_last_k_are_kept_and_latest_names_the_newest(tmp_path):
    checkpoints = a_checkpointer(tmp_path, keep=3)
    for step in (1, 2, 3, 10, 20):
        checkpoints.save(step, some_parts(), {})
    names = [f"step-{step:08d}" for step in (3, 10, 20)]
    assert checkpoint_names(tmp_path / "checkpoints") == names
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000020"
    assert latest(tmp_path).name == "step-00000020"


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


@pytest.mark.promise(2)
@pytest.mark.parametrize("damage", [cut_in_half, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "parts.pt", "MANIFEST.json", "state.json"])
def test_a_damaged_newest_is_set_aside_and_the_older_one_taken(tmp_path, damage, name):
    """By a resume; whoever only loads the run takes it where it is named."""
    warnings, folder = [], tmp_path / "checkpoints"
    checkpoints = a_checkpointer(tmp_path, warnings)
    checkpoints.save(1, some_parts(), {})
    checkpoints.save(2, some_parts(), {})
    damage(folder / "step-00000002" / name)
    reason = rf"step-00000002, is damaged \(.*{name}.*checkpoint='step-00000001'$"
    with pytest.raises(CheckpointError, match=reason):
        latest(tmp_path)
    for text in ("step-00000001", "step-000001", "step-1", "1"):
        assert named(tmp_path, text) == folder / "step-00000001"
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged .*: step-00000001$"):
        named(tmp_path, "step-2")

    assert checkpoints.restore(some_parts()) == 1
    assert len(list(folder.glob("bad-step-00000002-*"))) == 1
    assert "step-00000002 is damaged" in warnings[0]
    # the run has to come as far again
    with pytest.raises(CheckpointError, match=r"last checkpoint was damaged \(bad-step-00000002"):
        latest(tmp_path)
    checkpoints.save(2, some_parts(), {})
    assert latest(tmp_path) == folder / "step-00000002"


@pytest.mark.parametrize("name", ["", "step-", "latest", "../step-00000001", "9", "9" * 99])
def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(tmp_path, name):
    a_checkpointer(tmp_path).save(1, some_parts(), {})
    with pytest.raises(CheckpointError, match=r"has no checkpoint .*; there are: step-00000001$"):
        named(tmp_path, name)


def test_checkpoints_that_are_no_folder_are_one_line(tmp_path):
    (tmp_path / "checkpoints").touch()
    for use in (latest, lambda run: a_checkpointer(run).restore(some_parts())):
        with pytest.raises(CheckpointError, match="is a file where a folder should be"):
            use(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [b"[]", b"{}", b"null", b"\xff", b'{"model.safetensors": 3, "parts.pt": [], "state.json": {}}'],
)
def test_a_manifest_of_another_kind_is_damage(tmp_path, manifest):
    a_checkpointer(tmp_path).save(1, some_parts(), {})
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    (checkpoint / "MANIFEST.json").write_bytes(manifest)
    assert "MANIFEST.json" in str(damage_of(checkpoint))


def test_what_kills_left_goes_at_the_next_start(tmp_path):
    checkpoints, folder = a_checkpointer(tmp_path), tmp_path / "checkpoints"
    checkpoints.save(1, some_parts(), {})
    half = folder / ".tmp-step-00000002-0a1b2c3d"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (folder / ".tmp-step-00000003-file").touch()
    assert a_checkpointer(tmp_path).restore(some_parts()) == 1
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000001"]


def test_a_kill_while_an_old_one_is_removed_leaves_none_that_looks_whole(tmp_path, monkeypatch):
    checkpoints = a_checkpointer(tmp_path)
    checkpoints.save(1, some_parts(), {})
    checkpoints.save(2, some_parts(), {})

    def killed(path):
        (path / "MANIFEST.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sslpipe.run.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(3, some_parts(), {})
    names = checkpoint_names(tmp_path / "checkpoints")
    assert names == ["step-00000002", "step-00000003"]
    assert [damage_of(tmp_path / "checkpoints" / name) for name in names] == [None, None]
    assert a_checkpointer(tmp_path).restore(some_parts()) == 3
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_only_damaged_checkpoints_are_an_error_never_a_fresh_start(tmp_path):
    checkpoints = a_checkpointer(tmp_path)
    checkpoints.save(1, some_parts(), {})
    cut_in_half(tmp_path / "checkpoints" / "step-00000001" / "parts.pt")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        checkpoints.restore(some_parts())


def test_another_recipe_is_refused_with_the_keys_that_differ(tmp_path):
    a_checkpointer(tmp_path).save(1, some_parts(), {})
    other = {"digest": "b", "recipe": {"loss": {"temperature": 0.5}}, "index_sha256": "x"}
    with pytest.raises(CheckpointError, match=r"loss\.temperature = 0\.1 when it began, 0\.5 now"):
        a_checkpointer(tmp_path, identity=other).restore(some_parts())


def test_a_pickle_in_a_checkpoint_is_never_run(tmp_path):
    checkpoints = a_checkpointer(tmp_path)
    checkpoints.save(1, some_parts(), {})
    folder = tmp_path / "checkpoints" / "step-00000001"
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    torch.save({"optimizer": Bomb(), "loss": {}}, folder / "parts.pt")
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    raw = (folder / "parts.pt").read_bytes()
    manifest["parts.pt"] = [len(raw), hashlib.sha256(raw).hexdigest()]
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        checkpoints.restore(some_parts())
    assert not canary.exists()


@pytest.mark.parametrize("before", [[], [1]])
def test_a_full_disk_is_reported_retried_and_ends_the_run_at_the_third_time(
    tmp_path, monkeypatch, before
):
    warnings = []
    checkpoints = a_checkpointer(tmp_path, warnings)
    for step in before:
        checkpoints.save(step, some_parts(), {})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sslpipe.run.checkpoint.torch.save", full)
        assert not checkpoints.save(2, some_parts(), {})
        assert not checkpoints.save(3, some_parts(), {})
        assert f"cannot use {checkpoints.folder}: No space left" in warnings[0]
        assert [p.name for p in (tmp_path / "checkpoints").glob(".tmp-*")] == []
        with pytest.raises(CheckpointError, match=r"free some space.* 3 times in a row"):
            checkpoints.save(4, some_parts(), {})
    assert checkpoints.save(5, some_parts(), {})
    kept = [f"step-{step:08d}" for step in (*before, 5)]
    assert checkpoint_names(tmp_path / "checkpoints") == kept


def killed_in_a_save(process, fault, folder):
    os.environ["SSLPIPE_FAULT"] = fault
    checkpoints = a_checkpointer(folder)
    for step in (1, 2, 3):
        checkpoints.save(step, some_parts(step), {})


@pytest.mark.promise(2)
@pytest.mark.parametrize("point", ["model", "before_manifest", "before_rename", "before_prune"])
def test_a_kill_inside_a_save_leaves_a_whole_checkpoint(tmp_path, point):
    with pytest.raises(AssertionError, match="ended without a word"):
        run_processes(killed_in_a_save, 1, f"checkpoint.{point}:3", tmp_path)
    parts = some_parts(seed=9)
    step = a_checkpointer(tmp_path).restore(parts)
    assert step == (3 if point == "before_prune" else 2)
    expected = some_parts(step)["model"].state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in parts["model"].state_dict().items())
    assert a_checkpointer(tmp_path).save(4, parts, {})
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


# of which data a run is: a column that is computed from the images later changes nothing

FIRST_TWO, LAST_TWO = [0, 0, *[None] * 14], [*[None] * 14, 5, 5]


@pytest.fixture
def data(tmp_path):
    return as_built(write_dataset(tmp_path / "data", (16,)))


@pytest.fixture
def identity_of(tmp_path, data):
    """The identity of a run that is opened on the data set as it is now."""
    recipe = write_recipe(tmp_path)
    return lambda *settings: run_identity(load_recipe(recipe, settings), load_index(data), 1)


def test_a_column_that_a_run_does_not_use_may_come_change_and_go(data, identity_of):
    before = load_index(data)
    began = identity_of()
    for name, values in (("duplicate_group", FIRST_TWO), ("duplicate_group", LAST_TWO)):
        index = add_columns(data, **{name: values})
        assert index.sha256 == before.sha256 != index.sha256_for(name)
        assert index.has_sha256(before.sha256)
        assert identity_of() == began
    # any other column is part of the data
    add_columns(data, camera=["a"] * 16)
    assert identity_of()["digest"] != began["digest"]
    assert "the data set is not the one" in differences(began, identity_of())


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("duplicate_group", "data.keep=duplicate_group first"),
        ("duplicate_group", "pairs.never_negative=['duplicate_group']"),
        ("path", "pairs.positive=path"),
    ],
)
def test_a_run_that_uses_the_column_records_its_values(data, identity_of, name, use):
    """And not those of the other column that need not be there."""
    (other,) = {"duplicate_group", "path"} - {name}
    index = add_columns(data, **{name: FIRST_TWO})
    began = identity_of(use)
    assert began["index_sha256"] == index.sha256_for(name) != index.sha256
    assert index.has_sha256(began["index_sha256"])
    add_columns(data, **{name: FIRST_TWO, other: [1, *FIRST_TWO[1:]]})
    assert identity_of(use) == began
    add_columns(data, **{name: LAST_TWO})
    assert identity_of(use)["digest"] != began["digest"]


@pytest.mark.parametrize("lacking", ["checkpoint", "run"])
def test_a_part_that_only_the_checkpoint_or_only_the_run_has_is_refused(tmp_path, lacking):
    """A state that nobody takes would be lost without a word, and the weights be others."""
    stored = some_parts()
    ours = some_parts(seed=1)
    (ours if lacking == "checkpoint" else stored)["newer"] = nn.Linear(2, 2)
    a_checkpointer(tmp_path).save(3, stored, {})
    before = [v.clone() for v in ours["model"].state_dict().values()]
    with pytest.raises(CheckpointError, match=r"step-00000003 .*newer"):
        a_checkpointer(tmp_path).restore(ours)
    assert all(map(torch.equal, before, ours["model"].state_dict().values()))
