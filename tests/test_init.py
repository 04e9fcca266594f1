"""A pretraining that starts from weights: what it loads, records, keeps and resumes from."""

import json
import re
import shutil

import numpy as np
import pytest
import timm
import torch

import sslpipe.api
from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError, UserError, WeightsError
from sslpipe.export.formats import FORMATS
from sslpipe.export.load import load_backbone
from sslpipe.export.named import open_init
from sslpipe.export.start import Start, with_init
from sslpipe.export.write import export_backbone
from sslpipe.models.state import module_sha256
from sslpipe.plan import Pretraining
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.checkpoint_files import latest, read_state
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import png, write_dataset
from tests.helpers.finetunes import RECIPE as METRIC
from tests.helpers.processes import run_processes
from tests.helpers.runs import (
    NUMBERS,
    RECIPE,
    ROOT,
    assert_same_numbers,
    assert_same_weights,
    command_line,
    final_weights,
    train_from,
    train_over,
    write_recipe,
)

pytestmark = pytest.mark.usefixtures("proved_here")

WITHOUT_BACKBONE = RECIPE[: RECIPE.index("[backbone]")] + RECIPE[RECIPE.index("[projector]") :]


@pytest.fixture(scope="module")
def sources(data, tmp_path_factory):
    """Name -> a run of another mean and std, its export, and a run of another seed."""
    folder = tmp_path_factory.mktemp("sources")
    recipe = write_recipe(folder)
    own_view = ("augment.mean=[0.1,0.2,0.3]", "augment.std=[0.3,0.4,0.5]")
    train_over(1, recipe, data, folder / "run", "steps=2", *own_view)
    train_over(1, recipe, data, folder / "other", "steps=2", "seed=1", *own_view)
    model = load_backbone(folder / "run")
    (folder / "export").mkdir()
    FORMATS["safetensors"].write(model, folder / "export")
    return {name: folder / name for name in ("run", "other", "export")}


def write_short(folder):
    return write_recipe(folder, WITHOUT_BACKBONE)


def recipe_of(run_dir):
    """The recipe as it is in the digest."""
    return read_state(latest(run_dir)).identity.recipe


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
    recipe, recorded = recipe_of(run_dir), json.loads((run_dir / "run.json").read_text())["init"]
    assert recipe["init"] == recorded["weights_sha256"] == sha256
    assert recorded["source"] == str(sources[source])
    loaded = load_backbone(run_dir)
    assert loaded.config.facts["init"] == recorded
    # the views are the weights' own
    augment = recipe["augment"]
    assert (augment["mean"], augment["std"]) == ([0.1, 0.2, 0.3], [0.3, 0.4, 0.5])
    assert loaded.view.config() == given.view.config()
    if source == "export":
        export_backbone(run_dir, tmp_path / "exported", ["safetensors"])
        assert load_backbone(tmp_path / "exported").config.facts["init"] == recorded


def test_a_recipes_own_mean_and_std_count(data, sources, tmp_path):
    recipe = load_recipe(write_short(tmp_path), ["augment.mean=[0.5,0.5,0.5]"])
    fitted = with_init(recipe, load_backbone(sources["run"]), load_index(str(data)))
    augment = fitted.augment.arguments
    assert (list(augment["mean"]), list(augment["std"])) == ([0.5] * 3, [0.3, 0.4, 0.5])


def test_a_resume_needs_the_source_no_more_and_refuses_another(data, sources, tmp_path):
    """Killed before its first checkpoint, then after it, while the backbone is still frozen."""
    recipe, source = write_short(tmp_path), shutil.copytree(sources["run"], tmp_path / "source")
    run_dir = tmp_path / "run"
    tuned = "tune={projector_first_steps=6, ramp_steps=3}"
    words = ("train", str(recipe), tuned, "--data", str(data), "--run-dir", str(run_dir))
    named = ("--init", str(source))
    command_line(*words, *named, SSLPIPE_FAULT="train.step:3", status=9)
    assert not (run_dir / "checkpoints").exists()
    shutil.rmtree(source)
    command_line(*words, SSLPIPE_FAULT="train.step:8")  # without --init
    assert latest(run_dir).name == "step-00000005"
    # another source is refused with both hashes, one that is not there by name
    other = load_backbone(sources["other"])
    with pytest.raises(UserError, match=other.config.weights_sha256) as refused:
        Start.find(other, load_index(str(data)), run_dir)
    assert load_backbone(sources["run"]).config.weights_sha256 in str(refused.value)
    with pytest.raises(UserError, match=r"there is no .*elsewhere"):
        open_init(load_recipe(recipe), tmp_path / "elsewhere", run_dir=run_dir)
    done = command_line(*words, *named)  # the command it was started with
    assert done.returncode == 0, done.stderr
    command_line(*words[:-1], str(tmp_path / "straight"), "--init", str(sources["run"]), status=0)
    assert_same_weights(tmp_path / "straight", run_dir)


def test_check_says_what_it_starts_from_and_what_cannot_be(data, sources, tmp_path):
    recipe, index = load_recipe(write_short(tmp_path)), load_index(str(data))
    given = open_init(recipe, sources["export"])
    result = check_pretraining(Pretraining.make(recipe, index, given))
    assert result.recipe.init == given.config.weights_sha256
    assert result.digest
    with pytest.raises(RecipeError, match=r"no \[backbone\]; give one, or name weights .* init"):
        Pretraining.make(recipe, index)
    other = load_recipe(write_recipe(tmp_path), ["backbone.widths=[4,4]"])
    with pytest.raises(RecipeError, match=r"backbone.widths = \[4, 4\], but the given backbone"):
        Pretraining.make(other, index, given)
    words = ("check", str(write_short(tmp_path)), "--data", str(data))
    shown = command_line(*words, "--init", str(sources["export"]), COLUMNS="200", status=0)
    words_shown = "".join(shown.stdout.split())  # a long path is folded
    assert f"weightsof{sources['export']}" in words_shown
    assert f"sha256{given.config.weights_sha256[:16]}" in words_shown


def test_given_weights_bring_their_own_backbone_and_it_is_said(data, sources, tmp_path):
    """The recipe's is for random weights; an override of it that contradicts them is refused."""
    given, start = load_backbone(sources["run"]), ("--init", str(sources["run"]))
    few = ["sampler.classes_per_batch=2", "sampler.buffer=24"]
    for name, text, settings in (("metric", METRIC, few), ("pretrain", RECIPE, [])):
        other = text.replace('kind = "small_resnet"', 'kind = "torchvision/resnet18"')
        other = "\n".join(line for line in other.splitlines() if not line.startswith("widths"))
        recipe, run_dir = tmp_path / f"{name}.toml", tmp_path / name
        recipe.write_text(other)
        words = ("train", str(recipe), "steps=2", *settings, "--data", str(data), "--run-dir")
        for init in (start, ()):  # again: a resume, which keeps them
            done = command_line(*words, str(run_dir), *init, COLUMNS="200", status=0)
            said = " ".join((done.stdout + done.stderr).split())
            assert "backbone.kind = 'small_resnet', not 'torchvision/resnet18'" in said
        backbone = json.loads((run_dir / "recipe.json").read_text())["backbone"]
        widths = given.config.backbone.arguments["widths"]
        assert (backbone["kind"], backbone["widths"]) == ("small_resnet", widths)
        recipe_kept = recipe_of(run_dir)
        assert recipe_kept["init"] == given.config.weights_sha256
        assert recipe_kept["backbone"] == backbone
    # a record has the same; overrides of it and of the recipe have not
    checked = command_line("check", str(run_dir), "--data", str(data), COLUMNS="200")
    assert read_state(latest(run_dir)).identity.digest in checked.stdout, checked.stderr
    assert "given weights" not in checked.stdout + checked.stderr
    wrong = ("check", str(run_dir), "backbone.widths=[4]", "--data", str(data))
    assert "backbone.widths = [4]" in command_line(*wrong, COLUMNS="200", status=2).stderr
    wrong = (*words, f"{run_dir}-b", "backbone.kind=torchvision/resnet18", *start)
    refused = command_line(*wrong, COLUMNS="200", status=2).stderr
    assert "backbone.kind = 'torchvision/resnet18'" in refused
    assert "small_resnet" in refused


def test_others_weights_that_name_their_own_backbone_bring_it(data, tmp_path):
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "weights.pth")
    source, path = f"timm/test_resnet@{tmp_path / 'weights.pth'}", write_recipe(tmp_path)
    recipe = load_recipe(path)  # of a small_resnet
    plan = Pretraining.make(recipe, load_index(str(data)), open_init(recipe, source))
    result = check_pretraining(plan)
    assert result.recipe.backbone.kind == "timm/test_resnet"
    assert any("timm/test_resnet" in text for text in result.warnings)
    with pytest.raises(WeightsError, match="small_resnet"):
        open_init(load_recipe(path, ["backbone.kind=small_resnet"]), source)


TUNED = (
    *("optim.precision=fp64", "optim.kind=lars", "optim.peak_lr=0.5", "steps=5"),
    *("tune.projector_first_steps=2", "tune.ramp_steps=2", "tune.layer_decay=0.5"),
    *("tune.backbone_lr=0.5", "tune.last_blocks=2", "run.monitor_steps=5"),
    *("tune.batchnorm=frozen", "momentum.start=0.9", "data.micro_batch=4"),
)


@pytest.mark.promise(1)
def test_processes_change_nothing_in_a_tuned_run(data, sources, tmp_path):
    recipe = write_short(tmp_path)
    one, two = (tmp_path / str(world) for world in (1, 2))
    for world, run_dir in ((1, one), (2, two)):
        train_from(world, sources["run"], recipe, data, run_dir, *TUNED)
    assert len(assert_same_numbers(one, two, NUMBERS)) == 5
    evals = [read_metrics(run_dir, "eval") for run_dir in (one, two)]
    assert [line["step"] for line in evals[0]] == [0, 5]
    for name in ("holdout_knn", "holdout_map_at_r", "holdout_recall_at_1"):
        assert [e[name] for e in evals[0]] == [e[name] for e in evals[1]]
    assert_same_weights(one, two, rtol=1e-9, atol=1e-11)
    # frozen statistics are those of the weights, micro-batches or not
    weights = final_weights(one)
    for key, value in load_backbone(sources["run"]).backbone.named_buffers():
        assert weights[f"backbone.{key}"].equal(value.to(weights[f"backbone.{key}"])), key


def test_the_projector_alone_is_trained_first_and_frozen_statistics_stay(data, sources, tmp_path):
    recipe, start = write_short(tmp_path), load_backbone(sources["run"]).backbone
    settings = ("tune.projector_first_steps=2", "momentum.start=0.9", "tune.batchnorm=frozen")
    for steps in (2, 3):
        run_dir = tmp_path / str(steps)
        train_from(1, sources["run"], recipe, data, run_dir, *settings, f"steps={steps}",
                   "optim.schedule=constant")  # fmt: skip
        weights = final_weights(run_dir)
        for prefix in ("backbone.", "momentum.backbone."):
            for key, value in start.state_dict().items():
                kept = torch.equal(weights[prefix + key], value)
                assert kept == (steps == 2 or "running" in key or "num_batches" in key), key
    assert not torch.equal(weights["projector.0.weight"], weights["momentum.projector.0.weight"])


def test_images_of_another_size_in_evaluations_change_no_weight(data, sources, tmp_path):
    recipe, source = write_short(tmp_path), sources["run"]
    settings = ("steps=2", "tune.ramp_steps=1")
    tunes = []
    for name, more in (("same", ()), ("larger", ("tune.eval_crop_px=24",))):
        train_from(1, source, recipe, data, tmp_path / name, *settings, *more)
        tunes.append(recipe_of(tmp_path / name)["tune"])
    assert [tune.get("eval_crop_px") for tune in tunes] == [None, 24]
    assert_same_weights(tmp_path / "same", tmp_path / "larger")
    # evaluation and export see the larger ones
    export_backbone(tmp_path / "larger", tmp_path / "exported", ["safetensors"])
    for folder in (tmp_path / "larger", tmp_path / "exported"):
        model = load_backbone(folder)
        assert (model.view.crop_px, model.config.crop_px) == (24, 24)


def test_weights_of_others_start_at_the_evaluations_size_if_their_network_takes_both(
    data, tmp_path
):
    settings = ["augment.crop_px=32", "tune.eval_crop_px=48"]
    recipe, index = load_recipe(write_short(tmp_path), settings), load_index(str(data))
    given = {}
    for name in ("test_resnet", "regnetx_002", "test_vit"):  # a RegNet reads what it computes
        torch.save(timm.create_model(name).state_dict(), tmp_path / f"{name}.pth")
        given[name] = open_init(recipe, f"timm/{name}@{tmp_path / name}.pth")
        assert given[name].view.crop_px == 48
    Pretraining.make(recipe, index, given["test_resnet"])
    Pretraining.make(recipe, index, given["regnetx_002"])
    with pytest.raises(RecipeError, match=r"tune.eval_crop_px = 48, but a timm/test_vit trained"):
        Pretraining.make(recipe, index, given["test_vit"])


@pytest.mark.parametrize(
    "setting",
    ["projector_first_steps=3", "layer_decay=0.5", "eval_crop_px=3", 'batchnorm="frozen"'],
)
def test_what_means_nothing_to_random_weights_is_refused(data, tmp_path, setting):
    """The remedy is an override that works, and names all such settings at once."""
    key = setting.partition("=")[0]
    path = write_recipe(tmp_path)
    given = [f"tune.{setting}", "tune.ramp_steps=2"]
    with pytest.raises(RecipeError, match=f"tune.{key} = .*a run that starts from") as refused:
        Pretraining.make(load_recipe(path, given), load_index(str(data)))
    assert "tune.ramp_steps = 2" in str(refused.value)
    remedy = re.search("by '(tune=.*)'", str(refused.value))[1]
    Pretraining.make(load_recipe(path, [*given, remedy]), load_index(str(data)))


def test_the_remedy_for_random_weights_freezes_none_and_keeps_what_they_may_set(data):
    """Of the recipe for a phone's network, whose size of evaluations no override takes away."""
    path = ROOT / "recipes" / "metric" / "my_images_mobile.toml"
    with pytest.raises(RecipeError) as refused:
        with_init(load_recipe(path, ["tune.loss_lr=2"]), None, load_index(str(data)))
    assert "tune.ramp_steps = 10 and tune.eval_crop_px = 'auto'" in str(refused.value)
    assert "by 'tune={loss_lr=2.0}'" in str(refused.value)


def coloured(number, classes=10):
    """A picture of its class's colour, under noise."""
    rng = np.random.default_rng(number)
    colour = np.random.default_rng(0).uniform(60, 200, (classes, 3))[number % classes]
    pixels = colour + rng.normal(0, 8, 3) + rng.normal(0, 40, (16, 16, 3))
    return png(pixels.clip(0, 255).astype(np.uint8))


def continue_in_rank(process, recipe, data, folder):
    """A source that knows colours, continued at a rate that suits it, and at one far too high."""
    common = ("data.holdout=125", "data.batch_size=32", "augment.flip_prob=0.0",
              "augment.crop_area=[0.6,1.0]", "run.save_steps=100")  # fmt: skip
    adamw = (*common, "optim.kind=adamw")
    first = (*adamw, "steps=40", "optim.peak_lr=0.05", "optim.warmup_steps=10")
    sslpipe.api.train(recipe, data, f"{folder}/source", overrides=first)
    for name, settings in (
        ("good", (*adamw, "steps=8", "optim.peak_lr=0.0003")),
        ("bad", (*common, "steps=9", "optim.peak_lr=30.0", "optim.warmup_steps=100")),
    ):
        overrides, source = (*settings, "run.monitor_steps=1"), f"{folder}/source"
        sslpipe.api.train(recipe, data, f"{folder}/{name}", init=source, overrides=overrides)


def test_a_rate_far_too_high_raises_an_alarm_before_much_is_lost(tmp_path):
    pictures = {number: coloured(number) for number in range(500)}
    data = write_dataset(tmp_path / "data", (500,), classes=10, broken=pictures)
    run_processes(continue_in_rank, 1, str(write_recipe(tmp_path)), str(data), str(tmp_path))
    evals = [read_metrics(tmp_path / name, "eval") for name in ("good", "bad")]
    (start, *_), values = ([line["holdout_map_at_r"] for line in lines] for lines in evals)
    assert values[0] == start > 0.6  # of step 0, before any step
    assert min(values) < start - 0.1  # the accident
    first, *_ = read_metrics(tmp_path / "bad", "alarm")
    assert first["raised"] == ["below_start"]
    assert first["value"]["below_start"] > max(start - 0.15, min(values))
    assert all(value > start - 0.02 for value in values[: first["step"]])
    assert not read_metrics(tmp_path / "good", "alarm")


def test_a_start_that_failed_does_not_block_the_next(data, sources, tmp_path):
    """Refused before the first step, or killed before a checkpoint; then started from others."""
    run_dir = tmp_path / "run"
    words = ("train", str(write_short(tmp_path)), "--data", str(data), "--run-dir", str(run_dir))
    command_line(*words, "--init", str(sources["run"]), "optim.precision=fp16", status=2)
    command_line(*words, "--init", str(sources["run"]), SSLPIPE_FAULT="train.step:1", status=9)
    assert (run_dir / "init").is_dir()
    command_line(*words, "--init", str(sources["other"]), status=0)
    kept = load_backbone(run_dir / "init").config.weights_sha256
    assert kept == load_backbone(sources["other"]).config.weights_sha256
    late = command_line(*words, "--init", str(sources["run"]), status=2)
    assert "--init" in late.stderr
