"""Sharded data parallelism (FSDP2): a process holds a part of all weights, gradients and moments.

The launcher asks for it (launch/fsdp.yaml); no number of a run changes beyond rounding. accelerate
would cut the model on GPUs and, without a word, not on a CPU. So the run itself calls torch's
`fully_shard`, on any device, and accelerate is not told. Checkpoints hold whole tensors.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.optim import Optimizer

from sslpipe.distributed import current_rank, is_cut, local_part
from sslpipe.errors import RecipeError, UserError
from sslpipe.models.backbones import Backbone
from sslpipe.models.tuning import block_names, count_parameters
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.launcher import launched_processes

ModuleT = TypeVar("ModuleT", bound=nn.Module)

VARIABLE = "ACCELERATE_USE_FSDP"  # what accelerate's launcher sets
SMALLEST_BLOCK = 0.01  # of a backbone's parameters, to be gathered on its own
_LAUNCHER = {  # its further settings: the value that holds here; "": whole blocks are wrapped
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "",
}
_WHOLE = "or launch without FSDP (launch/gpu8.yaml)"


def is_asked_for() -> bool:
    """Say whether the launcher asks for it; one process alone holds everything as ever."""
    return os.environ.get(VARIABLE, "").lower() == "true" and launched_processes() > 1


def unknown_to_accelerate() -> AbstractContextManager[None]:
    """Inside, accelerate does not see what the launcher asks for."""
    hidden: AbstractContextManager[None] = patch_environment(**{VARIABLE: "false"})
    return hidden


def check_recipe(recipe: RunRecipe) -> None:
    """Refuse, by name, what a sharded run cannot do, where the launcher asks for one."""
    if not is_asked_for():
        return
    for variable, value in _LAUNCHER.items():
        set_to = os.environ.get(variable, value)
        if set_to.lower() != value.lower():
            key = variable.lower()
            remedy = f"set {key}: {value}" if value else "leave it out"
            raise UserError(f"{key}: {set_to} is not there; {remedy}, as launch/fsdp.yaml does")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"[sampler]: a fine-tuning cannot be sharded by FSDP; {_WHOLE[3:]}")
    refused = {
        "[momentum]": recipe.momentum is not None,
        "run.compile = true": recipe.run.compile,
        "run.cuda_graph = true": recipe.run.cuda_graph,
    }
    for setting, holds in refused.items():
        if holds:
            raise RecipeError(f"{setting} is not there under FSDP; leave it out, {_WHOLE}")


def check_precision(precision: str) -> None:
    """Refuse a precision that a sharded run does not have, where the launcher asks for one.

    precision: '' where a new run has "auto"; fp16's gradient scaler is not tested with parts.
    """
    if is_asked_for() and precision in ("", "fp16"):
        why = "is not there under FSDP" if precision else "times the whole model on one device"
        raise RecipeError(
            f"optim.precision = {precision or 'auto'!r} {why}; set 'bf16' or 'fp32', {_WHOLE}"
        )


def shard(model: ModuleT, device: torch.device, *, sent_as: torch.dtype | None = None) -> ModuleT:
    """Cut a model's parameters over the ranks, in place; they are the same on all. Collective.

    Each child (backbone, projector) gathers its parameters for itself, and so do those of its
    blocks that hold a hundredth of them; but for the first: what a patch embedding returns is a
    view, of which FSDP warns. An average of the backbone is cut like it.

    Args:
        model: On the CPU, so that one block at a time is whole on the device.
        device: Where the parts go.
        sent_as: Gradients are summed over the ranks in this dtype; None: their own.

    Raises:
        RecipeError: A parameter has no dimension to cut.
    """
    from torch.distributed.device_mesh import init_device_mesh  # a second, for few runs
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise RecipeError(
                f"[backbone]: its parameter {name} is a single number, which FSDP cannot cut; "
                f"take another backbone, {_WHOLE}"
            )
    # that of features, which nothing changes in place
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPBackbone\) returned a view")
    process = current_rank()
    options: Any = {
        "mesh": init_device_mesh(device.type, (process.world_size,)),
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=sent_as),
    }
    for child in model.children():
        network = child.network if isinstance(child, Backbone) else child
        smallest = SMALLEST_BLOCK * count_parameters(child)
        for name in block_names(network)[1:]:
            block = network.get_submodule(name)
            if count_parameters(block) > smallest:
                fully_shard(block, **options)
        if count_parameters(child):
            fully_shard(child, **options)
    if isinstance(average := getattr(model, "ema", None), nn.Module):
        _cut_average(average, model.get_submodule("backbone"), device)
    if process.rank == 0:
        own = sum(local_part(parameter).numel() for parameter in model.parameters())
        print(
            f"FSDP: each of {process.world_size} processes holds {own:,} of the "
            f"{count_parameters(model):,} weights, and as much of gradients and optimizer",
            flush=True,
        )
    return model


def _cut_average(average: nn.Module, backbone: nn.Module, device: torch.device) -> None:
    """Cut the weights of an average, which are buffers, as the backbone's are."""
    for name, parameter in backbone.named_parameters():
        owner, _, own_name = name.rpartition(".")
        part = average.get_submodule(owner)
        setattr(part, own_name, _like(parameter, part.get_buffer(own_name)))
    average.to(device)  # its statistics


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all weights, and may call the module as often as it likes.

    A forward of a sharded module is collective, and ranks evaluate unequal numbers of batches.
    """
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "unshard")]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    cut = [  # of an average
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if is_cut(buffer)
    ]
    for part, name, buffer in cut:
        setattr(part, name, cast(Any, buffer).full_tensor())
    try:
        yield
    finally:
        for part, name, buffer in cut:
            setattr(part, name, buffer)
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def whole_state(part: Any) -> dict[str, Any]:
    """Return a part's state_dict with whole tensors, as an unsharded run's; collective.

    What was gathered is on the CPU of rank 0, and None on the others.
    """
    state: dict[str, Any] = part.state_dict()
    return _whole(state) if any(map(is_cut, _parameters(part))) else state


def load_whole_state(part: Any, state: dict[str, Any]) -> None:
    """Load what `whole_state` returned, the same on all ranks: each its own share."""
    parameters = _parameters(part)
    if any(map(is_cut, parameters)):
        if isinstance(part, Optimizer):
            # torch numbers the parameters in the order of the groups
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            of_number = dict(zip(numbers, parameters, strict=True))
            moments = {
                number: {key: _like(of_number[number], value) for key, value in values.items()}
                for number, values in state["state"].items()
            }
            state = {**state, "state": moments}
        else:
            own = part.state_dict()
            state = {name: _like(own.get(name), value) for name, value in state.items()}
    part.load_state_dict(state)


def _parameters(part: Any) -> list[Tensor]:
    if isinstance(part, nn.Module):
        return list(part.parameters())
    if isinstance(part, Optimizer):
        return [parameter for group in part.param_groups for parameter in group["params"]]
    return []


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if not is_cut(value):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if current_rank().rank == 0 else None


def _like(own: Any, value: Any) -> Any:
    """Cut a whole tensor like the parameter `own`, if it is one of its shape."""
    if not is_cut(own) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return part.clone()  # else it is a view, and all of the whole tensor stays
