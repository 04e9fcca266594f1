"""Which device a recipe computes on, and how precisely; a plan asks, so no accelerate here."""

import torch

from sslpipe.distributed import pick_device
from sslpipe.errors import RecipeError
from sslpipe.recipe.sections import RunRecipe


def training_device(recipe: RunRecipe) -> torch.device:
    """Return the device that run.device names. Raises: UserError where torch does not have it."""
    name = recipe.run.device
    return torch.device(pick_device(name, f"run.device = {name!r}"))


def check_precision(precision: str, device: str) -> None:
    """Raise RecipeError for a precision that the device does not have."""
    if precision == "fp64" and device == "mps":
        raise RecipeError("optim.precision = 'fp64' does not exist on mps; use run.device = 'cpu'")
    if precision == "fp16" and device != "cuda":  # accelerate would train in fp32 and not say so
        raise RecipeError(
            f"optim.precision = 'fp16' needs a CUDA device, and this is {device}; "
            "use 'bf16' or 'fp32'"
        )


def resolve_precision(named: str, device: torch.device) -> str:
    """Return fp64, fp32, bf16 or fp16; `auto` is bf16 where a CUDA device has it, else fp32."""
    if named != "auto":
        return named
    # GPUs older than Ampere emulate bf16
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if has_bf16 else "fp32"
