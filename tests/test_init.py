"""A pretraining that starts from weights: what it loads, records, keeps and resumes from."""

import json
import shutil

import pytest
import torch

from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.evaluation.embed import module_sha256
from sslpipe.export.initial import open_init
from sslpipe.export.load import load_backbone
from sslpipe.export.write import export_model
from sslpipe.recipe import load_recipe
from sslpipe.run.checkpoint import latest, read_state
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import (
    RECIPE,
    command_line,
    final_weights,
    train_from,
    train_over,
    write_recipe,
)

WITHOUT_BACKBONE = RECIPE[: RECIPE.index("[backbone]")] + RECIPE[RECIPE.index("[projector]") :]
FP64 = ("optim.precision=fp64", "steps=5", "run.monitor_steps=5")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), (40, 3, 60, 25))


@pytest.fixture(scope="module")
def sources(data, tmp_path_factory):
    """Name -> a run of another mean and std, its export, and a run of another seed."""
    folder = tmp_path_factory.mktemp("sources")
    recipe = write_recipe(folder)
    own_view = ("augment.mean=[0.1,0.2,0.3]", "augment.std=[0.3,0.4,0.5]")
    train_over(1, recipe, data, folder / "run", "steps=2", *own_view)
    train_over(1, recipe, data, folder / "other", "steps=2", "seed=1", *own_view)
    model = load_backbone(folder / "run")
    export_model(model, folder / "export", ["safetensors"])
    return {name: folder / name for name in ("run", "other", "export")}


def write_short(folder):
    return write_recipe(folder, WITHOUT_BACKBONE)


def state_of(run_dir):
    return read_state(latest(run_dir))


@pytest.mark.parametrize("source", ["run", "export"])
def test_it_starts_from_these_weights_and_views_and_says_so(data, sources, tmp_path, source):
    given = load_backbone(sources[source])
    recipe, run_dir = write_short(tmp_path), tmp_path / "run"
    train_from(1, sources[source], recipe, data, run_dir, "steps=1", "optim.peak_lr=0.0")
    # no step moved anything but statistics
    weights = final_weights(run_dir)
    for key, value in given.backbone.named_parameters():
        assert torch.equal(weights[f"backbone.{key}"], value), key
    # the digest, the records and an export name them
    sha256 = module_sha256(given.backbone)
    state, recorded = state_of(run_dir), json.loads((run_dir / "run.json").read_text())["init"]
    assert state["identity"]["recipe"]["init"] == sha256
    assert recorded["weights_sha256"] == sha256
    assert recorded["source"] == str(sources[source])
    loaded = load_backbone(run_dir)
    assert loaded.config.facts["init"] == recorded
    # the views are the weights' own
    augment = state["identity"]["recipe"]["augment"]
    assert (augment["mean"], augment["std"]) == ([0.1, 0.2, 0.3], [0.3, 0.4, 0.5])
    assert loaded.view.config() == given.view.config()


def test_a_recipes_own_mean_and_std_count(data, sources, tmp_path):
    recipe, run_dir = write_short(tmp_path), tmp_path / "run"
    train_from(1, sources["run"], recipe, data, run_dir, "steps=1", "augment.mean=[0.5,0.5,0.5]")
    view = load_backbone(run_dir).view.config()
    assert (view["mean"], view["std"]) == ([0.5] * 3, [0.3, 0.4, 0.5])


def test_a_run_from_random_weights_has_the_digest_it_had(data, tmp_path):
    train_over(1, write_recipe(tmp_path), data, tmp_path / "run", "steps=1")
    identity = state_of(tmp_path / "run")["identity"]
    assert not {"init", "tune"} & {*identity["recipe"]}
    assert "init" not in json.loads((tmp_path / "run" / "run.json").read_text())


def test_a_resume_needs_the_source_no_more_and_refuses_another(data, sources, tmp_path):
    """Killed before its first checkpoint, then after it; the weights are those of one go."""
    recipe, source = write_short(tmp_path), shutil.copytree(sources["run"], tmp_path / "source")
    run_dir = tmp_path / "run"
    words = ("train", str(recipe), "--data", str(data), "--run-dir", str(run_dir))
    named = ("--init", str(source))
    killed = command_line(*words, *named, SSLPIPE_FAULT="train.step:3")
    assert killed.returncode == 9, killed.stderr
    assert not (run_dir / "checkpoints").exists()
    shutil.rmtree(source)
    killed = command_line(*words, SSLPIPE_FAULT="train.step:8")  # without --init
    assert latest(run_dir).name == "step-00000005"
    other = command_line(*words, "--init", str(sources["other"]))
    assert other.returncode == 2
    for path in (sources["run"], sources["other"]):
        assert load_backbone(path).config.weights_sha256 in other.stderr
    elsewhere = command_line(*words, "--init", str(tmp_path / "elsewhere"))
    assert elsewhere.returncode == 2
    assert f"started from {source}" in elsewhere.stderr
    done = command_line(*words, *named)  # the command it was started with
    assert done.returncode == 0, done.stderr
    assert f"{source} is not there any more: resumed from the copy in" in done.stderr
    straight = command_line(*words[:-1], str(tmp_path / "straight"), "--init", str(sources["run"]))
    assert straight.returncode == 0, straight.stderr
    expected, actual = final_weights(tmp_path / "straight"), final_weights(run_dir)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def test_check_says_what_it_starts_from_and_what_cannot_be(data, sources, tmp_path):
    recipe, index = load_recipe(write_short(tmp_path)), load_index(str(data))
    given = open_init(recipe, sources["export"])
    result = check_pretraining(recipe, index, given)
    assert result.recipe.init == given.config.weights_sha256
    assert result.data.digest
    with pytest.raises(RecipeError, match=r"no \[backbone\]; give one, or name weights .* --init"):
        check_pretraining(recipe, index)
    other = load_recipe(write_recipe(tmp_path), ["backbone.widths=[4,4]"])
    with pytest.raises(RecipeError, match=r"backbone.widths = \[4, 4\], but the given backbone"):
        check_pretraining(other, index, given)
    words = ("check", str(write_short(tmp_path)), "--data", str(data))
    shown = command_line(*words, "--init", str(sources["export"]), COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    assert f"weights {given.config.weights_sha256[:16]}" in shown.stdout
