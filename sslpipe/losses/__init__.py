"""Objectives `forward(z_a, z_b, *, ids, labels) -> ()`; LOSSES names them for recipes."""

from collections.abc import Callable

from torch import nn

from sslpipe.losses.nt_xent import NTXentLoss

LOSSES: dict[str, Callable[..., nn.Module]] = {"nt_xent": NTXentLoss}
