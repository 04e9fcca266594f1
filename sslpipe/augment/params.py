"""The parameters of views: random numbers become what each op does. No images here."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.augment.op import Draws
from sslpipe.augment.ops import ops_for
from sslpipe.augment.spec import ViewSpec
from sslpipe.random import uniform

__all__ = ["Draws", "ViewSpec", "draws"]


def draws(
    seed: int, epoch: int, ids: ArrayLike, sizes: ArrayLike, specs: tuple[ViewSpec, ...]
) -> Draws:
    """Draw the parameters of every view of the samples: all first views, then all second.

    A row depends on (seed, epoch, its id, its view, its size) and the view's spec only.

    Args:
        seed: the run's.
        epoch: of all samples.
        ids: (B,) integers.
        sizes: (B, 2) valid height and width in pixels, or (views, B, 2) where the views of a row
            show different images; both on the CPU.
        specs: the settings of each view.

    Returns:
        Draws of `len(specs) * B` rows, on the CPU.
    """
    ids = np.asarray(ids, dtype=np.int64)
    sizes = np.asarray(sizes, dtype=np.int64)
    sizes = np.broadcast_to(sizes, (len(specs), len(ids), 2))
    ops = ops_for(specs)
    lanes = np.concatenate([np.asarray(op.lanes) for op in ops])
    params: dict[str, list[NDArray[np.generic]]] = {name: [] for op in ops for name in op.params}
    for view, spec in enumerate(specs):
        u = uniform(seed, epoch, ids, view, lanes)  # (B, lanes)
        first = 0
        for op in ops:
            last = first + len(op.lanes)
            for name, values in zip(
                op.params, op.draw(u[:, first:last], sizes[view], spec), strict=True
            ):
                params[name].append(values)
            first = last
    views = np.repeat(np.arange(len(specs)), len(ids))
    return Draws(
        seed,
        epoch,
        torch.from_numpy(np.tile(ids, len(specs))),
        torch.from_numpy(views),
        {name: torch.from_numpy(np.concatenate(values)) for name, values in params.items()},
    )
