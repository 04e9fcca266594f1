"""From a launcher's environment to an Accelerator: processes, model and optimizer."""

import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, NamedTuple

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sslpipe.data.index import DatasetIndex
from sslpipe.distributed import Rank, current_rank, host_group
from sslpipe.errors import UserError
from sslpipe.models.sync_batchnorm import sync_batchnorm
from sslpipe.portable import keep_freed_memory
from sslpipe.random import hash_integers
from sslpipe.recipe.sections import RunRecipe
from sslpipe.registry.plugins import requested
from sslpipe.run.contract import PartsT, Plan
from sslpipe.run.description import write_description
from sslpipe.run.device import check_precision, resolve_precision, training_device
from sslpipe.run.launcher import launch_command, launched_processes, watch_launcher

_SHARDED = {  # what accelerate's launcher sets, and who would cut the model into parts
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_DECIDED = {  # what it sets, too, and the setting of the recipe that decides instead
    "ACCELERATE_MIXED_PRECISION": "optim.precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "data.micro_batch",
    "ACCELERATE_DYNAMO_BACKEND": "run.compile",
}
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # read by it on CPUs
_ACCELERATE_NAME = {"fp64": "no", "fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@contextmanager
def accelerate_kept() -> Iterator[None]:
    """Leave accelerate's state as it was, which the Accelerators of a notebook share."""
    if launched_processes() > 1:  # whose group stays
        yield
        return
    shared = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    try:
        yield
    finally:
        for state, kept in zip(shared, before, strict=True):
            state.clear()
            state.update(kept)


def join_processes(*, cpu: bool, timeout_s: float) -> Rank:
    """Join the launcher's process group, if there is one, over gloo where `cpu`; do it first.

    Args:
        cpu: Whether to compute there.
        timeout_s: Of a collective, in seconds.

    Raises:
        UserError: The launcher's processes are not the ones accelerate sees, or it asks for a model
            that is cut into parts.
    """
    for variable, name in _SHARDED.items():
        if os.environ.get(variable, "").lower() == "true":  # on a CPU accelerate would ignore it
            raise UserError(
                f"{variable} = true: the launcher asks for {name}, but here every process holds "
                "the whole model; use `distributed_type: MULTI_GPU` (launch/gpu8.yaml)"
            )
    _check_named_device(cpu=cpu)
    keep_freed_memory()
    timeout = timedelta(seconds=timeout_s)
    launched = launched_processes()  # read first: accelerate overwrites it
    if launched > 1 and "LOCAL_RANK" not in os.environ:
        raise UserError(
            f"WORLD_SIZE = {launched} is set, but no launcher started this one process; unset it, "
            f"or start with `{launch_command(launched)} ...`"
        )
    local_rank = os.environ.get("LOCAL_RANK", "-1")  # -1, some set it so: none
    if launched == 1 and local_rank != "-1" and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"LOCAL_RANK = {local_rank} is set, but no launcher started this "
            "process, which would set MASTER_ADDR, too; unset it"
        )
    if launched > 1:
        watch_launcher()
    else:
        if cpu:
            _check_mpi()
        PartialState._reset_state()  # else a process's second run gets its first one's device
    with _named_interface():
        state = PartialState(cpu=cpu, **({"timeout": timeout} if launched > 1 else {}))
    if launched != state.num_processes:
        raise UserError(
            f"the launcher started WORLD_SIZE = {launched} processes, but accelerate joined "
            f"{state.num_processes}; start them with `{launch_command(launched)} ...`"
        )
    if launched > 1:
        host_group(timeout)
    return Rank(state.process_index, state.num_processes)


def _check_mpi() -> None:
    """Refuse processes of mpirun or srun: accelerate would join them without an address."""
    for variable in _OF_MPI:
        count = os.environ.get(variable, "1")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"{variable} = {count}: mpirun or srun started the processes, which do not find "
                f"each other; start them with `{launch_command(int(count))} ...`, or unset it"
            )


@contextmanager
def _named_interface() -> Iterator[None]:
    """Explain a GLOO_SOCKET_IFNAME that is no interface of this machine."""
    try:
        yield
    except RuntimeError as error:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        if name is None or "Unable to find address" not in str(error):
            raise
        raise UserError(
            f"GLOO_SOCKET_IFNAME = {name!r} is no network interface of this machine; name one that "
            "`ip -brief address` lists, or unset it"
        ) from error


def _check_named_device(*, cpu: bool) -> None:
    """Refuse the environment's device, which accelerate takes, where it is of another kind."""
    named = os.environ.get("ACCELERATE_TORCH_DEVICE")
    kinds = ("cpu",) if cpu else ("cuda", "mps")
    if named is not None and named.partition(":")[0] not in kinds:
        raise UserError(
            f"ACCELERATE_TORCH_DEVICE = {named!r}, and here is computed on "
            f"{'the CPU' if cpu else 'a GPU'} (run.device, --device; 'auto' is CUDA where torch "
            "sees it); unset it, or let them agree"
        )


def start_accelerator(recipe: RunRecipe, precision: str) -> Accelerator:
    """Make the Accelerator over the group that was joined. Raises: RecipeError."""
    check_precision(precision, PartialState().device.type)
    AcceleratorState._reset_state()  # else a process's second run gets its first one's precision
    ddp = DistributedDataParallelKwargs(
        # each rank's are equal: their statistics are over all processes
        broadcast_buffers=False,
        gradient_as_bucket_view=True,  # no copies between gradients and messages
        # a backbone that is frozen at first has no gradients to wait for
        find_unused_parameters=recipe.tune.projector_first_steps > 0,
    )
    return Accelerator(
        cpu=PartialState().device.type == "cpu",
        mixed_precision=_ACCELERATE_NAME[precision],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        kwargs_handlers=[ddp],
    )


def launcher_remarks(precision: str) -> list[str]:
    """Name the launcher's settings that would change the run, and what of the recipe decides."""
    asked = {variable: os.environ.get(variable, "").lower() for variable in _DECIDED}
    without = ("", "no", "1", _ACCELERATE_NAME[precision])
    return [
        f"{variable} = {value} has no effect: the recipe decides, by {_DECIDED[variable]}"
        for variable, value in asked.items()
        if value not in without
    ]


class Placed(NamedTuple, Generic[PartsT]):
    """What is trained, on its device, and what trains it."""

    accelerator: Accelerator
    precision: str  # fp64, fp32, bf16 or fp16
    view_dtype: torch.dtype  # in which views are made
    parts: PartsT
    wrapped: nn.Module  # the model as it is run, compiled and in DDP
    optimizer: Any  # of what is not frozen, as accelerate prepared it


def place(plan: Plan[PartsT], parts: PartsT) -> Placed[PartsT]:
    """Move the parts to the device, in place, and make model and optimizer ready to run there."""
    recipe = plan.recipe
    precision = resolve_precision(recipe.optim.precision, training_device(recipe))
    accelerator = start_accelerator(recipe, precision)
    device = accelerator.device
    dtype = torch.float64 if precision == "fp64" else torch.float32
    parts.augment.to(device)
    for other in parts.others:
        other.to(device, dtype)
    model = parts.model.to(dtype=dtype)
    sync_batchnorm(model, current_rank().world_size)  # BatchNorms are over all processes
    model.to(device).to(memory_format=torch.channels_last)
    optimizer = plan.optimizer(parts)
    if recipe.run.compile != "off":
        # a graph for each size of views: a resumed run, which may see one size, has the same graphs
        model = torch.compile(model, mode=recipe.run.compile, dynamic=False)
    with warnings.catch_warnings():  # torch 2.15 renames broadcast_buffers, accelerate not yet
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        # never the data (it is cut by rank already), never the schedule (it would step W times)
        wrapped, prepared = accelerator.prepare(model, optimizer)
    if isinstance(wrapped, DistributedDataParallel):  # it times a step in 100, and waits for it
        wrapped._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
    # bf16 on CUDA rounds the model's input anyway
    is_rounded = device.type == "cuda" and precision == "bf16"
    return Placed(
        accelerator=accelerator,
        precision=precision,
        view_dtype=torch.bfloat16 if is_rounded else dtype,
        parts=parts,
        wrapped=wrapped,
        optimizer=prepared,
    )


@contextmanager
def deterministic_algorithms(recipe: RunRecipe, device_type: str) -> Iterator[None]:
    """Inside, run.deterministic holds; enter before anything is computed on the GPU."""
    if not recipe.run.deterministic or device_type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    settings = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    uninitialized: Any = torch.utils.deterministic
    filled = uninitialized.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it may choose another algorithm in each run
    uninitialized.fill_uninitialized_memory = False  # costs launches, finds nothing
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(settings[0])
        torch.backends.cudnn.benchmark = settings[1]
        uninitialized.fill_uninitialized_memory = filled


def seed_torch(device: torch.device, words: Sequence[int]) -> None:
    """Seed the CPU's and a device's generator, for dropout and the like, by a hash of integers.

    torch.manual_seed seeds every kind of device there is: most of a millisecond.
    """
    seed = int(hash_integers(words) >> 1)  # a positive int64
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def describe_run(
    run_dir: Path,
    recipe: RunRecipe,
    index: DatasetIndex,
    index_sha256: str,
    metadata: Mapping[str, Any],
) -> None:
    """Write recipe.json, data.json and run.json: what export and report need, without the shards.

    Args:
        run_dir: The run directory.
        recipe: Resolved.
        index: The data set.
        index_sha256: Of it, as the checkpoints record it.
        metadata: `precision`, `world` and, of a run from weights, `init`.
    """
    manifest = index.manifest.model_dump(mode="json", exclude={"splits"})
    manifest["samples"] = {
        name: sum(shard.samples for shard in shards)
        for name, shards in index.manifest.splits.items()
    }
    manifest["index_sha256"] = index_sha256
    if manifest["image"] is None:
        del manifest["image"]
    run = {key: metadata[key] for key in ("precision", "world")} | {"environment": environment()}
    if plugins := requested():
        run["plugins"] = plugins
    if Path(*sys.argv[:1]).name in ("sslpipe", "__main__.py") and "train" in sys.argv:
        # recipe and overrides as they were given; of a URL, name and query may hold a secret
        run["command"] = [_without_secrets(word) for word in sys.argv[1:]]
    if metadata.get("init") is not None:
        run["init"] = dict(metadata["init"])
    tree = recipe.model_dump(mode="json")
    write_description(run_dir, {"recipe.json": tree, "data.json": manifest, "run.json": run})


def _without_secrets(word: str) -> str:
    """Omit what may be secret of a URL: user and password, and the query."""
    word = re.sub(r"(://[^?]*\?).*", r"\1...", word)
    return re.sub(r"://[^/?#@]*@", "://...@", word)


def environment() -> dict[str, Any]:
    """List versions and devices that a result depends on; nothing of the shell or its user."""
    packages = ("torchvision", "kornia", "webdataset", "accelerate")  # slow to import
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in packages},
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
