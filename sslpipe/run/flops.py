"""Floating-point operations of a training step, and the peaks of known devices."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sslpipe.evaluation.embed import evaluating

# Dense peak, FLOP/s, by precision; vendors' data sheets, without sparsity.
PEAK_FLOPS = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},  # SXM
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "RTX 4090": {"bf16": 165e12, "fp16": 165e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "fp16": 71e12, "fp32": 35.6e12},
}


def step_flops(model: nn.Module, images: int, crop_px: int) -> float:
    """Count the FLOPs of forward and backward.

    One view is counted, with the model in eval mode; a multiply-add is 2, backward twice forward.

    Args:
        model: Images (B, 3, S, S) in; left as it was.
        images: Of a step, two views each.
        crop_px: S.
    """
    parameter = next(model.parameters())
    view = torch.zeros(1, 3, crop_px, crop_px, dtype=parameter.dtype, device=parameter.device)
    with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(view)
    return 3.0 * 2 * images * float(counter.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Look up the device's dense peak in FLOP/s; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, peaks in PEAK_FLOPS.items():
        if known in name:
            return peaks.get(precision)
    return None
