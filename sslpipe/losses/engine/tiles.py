"""Tiles of a similarity matrix: log-sum-exps and their closed-form gradient without the matrix.

A similarity is the dot product of a row and a column, in nats; the tiles work in bits, since exp2
is several times quicker than exp.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sslpipe.losses.engine.products import Multiply

LARGEST_PLAIN_EXPONENT = 50.0  # nats; exp(±50) and sums of 1e12 of them are normal float32 numbers
# Tiles are kept between the two passes where the similarities, if symmetric half of them, fit in
# this: up to 2,500 rows in float32. It saves a fifth of the time at 2,048 rows; to keep some of
# many would save less than it costs in memory.
KEPT_TILES_BYTES = 12 * 2**20
BITS = math.log2(math.e)  # of a nat


class Term(NamedTuple):
    """One of an objective's sums: log sum_j exp(power * s_ij). sign: of dL/d(that sum)."""

    power: float = 1.0
    sign: int = 1


class BlockGroups(NamedTuple):
    """The groups of one block's rows or columns: (r,) int64, ascending, and its ends as numbers."""

    of_each: Tensor
    lowest: int
    highest: int


class Tiles:
    """Similarities of rows (R, D) with columns (C, D), one tile at a time.

    largest: no |similarity| is above this, nats. tile_rows: rounded up to even. symmetric: rows and
    columns are the same, so only tiles on and above the diagonal are made, and each serves both.
    What is left out, as no pair at all: with `pairs_at`, rows are rows pairs_at, pairs_at + 1, ...
    of the columns, where 2i and 2i + 1 are the views of image i, and pairs of one image are left
    out; with `groups`, the group of each row and column, both ascending, pairs of one group are.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        *,
        largest: float,
        multiply: Multiply,
        tile_rows: int,
        terms: tuple[Term, ...] = (Term(),),
        symmetric: bool = False,
        pairs_at: int | None = None,
        groups: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.rows, self.columns, self.multiply, self.terms = rows, columns, multiply, terms
        self.symmetric, self.pairs_at = symmetric, pairs_at
        # with exponents this small neither a sum nor a term leaves float32's normal range
        self.plain = largest <= LARGEST_PLAIN_EXPONENT and terms == (Term(),)
        tile_rows += tile_rows % 2  # a tile never cuts an image's two views apart
        self.tile_rows = tile_rows
        self.buffers: dict[int, Tensor] = {}
        self.operands = self._blocks(multiply.operand(columns))
        # where similarities are rounded, the operands are too
        self.factors = self.operands if multiply.native_similarities else self._blocks(columns)
        numbers = rows.shape[0] * columns.shape[0] // (2 if symmetric else 1)
        self.keep = self.plain and numbers * rows.element_size() <= KEPT_TILES_BYTES
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.groups = None if groups is None else [self._of_blocks(part) for part in groups]

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Numbers of row and column block, similarities in bits (-inf: left out), overwritten by
        those of the next tile."""
        for i, rows in enumerate(self._blocks(self.rows)):
            left: Tensor | None = None
            for j, right in enumerate(self.factors):
                if self.symmetric and j < i:
                    continue
                tile = self.kept.get((i, j))
                if tile is None:
                    if left is None:
                        left = self.multiply.factor(rows * BITS)
                    shape = left.shape[0], right.shape[0]
                    if self.keep:
                        tile = self.kept[i, j] = rows.new_empty(shape)
                    else:
                        tile = self._buffer(0, shape)
                    self.multiply.similarities(left, right, out=tile)
                    self._leave_out(tile, i, j)
                    if self.plain:
                        tile.exp2_()  # from here on 2^x
                yield i, j, tile

    def log_sums(self) -> Tensor:
        """(terms, R): for each term and row the log of its sum, in nats; -inf where it is empty."""
        shape = len(self.terms), self.rows.shape[0]
        total = self.rows.new_full(shape, 0.0 if self.plain else -math.inf)
        parts = self._blocks(total, dim=1)
        for i, j, tile in self.tiles():
            mirrored = self.symmetric and i != j
            if self.plain:
                parts[i].add_(tile.sum(1))
                if mirrored:
                    parts[j].add_(tile.sum(0))
                continue
            for k, term in enumerate(self.terms):
                powered, spare = (self._buffer(n, tile.shape) for n in (1, 2))
                torch.mul(tile, term.power, out=powered)
                _log_add(parts[i][k], powered, 1, spare)
                if mirrored:
                    _log_add(parts[j][k], powered, 0, spare)
        return total.log_() if self.plain else total.div_(BITS)

    def add_gradient(
        self, into: Tensor, pull: Tensor, log_sums: Tensor, columns: tuple[Tensor, Tensor] | None
    ) -> None:
        """into (R, D) += dL/d(rows), from pull = dL/d(log_sums), both (terms, R).

        columns: the same two for the columns, (terms, C), where these are rows of a sum as well;
        None where the columns take no gradient. Symmetric tiles need none: it is that of the rows.
        """
        of_rows = self._factors(pull, log_sums)
        at_rows = self._blocks(of_rows.unsqueeze(-1), dim=-2)
        at_columns: Sequence[Tensor | None] = [None] * len(self.operands)
        if self.symmetric or columns is not None:
            of_columns = of_rows if columns is None else self._factors(*columns)
            at_columns = self._blocks(of_columns.unsqueeze(-2), dim=-1)
        parts = self._blocks(into)
        for i, j, tile in self.tiles():
            weights = self.multiply.operand(self._weights(tile, at_rows[i], at_columns[j]))
            self.multiply.add(parts[i], weights, self.operands[j])
            if self.symmetric and i != j:
                self.multiply.add(parts[j], weights.T, self.operands[i])

    def _factors(self, pull: Tensor, log_sums: Tensor) -> Tensor:
        """dL/d(sum) (R,), what a power of 2 is multiplied with; not plain: its |log2| (terms, R).

        An empty sum, of log -inf, has no pull, and its factor is 0.
        """
        if self.plain:
            # the least sum is above exp(-60); an empty one's infinity times 0 would be NaN
            return (-log_sums[0]).clamp_max_(60).exp_().mul_(pull[0])
        powers = pull.new_tensor([term.power for term in self.terms])[:, None]
        lowest = torch.finfo(pull.dtype).min
        return (pull.abs() * powers).log2_() - (log_sums * BITS).clamp_min(lowest)

    def _weights(self, tile: Tensor, at_rows: Tensor, at_columns: Tensor | None) -> Tensor:
        """dL/ds_ij + dL/ds_ji of one tile: what column j pulls on row i."""
        other = self._buffer(1, tile.shape)
        if self.plain:
            if at_columns is None:
                return torch.mul(tile, at_rows, out=other)
            return torch.add(at_rows, at_columns, out=other).mul_(tile)
        weights, powered = other.zero_(), self._buffer(2, tile.shape)
        for k, term in enumerate(self.terms):
            for offsets in (at_rows, at_columns):
                if offsets is not None:
                    torch.mul(tile, term.power, out=powered)
                    weights.add_(powered.add_(offsets[k]).exp2_(), alpha=term.sign)
        return weights

    def _leave_out(self, tile: Tensor, i: int, j: int) -> None:
        if self.groups is not None:
            of_rows, of_columns = self.groups[0][i], self.groups[1][j]
            if of_rows.lowest <= of_columns.highest and of_columns.lowest <= of_rows.highest:
                same = of_rows.of_each[:, None] == of_columns.of_each
                tile.masked_fill_(same, -math.inf)
        elif self.pairs_at is not None:
            _fill_pairs(tile, self.pairs_at + i * self.tile_rows, j * self.tile_rows)

    def _buffer(self, n: int, shape: torch.Size | tuple[int, int]) -> Tensor:
        """Scratch memory n in this shape; what it held is overwritten."""
        if n not in self.buffers:  # the first tile is the largest
            self.buffers[n] = self.rows.new_empty(shape)
        buffer = self.buffers[n]
        if buffer.shape == shape:
            return buffer
        return buffer.flatten()[: shape[0] * shape[1]].view(shape)

    def _blocks(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """x cut where the tiles are; no block where it is empty."""
        if 0 < x.shape[dim] <= self.tile_rows:
            return (x,)
        return torch.split(x, self.tile_rows, dim) if x.shape[dim] else ()

    def _of_blocks(self, groups: Tensor) -> list[BlockGroups]:
        return [
            BlockGroups(block, int(copy[0]), int(copy[-1]))
            for block, copy in zip(self._blocks(groups), self._blocks(groups.cpu()), strict=True)
        ]


def _fill_pairs(tile: Tensor, row: int, column: int) -> None:
    """-inf where views of one image meet; the tile begins at (row, column), all sizes are even."""
    images, others = tile.shape[0] // 2, tile.shape[1] // 2
    offset = (row - column) // 2
    if -images < offset < others:
        blocks = tile.view(images, 2, others, 2).diagonal(offset, 0, 2)
        blocks.fill_(-math.inf)


def _log_add(total: Tensor, tile: Tensor, dim: int, spare: Tensor) -> None:
    """total = log2(2^total + sum over dim of 2^tile), in place, safe at any exponent."""
    top = torch.maximum(total, tile.amax(dim)).clamp_min_(torch.finfo(tile.dtype).min)
    sums = torch.sub(tile, top.unsqueeze(dim), out=spare).exp2_().sum(dim)
    total.copy_((total - top).exp2_().add_(sums).log2_().add_(top))
