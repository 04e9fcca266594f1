"""launch/*.yaml start what they say: launched on the CPU, parsed where GPUs are too few."""

import argparse
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

import sslpipe
from sslpipe.cli.train import app as train_commands
from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError, UserError
from sslpipe.export.load import load_backbone
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.accelerator import join_processes
from sslpipe.run.device import resolve_precision
from sslpipe.run.launcher import launch_command
from sslpipe.run.lock import holder_of
from sslpipe.run.log import read_metrics
from tests.helpers import finetunes
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import free_port
from tests.helpers.runs import (
    ROOT,
    assert_same_weights,
    command_line,
    python,
    train_words,
    write_recipe,
)

LAUNCH = ROOT / "launch"
PROCESSES = {"cpu2": 2, "cpu4": 4, "gpu1": 1, "gpu8": 8, "nodes": 16}

PROBE = """
import json, sys
import torch
import torch.distributed as dist
from pathlib import Path
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.accelerator import join_processes

recipe = load_recipe(sys.argv[1], sys.argv[3:])
process = join_processes(cpu=recipe.run.device == "cpu", timeout_s=recipe.run.timeout_s)
ones = torch.ones(())
if dist.is_initialized():
    dist.all_reduce(ones)
said = [process.rank, process.world_size, int(ones)]
Path(sys.argv[2], f"{process.rank}-of-{process.world_size}.json").write_text(json.dumps(said))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()  # or gloo may abort the rank whose peer left first
"""


def probe(tmp_path: Path, *launchers: list[str], **environment: str) -> list[list[int]]:
    """What each process the launchers started said: rank, world, sum of ones over its group."""
    script, out = tmp_path / "probe.py", tmp_path / "said"
    script.write_text(PROBE)
    out.mkdir()
    rest = [str(script), str(write_recipe(tmp_path)), str(out), "run.device=cpu"]
    with ThreadPoolExecutor(len(launchers)) as pool:
        list(pool.map(lambda words: python(*words, *rest, status=0, **environment), launchers))
    return sorted(json.loads(path.read_text()) for path in out.iterdir())


def launcher(name: str, *flags: str) -> list[str]:
    module = ["-m", "accelerate.commands.accelerate_cli", "launch"]
    return [*module, "--config_file", str(LAUNCH / f"{name}.yaml"), *flags]


def home_of_a_user(tmp_path: Path) -> str:
    """A HF_HOME with an accelerate configuration that asks for another number of processes."""
    home = tmp_path / "home" / "accelerate"
    home.mkdir(parents=True)
    theirs = {"distributed_type": "MULTI_GPU", "num_processes": 3, "mixed_precision": "fp16"}
    (home / "default_config.yaml").write_text(yaml.safe_dump(theirs))
    return str(home.parent)


# cpu2: a fine-tuning, below
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu1", "cpu4"])
def test_a_launch_is_one_group_of_exactly_its_processes(tmp_path, name):
    """The user's own accelerate configuration is not used."""
    n = PROCESSES[name]
    said = probe(tmp_path, launcher(name), HF_HOME=home_of_a_user(tmp_path))
    assert said == [[rank, n, n] for rank in range(n)]


def would_start(*flags: str) -> argparse.Namespace:
    """What accelerate's own parser makes of the flags of a launch."""
    words = [*flags, "script.py"]
    return _validate_launch_command(launch_command_parser().parse_args(words))[0]


def test_the_launch_that_the_help_names_needs_no_file():
    """It works from a wheel, which has no launch folder, and starts what cpu2.yaml does."""
    [command] = [c for c in train_commands.registered_commands if c.callback.__name__ == "train"]
    unbroken = re.sub(r" \\\n +", " ", command.epilog)
    flags = re.search(r"accelerate launch (.*?) -m sslpipe train", unbroken)[1]
    own, of_file = (
        vars(would_start(*words))
        for words in (flags.split(), ["--config_file", str(LAUNCH / "cpu2.yaml")])
    )
    # only how they were found, and what is for several machines or a notebook
    assert {key for key in own.keys() | of_file.keys() if own.get(key) != of_file.get(key)} == {
        *("config_file", "nondefault", "gpu_ids"),
        *("machine_rank", "main_process_port", "main_training_function"),
    }


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_launch_that_would_cut_the_model_into_parts_is_refused(name, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(UserError, match=rf"ACCELERATE_USE_{name} = true: .*launch/gpu8\.yaml"):
        join_processes(cpu=True, timeout_s=10)


@pytest.mark.parametrize(("named", "cpu"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_a_device_of_the_environment_of_another_kind_is_one_error(named, cpu, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", named)
    with pytest.raises(UserError, match=rf"ACCELERATE_TORCH_DEVICE = '{named}'.*run\.device"):
        join_processes(cpu=cpu, timeout_s=10)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert join_processes(cpu=True, timeout_s=10) == Rank()


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_processes_of_mpirun_are_one_error(variable, monkeypatch):
    """As under `mpirun -n 2`, or srun with PMI; a single task is no other process."""
    monkeypatch.setenv(variable, "2")
    with pytest.raises(UserError, match=rf"{variable} = 2: mpirun or srun .*torchrun"):
        join_processes(cpu=True, timeout_s=10)
    monkeypatch.setenv(variable, "1")
    assert join_processes(cpu=True, timeout_s=10) == Rank()


def test_an_interface_that_is_not_there_is_one_error(data, tmp_path):
    recipe = write_recipe(tmp_path)
    words = ("train", str(recipe), "--data", str(data), "--run-dir", str(tmp_path / "run"))
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1"}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "nope"}
    ended = command_line(*words, "run.device=cpu", **group, **alone, status=2)
    assert "error: GLOO_SOCKET_IFNAME = 'nope' is no network interface" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_the_launcher_sets_and_the_recipe_decides_changes_nothing(
    tmp_path, monkeypatch, capsys
):
    """Accelerate would divide the gradient by the steps to accumulate, and compile the network."""
    data = write_dataset(tmp_path / "data")
    recipe = write_recipe(tmp_path)
    changes = {"steps": 2, "optim.kind": "sgd", "run.device": "cpu"}
    settings = {"MIXED_PRECISION": "bf16", "GRADIENT_ACCUMULATION_STEPS": "4"}
    settings["DYNAMO_BACKEND"] = "EAGER"
    for name in ("as it is", "launched"):
        sslpipe.train(recipe, data, tmp_path / name, overrides=changes)
        said = capsys.readouterr()
        remarks = re.findall("ACCELERATE_([A-Z_]+) = (.+) has no effect", said.out + said.err)
        assert dict(remarks) == (
            {} if name == "as it is" else {k: v.lower() for k, v in settings.items()}
        )
        for variable, value in settings.items():
            monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    assert_same_weights(tmp_path / "as it is", tmp_path / "launched")


def test_a_rank_that_no_launcher_gave_is_one_error(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="LOCAL_RANK = 1 is set, but no launcher"):
        join_processes(cpu=True, timeout_s=10)
    monkeypatch.setenv("LOCAL_RANK", "-1")  # as some set it where there is none
    assert join_processes(cpu=True, timeout_s=10) == Rank()


def test_a_launched_finetuning_from_a_backbone_ends_with_the_weights_of_one_process(
    killed_run, tmp_path
):
    """In float64, by SGD: views made 6 and 12 at a time differ in their last float32 bit.

    The user's own accelerate configuration is not used.
    """
    data = str(write_dataset(tmp_path / "data", (40, 60, 72), classes=8))
    recipe = str(finetunes.write_recipe(tmp_path))
    pretrained = killed_run / "pretrain"
    init = load_backbone(pretrained).config.weights_sha256
    changes = ("steps=4", "optim.kind=sgd", "optim.precision=fp64", "run.device=cpu")
    changes += ("backbone.widths=[8,8]",)  # the pretrained one's
    losses, home = [], home_of_a_user(tmp_path)
    for number, before in enumerate(([], launcher("cpu2"))):
        run_dir = tmp_path / f"run{number}"
        where = ["--data", data, "--run-dir", str(run_dir), "--init", str(pretrained)]
        words = ("-m", "sslpipe", "train", recipe, *where, *changes)
        if before:
            python(*before, *words, status=0, HF_HOME=home)
        else:
            command_line(*words[2:], status=0)
        [started] = read_metrics(run_dir, "start")
        assert started["world"] == number + 1
        assert json.loads((run_dir / "recipe.json").read_text())["init"] == init
        losses.append([m["loss"] for m in read_metrics(run_dir)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][0] != losses[0][3]
    assert_same_weights(tmp_path / "run0", tmp_path / "run1", rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_two_machines_become_one_group(tmp_path):
    """nodes.yaml with one process a machine, both of them this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    machines = [launcher("nodes", *where, "--machine_rank", rank) for rank in ("0", "1")]
    assert probe(tmp_path, *machines) == [[0, 2, 2], [1, 2, 2]]


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_file_as_meant(path):
    config, name = load_config_from_file(str(path)), path.stem
    kind = DistributedType.MULTI_GPU if PROCESSES[name] > 1 else DistributedType.NO
    assert config.distributed_type == kind
    assert config.num_processes == PROCESSES[name]
    assert config.num_machines == (2 if name == "nodes" else 1)
    if PROCESSES[name] > 1 and name != "nodes":
        assert config.main_process_port == 0  # any that is free
    assert not config.use_cpu  # true starts one process and says nothing
    assert config.mixed_precision == "no"  # the recipe decides


NODES = {"nproc_per_node": "8", "nnodes": "2", "node_rank": 1, "rdzv_endpoint": "10.0.0.1:29500"}
FOUR = {"nproc_per_node": "8", "nnodes": "4", "node_rank": 3}


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("gpu8", "", {"nproc_per_node": "8"}),
        ("gpu8", "--num_processes 4", {"nproc_per_node": "4"}),
        ("nodes", "--machine_rank 1 --main_process_ip 10.0.0.1", NODES),
        ("nodes", "--num_machines 4 --num_processes 32 --machine_rank 3", FOUR),
    ],
)
def test_the_launcher_would_start_the_right_processes_on_gpus(name, flags, expected):
    """Accelerate's own parser and its own step from settings to torchrun's arguments."""
    arguments = would_start("--config_file", str(LAUNCH / f"{name}.yaml"), *flags.split())
    assert arguments.multi_gpu
    prepare_multi_gpu_env(arguments)
    assert {key: getattr(arguments, key) for key in expected} == expected


def test_a_world_size_that_accelerate_does_not_join_is_one_error_naming_both(data, tmp_path):
    script = tmp_path / "stale.py"
    script.write_text(
        "import os, sys\n"
        "from accelerate import PartialState\n"
        "PartialState(cpu=True)\n"  # whoever made the state before the launcher's variables
        "os.environ.update(WORLD_SIZE='2', RANK='0', LOCAL_RANK='0')\n"
        "from sslpipe.__main__ import main\n"
        "main()\n"
    )
    done = python(str(script), *train_words(tmp_path, data), "run.device=cpu", status=2)
    (error,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "WORLD_SIZE = 2" in error
    assert "accelerate joined 1" in error
    assert not (tmp_path / "run").exists()


def test_a_world_size_without_a_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE = 2 is set, but no launcher started this one"):
        join_processes(cpu=True, timeout_s=10)


def test_processes_that_do_not_divide_the_streams_are_refused_with_the_valid_numbers(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))  # 4 streams
    with pytest.raises(RecipeError, match="4 does not divide over 3 processes; start 1, 2, 4 "):
        recipe.data.check_processes(3)
    for world in (1, 2, 4):
        recipe.data.check_processes(world)


FAILING = """
import sys
from sslpipe.__main__ import main
from sslpipe.run.run import Run

original = Run.steps

def failing(self, *given, **named):
    for step, batch in original(self, *given, **named):
        if step == 2 and self.process.rank == 1:
            raise RuntimeError("the cable of rank 1 was pulled")
        yield step, batch

Run.steps = failing
main()
"""


@pytest.mark.slow
def test_one_failing_rank_ends_the_launch_with_its_message(data, tmp_path):
    """A launch as messages name it, which needs no file either."""
    script, run_dir = tmp_path / "failing.py", tmp_path / "run"
    script.write_text(FAILING)
    flags = launch_command(2).removeprefix("torchrun ").removesuffix(" -m sslpipe train")
    words = ("-m", "torch.distributed.run", *flags.split(), str(script))
    done = python(*words, *train_words(tmp_path, data), status=1, HF_HOME=str(tmp_path))
    assert "RuntimeError: the cable of rank 1 was pulled" in done.stderr
    said = (run_dir / "FAILED").read_text()
    assert said == "rank 1: RuntimeError: the cable of rank 1 was pulled\n"
    assert not (run_dir / "DONE").exists()
    assert holder_of(run_dir) is None  # gloo may abort rank 0: its lock is then no process's


def test_auto_is_fp32_on_every_cpu_and_any_other_precision_is_itself():
    for device in ("cpu", "mps"):
        assert resolve_precision("auto", torch.device(device)) == "fp32"
    assert resolve_precision("bf16", torch.device("cpu")) == "bf16"
