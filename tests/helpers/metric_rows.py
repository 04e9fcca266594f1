"""Rows, labels and losses that the tests of metric learning share."""

import inspect

import torch

from sslpipe.metric_learning import HEADS, METRIC_LOSSES

LABELS = [0, 1, 2, 0, 1, 3, 2, 0, 1, 2]  # unequal classes, one row alone in its own
SIZES = {"num_classes": 4, "dim": 6}


def rows(seed=0, spread=0.6, size=10, dim=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dim, generator=generator, dtype=torch.float64) * spread


def built(name, **arguments):
    """A loss or head in float64; its weights are moved away from where they start."""
    torch.manual_seed(1)
    loss = {**METRIC_LOSSES, **HEADS}[name](**arguments).double()
    for parameter in filter(lambda p: p.requires_grad, loss.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return loss


def sizes_of(name, dim=6):
    """num_classes and dim, where the loss or head asks for them."""
    asked = inspect.signature({**METRIC_LOSSES, **HEADS}[name]).parameters
    sizes = {**SIZES, "dim": dim}
    return {key: size for key, size in sizes.items() if key in asked and name != "margin"}


def made(name, dim=6, **arguments):
    """A loss or head as a user makes it; weights are always the same."""
    torch.manual_seed(0)
    return {**METRIC_LOSSES, **HEADS}[name](**sizes_of(name, dim), **arguments)


def value_and_grad(fn, x):
    x = x.detach().requires_grad_()
    value = fn(x)
    return value.detach(), torch.autograd.grad(value, x)[0]
