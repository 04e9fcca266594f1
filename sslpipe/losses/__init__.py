"""Objectives `forward(z_a, z_b, *, ids, labels) -> ()`; LOSSES names them for recipes."""

from collections.abc import Callable

from sslpipe.losses.nt_xent import NTXentLoss

Objective = NTXentLoss
LOSSES: dict[str, Callable[..., Objective]] = {"nt_xent": NTXentLoss}
