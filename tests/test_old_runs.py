"""Runs and exports that the code before the restructuring wrote resume, load and evaluate today.

tests/old_runs: a data set, an export, and three runs saved at step 4 and killed at step 5 of 8,
each with the weights that the old code reached from the same recipe (NAME.final.safetensors).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sslpipe
from sslpipe.evaluation.embed import load_embeddings
from sslpipe.run.checkpoint_files import latest
from sslpipe.run.status import status
from tests.helpers.runs import command_line, final_weights

OLD = Path(__file__).with_name("old_runs")
RUNS = ("pretrain", "moco", "finetune")
TOLERANCE = 1e-4  # of a tensor's norm: other machines round otherwise, over 4 steps


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy that a test may write to."""
    return shutil.copytree(OLD, tmp_path / "old")


def digest_of(run_dir: Path) -> str:
    return json.loads((latest(run_dir) / "state.json").read_text())["identity"]["digest"]


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_resumes_to_the_weights_that_the_old_code_reached(old, name):
    run_dir, digest = old / name, digest_of(old / name)
    before = status(run_dir)
    assert (before["state"], before["step"]) == ("lost", 5)
    assert latest(run_dir).name == "step-00000004"
    backbone = ["--init", str(old / "backbone")] if name == "finetune" else []
    data = str(old / "data" / "dataset.json")
    arguments = ("train", str(old / f"{name}.toml"), "--data", data, "--run-dir", str(run_dir))
    command_line(*arguments, *backbone, status=0)
    assert status(run_dir)["state"] == "done"
    assert latest(run_dir).name == "step-00000008"
    assert digest_of(run_dir) == digest  # of the checkpoint that today's code wrote
    ours, theirs = final_weights(run_dir), load_file(old / f"{name}.final.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        difference = (ours[key].double() - tensor.double()).norm()
        assert difference <= TOLERANCE * tensor.double().norm(), key


@pytest.mark.parametrize("name", RUNS)
def test_the_backbone_of_an_old_run_loads(name):
    backbone = sslpipe.load_backbone(OLD / name)
    weights = load_file(latest(OLD / name) / "model.safetensors")
    for key, tensor in backbone.backbone.state_dict().items():
        assert torch.equal(tensor, weights[f"backbone.{key}"])


def test_an_old_run_embeds_and_is_evaluated(old, tmp_path):
    data, features, out = old / "data/dataset.json", tmp_path / "features", tmp_path / "eval.json"
    for words in (
        ("embed", old / "finetune", "--data", data, "--out", features),
        ("evaluate", "suite", old / "pretrain", "--data", data, "--no-baselines", "--out", out),
    ):
        command_line(*map(str, words), "--device", "cpu", status=0)
    assert load_embeddings(features)[0].features.shape == (16, 8)
    rows = json.loads(out.read_text())["rows"]
    assert {row["features"] for row in rows} == {"ssl"}


def test_an_old_export_loads():
    backbone = sslpipe.load_backbone(OLD / "backbone")
    config = json.loads((OLD / "backbone" / "config.json").read_text())
    assert backbone.config.weights_sha256 == config["weights_sha256"]
    images = torch.randint(0, 256, (2, 3, 20, 24), dtype=torch.uint8)
    assert backbone.encode(images).shape == (2, config["num_features"])
