"""A run that FSDP2 shards over two processes is the run of one: its numbers, files and promises."""

import json
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sslpipe.errors import RecipeError, UserError
from sslpipe.export.load import load_run
from sslpipe.models.backbones import small_resnet
from sslpipe.models.simclr import SimCLR
from sslpipe.recipe import load_recipe
from sslpipe.recipe.pretrain import Projector
from sslpipe.run.checkpoint_files import latest
from sslpipe.run.fsdp import check_precision, check_recipe, gathered, shard
from sslpipe.run.log import read_metrics
from sslpipe.run.session import Run
from tests.helpers import finetunes
from tests.helpers.processes import run_processes
from tests.helpers.runs import (
    NUMBERS,
    RECIPE,
    assert_same_numbers,
    assert_same_weights,
    at_each_step,
    kill_over,
    train_from_in_rank,
    train_in_rank,
    train_on_equal_views,
    train_over,
    write_recipe,
)

FP64 = ("optim.precision=fp64", "steps=5", "run.monitor_steps=5")
TOLERANCE = 1e-9  # as in test_invariance


def ask_for_fsdp():
    """As accelerate's launcher does with launch/fsdp.yaml."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_OFFLOAD_PARAMS="false")


def sharded_in_rank(process, *arguments):
    ask_for_fsdp()
    return train_on_equal_views(process, *arguments)


def sharded_from_in_rank(process, *arguments, init):
    ask_for_fsdp()
    return train_from_in_rank(process, *arguments, init=init)


def assert_same_run(expected_dir, run_dir):
    assert_same_numbers(expected_dir, run_dir, NUMBERS)
    assert_same_weights(tensors_of(expected_dir), tensors_of(run_dir), TOLERANCE, 1e-11)
    one, two = (load_run(folder).backbone.state_dict() for folder in (expected_dir, run_dir))
    assert_same_weights(one, two, 1e-5, 1e-7)  # what is exported and evaluated


def tensors_of(run_dir, checkpoint=None):
    """Everything in a checkpoint, the newest unless named, by its place there; whole tensors."""
    checkpoint = checkpoint or latest(run_dir)
    moments = torch.load(checkpoint / "parts.pt", weights_only=True)["optimizer"]["state"]
    tensors = load_file(checkpoint / "model.safetensors") | {
        f"{number}.{name}": value
        for number, values in moments.items()
        for name, value in values.items()
    }
    assert {type(value) for value in tensors.values()} == {torch.Tensor}
    return tensors


def test_two_shards_train_what_one_process_trains(data, tmp_path):
    """By LARS; AdamW: test_checkpoints_go_from_layout_to_layout, SGD: the next."""
    recipe = write_recipe(tmp_path)
    changes = ("optim.kind=lars", "optim.peak_lr=0.5", "data.micro_batch=4", "optim.ema=0.9")
    changes += ("run.monitor_steps=3",)  # the average is gathered, and cut again
    for name, by, world in (("one", train_on_equal_views, 1), ("two", sharded_in_rank, 2)):
        train_over(world, recipe, data, tmp_path / name, *FP64, *changes, by=by)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    evals = [read_metrics(tmp_path / name, "eval")[-1] for name in ("one", "two")]
    for name in evals[0].keys() & {"holdout_knn", "ema_holdout_knn"}:
        assert evals[0][name] == evals[1][name]


def test_nor_does_a_tuned_run_change(data, tmp_path):
    """Frozen blocks and statistics, decay towards the start, rates of their own, a frozen start."""
    recipe = write_recipe(tmp_path)
    train_over(1, recipe, data, tmp_path / "start", "steps=2", by=train_on_equal_views)
    tune = "tune={batchnorm='frozen', last_blocks=2, l2_to_init=0.1, layer_decay=0.5, "
    tune += "projector_first_steps=2}"
    sgd = ("optim.nesterov=true", "optim.clip_norm=0.5", "optim.decay_one_dim=true")
    for name, fn, world in (("one", train_from_in_rank, 1), ("two", sharded_from_in_rank, 2)):
        by = partial(fn, init=str(tmp_path / "start"))
        train_over(world, recipe, data, tmp_path / name, *FP64, *sgd, tune, by=by)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    first = [read_metrics(tmp_path / name, "eval")[0] for name in ("one", "two")]
    assert first[0]["step"] == 0  # before the model has been called in training
    assert first[0]["holdout_knn"] == first[1]["holdout_knn"]


@pytest.mark.parametrize(
    ("changes", "bf16", "same", "apart"),
    [
        # in float32 they would differ more: autocast reaches the sharded model
        ((), "optim.precision=bf16", {"rtol": 0, "atol": 1e-4}, "optim.precision=fp32"),
        # with the gradients that are sent in float64, everything else in it
        (
            ("optim.precision=fp64",),
            "optim.gradient_compression=bf16",
            {"rtol": 1e-6, "atol": 0},
            "optim.gradient_compression=none",
        ),
    ],
)
def test_bf16_rounds_what_ddp_rounds(data, tmp_path, changes, bf16, same, apart):
    losses = {}
    ddp, sharded = train_on_equal_views, sharded_in_rank
    runs = (("ddp", ddp, 2, bf16), ("sharded", sharded, 2, bf16), ("exact", ddp, 1, apart))
    for name, by, world, setting in runs:
        settings = ("steps=3", "run.save_steps=3", *changes, setting)
        train_over(world, write_recipe(tmp_path), data, tmp_path / name, *settings, by=by)
        losses[name] = torch.tensor([line["loss"] for line in read_metrics(tmp_path / name)])
    torch.testing.assert_close(losses["sharded"], losses["ddp"], **same)
    assert (losses["exact"] - losses["sharded"]).abs().max() > 1e-3


def test_checkpoints_go_from_layout_to_layout(data, tmp_path):
    """Two shards, one process, two shards, DDP; killed in between. The digest is one."""
    recipe = write_recipe(tmp_path)
    settings = ("optim.precision=fp64", "optim.kind=adamw", "optim.clip_norm=0.5", "steps=8")
    settings += ("run.save_steps=2", "optim.warmup_steps=2", "optim.peak_lr=0.001")
    run_dir, straight = tmp_path / "moved", tmp_path / "straight"
    layouts = ((sharded_in_rank, 2), (train_on_equal_views, 1), (sharded_in_rank, 2))
    for number, (by, world) in enumerate(layouts):
        point = f"train.step:{3 if number == 0 else 4}"  # two steps behind a checkpoint at most
        kill_over(world, point, recipe, data, run_dir, *settings, by=by)
        assert latest(run_dir).name == f"step-{2 * (number + 1):08d}"
    train_over(2, recipe, data, run_dir, *settings, by=train_on_equal_views)
    starts = [line["step"] for line in read_metrics(run_dir, "start")]
    assert starts == [0, 2, 4, 6]
    train_over(1, recipe, data, straight, *settings, by=train_on_equal_views)
    assert_same_weights(tensors_of(straight), tensors_of(run_dir), TOLERANCE, 1e-11)
    groups = [
        torch.load(latest(folder) / "parts.pt", weights_only=True)["optimizer"]["param_groups"]
        for folder in (straight, run_dir)
    ]
    assert groups[0] == groups[1]  # who computed the last steps has left no trace


def poisoned_shard_in_rank(process, step, *arguments):
    """At one step, the last rank's own part of one gradient is NaN; every loss is finite."""
    original, calls = Run.backward, []

    def backward(self, loss):
        original(self, loss)
        if len(calls) == step and process.rank == process.world_size - 1:
            next(self._model.parameters()).grad.to_local().view(-1)[0] = float("nan")
        calls.append(1)

    Run.backward = backward  # this process ends with the call
    return sharded_in_rank(process, *arguments)


def test_a_nan_in_one_shard_moves_no_weight_on_any_rank(data, tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    settings = ("steps=4", "run.save_steps=1", "run.keep_checkpoints=4", "optim.ema=0.9")
    settings += ("optim.kind=adamw",)
    run_processes(poisoned_shard_in_rank, 2, 2, str(recipe), str(data), str(run_dir), *settings)
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    _, before, after, last = (tensors_of(run_dir, folder) for folder in folders)
    assert_same_weights(before, after)  # nor any moment of the optimizer
    for name in ("backbone.network.0.weight", "ema.network.0.weight", "0.exp_avg"):
        assert not torch.equal(last[name], before[name])
    assert all(bool(value.isfinite().all()) for value in last.values())
    lines = read_metrics(run_dir)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert lines[2]["loss"] is not None
    for rank in range(2):
        (line,) = (run_dir / f"bad_steps.{rank}.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 2


def held_in_rank(process, *arguments):
    """How many numbers of weights, moments and averages this process holds before the last step."""
    found = {}

    def count(step, batch):
        found.update(numbers=[numel(x) for x in (weights, moments(optimizers[0]), averages)])

    def numel(tensors):  # with what else is kept for a tensor that is a view
        storages = [each.to_local().untyped_storage() for each in tensors]
        return sum(storage.nbytes() // 4 for storage in storages)

    def moments(optimizer):
        return [x for values in optimizer.state.values() for x in values.values() if x.ndim]

    weights, optimizers, averages = [], [], []

    def trained_names(model):
        return dict(model.backbone.named_parameters())

    prepare = Run.prepare

    def prepared(self, model, optimizer):
        weights.extend(model.parameters())
        averages.extend(dict(model.ema.named_buffers())[name] for name in trained_names(model))
        optimizers.append(optimizer)
        return prepare(self, model, optimizer)

    Run.prepare = prepared
    at_each_step(count)
    ask_for_fsdp()
    train_in_rank(process, *arguments)
    return found["numbers"], sum(x.numel() for x in weights), sum(x.numel() for x in averages)


def test_a_process_holds_half_of_everything(data, tmp_path):
    """Also in a run that was resumed from whole tensors."""
    arguments = write_recipe(tmp_path), data, tmp_path / "run", "optim.kind=adamw"
    arguments += ("steps=4", "run.save_steps=2", "optim.ema=0.9")
    kill_over(2, "train.step:3", *arguments, by=sharded_in_rank)
    ranks = train_over(2, *arguments, by=held_in_rank)
    assert ranks == [([10640 // 2, 10640, 10224 // 2], 10640, 10224)] * 2


def unequal_calls_in_rank(process):
    """Outputs of a sharded model that ranks call unequally often, its types within and after."""
    torch.manual_seed(0)
    model = SimCLR(small_resnet((8, 16)), Projector(hidden_dim=16, out_dim=8)).eval()
    images = torch.rand(2, 3, 16, 16)
    expected = model.backbone(images).detach()
    shard(model, torch.device("cpu"))
    kinds = []
    with gathered(model.backbone), torch.no_grad():
        for _ in range(1 + process.rank):  # with a collective in each, this would hang
            assert torch.equal(model.backbone(images), expected)
        kinds.append({type(p).__name__ for p in model.backbone.parameters()})
    kinds.append({type(p).__name__ for p in model.parameters()})
    model(images).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return kinds


def test_gathered_weights_take_unequal_numbers_of_batches():
    for within, after in run_processes(unequal_calls_in_rank, 2, timeout_s=60):
        assert within == {"Parameter"}
        assert after == {"DTensor"}


# what is refused, in one line, before anything is written


@pytest.fixture
def asked(monkeypatch):
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("momentum.start=0.99", r"\[momentum\] is not there under FSDP; leave it out, or "),
        ("run.compile=true", "run.compile = true is not there under FSDP"),
        ("run.cuda_graph=true", "run.cuda_graph = true is not there under FSDP"),
        (None, r"\[sampler\]: a fine-tuning cannot be sharded by FSDP"),
        ("FSDP_VERSION=1", "fsdp_version: 1 is not there; set fsdp_version: 2"),
        ("FSDP_OFFLOAD_PARAMS=true", "set fsdp_offload_params: false"),
        ("FSDP_ACTIVATION_CHECKPOINTING=true", "set fsdp_activation_checkpointing: false"),
        ("FSDP_RESHARD_AFTER_FORWARD=false", "set fsdp_reshard_after_forward: true"),
        ("FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT", "set fsdp_state_dict_type: FULL_STATE"),
        ("FSDP_AUTO_WRAP_POLICY=NO_WRAP", "leave it out, as launch/fsdp.yaml does"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(asked, tmp_path, changes, named):
    """A setting of the recipe, or one of the launcher that would have no effect."""
    if changes is None:
        recipe = load_recipe(finetunes.write_recipe(tmp_path))
    elif changes.startswith("FSDP_"):
        recipe = load_recipe(write_recipe(tmp_path))
        check_recipe(recipe)
        asked.setenv(*changes.split("="))
    else:
        recipe = load_recipe(write_recipe(tmp_path), [changes])
    with pytest.raises(UserError, match=named):
        check_recipe(recipe)
    asked.setenv("WORLD_SIZE", "1")  # then nothing is sharded
    check_recipe(recipe)


def test_a_precision_that_is_timed_or_scaled_is_refused(asked):
    with pytest.raises(RecipeError, match=r"optim\.precision = 'fp16' is not there under FSDP"):
        check_precision("fp16")
    with pytest.raises(RecipeError, match=r"optim\.precision = 'auto' times the whole model"):
        check_precision("")  # of a new run
    for precision in ("fp32", "bf16", "fp64"):
        check_precision(precision)


def test_a_new_run_says_its_precision_and_a_resumed_one_has_it(data, tmp_path):
    recipe = write_recipe(tmp_path, RECIPE.replace('precision = "fp32"\n', ""))
    arguments = recipe, data, tmp_path / "run", "steps=2", "run.save_steps=1"
    with pytest.raises(AssertionError, match=r"optim\.precision = 'auto' times the whole model"):
        train_over(2, *arguments, by=sharded_in_rank)
    assert not (tmp_path / "run" / "checkpoints").exists()
    kill_over(1, "train.step:2", *arguments, by=train_on_equal_views)
    assert [done for done, _ in train_over(2, *arguments, by=sharded_in_rank)] == [2, 2]


def test_a_parameter_without_dimensions_is_refused_by_name():
    model = nn.Module()
    model.backbone = nn.Linear(2, 2)
    model.backbone.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(RecipeError, match=r"its parameter backbone\.gain is a single number"):
        shard(model, torch.device("cpu"))
