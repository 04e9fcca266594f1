"""A non-finite step leaves weights and buffers of all ranks as they were, and the run continues."""

import json
import math
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from sslpipe.augment.two_views import FusedViews
from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError, UserError
from sslpipe.optim.optimizers import OPTIMIZERS
from sslpipe.plan import Pretraining
from sslpipe.pretrain import pretrain
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.accelerator import start_accelerator
from sslpipe.run.guard import StepGuard, advice
from sslpipe.run.log import read_metrics
from sslpipe.run.status import status
from tests.helpers.dataset import write_dataset
from tests.helpers.optimizers import build_optimizer
from tests.helpers.processes import run_processes
from tests.helpers.runs import assert_same_weights, final_weights, train_in_rank, write_recipe


def poisoned_in_rank(process, steps, *arguments):
    """At the given steps, the views of the last rank alone are NaN."""
    original, calls = FusedViews.forward, []

    def poisoned(self, batch, **given):
        views = original(self, batch, **given)
        if len(calls) in steps and process.rank == process.world_size - 1:
            views = views * float("nan")
        calls.append(1)
        return views

    FusedViews.forward = poisoned  # this process ends with the call
    return train_in_rank(process, *arguments)


def poisoned_gradient_in_rank(process, steps, *arguments):
    """At the given steps, one gradient of the last rank alone is NaN; every loss is finite."""
    original = torch.Tensor.backward
    calls = []

    def backward(self, *given, **named):
        original(self, *given, **named)
        calls.append(1)

    def train(recipe, index, run_dir):
        plan = Pretraining.make(recipe, index, run_dir=run_dir)
        parts = plan.build()
        weight = next(parts.model.parameters())
        bad = process.rank == process.world_size - 1
        weight.register_hook(lambda g: g * float("nan") if bad and len(calls) in steps else g)
        return pretrain(plan, run_dir, parts)

    torch.Tensor.backward = backward
    return train_in_rank(process, *arguments, train=train)


PAIR = ("momentum.start=0.5", "loss.kind=moco", "loss.queue_rows=24", "data.micro_batch=8")


@pytest.mark.parametrize(
    ("world", "poison", "steps", "settings"),
    [
        (1, poisoned_in_rank, (2,), ()),
        (2, poisoned_in_rank, (8, 9), PAIR),  # a step makes 2 x 2 views
        (2, poisoned_gradient_in_rank, (7,), PAIR),  # and 1 + 2 calls of backward
    ],
)
def test_a_nan_on_one_rank_changes_nothing_on_any_and_is_counted(
    data, tmp_path, world, poison, steps, settings
):
    """Weights, running statistics, the momentum encoder with its own, the queue."""
    recipe = write_recipe(tmp_path)
    settings = ("steps=4", "run.save_steps=1", "run.keep_checkpoints=4", *settings)
    arguments = (str(recipe), str(data), str(tmp_path / "run"), *settings)
    ranks = run_processes(poison, world, steps, *arguments)
    assert [done for done, _ in ranks] == [4] * world
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    _, before, after, last = (load_file(folder / "model.safetensors") for folder in folders)
    assert any(key.startswith("momentum.") for key in before) == (PAIR[0] in settings)
    assert_same_weights(before, after)
    first = [key for key in last if key.endswith("network.0.weight")]  # of each of these
    assert len(first) == (2 if PAIR[0] in settings else 1)
    assert not any(torch.equal(last[key], before[key]) for key in first)
    assert all(bool(torch.isfinite(value).all()) for value in last.values())
    queues = [torch.load(folder / "parts.pt", weights_only=True)["loss"] for folder in folders]
    for key, value in queues[1].items():
        assert torch.equal(queues[2][key], value), key
        assert not torch.equal(queues[3][key], value) or key == "filled_rows"  # it was full
    lines = read_metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert (lines[2]["loss"] is None) == (poison is poisoned_in_rank)
    assert lines[2]["grad_norm"] is None
    for rank in range(world):
        (line,) = (tmp_path / "run" / f"bad_steps.{rank}.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 2
        assert json.loads(line)["ids"] == ranks[rank][1][2][0].tolist()


def test_too_many_in_a_row_stop_the_run_with_a_remedy(data, tmp_path):
    recipe = write_recipe(tmp_path)
    arguments = (str(recipe), str(data), str(tmp_path / "run"), "run.max_bad_steps=3")
    with pytest.raises(AssertionError, match=r"3 steps in a row had a non-finite loss"):
        run_processes(poisoned_in_rank, 1, (6, 7, 8), *arguments)
    failed = (tmp_path / "run" / "FAILED").read_text()
    assert "UserError: 3 steps in a row" in failed
    assert "(the last: step 9, loss nan, gradient norm nan)" in failed
    summary = status(tmp_path / "run")
    assert f"; the last checkpoint is {summary['checkpoint']['name']}. Every step" in failed
    good = [line for line in read_metrics(tmp_path / "run") if line["loss"] is not None][-1]
    assert f"the last finite log line: step {good['step']}, loss {good['loss']:.4g}, lr " in failed
    assert all(bool(torch.isfinite(v).all()) for v in final_weights(tmp_path / "run").values())


@pytest.mark.parametrize(
    ("clip_norm", "precision", "moved", "named"),
    [
        (None, "fp32", True, ["it is 3e+11; try optim.peak_lr=3e+10", "optim.clip_norm"]),
        (1.0, "bf16", True, ["rate or the precision is", "optim.peak_lr", "optim.precision = "]),
        (None, "fp32", False, ["sslpipe preview --ids"]),
        (None, "bf16", False, ["sslpipe preview --ids", "optim.precision = 'fp32'"]),
    ],
)
def test_what_to_change_is_named_unless_it_is_set_already(clip_norm, precision, moved, named):
    said = advice(OPTIMIZERS["lars"](peak_lr=3e11, clip_norm=clip_norm), precision, moved=moved)
    keys = ("optim.peak_lr", "optim.clip_norm", "optim.precision")
    assert [key in said for key in keys] == [any(key in text for text in named) for key in keys]
    assert all(text in said for text in named)


@pytest.fixture
def trainee_of(tmp_path):
    """Makes a `Trainee`."""
    with pytest.MonkeyPatch.context() as patch:

        def make(folder=tmp_path, **settings):
            folder.mkdir(exist_ok=True)
            return Trainee(folder, patch, **settings)

        yield make
    AcceleratorState._reset_state(reset_partial_state=True)  # when nothing of it is patched


class Trainee:
    """A small model, trained as the loop does; under an fp16 scaler where there is a scale.

    accelerate makes fp32 of fp16 without a GPU, so it is set afterwards. Fused optimizers: a step
    that is decided on the device needs them, and a CPU has them too.
    """

    def __init__(self, folder, monkeypatch, *, on_device, scale=None, kind="lars", most=2, lr=0.5):
        self.accelerator = Accelerator(cpu=True)
        if scale:
            monkeypatch.setattr(self.accelerator.state, "_mixed_precision", "fp16")
            monkeypatch.setattr(self.accelerator, "native_amp", True)
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 6, bias=False)  # the norm takes a bias away
        self.model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(6))
        self.model.register_buffer("followed", torch.zeros(6, 4).T)  # not contiguous
        self.model.register_buffer("flags", torch.zeros(3, dtype=torch.bool))  # not of 4 bytes each
        own = {"trust_coefficient": 0.1} if kind == "lars" else {}
        settings = OPTIMIZERS[kind](peak_lr=lr, weight_decay=0.1, **own)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", on_device and kind != "lars")
            inner = build_optimizer(self.model, settings)
        self.optimizer = AcceleratedOptimizer(inner, scaler=self.accelerator.scaler)
        self.accelerator._optimizers.append(self.optimizer)
        self.guard = StepGuard(
            [self.model],
            self.accelerator,
            self.optimizer,
            max_bad_steps=most,
            folder=folder,
            first_step=0,
            rank=0,
            on_device=on_device,
            warn=(warnings := []).append,
            optim=settings,
            precision="fp32",
        )
        self.done, self.warnings = 0, warnings

    def step(self, *, gradient=1.0, loss_factor=1.0, clip_norm=0.01):
        """One step of the loop; its loss and its gradient come out times these factors."""
        self.guard.remember()
        rows = torch.arange(20.0).view(5, 4) + self.done
        loss = self.model(rows).square().mean() + self.model[0].weight.square().sum()
        self.accelerator.backward(loss)
        self.model[0].weight.grad.mul_(gradient)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip_norm)
        ids = torch.arange(5) + 10 * self.done
        numbers = loss * loss_factor, norm
        with self.guard.step(*numbers) as decision:
            self.model.followed.lerp_(self.model[0].weight.T, 0.25)
            self.model.flags[self.done % 3].logical_not_()
        assert self.model[0].weight.grad is None
        self.guard.count(self.done, ids, ids + 9, decision, epoch=self.done // 3)
        self.done += 1
        return not bool(decision.skipped)

    def steps(self, *gradients):
        for gradient in gradients:
            self.step(gradient=gradient)

    def state(self):
        """Copies of all that a checkpoint would hold."""
        optimizer = self.optimizer.state_dict()["state"]
        parts = {f"{n}.{key}": value for n, own in optimizer.items() for key, value in own.items()}
        return {key: x.clone() for key, x in {**self.model.state_dict(), **parts}.items()}


def scaled_step(trainee, **factors):
    """One step under a scaler; (weights moved, guard, its scale, weights and buffers)."""
    moved = trainee.step(**factors)
    trainee.guard.settle()
    scale = trainee.accelerator.scaler.get_scale()
    return moved, trainee.guard, scale, trainee.model.state_dict()


def first_weights():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 6).weight.detach()


ON_DEVICE = pytest.mark.parametrize("on_device", [False, True])


@ON_DEVICE
@pytest.mark.parametrize("kind", ["lars", "sgd", "adamw"])
@pytest.mark.parametrize("bad", [(0,), (1, 2), (0, 3, 4)])
def test_bad_steps_change_nothing_wherever_they_are_decided(
    tmp_path, trainee_of, on_device, kind, bad
):
    """The run is the one without them, to the bit: weights, optimizer, statistics, what follows."""
    trainee = trainee_of(tmp_path / "with", on_device=on_device, kind=kind, most=3)
    plain = trainee_of(tmp_path / "without", on_device=on_device, kind=kind)
    for step in range(6):
        before = trainee.state()
        spoilt = {"gradient": math.nan} if step % 2 else {"loss_factor": math.inf}
        assert trainee.step(**(spoilt if step in bad else {})) == (step not in bad)
        if step in bad:
            plain.done += 1
            for key, value in trainee.state().items():
                assert torch.equal(value, before.get(key, torch.zeros_like(value))), (step, key)
        else:
            assert plain.step()
            torch.testing.assert_close(trainee.state(), plain.state(), rtol=0, atol=0)
    trainee.guard.settle()
    assert (trainee.guard.skipped, trainee.guard.overflows) == (len(bad), 0)
    lines = (tmp_path / "with" / "bad_steps.0.jsonl").read_text().splitlines()
    written = [(line["step"], line["ids"][0], line["epoch"]) for line in map(json.loads, lines)]
    assert written == [(step, 10 * step, step // 3) for step in bad]
    why = ["gradient norm nan" if step % 2 else "loss inf" for step in bad]
    assert trainee.warnings == [
        f"step {step + 1} skipped: {reason}; its samples are in bad_steps.0.jsonl"
        for step, reason in zip(bad, why, strict=True)
    ]
    assert not list((tmp_path / "without").iterdir())


def test_many_skipped_steps_are_told_at_each_doubling_of_their_number(trainee_of):
    trainee = trainee_of(on_device=True, most=99)
    trainee.steps(*[math.nan] * 19, 1.0)
    trainee.guard.settle()
    told = [int(re.match(r"step (\d+) skipped", text)[1]) for text in trainee.warnings]
    assert told == [1, 2, 3, 4, 8, 16]
    assert trainee.warnings[-1].endswith("(16 skipped since this start)")


@ON_DEVICE
def test_the_run_ends_as_it_was_when_too_many_were_bad_in_a_row(trainee_of, on_device):
    """On the device the host knows a step later; that step, though good, moved nothing."""
    trainee = trainee_of(on_device=on_device, most=2)
    trainee.steps(math.nan, 1.0, math.inf)  # the good one between them starts a new row
    before = trainee.state()
    with pytest.raises(UserError, match=r"2 steps in a row.*the last: step 4, .*norm nan") as ended:
        trainee.steps(math.nan, 1.0)
    said = str(ended.value)
    assert "; no log line is finite (run.log_steps = 1 logs every step); no checkpoint was" in said
    assert "lower optim.peak_lr" in said
    assert trainee.done == (4 if on_device else 3)  # steps that came to their end
    torch.testing.assert_close(trainee.state(), before, rtol=0, atol=0)
    # without one finite step nobody is told to lower the rate
    trainee = trainee_of(on_device=on_device, most=2)
    with pytest.raises(UserError, match=r"No step has changed the weights"):
        trainee.steps(math.nan, math.nan, 1.0)


@ON_DEVICE
def test_overflows_neither_end_a_row_of_bad_steps_nor_lengthen_it(trainee_of, on_device):
    trainee = trainee_of(on_device=on_device, scale=4.0, most=2)
    assert not trainee.step(loss_factor=math.nan)
    trainee.steps(math.inf, math.inf)  # the scale becomes 2 and 1
    trainee.guard.settle()
    assert (trainee.guard.skipped, trainee.guard.overflows) == (1, 2)
    before = trainee.state()
    with pytest.raises(UserError, match="2 steps in a row"):  # one that is none at scale 1
        trainee.steps(math.inf, 1.0)
    torch.testing.assert_close(trainee.state(), before, rtol=0, atol=0)


@ON_DEVICE
def test_a_scaler_changes_neither_the_clipped_norm_nor_lars(trainee_of, on_device):
    """Gradients are unscaled before both; or decay and clipping would weigh in by the scale."""
    steps = [scaled_step(trainee_of(on_device=on_device, scale=s)) for s in (1.0, 65536.0)]
    (one, _, _, expected), (two, _, _, actual) = steps
    assert (one, two) == (True, True)
    torch.testing.assert_close(actual, expected)


@ON_DEVICE
@pytest.mark.parametrize(
    ("scale", "factors", "counted"),  # skipped, overflows, the scale afterwards
    [
        (2.0, {"gradient": math.inf}, (0, 1, 1.0)),
        # bounded: gradients that are infinite unscaled will be so at any scale
        (1.0, {"gradient": math.inf}, (1, 0, 0.5)),
        # finite ones of infinite norm: clipping divides infinity by itself
        (2.0, {"gradient": 1e38, "clip_norm": math.inf}, (1, 0, 2.0)),
    ],
)
def test_an_overflow_of_the_scaler_moves_nothing_and_at_scale_1_is_a_bad_step(
    trainee_of, tmp_path, on_device, scale, factors, counted
):
    trainee = trainee_of(on_device=on_device, scale=scale)
    moved, guard, scale, actual = scaled_step(trainee, **factors)
    assert not moved
    assert (guard.skipped, guard.overflows, scale) == counted
    assert not actual["1.running_mean"].any()  # restored to what it was
    torch.testing.assert_close(actual["0.weight"], first_weights())
    files = list(tmp_path.glob("bad_steps*"))
    assert len(files) == counted[0]
    for line in (json.loads(path.read_text()) for path in files):
        assert (line["ids"], line["source_ids"]) == ([0, 1, 2, 3, 4], [9, 10, 11, 12, 13])


def test_a_resumed_run_counts_the_steps_that_it_skipped_before(tmp_path, trainee_of):
    # it resumed from a checkpoint between 3 and 8; the next is at 10, whose step is done again
    steps = (3, 8, 8, 10, 12)
    lines = [json.dumps({"step": step, "loss": "nan"}) for step in steps]
    (tmp_path / "bad_steps.1.jsonl").write_text("\n".join([*lines, '{"st']))
    settings = {"max_bad_steps": 2, "folder": tmp_path, "first_step": 10, "on_device": False}
    settings |= {"warn": print, "optim": OPTIMIZERS["lars"](peak_lr=0.1), "precision": "fp32"}
    parts = [], Accelerator(cpu=True), None
    assert [StepGuard(*parts, rank=rank, **settings).skipped for rank in (0, 1)] == [0, 2]


def test_fp16_on_a_cpu_is_refused_not_trained_in_fp32(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path), ("optim.precision=fp16", "run.device=cpu"))
    plan = Pretraining.make(recipe, load_index(write_dataset(tmp_path / "data")))
    for refuse in (lambda: start_accelerator(recipe, "fp16"), lambda: check_pretraining(plan)):
        with pytest.raises(RecipeError, match=r"optim.precision = 'fp16' needs a CUDA.*'bf16'"):
            refuse()
