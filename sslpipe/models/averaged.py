"""A moving average of an encoder's weights, which follows them at every step."""

import copy

import torch

from sslpipe.models.backbones import Backbone
from sslpipe.models.momentum import follow, without_parameters


def averaged(backbone: Backbone) -> Backbone:
    """Copy a backbone for `follow_average`: the average's start.

    The copy is all buffers, so the optimizer and DDP leave it alone, and checkpoints and the
    undoing of a skipped step include it. Its keys are the backbone's.
    """
    return without_parameters(copy.deepcopy(backbone))


@torch.no_grad()
def follow_average(average: Backbone, backbone: Backbone, decay: float, step: int) -> None:
    """Move an average towards its backbone after the optimizer step of this number, in place.

    BatchNorm's statistics are averaged as the weights are, and its counts taken over.

    Args:
        average: What `averaged` made.
        backbone: The trained one.
        decay: The recipe's optim.ema.
        step: Counts from 0.
    """
    follow(average, backbone, decay_at(step, decay), buffers=True)


def decay_at(step: int, decay: float) -> float:
    """Compute the part of itself that an average keeps at one step: at most (1 + t) / (10 + t).

    With a constant one, a short run's average would be mostly its random start.

    Args:
        step: t, counts from 0.
        decay: The recipe's optim.ema.

    Source:
        TensorFlow's `ExponentialMovingAverage` with num_updates.
    """
    return min(decay, (1 + step) / (10 + step))
