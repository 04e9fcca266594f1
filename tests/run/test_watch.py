"""By default a run from weights, or with labels, is watched and keeps its best, the start too."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import sslpipe.metric_learning.finetune as finetuning
from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.evaluation.embed import EmbedOptions, embed
from sslpipe.export.load import load_backbone, load_run
from sslpipe.export.named import open_init
from sslpipe.metric_learning.classes import held_out, labelled_split
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.plan import Pretraining
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.checkpoint_files import checkpoint_names, latest, read_state
from sslpipe.run.health import StartAlarm
from sslpipe.run.log import read_metrics
from sslpipe.run.status import list_runs
from tests.helpers import finetunes, runs
from tests.helpers.dataset import picture, png, write_dataset
from tests.helpers.runs import ROOT, assert_same_weights, command_line, forget_accelerator

QUIET = 'keep = "last"\n'  # of the tests' tiny recipes, which these tests do without


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """8 shards of 24 images of 24 classes, each a colour of its own."""
    colours = np.random.default_rng(0).integers(0, 256, (24, 3))
    pixels = (0.7 * colours[i % 24] + 0.3 * picture(i) for i in range(192))
    images = {i: png(each.astype(np.uint8)) for i, each in enumerate(pixels)}
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, (24,) * 8, classes=24, broken=images)
    return load_index(write_dataset(folder, (24,), classes=24, broken=images, split="test"))


@pytest.fixture(scope="module")
def start(tmp_path_factory, data):
    """A run of a few steps, whose weights the others start from."""
    folder = tmp_path_factory.mktemp("start")
    recipe = load_recipe(runs.write_recipe(folder), ["steps=2"])
    train(recipe, data, folder / "run")
    forget_accelerator()
    return folder / "run"


def recipe_of(folder: Path, module, *overrides: str):
    """A tiny recipe that says nothing of what is held out, scored or kept."""
    lines = module.RECIPE.replace(QUIET, "").replace("validation_classes = 2\n", "")
    text = "\n".join(line for line in lines.splitlines() if not line.startswith("holdout"))
    return load_recipe(module.write_recipe(folder, text), overrides)


def run_of(module, recipe, data, run_dir, start):
    train(recipe, data, run_dir, init=open_init(recipe, start))
    forget_accelerator()
    return read_state(latest(run_dir))


RUIN = ("optim.peak_lr=1e12", "optim.schedule=constant", "steps=6", "run.max_bad_steps=100")


@pytest.mark.promise(15)
@pytest.mark.parametrize("module", [runs, finetunes], ids=["pretraining", "fine-tuning"])
def test_a_ruinous_run_ends_with_its_starts_weights_and_says_so(
    data, start, tmp_path, capfd, module
):
    plain = ("embedding={normalize=true}",) if module is finetunes else ()  # no layer on top
    recipe = recipe_of(tmp_path, module, *RUIN, *plain)
    assert (recipe.run.keep, recipe.run.monitor_steps) == (None, None)
    state = run_of(module, recipe, data, tmp_path / "run", start)
    assert (state.best.step, state.best.name) == (0, "step-00000000")
    assert state.best.measure in ("holdout_map_at_r", "validation_map_at_r")
    said = " ".join(capfd.readouterr().err.split())
    assert "commands take step-00000000, the start: no evaluation was clearly better" in said
    assert "below_start" in said
    taken = load_backbone(tmp_path / "run").backbone.network.state_dict()
    assert_same_weights(load_backbone(start).backbone.network.state_dict(), taken)
    last = load_run(tmp_path / "run", checkpoint="last").backbone.network.state_dict()
    assert not all(torch.equal(taken[key], x) for key, x in last.items())
    suite = ("evaluate", "suite", tmp_path / "run", "--data", f"{data.folder}/dataset.json")
    options = ("--no-baselines", "--no-leakage", "--num-workers", "0", "--device", "cpu")
    done = command_line(*map(str, (*suite, *options, "--out", tmp_path / "eval.json")), status=0)
    report = json.loads((tmp_path / "eval.json").read_text())
    assert {row["features"] for row in report["rows"]} == {"ssl"}  # measured once
    assert report["against"] == []
    assert "which it started from, are the same weights" in " ".join(done.stdout.split())
    steps = [line["step"] for line in read_metrics(tmp_path / "run", "eval")]
    assert steps == list(range(7))  # the start, and ten times a run at most
    # an evaluation that was higher by luck is not what commands take, nor what is listed
    line = {"kind": "eval", "step": 6, state.best.measure: 1.0, "wall": 0.0, "restart": 0}
    with open(tmp_path / "run" / "metrics.jsonl", "a") as log:
        log.write(json.dumps(line) + "\n")
    (listed,) = list_runs(tmp_path)
    assert (listed["best"], listed["best_of"]) == (state.best.value, state.best.measure)


@pytest.mark.parametrize("module", [runs, finetunes], ids=["pretraining", "fine-tuning"])
def test_what_below_start_says_to_change_can_be_changed(data, start, tmp_path, module):
    """Also where the loss compares the backbone's own features, and nothing lies behind it."""
    plain = ("embedding={normalize=true}",) if module is finetunes else ()
    plan_of = Finetuning if module is finetunes else Pretraining
    (alarm,) = StartAlarm({"holdout_map_at_r": 0.8}).read({"holdout_map_at_r": 0.5})
    smaller = {"optim.peak_lr": "1e-4", "tune.backbone_lr": "0.5", "tune.last_blocks": "1"}
    assert set(re.findall(r"(?:optim|tune)\.\w+", alarm.text)) == smaller.keys()
    for name, value in smaller.items():
        recipe = recipe_of(tmp_path, module, *plain, f"{name}={value}")
        plan = plan_of.make(recipe, data, named=open_init(recipe, start))
        assert plan.groups(plan.build())


@pytest.mark.promise(15)
@pytest.mark.parametrize("module", [runs, finetunes], ids=["pretraining", "fine-tuning"])
def test_ruin_is_undone_at_the_size_of_the_source(data, start, tmp_path, module):
    plain = ("embedding={normalize=true}",) if module is finetunes else ()
    recipe = recipe_of(tmp_path, module, *RUIN, *plain, "tune.eval_crop_px=auto")
    source = load_backbone(f"{start}@24")
    state = run_of(module, recipe, data, tmp_path / "run", f"{start}@24")
    assert state.best.step == 0
    # the start was scored as it is used: at its own size
    split = data.split("train")
    ids = held_out(recipe, *labelled_split(recipe, data)).ids if module is finetunes else None
    taken = load_backbone(tmp_path / "run")
    assert taken.view.config() == source.view.config()
    rows = [
        embed(one.backbone, one.view, split, EmbedOptions(canvas_px=16), ids=ids)
        for one in (taken, source)
    ]
    features = [torch.nn.functional.normalize(each.features, dim=1) for each in rows]
    torch.testing.assert_close(*features, rtol=0, atol=1e-5)


@pytest.mark.promise(15)
def test_without_labels_images_are_held_out_and_found_by_the_other_view(start, tmp_path):
    data = load_index(write_dataset(tmp_path / "data", (24,) * 8, labelled=False))
    state = run_of(runs, recipe_of(tmp_path, runs), data, tmp_path / "run", start)
    recipe = state.identity.recipe
    assert (recipe["data"]["holdout"], recipe["data"]["holdout_from"]) == (38, "all")
    assert state.best.measure == "holdout_view_recall"


@pytest.mark.promise(15)
@pytest.mark.parametrize(("batch_size", "held"), [(128, 38), (160, 19)])
def test_of_few_images_a_fifth_is_held_out_where_that_leaves_a_batch(
    data, start, tmp_path, batch_size, held
):
    recipe = recipe_of(tmp_path, runs, f"data.batch_size={batch_size}")
    plan = Pretraining.make(recipe, data, open_init(recipe, start))
    assert plan.recipe.data.holdout == held
    assert plan.recipe.data.batch_size == batch_size


def test_what_is_held_out_by_default_is_doubted_but_no_other_number_is_advised(start, tmp_path):
    """Of most classes there is one image, so no choice gives most held-out images a partner."""
    index = load_index(write_dataset(tmp_path / "rare", (120,), classes=100))
    recipe = recipe_of(tmp_path, runs)
    plan = Pretraining.make(recipe, index, open_init(recipe, start))
    assert (plan.recipe.data.holdout, plan.recipe.data.holdout_by) == (24, "class")
    (doubt,) = (text for text in plan.remarks(plan.build()) if "held-out kNN" in text)
    assert doubt.startswith("no useful held-out kNN: only ")
    assert doubt.endswith("scores without labels are logged")


@pytest.mark.parametrize("unwatched", ["data.holdout=0", "run.monitor_steps=0"])
def test_the_error_of_a_run_without_a_watch_names_all_that_lets_it_run(
    data, start, tmp_path, unwatched
):
    chosen = (unwatched, "run.keep=best", "run.patience=3")  # as recipes/adapt_mobile.toml has it
    recipe = recipe_of(tmp_path, runs, *chosen)
    plan = Pretraining.make(recipe, data, open_init(recipe, start))
    with pytest.raises(RecipeError, match=r"run\.keep = .best. ") as refusal:
        plan.remarks(plan.build())
    advised = re.search(r"run\.keep=last.*", str(refusal.value))[0].split()
    recipe = recipe_of(tmp_path, runs, *chosen, *advised)
    plan = Pretraining.make(recipe, data, open_init(recipe, start))
    plan.remarks(plan.build())


@pytest.mark.parametrize("neighbours", [0, 3])
def test_batches_of_near_classes_raise_the_loss_and_no_alarm(data, tmp_path, neighbours):
    recipe = recipe_of(tmp_path, finetunes, f"sampler.neighbours={neighbours}", "steps=50")
    plan = Finetuning.make(recipe, data)
    alarms = plan.alarms(plan.build())
    changes = [change for step in range(20) for change in alarms.read(step, {"loss": 2.0 + step})]
    assert [change.name for change in changes] == ([] if neighbours else ["loss_rises"])


@pytest.mark.parametrize("kind", ["sup_con", "arcface"])
def test_an_alarm_advises_another_loss_than_that_of_the_recipe(data, tmp_path, kind):
    plan = Finetuning.make(recipe_of(tmp_path, finetunes, f"loss={{kind='{kind}'}}"), data)
    alarms = plan.alarms(plan.build())
    alarms.read(1, {"negative_similarity": 0.2})
    (collapse,) = alarms.read(2, {"negative_similarity": 0.99})
    assert "optim.peak_lr" in collapse.text
    assert ("sup_con" in collapse.text) == (kind != "sup_con")


def test_a_run_from_random_weights_holds_nothing_out(data, tmp_path):
    train(recipe_of(tmp_path, runs, "steps=2"), data, tmp_path / "run")
    forget_accelerator()
    state = read_state(latest(tmp_path / "run"))
    assert state.identity.recipe["data"]["holdout"] == 0
    assert state.best is None
    assert not read_metrics(tmp_path / "run", "eval")


@pytest.mark.parametrize(
    ("module", "off"),
    [
        (runs, "data.holdout=0"),
        (finetunes, "data.validation_classes=0"),
        (finetunes, "run.keep=last"),
    ],
)
def test_the_watch_can_be_switched_off(data, start, tmp_path, module, off):
    state = run_of(module, recipe_of(tmp_path, module, off), data, tmp_path / "run", start)
    assert state.best is None
    assert "step-00000000" not in checkpoint_names(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    ("classes", "each", "batch", "whole", "held"),
    [
        (100, 4, (16, 4), True, 100),  # a quarter at most
        (60, 50, (16, 4), True, 300),  # a tenth
        (300, 20, (16, 4), True, 500),  # no more than that
        (5, 100, (4, 4), False, 100),  # too few classes: images of each
        (40, 100, (16, 4), False, 400),
        (40, 6, (40, 4), False, 40),  # every class is in each batch: of each one that it can spare
        (20, 4, (16, 4), True, 16),  # no class can spare an image: four classes
        (16, 4, (16, 4), True, 0),  # nothing can be spared
        (3, 3, (3, 3), True, 0),
    ],
)
def test_what_is_held_out_fits_the_classes(tmp_path, classes, each, batch, whole, held):
    data = load_index(write_dataset(tmp_path, (classes * each,), px=2, classes=classes))
    sampler = f"sampler={{classes_per_batch={batch[0]},images_per_class={batch[1]},buffer=8000}}"
    recipe = recipe_of(tmp_path, finetunes, sampler)
    split, names = labelled_split(recipe, data)
    ids, whole_classes = held_out(recipe, split, names)
    assert (len(ids), whole_classes) == (held, whole)
    labels, sizes = np.unique(split.labels[ids], return_counts=True)
    if whole:
        assert {*sizes} <= {each}
    else:
        assert len(labels) == classes
        assert (each - sizes >= batch[1]).all()


@pytest.mark.parametrize(
    ("name", "people", "each"), [("reid_batch_hard", 75, 15), ("face_arcface", 300, 4)]
)
def test_of_few_people_a_recipe_holds_a_quarter_out_at_most(tmp_path, name, people, each):
    data = load_index(write_dataset(tmp_path, (people * each,), px=2, classes=people))
    recipe = load_recipe(ROOT / "recipes" / "metric" / f"{name}.toml")
    split, names = labelled_split(recipe, data)
    ids, whole_classes = held_out(recipe, split, names)
    held = len(np.unique(split.labels[ids]))
    assert whole_classes
    assert 5 <= held <= people / 4
    assert people - held >= recipe.sampler.classes_per_batch


def test_held_out_images_search_each_other_and_trained_ones(data, start, tmp_path):
    """Every class is in each batch, so that images are held out; by a loop over all rows."""
    batch = "sampler={classes_per_batch=24,images_per_class=3,buffer=400}"
    recipe = recipe_of(tmp_path, finetunes, batch, "steps=1")
    run_of(finetunes, recipe, data, tmp_path / "run", start)
    split, names = labelled_split(recipe, data)
    ids = held_out(recipe, split, names).ids
    model = load_run(tmp_path / "run", checkpoint="0")
    rows = embed(model.backbone, model.view, split, EmbedOptions(canvas_px=16, num_workers=0))
    units = torch.nn.functional.normalize(rows.features.double(), dim=1)
    hits = []
    for row in ids.tolist():
        cosines = units @ units[row]
        cosines[row] = -2
        hits.append(bool(rows.labels[cosines.argmax()] == rows.labels[row]))
    first = read_metrics(tmp_path / "run", "eval")[0]
    assert first["validation_recall_at_1"] == pytest.approx(np.mean(hits), abs=1e-6)


def test_a_fine_tuning_that_collapses_says_what_to_change(
    data, start, tmp_path, capfd, monkeypatch
):
    """Every log line has the numbers of embeddings that are one point, from the second on."""
    collapsed = {"positive_similarity": 1.0, "negative_similarity": 0.999, "effective_rank": 1.0}
    lines = iter([{**collapsed, "negative_similarity": 0.2, "effective_rank": 20.0}])
    monkeypatch.setattr(
        finetuning, "similarities", lambda embeddings, labels: next(lines, collapsed)
    )
    recipe = recipe_of(tmp_path, finetunes, "steps=4", "run.keep=last")
    run_of(finetunes, recipe, data, tmp_path / "run", start)
    (alarm,) = read_metrics(tmp_path / "run", "alarm")
    assert alarm["step"] == 2
    assert alarm["raised"] == ["embedding_collapse", "rank_collapse"]
    said = " ".join(capfd.readouterr().err.split())
    assert "step 2: embedding_collapse: the mean cosine of two images is 0.999" in said
    assert said.count("tune.loss_lr") == 2
