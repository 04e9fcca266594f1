import copy
import dataclasses
import io
import math
import re
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torchvision
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import VisionTransformer

import sslpipe.check.estimate
from sslpipe.augment.two_views import build_augment
from sslpipe.check import pretraining
from sslpipe.check.estimate import step_seconds, time_text
from sslpipe.check.pretraining import check_pretraining, mixing_score
from sslpipe.data.holdout import holdout_ids, plan_order
from sslpipe.data.index import Split, load_index
from sslpipe.data.order import ORDER_VERSION, Order
from sslpipe.errors import RecipeError, UserError
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.flops import step_flops
from sslpipe.models.tuning import count_parameters
from sslpipe.parts import build_model
from sslpipe.plan import Pretraining
from sslpipe.planning.memory import estimate_memory
from sslpipe.recipe.identity import identity
from sslpipe.recipe.reading import load_recipe
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.optimizers import build_optimizer
from tests.helpers.runs import ROOT, command_line, write_recipe


def rows_of(check):
    """All that a check prints, by name; the later of two rows of a name."""
    return dict(check.rows + check.details)


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch):
    monkeypatch.setattr(sslpipe.check.estimate, "_LONG_ENOUGH_S", 0.0)


@pytest.fixture
def index(tmp_path):
    return load_index(write_dataset(tmp_path / "data"))


@pytest.fixture
def recipe_of(tmp_path):
    path = write_recipe(tmp_path)
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def checked(recipe_of, index):
    """Check a plan of the recipe with overrides, on `index`."""
    return lambda *overrides: check_pretraining(Pretraining.make(recipe_of(*overrides), index))


def test_the_sizes_are_those_of_the_recipe_and_the_data(recipe_of, index):
    recipe = recipe_of("epochs=3")
    result = check_pretraining(Pretraining.make(recipe, index))
    rows = rows_of(result)
    assert rows["data"] == "tiny: 128 images, 16 held out"
    rounded = rows_of(check_pretraining(Pretraining.make(recipe_of("data.holdout=15"), index)))[
        "data"
    ]
    assert "16 held out (data.holdout = 15" in rounded
    assert rows["steps per epoch"] == "7 (the run: 3 epochs)"  # (128 - 16) / 16
    assert (result.recipe.steps, rows["steps"]) == (21, "21")
    assert rows["negatives per anchor"] == "30 (2 x 16 - 2)"
    assert rows["processes"].startswith("1, 2, 4 (they divide")
    assert result.digest == identity(recipe.resolved(7), index.sha256, ORDER_VERSION)["digest"]


def test_resnet18_has_torchvisions_parameters_and_flops():
    backbone = build_backbone(backbone_settings(kind="torchvision/resnet18"), crop_px=224)
    published = torchvision.models.ResNet18_Weights.DEFAULT.meta
    head = 512 * 1000 + 1000
    assert count_parameters(backbone) == published["num_params"] - head
    multiply_adds = published["_ops"] * 1e9
    assert step_flops(backbone, 1, 224) == pytest.approx(2 * 3 * 2 * multiply_adds, rel=0.01)


def test_a_holdout_that_leaves_little_to_train_on_is_told_with_one_to_set(checked, monkeypatch):
    monkeypatch.setattr(pretraining, "mixing_score", lambda *given: 0.5)
    (mixed,) = checked("data.holdout=32").warnings
    (warning,) = checked("data.holdout=36").warnings  # the shards are not blamed, too
    assert mixed.startswith("mixing score 0.500")
    assert "data.holdout = 36 holds out 36 of 128 images of the split 'train' (28%)" in warning
    assert warning.endswith("set data.holdout=12")


def test_flops_of_a_transformer_are_those_of_torchs_counter():
    network = VisionTransformer(32, 16, 2, 2, 32, 64)
    with FlopCounterMode(display=False) as counter:
        network.eval()(torch.zeros(1, 3, 32, 32))
    assert step_flops(network, 5, 32) == 5 * 2 * 3 * counter.get_total_flops()


def test_activations_are_what_autograd_must_keep(recipe_of):
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 5))
    memory = estimate_memory(model, recipe_of("data.batch_size=64"), crop_px=4, precision="fp32")
    assert memory.activations == 128 * 20 * 4  # a ReLU's output, for itself and the next layer
    assert memory.views == 128 * 48 * 4
    assert memory.weights == memory.gradients == 4 * (48 * 20 + 20 + 20 * 5 + 5)
    canvas_px = recipe_of().data.canvas_px
    assert memory.batches == (4 + 2) * 64 * 3 * canvas_px**2
    assert memory.total == sum(memory)
    halved = estimate_memory(
        model, recipe_of("data.batch_size=64"), crop_px=4, precision="fp32", world=2
    )
    assert halved.batches == memory.batches // 2
    assert (halved.activations, halved.views) == (memory.activations // 2, memory.views // 2)
    micro = recipe_of("data.batch_size=64", "data.micro_batch=8")
    micro = estimate_memory(model, micro, crop_px=4, precision="fp32")
    assert (micro.activations, micro.views) == (memory.activations // 8, memory.views // 8)
    assert (micro.weights, micro.batches) == (memory.weights, memory.batches)
    assert (
        estimate_memory(model.double(), recipe_of(), crop_px=4, precision="fp64").views
        == 32 * 48 * 8
    )


def kept_by_a_real_forward(model, rows, px, precision):
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    views, kept = torch.zeros(rows, 3, px, px), {}
    own.add(views.untyped_storage().data_ptr())

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        model.train()(views)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_line_through_two_and_four_images_meets_a_real_batch(recipe_of, precision):
    recipe = recipe_of("data.batch_size=64")
    model = build_model(recipe, 16)
    real = kept_by_a_real_forward(model, 128, 16, precision)
    assert estimate_memory(
        model, recipe, crop_px=16, precision=precision
    ).activations == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(
    "override", ["optim.kind=sgd", "optim.momentum=0", "optim.kind=adamw", "optim.kind=lars"]
)
def test_the_optimizer_state_is_what_the_optimizer_allocates(recipe_of, override):
    recipe = recipe_of(override)
    model = build_model(recipe, 16)
    optimizer = build_optimizer(model, recipe.optim)
    model(torch.rand(4, 3, 16, 16)).square().sum().backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if t is not None]
    real = sum(t.numel() * t.element_size() for t in held if t.ndim)  # step counters are scalars
    assert estimate_memory(model, recipe, crop_px=16, precision="fp32").optimizer == real


@pytest.mark.parametrize(("step_s", "shown"), [(0.0123, "0.012"), (9.6, "9.6"), (123.4, "123")])
def test_the_time_of_a_step_is_a_plain_number(tmp_path, step_s, shown):
    said = time_text(step_s, load_recipe(write_recipe(tmp_path)), "fp32", torch.device("cpu"))
    assert f", {shown} s/step (" in said


def test_the_estimated_time_is_a_rows_time_times_the_rows(recipe_of, index, monkeypatch):
    """By the CPU time of one thread: other programs take the clock's, waiting threads the rest."""
    now_s, threads = [0.0], []
    monkeypatch.setattr(time, "thread_time", lambda: now_s[0])
    monkeypatch.setattr(time, "perf_counter", lambda: 40 * now_s[0])
    monkeypatch.setattr(time, "process_time", lambda: 80 * now_s[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    class Model(nn.Linear):
        def forward(self, views):  # a row takes 1 ms with autocast, 3 ms without
            now_s[0] += (0.001 if torch.is_autocast_enabled("cpu") else 0.003) * len(views)
            return super().forward(views.flatten(1))

    cpu, share = torch.device("cpu"), 0.8 * 2  # of two threads
    for settings, precision, rows_s in (
        (("data.batch_size=1024",), "fp32", 2048 * 0.003),
        (("data.batch_size=1024",), "bf16", 2048 * 0.001),
        (("data.batch_size=64", "data.micro_batch=16"), "fp32", 2 * 128 * 0.003),  # twice forward
    ):
        recipe = recipe_of(*settings)
        augment = build_augment(recipe, index)
        seconds = step_seconds(
            Model(3 * 16 * 16, 2),
            augment,
            canvas_px=16,
            batch_size=recipe.data.batch_size,
            precision=precision,
            device=cpu,
            cached=recipe.data.micro_batches > 1,
        )
        assert seconds == pytest.approx(rows_s / share)
    assert threads == [1, 2] * 3


def test_no_global_batch_holds_a_sample_twice_and_a_double_would_be_counted(recipe_of, index):
    plan = Pretraining.make(recipe_of(), index)
    result = check_pretraining(plan)
    order = plan_order(recipe_of(), index)
    ids = [order.ids(step, range(4))[1].tolist() for step in range(7)]
    assert max(n for batch in ids for n in Counter(batch).values()) == 1
    looked = "over 7 planned batches of the first epoch"
    assert rows_of(result)["duplicates in a global batch"] == f"0 {looked}"

    class Twice(Order):
        def ids(self, step, streams):
            epoch, actual = super().ids(step, streams)
            actual[:3] = actual[3]
            return epoch, actual

    doubled = copy.copy(plan.order)
    doubled.__class__ = Twice
    rows = rows_of(check_pretraining(dataclasses.replace(plan, order=doubled)))
    assert rows["duplicates in a global batch"] == f"{7 * 3} {looked}"


def test_the_mixing_score_is_the_ratio_of_entropies():
    pool = np.array([0, 0, 1, 1])  # as large as a batch: the uniform shuffle's entropy is ln 2
    skewed = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert mixing_score([np.array([1, 0, 1, 0])], pool) == pytest.approx(1, abs=1e-12)
    assert mixing_score([np.array([0, 0, 0, 1])], pool) == pytest.approx(skewed, abs=1e-12)
    assert mixing_score([np.array([0] * 4), np.array([1] * 4)], pool) == 0
    assert mixing_score([np.array([0, 1, 0, -1])], np.array([0, 0, 1, -1])) is None
    assert mixing_score([np.array([2, 2])], np.array([2, 2, 2])) is None


def monitor_warnings(recipe, index):
    plan = Pretraining.make(recipe, index)
    said = plan.remarks(plan.build())
    return [text for text in said if "held-out kNN" in text]


@pytest.mark.parametrize(
    ("shape", "holdout", "reason"),
    [
        ({"classes": 40, "sizes": (60, 60)}, 24, "no neighbour can be right"),
        ({"classes": 40, "sizes": (60, 60)}, 0, "data.holdout = 0"),
        ({"classes": 120, "sizes": (60, 60)}, 12, "rounds to no image of each"),
        ({"labelled": False, "sizes": (60, 60)}, 12, "no image has a label"),
        ({"classes": 2, "sizes": (60, 60)}, 2, "no neighbour can be right"),
    ],
)
def test_why_the_monitor_says_nothing_is_told_and_the_advice_followed_works(
    recipe_of, tmp_path, shape, holdout, reason
):
    index = load_index(write_dataset(tmp_path / "data", **shape))
    small = ("data.batch_size=2", "data.num_streams=1", "run.monitor_steps=5")
    (warning,) = monitor_warnings(recipe_of(*small, f"data.holdout={holdout}"), index)
    assert reason in warning
    advised = re.findall(r"data\.\w+=\w+", warning)
    if not advised:  # a single class, held out already: nothing is left to set
        assert "scores without labels are logged" in warning
        return
    recipe = recipe_of(*small, *advised)
    ids = holdout_ids(recipe, index.split("train"))
    assert 2 <= len(ids) <= 60
    tells = shape.get("labelled", True) and 1 < shape["classes"] < 120
    # labels that could not be used are named again; without any, it is what was asked for
    assert bool(monitor_warnings(recipe, index)) == (shape.get("labelled", True) and not tells)
    assert ("for scores without labels" in warning) != tells
    if tells:  # what chooses the best checkpoint is there, too
        monitor_warnings(recipe_of(*small, *advised, "run.keep=best"), index)


@pytest.mark.parametrize(
    ("labelled", "asked"),
    [
        (True, ("run.keep=best", "run.monitor_steps=0", "data.holdout=0")),
        (False, ("run.keep=best", "run.monitor_steps=0", "data.holdout=0")),
        (True, ("run.keep=best", "run.monitor_steps=0", "data.holdout=12")),
        (False, ("run.keep=best", "run.monitor_steps=0", "data.holdout=12")),
        (True, ("run.patience=2", "run.monitor_steps=5", "data.holdout=0")),
        (False, ("run.patience=2", "run.monitor_steps=5", "data.holdout=0")),
        (False, ("run.monitor_steps=5", "data.holdout=12", "data.holdout_by=class")),
    ],
)
def test_one_round_of_advice_gives_all_that_choosing_weights_needs(
    recipe_of, tmp_path, labelled, asked
):
    index = load_index(write_dataset(tmp_path / "data", labelled=labelled, sizes=(60, 60)))
    small = ("data.batch_size=2", "data.num_streams=1")

    def said(*overrides):
        plan = Pretraining.make(recipe_of(*small, *overrides), index)
        try:
            return monitor_warnings(recipe_of(*small, *overrides), index), len(plan.watched)
        except RecipeError as error:
            return [str(error)], 0

    messages, _ = said(*asked)
    if "data.holdout=12" in asked and "run.keep=best" in asked and labelled:
        assert "data." not in messages[0].partition(", or ")[0]
    (message,) = messages
    advised = re.findall(r"(?:data|run)\.\w+=\w+", re.split(", or ", message)[0])
    assert advised
    left, watched = said(*asked, *advised)
    assert watched >= 2
    assert not [text for text in left if "needs evaluations" in text or "no held-out" in text]


def test_labels_that_cannot_choose_leave_it_to_the_other_views(
    recipe_of, index, tmp_path, monkeypatch
):
    one = load_index(write_dataset(tmp_path / "one", classes=1))
    settings = ("run.monitor_steps=5", "data.holdout=16", "run.patience=2")
    assert "one class" in monitor_warnings(recipe_of(*settings), one)[0]
    with pytest.raises(RecipeError, match="patience has no held-out images to choose by; set data"):
        check_pretraining(Pretraining.make(recipe_of(*settings[::2], "data.holdout=0"), one))
    # only the first of those held out has a label, so that it has no neighbour
    monkeypatch.setattr(Split, "labels_of", lambda self, ids: np.arange(len(ids)) * -1)
    assert monitor_warnings(recipe_of(*settings), index)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.warmup_steps=12", "does not end before the run's 12 steps"),
        ("backbone={kind='torchvision/resnet18', stem='imagenet'}", "backbone.stem = 'imagenet'"),
    ],
)
def test_what_a_setting_costs_is_reported(checked, override, message):
    (warning,) = {*checked(override).warnings} - {*checked().warnings}
    assert message in warning


@pytest.mark.parametrize(("together", "window", "warned"), [(4, 8, True), (1, 64, False)])
def test_few_groups_in_a_window_are_a_warning(recipe_of, tmp_path, together, window, warned):
    manifest = write_dataset(tmp_path / "groups", (256,))
    index = add_columns(manifest, icon=[f"icon{i // together % 64}" for i in range(256)])
    settings = ("pairs.positive=icon", "data.num_streams=4", f"data.shuffle_window={window}")
    result = check_pretraining(Pretraining.make(recipe_of(*settings), index))
    assert float(rows_of(result)["mixing score of groups"].split()[0]) < 1
    texts = [text for text in result.warnings if text.startswith("mixing score of groups 0.")]
    assert len(texts) == warned
    if warned:
        assert "each of 4 streams gives 4 samples to a batch from windows of 8" in texts[0]
        assert "raise data.shuffle_window or data.num_streams" in texts[0]


def test_a_queue_needs_a_momentum_encoder_and_is_what_the_negatives_come_from(checked):
    queue = ("loss.kind=moco", "loss.queue_rows=96")
    with pytest.raises(RecipeError, match=r"add a section \[momentum\]"):
        checked(*queue)
    result = checked(*queue, "momentum.start=0.99")
    assert rows_of(result)["negatives per anchor"] == "96 (the full queue)"


def test_a_momentum_encoder_costs_its_weights_and_a_forward(checked):
    plain = checked()
    pair = checked("momentum.start=0.99")
    assert pair.memory.weights == 2 * plain.memory.weights
    assert pair.memory.gradients == plain.memory.gradients
    assert pair.memory.activations < 0.6 * plain.memory.activations  # keys keep none
    # both views forward, backward (twice a forward) for one of them only
    assert pair.step_flops == pytest.approx(plain.step_flops * 4 / 6)


def test_the_tables_show_everything_and_cut_no_digest(checked):
    console = Console(file=io.StringIO(), width=60)
    result = checked("augment.preset=byol")
    console.print(result.render())
    text = console.file.getvalue()
    assert result.digest in "".join(text.split())
    for expected in ("time", "memory", "FLOPs per step", "no_decay: ", "BatchNorm2d.bias", "0.05"):
        assert expected in text
    (row,) = [row for row in text.splitlines() if row.strip().startswith("blur_prob")]
    assert "1 | 0.1" in row  # views that differ, side by side
    # each setting of the views once, those that do nothing in one line
    _, _, views = text.partition("\nviews")
    views, _, _ = views.partition("\ndetails")
    words = views.replace(",", " ").split()
    assert [words.count(key) for key in result.views[0]] == [1] * len(result.views[0])
    assert not [line for line in views.splitlines() if re.fullmatch(r" *\w+ +0 *", line)]
    assert "at 0:" in views
    console.file.truncate(0)
    console.print(result._replace(views=({"blur_prob": 0.5},)).render())
    assert "at 0:" not in console.file.getvalue()  # where there is none


def test_the_command_prints_the_check_or_one_line(tmp_path, index, monkeypatch):
    monkeypatch.setenv("SSLPIPE_NEXT", "0")
    recipe, data = str(write_recipe(tmp_path)), f"{index.folder}/dataset.json"
    before = sorted(tmp_path.rglob("*"))
    good = command_line("check", recipe, "--data", data, "data.num_streams=8", status=0)
    table, _, defaults = good.stdout.partition("at their defaults: ")
    assert re.search(r"data\.num_streams +8\b", table.partition("settings")[2])
    assert "run.max_bad_steps 10" in " ".join(defaults.split())
    assert "run.max_bad_steps" not in table
    assert sorted(tmp_path.rglob("*")) == before  # it writes nothing
    # nor imports torch.compile, which takes as long as torch itself
    code = "import sys; sys.argv[0] = 'sslpipe'\nfrom sslpipe.__main__ import main\ntry: main()\n"
    code += "finally: print('torch._dynamo' in sys.modules)"
    words = [sys.executable, "-c", code, "check", recipe, "--data", data]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "False"


def test_python_checks_what_the_command_shows(tmp_path, index, monkeypatch):
    monkeypatch.setenv("SSLPIPE_NEXT", "0")
    recipe, data = str(write_recipe(tmp_path)), f"{index.folder}/dataset.json"
    before = sorted(tmp_path.rglob("*"))
    shown = command_line("check", recipe, "--data", data, "data.num_streams=8", status=0).stdout
    ours = sslpipe.check_recipe(recipe, data, overrides=["data.num_streams=8"])
    assert sorted(tmp_path.rglob("*")) == before  # it writes nothing
    there = "".join(shown.split())
    measured = ("time", "memory")  # here, and in another process
    for name, text in (*ours.rows, *ours.details):
        assert "".join(name.split()) in there
        assert name in measured or "".join(text.split()) in there
    assert ours.digest in there
    same = sslpipe.check_recipe(load_recipe(recipe, ["data.num_streams=8"]), index)
    assert same.digest == ours.digest
    # a run's own recipe and, where it keeps one, its start
    sslpipe.train(recipe, index, tmp_path / "run", overrides=["steps=1"])
    again = sslpipe.check_recipe(tmp_path / "run", index)
    assert again.digest == sslpipe.check_recipe(recipe, index, overrides=["steps=1"]).digest
    tuned = sslpipe.check_recipe(recipe, index, init=tmp_path / "run")
    assert dict(tuned.rows)["starts from"] != dict(ours.rows)["starts from"]
    sslpipe.train(recipe, index, tmp_path / "on", init=tmp_path / "run", overrides=["steps=1"])
    kept = sslpipe.check_recipe(tmp_path / "on", index)
    assert dict(kept.rows)["starts from"] == dict(tuned.rows)["starts from"]
    with pytest.raises(UserError, match="overrides are for the path"):
        sslpipe.check_recipe(load_recipe(recipe), index, overrides=["steps=1"])


def test_without_data_the_settings_are_checked_and_what_is_unknown_is_said(tmp_path):
    recipe = str(write_recipe(tmp_path))
    shown = command_line("check", recipe, "data.num_streams=8", status=0).stdout
    assert re.search(r"data\.num_streams +8\b", shown)
    assert "--data" in shown
    assert not re.search(r"digest +\w{16}|s/step", shown)  # nothing was built
    wrong = command_line("check", recipe, "data.num_stream=8", status=2)
    assert "data.num_stream" in wrong.stderr
    # weights are fitted to data: they are not read and silently forgotten
    refused = command_line("check", recipe, "--init", "timm:resnet18", status=2)
    assert "--init" in refused.stderr
    assert "--data" in refused.stderr


@pytest.mark.promise(8)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.split=valid",), "has no split 'valid'; it has: train"),
        (("data.batch_size=256",), "data.batch_size = 256 is more than the 112 samples"),
        (("data.holdout=128",), "data.holdout = 128 leaves nothing to train on"),
        (("data.keep=duplicate_group first",), "`sslpipe curate duplicates` writes it"),
        (("data.holdout_by=patients",), "no column 'patients'; did you mean 'patient'"),
        (("backbone={kind = 'torchvision/resnet19'}",), "did you mean 'resnet1"),
        (
            ("augment.crop_pixels=3",),
            "augment.crop_pixels is not a setting of the views; did you mean 'crop_px'",
        ),
        (("optim.precision=fp16", "run.device=cpu"), "precision = 'fp16' needs a CUDA device"),
    ],
)
def test_what_cannot_be_trained_is_one_user_error(recipe_of, tmp_path, overrides, message):
    index = add_columns(write_dataset(tmp_path / "data"), patient=["a", "b"] * 64)
    with pytest.raises(UserError) as caught:
        check_pretraining(Pretraining.make(recipe_of(*overrides), index))
    assert message in str(caught.value)


@pytest.mark.promise(8)
def test_missing_and_truncated_shards_are_one_user_error(recipe_of, tmp_path):
    path = write_dataset(tmp_path / "broken")
    path.with_name("train-000003.tar").unlink()
    with open(path.with_name("train-000005.tar"), "r+b") as file:
        file.truncate(2048)
    with pytest.raises(
        UserError, match=r"train-000003\.tar is missing; train-000005\.tar has 2048"
    ):
        Pretraining.make(recipe_of(), load_index(path))


def test_columns_whose_groups_straddle_splits_are_named(recipe_of, tmp_path):
    path = write_dataset(tmp_path / "two")
    write_dataset(tmp_path / "two", (4,), split="test")
    add_columns(path, patient=["a", "b"] * 64, place=["y", "x"] * 64, age=[1, 2] * 64)
    add_columns(
        path, "test", patient=["b", "c", "c", None], place=["z", None] * 2, age=[3, 4, 5, 5]
    )
    result = check_pretraining(Pretraining.make(recipe_of(), load_index(path)))
    (warning,) = [text for text in result.warnings if "straddle" in text]
    assert "1 of 2 values of patient in test are in train, too" in warning
    assert "place" not in warning
    assert "age" not in warning
    # what two partners are to differ in, as a vendor, is no group that stays whole
    recipe = recipe_of("pairs.positive=age", "pairs.different=patient")
    plan = Pretraining.make(recipe, load_index(path))
    assert not [text for text in check_pretraining(plan).warnings if "straddle" in text]


@pytest.mark.parametrize("batch_size", [32, 64, 128])
def test_a_batch_beyond_what_a_large_holdout_leaves_is_answered_by_a_smaller_one(
    recipe_of, tmp_path, batch_size
):
    """The advice is followed, fits, and trains on most images."""
    index = load_index(write_dataset(tmp_path / "data"))
    given = ["data.holdout=100", f"data.batch_size={batch_size}"]
    with pytest.raises(UserError, match="more than the") as caught:
        Pretraining.make(recipe_of(*given), index)
    advice = str(caught.value).rpartition("; set ")[2].split()
    plan = Pretraining.make(recipe_of(*given, *advice), index)
    assert len(plan.watched) <= len(plan.split) / 4
    if batch_size == 64:
        assert not any("batch_size" in word for word in advice)
