"""Tiles of a similarity matrix: log-sum-exps and their closed-form gradient without the matrix.

The textbook, with the whole matrix, for one term of power 1 (rows (R, D), columns (C, D)):

    s = (rows @ columns.T).masked_fill(masked, -inf)                  # (R, C), nats
    log_sums = torch.logsumexp(s, dim=1)                              # (R,)
    p = (s - log_sums[:, None]).exp()                                 # softmax over each row
    grad_rows = (grad_sums[:, None] * p) @ columns                    # grad_sums = dL/d(log_sums)
    # where columns are rows too: + the same with the softmax over each column

Four tricks make that fast; each is explained where it is done:

- bits: similarities are scaled by log2(e), since on a CPU exp2 is several times faster than exp; on
  CUDA it is as fast, but torch compiles it at the first step.
- plain: where |s| is small, sums are taken without subtracting a row's maximum first.
- symmetric: where rows are the columns, a tile above the diagonal serves its mirror image as well.
- kept: a small matrix's tiles are not computed a second time for the gradient.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sslpipe.losses.engine.anchors import Masks, MaskTiles, cut
from sslpipe.precision import float32_products

FEW_PAIRS = 2**15  # of rows and columns; below, oneDNN's overhead is more than its products save
LARGEST_PLAIN_EXPONENT = 50.0  # nats; exp(±50) and sums of 1e12 of them are normal float32 numbers
# Tiles are kept between the two passes where the similarities, if symmetric half of them, fit in
# this: up to 2,500 rows in float32. It saves a fifth of the time at 2,048 rows; to keep some of
# many would save less than it costs in memory.
KEPT_TILES_BYTES = 12 * 2**20


class Unit(NamedTuple):
    """What exponents are counted in inside: so many a nat, with the exp and log of it."""

    per_nat: float
    exp_: Callable[[Tensor], Tensor]
    log_: Callable[[Tensor], Tensor]


BITS = Unit(math.log2(math.e), Tensor.exp2_, Tensor.log2_)
NATS = Unit(1.0, Tensor.exp_, Tensor.log_)


class Term(NamedTuple):
    """One of an objective's sums over an anchor's negatives: log sum_j exp(power * s_ij).

    Args:
        power: > 0.
        sign: of dL/d(that sum), +1 or -1, the same for every row and input.
    """

    power: float = 1.0
    sign: int = 1


ONE_SUM = (Term(),)  # the log-sum-exp of similarities, all that most losses need


def fast_kernels(x: Tensor, pairs: int) -> AbstractContextManager[None]:
    """Let oneDNN multiply float32 matrices inside, where it does so unrounded and faster than MKL.

    Args:
        x: Any tensor of the loss, for its device.
        pairs: Of a row and a column, on all ranks; of few its overhead is more than it saves.
    """
    if pairs < FEW_PAIRS or x.device.type != "cpu" or not _onednn_keeps_float32():
        return nullcontext()
    return float32_products("mkldnn", "bf16")


@cache
def _onednn_keeps_float32() -> bool:
    """Try whether oneDNN, allowed bfloat16, multiplies in float32 all the same.

    So it is on x86 without AMX. There its kernels may be had for free, which are up to twice as
    fast as MKL's (AMD Zen 5).
    """
    x = torch.linspace(1, 2, 128 * 128).view(128, 128)
    with float32_products("mkldnn", "bf16"):
        product = torch.mm(x, x)
    exact = torch.mm(x.double(), x.double())
    return float((product - exact).abs().max() / exact.max()) < 1e-6


class Tiles:
    """Similarities of rows with columns, one tile at a time.

    A masked pair counts as no pair at all. `pairs_at` masks the pairs of one image, `masks` any;
    with neither, nothing is masked.

    Args:
        rows: (R, D), and columns: (C, D), scaled so that their dot products are nats.
        largest: no |similarity| is above this, nats.
        tile_rows: rows and columns of a tile; rounded up to even.
        terms: the sums that are wanted.
        symmetric: rows and columns are the same.
        pairs_at: rows are rows pairs_at, pairs_at + 1, ... of the columns, where 2i and 2i + 1 are
            the views of image i.
        masks: what decides which pairs are masked. Fastest ascending: see MaskTiles.
        absent: (C,) bool, columns that count for no row; None: there are none.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        *,
        largest: float,
        tile_rows: int,
        terms: tuple[Term, ...] = ONE_SUM,
        symmetric: bool = False,
        pairs_at: int | None = None,
        masks: Masks | None = None,
        absent: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.terms = terms
        self.unit = NATS if rows.is_cuda else BITS
        self.symmetric = symmetric
        self.pairs_at = pairs_at
        # with exponents this small neither a sum nor a term leaves float32's normal range
        self.plain = largest <= LARGEST_PLAIN_EXPONENT and terms == ONE_SUM
        tile_rows += tile_rows % 2  # a tile never cuts an image's two views apart
        self.tile_rows = tile_rows
        self.buffers: dict[int, Tensor] = {}
        self.columns = self._blocks(columns)
        numbers = rows.shape[0] * columns.shape[0] // (2 if symmetric else 1)
        self.keep = self.plain and numbers * rows.element_size() <= KEPT_TILES_BYTES
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.masks = None if masks is None else MaskTiles(masks, tile_rows, rows.device)
        self.absent = None if absent is None else self._blocks(absent)

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield numbers of row and column block, and their similarities s, overwritten by the next.

        A tile holds s in `unit`, -inf where masked; if plain, exp(s) already.
        """
        for i, rows in enumerate(self._blocks(self.rows)):
            left: Tensor | None = None
            for j, right in enumerate(self.columns):
                if self.symmetric and j < i:
                    continue  # tile (j, i) has served it
                tile = self.kept.get((i, j))
                if tile is None:
                    if left is None:
                        left = rows * self.unit.per_nat
                    shape = left.shape[0], right.shape[0]
                    if self.keep:
                        tile = self.kept[i, j] = rows.new_empty(shape)
                    else:
                        tile = self._buffer(0, shape)
                    torch.mm(left, right.T, out=tile)
                    self._mask(tile, i, j)
                    if self.plain:
                        self.unit.exp_(tile)
                yield i, j, tile

    def log_sums(self) -> Tensor:
        """Return (terms, R): log sum_j exp(power * s_ij), in nats; -inf where the sum is empty."""
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
                _log_add(total=parts[i][k], tile=powered, dim=1, spare=spare, unit=self.unit)
                if mirrored:
                    _log_add(total=parts[j][k], tile=powered, dim=0, spare=spare, unit=self.unit)
        return total.log_() if self.plain else total.div_(self.unit.per_nat)

    def add_gradient(
        self,
        into: Tensor,
        grad_sums: Tensor,
        log_sums: Tensor,
        columns: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Add dL/d(rows) to `into`.

        Args:
            into: (R, D).
            grad_sums: dL/d(log_sums), (terms, R).
            log_sums: what `log_sums` returned, (terms, R).
            columns: the same two for the columns, (terms, C), where these are rows of a sum as
                well; None where the columns take no gradient. Symmetric tiles need none: it is that
                of the rows.
        """
        row_scales = self._softmax_scales(grad_sums, log_sums)
        at_rows = self._blocks(row_scales.unsqueeze(-1), dim=-2)
        at_columns: Sequence[Tensor | None] = [None] * len(self.columns)
        if self.symmetric or columns is not None:
            column_scales = row_scales
            if columns is not None:
                column_grad, column_sums = columns
                column_scales = self._softmax_scales(column_grad, column_sums)
            at_columns = self._blocks(column_scales.unsqueeze(-2), dim=-1)
        parts = self._blocks(into)
        for i, j, tile in self.tiles():
            weights = self._weights(tile, at_rows[i], at_columns[j])
            torch.addmm(parts[i], weights, self.columns[j], out=parts[i])
            if self.symmetric and i != j:
                torch.addmm(parts[j], weights.T, self.columns[i], out=parts[j])

    def _softmax_scales(self, grad_sums: Tensor, log_sums: Tensor) -> Tensor:
        """Return grad_sums * power / exp(log_sums), which times exp(power * s_ij) is dL/ds_ij.

        Plain: (R,). Otherwise the log of its size, (terms, R), which is added to an exponent. The
        scale of an empty sum, whose log is -inf and whose gradient is 0, is 0.
        """
        if self.plain:
            # the least sum is above exp(-60); an empty one's infinity times 0 would be NaN
            return (-log_sums[0]).clamp_max_(60).exp_().mul_(grad_sums[0])
        scales = grad_sums.abs()
        for term, scale in zip(self.terms, scales, strict=True):
            scale.mul_(term.power)
        lowest = torch.finfo(grad_sums.dtype).min
        return self.unit.log_(scales) - (log_sums * self.unit.per_nat).clamp_min(lowest)

    def _weights(self, tile: Tensor, at_rows: Tensor, at_columns: Tensor | None) -> Tensor:
        """Return dL/ds_ij + dL/ds_ji of one tile: what column j weighs in the gradient of row i."""
        other = self._buffer(1, tile.shape)
        if self.plain:
            if at_columns is None:
                return torch.mul(tile, at_rows, out=other)
            return torch.add(at_rows, at_columns, out=other).mul_(tile)
        weights = other.zero_()
        powered = self._buffer(2, tile.shape)
        for k, term in enumerate(self.terms):
            for scales in (at_rows, at_columns):
                if scales is not None:
                    torch.mul(tile, term.power, out=powered)
                    weights.add_(self.unit.exp_(powered.add_(scales[k])), alpha=term.sign)
        return weights

    def _mask(self, tile: Tensor, i: int, j: int) -> None:
        if self.absent is not None:
            tile.masked_fill_(self.absent[j], -math.inf)
        if self.masks is not None:
            masked = self.masks.tile(i, j)
            if masked is not None:
                tile.masked_fill_(masked, -math.inf)
        elif self.pairs_at is not None:
            _mask_pairs(tile, self.pairs_at + i * self.tile_rows, j * self.tile_rows)

    def _buffer(self, n: int, shape: torch.Size | tuple[int, int]) -> Tensor:
        """Return scratch memory n in this shape; what it held is overwritten."""
        if n not in self.buffers:  # the first tile is the largest
            self.buffers[n] = self.rows.new_empty(shape)
        buffer = self.buffers[n]
        if buffer.shape == shape:
            return buffer
        return buffer.flatten()[: shape[0] * shape[1]].view(shape)

    def _blocks(self, x: Tensor, dim: int = 0) -> Sequence[Tensor]:
        return cut(x, self.tile_rows, dim)


def _mask_pairs(tile: Tensor, row: int, column: int) -> None:
    """Set -inf where views of one image meet; the tile begins at (row, column), sizes are even."""
    images = tile.shape[0] // 2
    others = tile.shape[1] // 2
    offset = (row - column) // 2
    if -images < offset < others:
        blocks = tile.view(images, 2, others, 2).diagonal(offset, 0, 2)
        blocks.fill_(-math.inf)


def _log_add(total: Tensor, tile: Tensor, dim: int, spare: Tensor, unit: Unit) -> None:
    """Set total = log(exp(total) + sum over dim of exp(tile)), in place, safe at any exponent."""
    top = torch.maximum(total, tile.amax(dim)).clamp_min_(torch.finfo(tile.dtype).min)
    sums = unit.exp_(torch.sub(tile, top.unsqueeze(dim), out=spare)).sum(dim)
    total.copy_(unit.log_(unit.exp_(total - top).add_(sums)).add_(top))
