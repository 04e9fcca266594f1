"""Weights that are loaded are the run's last, or those of a checkpoint that was named."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sslpipe.errors import UserError
from sslpipe.export.load import load_backbone, load_run
from sslpipe.export.named import open_init
from sslpipe.recipe.reading import load_recipe


def save(run_dir: Path, step: int, scale: float) -> None:
    """Write the old checkpoint again, of another step and with other weights."""
    old, new = (run_dir / "checkpoints" / f"step-{n:08d}" for n in (4, step))
    shutil.copytree(old, new, dirs_exist_ok=True)
    tensors = load_file(old / "model.safetensors")
    save_file({k: scale * t if t.is_floating_point() else t for k, t in tensors.items()},
              new / "model.safetensors")  # fmt: skip
    state = {**json.loads((new / "state.json").read_text()), "step": step}
    (new / "state.json").write_text(json.dumps(state))
    files = {p.name: p.read_bytes() for p in new.iterdir() if p.name != "MANIFEST.json"}
    manifest = {n: [len(raw), hashlib.sha256(raw).hexdigest()] for n, raw in files.items()}
    (new / "MANIFEST.json").write_text(json.dumps(manifest))


@pytest.fixture
def run_dir(killed_run, tmp_path):
    run_dir = shutil.copytree(killed_run / "pretrain", tmp_path / "run")
    save(run_dir, 8, scale=0.5)
    return run_dir


def flip(path: Path, place: int = -3) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def weight(model) -> torch.Tensor:
    return next(model.backbone.parameters())


def test_the_newest_is_loaded_and_an_older_one_where_it_is_named(run_dir):
    newest, older = load_run(run_dir), load_run(run_dir, checkpoint="step-4")
    assert torch.equal(weight(newest), 0.5 * weight(older))
    assert (newest.config.facts["step"], older.config.facts["step"]) == (8, 4)
    assert "checkpoint" not in newest.config.facts
    assert older.config.facts["checkpoint"] == "step-00000004"


@pytest.mark.parametrize("name", ["MANIFEST.json", "model.safetensors", "parts.pt", "state.json"])
def test_a_damaged_newest_is_refused_with_the_file_and_the_remedy(killed_run, run_dir, name):
    flip(run_dir / "checkpoints" / "step-00000008" / name)
    recipe = load_recipe(killed_run / "finetune.toml")
    for load in (load_backbone, load_run, lambda path: open_init(recipe, path)):
        with pytest.raises(UserError, match=rf"{name}.*by checkpoint=.step-00000004.$") as error:
            load(run_dir)
        assert "step-00000008, is damaged" in str(error.value)
    expected = load_run(killed_run / "pretrain").backbone.state_dict()
    for model in (
        load_backbone(run_dir, checkpoint="step-4"),
        open_init(recipe, run_dir, checkpoint="step-00000004"),
    ):
        assert all(torch.equal(t, expected[k]) for k, t in model.backbone.state_dict().items())


def test_a_flipped_digit_of_the_mean_does_not_load(run_dir):
    text = (run_dir / "data.json").read_text()
    assert text.count("0.5") == 3
    (run_dir / "data.json").write_text(text.replace("0.5", "0.4", 1))
    with pytest.raises(UserError, match=r"data\.json is not the file that MANIFEST\.json"):
        load_run(run_dir)


def test_a_checkpoint_of_what_is_no_run_is_refused(killed_run):
    with pytest.raises(UserError, match="init that is a run directory"):
        open_init(load_recipe(killed_run / "finetune.toml"), None, checkpoint="step-4")


def test_an_export_is_checked_against_its_sums(killed_run, tmp_path):
    for name in ("config.json", "model.safetensors", "SHA256SUMS"):
        folder = shutil.copytree(killed_run / "backbone", tmp_path / name)
        text = (folder / "config.json").read_text()
        if name == "config.json":  # a digit of the mean: nothing else would tell
            assert text.count("0.5,") == 2
            (folder / name).write_text(text.replace("0.5,", "0.4,", 1))
        else:
            flip(folder / name, place=-30)  # in the weights; in the last hash
        with pytest.raises(UserError, match=rf"{name} .*copy the export again$"):
            load_backbone(folder)
    # a model card is for people to change
    folder = shutil.copytree(killed_run / "backbone", tmp_path / "card")
    (folder / "README.md").write_text("mine")
    load_backbone(folder)
