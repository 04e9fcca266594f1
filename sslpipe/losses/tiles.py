"""Tiles of a similarity matrix: log-sum-exps and their closed-form gradient without the matrix.

A similarity is the dot product of a row and a column, in nats; the tiles work in bits, since exp2
is several times quicker than exp.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sslpipe.losses.products import Multiply

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


class Block(NamedTuple):
    """Consecutive rows."""

    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


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
        self.symmetric, self.pairs_at, self.groups = symmetric, pairs_at, groups
        # with exponents this small neither a sum nor a term leaves float32's normal range
        self.plain = largest <= LARGEST_PLAIN_EXPONENT and terms == (Term(),)
        tile_rows += tile_rows % 2  # a tile never cuts an image's two views apart
        self.row_blocks = _blocks(rows.shape[0], tile_rows)
        self.column_blocks = _blocks(columns.shape[0], tile_rows)
        area = min(tile_rows, rows.shape[0]) * min(tile_rows, columns.shape[0])
        self.buffers = [rows.new_empty(area) for _ in range(2 if self.plain else 3)]
        numbers = rows.shape[0] * columns.shape[0] // (2 if symmetric else 1)
        self.keep = self.plain and numbers * rows.element_size() <= KEPT_TILES_BYTES
        self.kept: dict[tuple[int, int], Tensor] = {}
        if groups is not None:
            self.row_groups, self.column_groups = (
                [(int(g[b.start]), int(g[b.stop - 1])) for b in blocks]
                for g, blocks in zip(
                    (g.cpu() for g in groups), (self.row_blocks, self.column_blocks), strict=True
                )
            )

    def tiles(self) -> Iterator[tuple[Block, Block, Tensor]]:
        """Row block, column block, similarities in bits (-inf: left out), in a reused buffer."""
        for i, rows in enumerate(self.row_blocks):
            left = self.rows[rows.rows] * BITS
            for j, columns in enumerate(self.column_blocks):
                if self.symmetric and j < i:
                    continue
                tile = self.kept.get((i, j))
                if tile is None:
                    shape = rows.stop - rows.start, columns.stop - columns.start
                    if self.keep:
                        tile = self.kept[i, j] = left.new_empty(shape)
                    else:
                        tile = self._buffer(0, shape)
                    self.multiply.similarities(left, self.columns[columns.rows], out=tile)
                    self._leave_out(tile, i, j)
                    if self.plain:
                        tile.exp2_()  # from here on 2^x
                yield rows, columns, tile

    def log_sums(self) -> Tensor:
        """(terms, R): for each term and row the log of its sum, in nats; -inf where it is empty."""
        shape = len(self.terms), self.rows.shape[0]
        total = self.rows.new_full(shape, 0.0 if self.plain else -math.inf)
        for rows, columns, tile in self.tiles():
            mirrored = self.symmetric and rows != columns
            if self.plain:
                total[0, rows.rows] += tile.sum(1)
                if mirrored:
                    total[0, columns.rows] += tile.sum(0)
                continue
            for k, term in enumerate(self.terms):
                powered, spare = (self._buffer(n, tile.shape) for n in (1, 2))
                torch.mul(tile, term.power, out=powered)
                _log_add(total[k, rows.rows], powered, 1, spare)
                if mirrored:
                    _log_add(total[k, columns.rows], powered, 0, spare)
        return total.log_() if self.plain else total.div_(BITS)

    def add_gradient(
        self, into: Tensor, pull: Tensor, log_sums: Tensor, columns: tuple[Tensor, Tensor] | None
    ) -> None:
        """into (R, D) += dL/d(rows), from pull = dL/d(log_sums), both (terms, R).

        columns: the same two for the columns, (terms, C), where these are rows of a sum as well;
        None where the columns take no gradient. Symmetric tiles need none: it is that of the rows.
        """
        of_rows = self._factors(pull, log_sums)
        of_columns = None if columns is None else self._factors(*columns)
        if self.symmetric:
            of_columns = of_rows
        operand = self.multiply.operand(self.columns)
        for rows, cols, tile in self.tiles():
            at_rows = of_rows[:, rows.rows, None]
            at_columns = None if of_columns is None else of_columns[:, cols.rows]
            weights = self.multiply.operand(self._weights(tile, at_rows, at_columns))
            self.multiply.add(into[rows.rows], weights, operand[cols.rows])
            if self.symmetric and rows != cols:
                self.multiply.add(into[cols.rows], weights.T, operand[rows.rows])

    def _factors(self, pull: Tensor, log_sums: Tensor) -> Tensor:
        """dL/d(sum) (terms, R), what a power of 2 is multiplied with; not plain: its |log2|.

        An empty sum, of log -inf, has no pull, and its factor is 0.
        """
        if self.plain:
            # 1 / sum is in range but for the empty sum's infinity, which times 0 would be NaN
            return (-log_sums).exp_().mul_(pull).masked_fill_(log_sums == -math.inf, 0)
        powers = pull.new_tensor([term.power for term in self.terms])[:, None]
        lowest = torch.finfo(pull.dtype).min
        return (pull.abs() * powers).log2_() - (log_sums * BITS).clamp_min(lowest)

    def _weights(self, tile: Tensor, at_rows: Tensor, at_columns: Tensor | None) -> Tensor:
        """dL/ds_ij + dL/ds_ji of one tile: what column j pulls on row i."""
        other = self._buffer(1, tile.shape)
        if self.plain:
            if at_columns is None:
                return torch.mul(tile, at_rows[0], out=other)
            torch.add(at_rows[0], at_columns[0], out=other)
            return other.mul_(tile)
        weights, powered = other.zero_(), self._buffer(2, tile.shape)
        for k, term in enumerate(self.terms):
            for offsets in (at_rows, at_columns):
                if offsets is not None:
                    torch.mul(tile, term.power, out=powered)
                    weights.add_(powered.add_(offsets[k]).exp2_(), alpha=term.sign)
        return weights

    def _leave_out(self, tile: Tensor, i: int, j: int) -> None:
        if self.groups is not None:
            (row_first, row_last), (first, last) = self.row_groups[i], self.column_groups[j]
            if row_first <= last and first <= row_last:
                of_rows = self.groups[0][self.row_blocks[i].rows]
                of_columns = self.groups[1][self.column_blocks[j].rows]
                tile.masked_fill_(of_rows[:, None] == of_columns, -math.inf)
        elif self.pairs_at is not None:
            row = self.pairs_at + self.row_blocks[i].start
            _fill_pairs(tile, row, self.column_blocks[j].start)

    def _buffer(self, n: int, shape: torch.Size | tuple[int, int]) -> Tensor:
        return self.buffers[n][: shape[0] * shape[1]].view(shape)


def _blocks(rows: int, size: int) -> list[Block]:
    return [Block(start, min(start + size, rows)) for start in range(0, rows, size)]


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
