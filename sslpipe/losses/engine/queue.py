"""A first-in, first-out queue of rows in buffers, which checkpoints save as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor


def enqueue(
    buffers: Sequence[Tensor], rows: Sequence[Tensor], next_row: Tensor, filled_rows: Tensor
) -> None:
    """Overwrite the oldest rows of the buffers, in place; of more than fit, the last ones stay.

    Args:
        buffers: (size, ...) each, of any dtypes; they are written round and round.
        rows: (n, ...) for each buffer, cast to its dtype.
        next_row: () int64, where the next row goes; moved on by n.
        filled_rows: () int64, how many rows have been written so far; at most size.
    """
    size = len(buffers[0])
    count = len(rows[0])
    places = (next_row + torch.arange(count, device=next_row.device)) % size  # (n,)
    for buffer, new in zip(buffers, rows, strict=True):
        buffer[places[-size:]] = new[-size:].to(buffer.dtype)
    next_row.copy_((next_row + count) % size)
    filled_rows.copy_((filled_rows + count).clamp_max(size))
