"""What a step will hold is known before it: counted honestly, compared with what is free."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import sslpipe.api
import sslpipe.planning.memory
from sslpipe import portable
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.models.backbones import Backbone, backbone_settings, build_backbone
from sslpipe.models.limits import within_memory
from sslpipe.planning.memory import Memory, Room, check_memory, estimate_memory, saved_bytes
from sslpipe.recipe.reading import load_recipe
from tests.helpers import finetunes, runs
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.runs import at_each_step, python

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def recipe(tmp_path):
    return load_recipe(runs.write_recipe(tmp_path))


def machine(monkeypatch, free: int, total: int) -> None:
    monkeypatch.setattr(sslpipe.planning.memory, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(sslpipe.planning.memory, "total_memory_bytes", lambda: total)


def test_a_step_that_does_not_fit_is_a_warning_with_numbers_and_remedy(recipe):
    # weights and the process are there already
    memory = Memory(9 * GIB, GIB, GIB, 3 * GIB, GIB, GIB, workspaces=3 * GIB, process=5 * GIB)
    room = Room(10 * GIB, 16 * GIB, processes=1, on_cuda=False)
    assert check_memory(memory, recipe, room) is None
    room = room._replace(free=8 * GIB)
    text = check_memory(memory, recipe, room)
    for expected in ("10.0 GiB", "8.0 GiB free of 16.0 GiB", "data.micro_batch", "data.batch_size"):
        assert expected in text
    # many times too much is an error, but no canvas is
    hopeless = Memory(0, 0, 0, 8 * 16 * GIB, GIB, 0)
    with pytest.raises(RecipeError, match=r"cannot run here"):
        check_memory(hopeless, recipe, room)
    assert check_memory(hopeless._replace(activations=0, batches=999 * GIB), recipe, room)
    shared = room._replace(processes=4)
    said = check_memory(memory, recipe, shared)
    assert "4 processes of a step need an estimated 40.0 GiB" in said


def test_the_processes_of_a_machine_share_its_memory(monkeypatch):
    assert Room.here(CPU).processes == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Room.here(CPU, world=8).processes == 4


def test_the_limits_of_a_container_count(monkeypatch, tmp_path):
    """Files as the kernel writes them: version 2 with a nested group, then version 1."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    memory = SimpleNamespace(total=64000 * 1024, available=32000 * 1024)
    swap = SimpleNamespace(total=1000 * 1024)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    monkeypatch.setattr(portable, "PROC", proc)
    monkeypatch.setattr(portable, "CGROUPS", groups)
    assert portable.free_memory_bytes() == 32000 * 1024
    assert portable.total_memory_bytes() == 65000 * 1024

    def group(path, groups_file, **files):
        (proc / "self" / "cgroup").write_text(groups_file)
        (groups / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (groups / path / name.replace("__", ".")).write_text(text)

    step = {"memory__max": "max\n", "memory__current": "5\n"}
    group("job/step", "0::/job/step\n", **step, memory__stat="anon 5\ninactive_file 0\n")
    assert portable.free_memory_bytes() == 32000 * 1024
    job = {"memory__max": "10000000\n", "memory__current": "7000000\n"}
    group("job", "0::/job/step\n", **job, memory__stat="anon 5000000\ninactive_file 2000000\n")
    assert portable.free_memory_bytes() == 10_000_000 - (7_000_000 - 2_000_000)
    assert portable.total_memory_bytes() == 10_000_000 + 1000 * 1024
    box = {"memory__limit_in_bytes": "4000\n", "memory__usage_in_bytes": "3000\n"}
    stat = "cache 7\ntotal_inactive_file 500\n"
    group("memory/box", "3:cpu,memory:/box\n1:name=systemd:/\n", **box, memory__stat=stat)
    assert portable.free_memory_bytes() == 1500


def train_on_a_small_machine(process, recipe: str, data: str, run_dir: str):
    """What is on stderr when the first step begins."""
    sslpipe.planning.memory.free_memory_bytes = lambda: 2**16
    stderr, seen = io.StringIO(), []
    at_each_step(lambda step, batch: seen.append(stderr.getvalue()))
    with contextlib.redirect_stderr(stderr):
        sslpipe.api.train(load_recipe(recipe, ["steps=1"]), load_index(data), Path(run_dir))
    return seen[0]


@pytest.mark.parametrize(("kind", "remedy"), [(runs, "data.micro_batch"), (finetunes, "sampler.")])
def test_training_warns_before_the_first_step_and_goes_on(tmp_path, kind, remedy):
    data = write_dataset(tmp_path / "data", (40, 60, 72), classes=8)
    recipe = kind.write_recipe(tmp_path)
    arguments = str(recipe), str(data), str(tmp_path / "run")
    [text] = run_processes(train_on_a_small_machine, 1, *arguments)
    (line,) = [line for line in text.splitlines() if "an estimated" in line]
    assert line.startswith("warning: ")
    assert "64 KiB free" in line
    assert remedy in line


BIG = ("steps=2", "augment.crop_px=64", "data.canvas_px=64", "run.num_workers=1")
WIDE = (*BIG, "data.batch_size=16", "projector.hidden_dim=3072", "projector.num_layers=3")
MANY = (*BIG, "data.batch_size=64", "backbone.widths=[32, 64]")
PK = "sampler={classes_per_batch=6, images_per_class=24, buffer=300}"


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        (runs, MANY),
        (runs, (*MANY, "data.micro_batch=32")),
        (runs, (*WIDE, "optim.kind=adamw")),
        (finetunes, (*BIG, PK, "data.validation_classes=0", "backbone.widths=[32, 64]")),
    ],
    ids=["activations", "micro-batches", "weights", "fine-tuning"],
)
def test_a_trainings_peak_is_near_its_estimate(tmp_path, kind, overrides):
    """Of the whole process, Python and torch included."""
    data = write_dataset(tmp_path / "data", (100, 100, 100), classes=6, px=64)
    recipe = kind.write_recipe(tmp_path)
    words = (str(recipe), str(data), str(tmp_path / "run"), *overrides)
    done = python("-m", "tests.helpers.peak_memory", *words, status=0)
    estimate, peak = json.loads(done.stdout.splitlines()[-1])
    assert estimate / 1.3 < peak < 1.3 * estimate, (estimate, peak)


class Reads(torch.nn.Module):
    """Looks at its numbers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(48, 5)

    def forward(self, views):
        assert float(views.sum()) == 0
        return self.layer(views.flatten(1)).relu()


def test_a_network_that_reads_its_numbers_is_counted_too_and_draws_none():
    torch.manual_seed(0)
    model = Reads()
    expected, before = 4 * 5 * 4, torch.random.get_rng_state()
    assert saved_bytes(model, rows=4, crop_px=4, precision="fp32") == expected
    assert torch.equal(torch.random.get_rng_state(), before)


def test_counting_changes_nothing(recipe):
    backbone = build_backbone(backbone_settings(kind="torchvision/resnet18"), crop_px=64)
    backbone.network.layer1.eval()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    memory = estimate_memory(backbone, recipe, crop_px=64, precision="fp32")
    assert memory.activations > 2**20
    assert all(torch.equal(before[name], t) for name, t in backbone.state_dict().items())
    assert backbone.network.layer2.training
    assert not backbone.network.layer1.training


@pytest.mark.parametrize("total", [2**38, 64 * 2**20])
def test_views_that_keep_more_than_there_is_are_refused_while_they_are_counted(
    recipe, monkeypatch, total
):
    """Of 100,000 px before anything is computed, of 512 px in the middle of a forward."""
    machine(monkeypatch, total, total)
    backbone = build_backbone(backbone_settings(kind="torchvision/resnet18"), crop_px=64)
    crop_px = 512 if total < 2**30 else 100_000
    with pytest.raises(RecipeError, match=rf"augment\.crop_px = {crop_px} keep more than"):
        estimate_memory(backbone, recipe, crop_px=crop_px, precision="fp32")
    assert not backbone.network.bn1.running_mean.any()


def test_a_network_that_cannot_take_the_views_is_named(recipe):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(7, 2))
    with pytest.raises(
        RecipeError, match=r"\[backbone\] cannot take views of augment\.crop_px = 8"
    ):
        estimate_memory(Backbone(network, 2), recipe, crop_px=8, precision="fp32")


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.nn.Linear(2**31, 2**20),
        lambda: torch.zeros(2**50, 2**40),
        lambda: torch.nn.Linear(2**62, 2**62),
    ],
    ids=["weights", "overflow", "both"],
)
def test_an_allocation_that_fails_is_one_line_that_names_the_section(build):
    with pytest.raises(RecipeError, match=r"^\[part\] asks for"), within_memory("[part]"):
        build()
