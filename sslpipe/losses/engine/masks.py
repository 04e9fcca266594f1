"""Which pairs of views are no negatives, tile by tile: never a matrix of all pairs.

The textbook, with the matrix, for keys (R,) of the rows and (C,) of the columns:

    masked = any(rows[:, None] == columns for rows, columns in keys)           # (R, C)
    masked = (masked & (kept_rows[:, None] != kept_columns)) | (own_rows[:, None] == own_columns)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sslpipe.distributed import to_device

Keys = tuple[Tensor, Tensor]  # int64 numbers of the rows (R,) and of the columns (C,)


class Masks(NamedTuple):
    """Numbers of rows and columns that decide which pairs are masked; fastest on the host.

    Args:
        keys: A pair with equal numbers in any of these is masked.
        kept: But one with equal numbers in these is not; None: all are.
        own: And one with equal numbers in these is, whatever else; None: there are none.
    """

    keys: tuple[Keys, ...]
    kept: Keys | None = None
    own: Keys | None = None

    @property
    def numbers(self) -> Tensor:
        """Return the first numbers of the columns."""
        first = self.keys[0] if self.keys else self.own
        assert first is not None
        return first[1]

    def select(self, rows: Tensor | slice, columns: Tensor | slice) -> "Masks":
        """Select rows and columns of numbers (N, V): (n V,) and (m V,), row by row."""

        def some(keys: Keys) -> Keys:
            return keys[0][rows].flatten(), keys[1][columns].flatten()

        return Masks(
            tuple(map(some, self.keys)), self.kept and some(self.kept), self.own and some(self.own)
        )


class _Block(NamedTuple):
    """The numbers of one block's rows or columns: (r,) int64, and what they lie between."""

    numbers: Tensor
    lowest: float
    highest: float


class MaskTiles:
    """The masks of blocks of rows with blocks of columns.

    The ends of most blocks' numbers show that they share none, if the rows and columns are sorted
    by them and the numbers come from the host. On the device all are compared.

    Args:
        masks: Of all rows and columns.
        tile_rows: Rows and columns of a block.
        device: Where the tiles are.
    """

    def __init__(self, masks: Masks, tile_rows: int, device: torch.device) -> None:
        self.tile_rows, self.device = tile_rows, device
        self._keys = [self._blocks(keys) for keys in masks.keys]
        self._kept = None if masks.kept is None else self._blocks(masks.kept)
        self._own = None if masks.own is None else self._blocks(masks.own)
        self._rows, self._columns = (len(numbers) for numbers in masks.own or masks.keys[0])

    def tile(self, i: int, j: int) -> Tensor | None:
        """Return which pairs of row block i and column block j are masked, bool; None: none is."""
        masked: Tensor | None = None
        for rows, columns in self._keys:
            masked = _either(masked, _equal(rows[i], columns[j]))
        if masked is not None and self._kept is not None:
            kept = _equal(self._kept[0][i], self._kept[1][j])
            masked = masked if kept is None else masked.logical_and_(kept.logical_not_())
        if self._own is not None:
            masked = _either(masked, _equal(self._own[0][i], self._own[1][j]))
        return masked

    def count(self) -> Tensor:
        """Count the masked columns of each row, (R,) int64."""
        counts = torch.zeros(self._rows, dtype=torch.int64, device=self.device)
        for i, part in enumerate(cut(counts, self.tile_rows)):
            for j in range(-(-self._columns // self.tile_rows)):
                masked = self.tile(i, j)
                if masked is not None:
                    part += masked.sum(1)
        return counts

    def _blocks(self, keys: Keys) -> tuple[list[_Block], list[_Block]]:
        return self._one_side(keys[0]), self._one_side(keys[1])

    def _one_side(self, numbers: Tensor) -> list[_Block]:
        blocks = cut(to_device(numbers, self.device), self.tile_rows)
        if numbers.device.type != "cpu":  # reading their ends would wait for the device
            return [_Block(block, -math.inf, math.inf) for block in blocks]
        return [
            _Block(block, int(part.min()), int(part.max()))
            for block, part in zip(blocks, cut(numbers, self.tile_rows), strict=True)
        ]


def cut(x: Tensor, tile_rows: int, dim: int = 0) -> Sequence[Tensor]:
    """Cut x where tiles are; no block where it is empty."""
    if 0 < x.shape[dim] <= tile_rows:
        return (x,)
    return torch.split(x, tile_rows, dim) if x.shape[dim] else ()


def _equal(rows: _Block, columns: _Block) -> Tensor | None:
    if rows.lowest > columns.highest or columns.lowest > rows.highest:
        return None
    return rows.numbers[:, None] == columns.numbers


def _either(masked: Tensor | None, more: Tensor | None) -> Tensor | None:
    if masked is None or more is None:
        return more if masked is None else masked
    return masked.logical_or_(more)
