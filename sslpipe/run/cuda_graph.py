"""`run.cuda_graph`: the model's forward and backward pass, each recorded once and then replayed.

A small encoder computes faster than the host launches its hundreds of kernels. A CUDA graph of them
is one launch. Views, loss, guard and optimizer stay outside: what they launch depends on the step.
"""

import torch
from torch import Tensor, nn

from sslpipe.distributed import Rank
from sslpipe.recipe.pretrain import Recipe


def graph_refusal(recipe: Recipe, device_type: str, world_size: int) -> str | None:
    """Say why the passes of a run cannot be recorded; None: they can be, or nobody asked for it.

    Args:
        recipe: Of the run.
        device_type: "cuda", "cpu" or "mps".
        world_size: Processes of the run.
    """
    reasons = {
        f"{device_type} has no CUDA graphs": device_type != "cuda",
        f"{world_size} processes exchange gradients and statistics inside them": world_size > 1,
        "data.micro_batch adds up gradients, which a replay overwrites": recipe.data.micro_batch,
        "run.compile = true makes kernels of its own": recipe.run.compile,
        "tune.projector_first_steps changes what is trained": recipe.tune.projector_first_steps,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    return _launched_singly(reason) if reason and recipe.run.cuda_graph else None


def record_passes(
    model: nn.Module, recipe: Recipe, crop_px: int, dtype: torch.dtype, process: Rank
) -> str | None:
    """Record the passes of a run's model where run.cuda_graph asks for it; see `record_graphs`.

    Args:
        model: As it is called in each step, on its device.
        recipe: Of the run.
        crop_px: Side of the views.
        dtype: Of the views.
        process: This process among all.

    Returns:
        Why nothing was recorded though it was asked for; else None.
    """
    device = next(model.parameters()).device
    refusal = graph_refusal(recipe, device.type, process.world_size)
    if refusal is not None or not recipe.run.cuda_graph:
        return refusal
    shape = 2 * recipe.data.batch_size, 3, crop_px, crop_px
    views = torch.zeros(shape, dtype=dtype, device=device)
    return record_graphs(model, views.contiguous(memory_format=torch.channels_last))


def record_graphs(model: nn.Module, views: Tensor) -> str | None:
    """Record the passes of a model in train mode; from then on its calls replay them.

    Call it before any other thread uses the device, and with views of the shape, dtype and layout
    of every step. Calls in eval mode are as before. Parameters and buffers are as they were; a
    gradient is overwritten by the next backward pass.

    Args:
        model: On the device; called with views alone.
        views: (2B, 3, S, S); its memory is what the recorded pass reads.

    Returns:
        Why nothing was recorded, where an operation of the model cannot be; else None.
    """
    buffers = list(model.buffers())
    kept = [buffer.clone() for buffer in buffers]
    try:
        # on a stream of its own: three passes that warm up, then those that are recorded
        torch.cuda.make_graphed_callables(model, (views,))
    except (RuntimeError, AssertionError) as error:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return _launched_singly(str(error).splitlines()[0] if str(error) else "it failed")
    finally:
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)  # the warm-up counts for BatchNorm as steps do
    return None


def _launched_singly(reason: str) -> str:
    return f"run.cuda_graph = true has no effect: {reason}"
