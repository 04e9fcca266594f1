"""Tiles of the similarity matrix: log-sum-exps and closed-form gradients without the matrix.

Each rank makes the tiles of its own rows; of the others it needs their directions and, for the
gradient, their log-sum-exps.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Products = Literal["float32", "bfloat16"]

LARGEST_PLAIN_EXPONENT = 60.0  # nats; exp(±60) and sums of 1e12 of them are normal float32 numbers
KEPT_TILES_BYTES = 16 * 2**20  # similarities kept between the two passes when all fit in this


class Twins(NamedTuple):
    """Views whose sample id occurs more than once in the global batch. rows: sorted (2 views)."""

    ids: Tensor  # (N,) int64
    rows: Tensor  # (T,) int64 in [0, 2N): first views, then second
    masked_pairs: int


def find_twins(ids: Tensor) -> Twins | None:
    """The repeated ids of the global batch (N,), or None when all differ. O(N log N)."""
    _, group, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
    if sizes.numel() == ids.numel():
        return None
    images = torch.nonzero(sizes[group] > 1).flatten()
    # both views of an image mask both views of each of its size - 1 twins
    masked_pairs = int((4 * sizes * (sizes - 1)).sum())
    return Twins(ids, torch.cat([images, images + ids.numel()]), masked_pairs)


class Block(NamedTuple):
    """Consecutive rows of the 2N."""

    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def normalised(z: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of z (R, D) at length 1, and 1 / length (R, 1); a zero row stays zero, with 0.

    Divided by the largest entry first, so that lengths near the limits of the dtype are exact too.
    """
    largest = z.abs().amax(1, keepdim=True)
    inverse_largest = (1 / largest).masked_fill(largest < torch.finfo(z.dtype).tiny, 0)
    scaled = z * inverse_largest
    inverse = 1 / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(0.5)
    return scaled * inverse, inverse_largest * inverse


class Tiles:
    """Similarities of some rows with all columns, one tile at a time.

    In bits: x = log2(e) cosine / temperature, since exp2 is several times quicker than exp.
    symmetric: the rows are all rows, so only tiles on and above the diagonal are made, and each
    serves its rows and its columns.
    """

    def __init__(
        self,
        directions: Tensor,
        temperature: float,
        spans: list[slice],
        *,
        symmetric: bool,
        tile_rows: int,
        twins: Twins | None,
    ) -> None:
        bits = math.log2(math.e) / temperature
        self.v = directions * math.sqrt(bits)  # v_i . v_j: similarity in bits
        self.temperature = temperature
        self.twins = twins
        self.images = directions.shape[0] // 2
        self.symmetric = symmetric
        # with exponents this small neither a sum nor a term leaves float32's normal range
        self.plain = 1 / temperature <= LARGEST_PLAIN_EXPONENT
        self.columns = _blocks([slice(0, 2 * self.images)], tile_rows)
        self.anchors = _blocks(spans, tile_rows)
        largest = min(tile_rows, 2 * self.images)
        self.buffer = self.v.new_empty(2, largest * largest)
        anchor_rows = sum(block.stop - block.start for block in self.anchors)
        tile_numbers = anchor_rows * 2 * self.images // (2 if symmetric else 1)
        self.keep = tile_numbers * self.v.element_size() <= KEPT_TILES_BYTES
        self.kept: dict[tuple[int, int], Tensor] = {}

    def pairs(self) -> Iterator[tuple[Block, Block]]:
        for anchors in self.anchors:
            for columns in self.columns:
                if not self.symmetric or columns.start >= anchors.start:
                    yield anchors, columns

    def negatives(self) -> tuple[Tensor, Tensor]:
        """For each row (2N,): log2 of sum_j 2^x_ij over its negatives, and x of its positive.

        The positive is kept out of the sum: a loss near 0 is then as exact as a large one.
        """
        start = 0.0 if self.plain else -math.inf
        total = torch.full_like(self.v[:, 0], start)
        positive = torch.zeros_like(total)
        for anchors, columns in self.pairs():
            tile = self._tile(anchors, columns, keep=self.keep)
            self._take_positive(tile, anchors, columns, positive)
            mirrored = self.symmetric and anchors != columns
            if self.plain:
                tile = tile.exp2_()  # a kept tile stays exponentiated
                total[anchors.rows] += tile.sum(1)
                if mirrored:
                    total[columns.rows] += tile.sum(0)
            else:
                _log_add(total[anchors.rows], tile, 1)
                if mirrored:
                    _log_add(total[columns.rows], tile, 0)
        return (total.log2_() if self.plain else total), positive

    def gradient(self, lse: Tensor, missing: Tensor) -> Tensor:
        """dL/du_i = 1/(2N tau) sum_j w_ij u_j for the rows, L the mean over all 2N anchors.

        w_ij = p_ij + p_ji for a negative, p_ij = 2^(x_ij - lse_i), and -(missing_i + missing_j)
        for the positive. lse (2N,): log2 of the sum over negatives and positive; missing (2N,):
        1 - p of the positive, given apart because 1 - p cancels where p is near 1.
        """
        grad = torch.zeros_like(self.v)
        inverse = (-lse).exp2_() if self.plain else lse
        for anchors, columns in self.pairs():
            weights = self._weights(anchors, columns, inverse)
            for offset, rows, cols in self._positives(anchors, columns):
                weights.diagonal(offset).copy_(-(missing[rows] + missing[cols]))
            _add_product(grad[anchors.rows], weights, self.v[columns.rows])
            if self.symmetric and anchors != columns:
                _add_product(grad[columns.rows], weights.T, self.v[anchors.rows])
        # v is u sqrt(log2(e) / tau), and the formula asks for u / tau
        return grad.mul_(1 / (2 * self.images * math.sqrt(math.log2(math.e) * self.temperature)))

    def _weights(self, anchors: Block, columns: Block, inverse: Tensor) -> Tensor:
        """p_ij + p_ji of one tile."""
        tile = self.kept.pop((anchors.start, columns.start), None)
        fresh = tile is None
        if tile is None:
            tile = self._tile(anchors, columns, keep=False)
        other = self.buffer[1, : tile.numel()].view(tile.shape)
        of_rows, of_columns = inverse[anchors.rows, None], inverse[columns.rows]
        if self.plain:
            torch.add(of_rows, of_columns, out=other)
            return (tile.exp2_() if fresh else tile).mul_(other)
        torch.sub(tile, of_columns, out=other)
        return tile.sub_(of_rows).exp2_().add_(other.exp2_())

    def _tile(self, anchors: Block, columns: Block, keep: bool) -> Tensor:
        """x of one tile; -inf for a view with itself and for views of twins."""
        shape = anchors.stop - anchors.start, columns.stop - columns.start
        if keep:
            tile = self.kept[anchors.start, columns.start] = self.v.new_empty(shape)
        else:
            tile = self.buffer[0, : shape[0] * shape[1]].view(shape)
        torch.mm(self.v[anchors.rows], self.v[columns.rows].T, out=tile)
        _fill_diagonal(tile, anchors.start - columns.start)
        if self.twins is not None:
            self._mask_twins(tile, anchors, columns, self.twins)
        return tile

    def _mask_twins(self, tile: Tensor, anchors: Block, columns: Block, twins: Twins) -> None:
        rows = _inside(twins.rows, anchors)
        cols = _inside(twins.rows, columns)
        image_r, image_c = rows % self.images, cols % self.images
        same_id = twins.ids[image_r, None] == twins.ids[image_c]
        at = torch.nonzero(same_id & (image_r[:, None] != image_c))
        tile[rows[at[:, 0]] - anchors.start, cols[at[:, 1]] - columns.start] = -math.inf

    def _positives(self, anchors: Block, columns: Block) -> Iterator[tuple[int, slice, slice]]:
        """Diagonals of the tile with positives (column = row ± N): offset, their rows, columns."""
        for distance in (self.images, -self.images):
            first = max(anchors.start, columns.start - distance)
            last = min(anchors.stop, columns.stop - distance)
            if first < last:
                offset = anchors.start + distance - columns.start
                yield offset, slice(first, last), slice(first + distance, last + distance)

    def _take_positive(
        self, tile: Tensor, anchors: Block, columns: Block, positive: Tensor
    ) -> None:
        """Move the tile's positives into `positive`, leaving -inf."""
        for offset, rows, cols in self._positives(anchors, columns):
            values = tile.diagonal(offset)
            positive[rows] = values
            if self.symmetric:
                positive[cols] = values
            values.fill_(-math.inf)


def _blocks(spans: list[slice], size: int) -> list[Block]:
    return [
        Block(start, min(start + size, span.stop))
        for span in spans
        for start in range(span.start, span.stop, size)
    ]


def _inside(rows: Tensor, block: Block) -> Tensor:
    return rows[(rows >= block.start) & (rows < block.stop)]


def _fill_diagonal(tile: Tensor, offset: int) -> None:
    if -tile.shape[0] < offset < tile.shape[1]:
        tile.diagonal(offset).fill_(-math.inf)


def _log_add(total: Tensor, tile: Tensor, dim: int) -> None:
    """total = log2(2^total + sum over dim of 2^tile), in place, safe at any exponent."""
    top = torch.maximum(total, tile.amax(dim)).clamp_min(torch.finfo(tile.dtype).min)
    sums = (tile - top.unsqueeze(dim)).exp2_().sum(dim)
    total.copy_((total - top).exp2_().add_(sums).log2_().add_(top))


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(out, left, right, out=out)


@contextmanager
def tile_precision(products: Products) -> Iterator[None]:
    """ "bfloat16": float32 products inside run as bfloat16 on CPUs with AMX, as TF32 on CUDA."""
    before = torch.get_float32_matmul_precision()
    if products == "float32" or before == "medium":
        yield
        return
    torch.set_float32_matmul_precision("medium")  # of the whole process: put back whatever happens
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
