"""Who is whose negative in the global batch, and which pairs that masks, tile by tile.

Found on the host from ids, groups and labels; a matrix of all pairs is never made. The textbook,
with the matrix, for keys (R,) of the rows and (C,) of the columns:

    masked = any(rows[:, None] == columns for rows, columns in keys)           # (R, C)
    masked = (masked & (kept_rows[:, None] != kept_columns)) | (own_rows[:, None] == own_columns)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sslpipe.distributed import all_gather_rows, current_rank, row_counts, to_device
from sslpipe.precision import wide_dtype

Keys = tuple[Tensor, Tensor]  # int64 numbers of the rows (R,) and of the columns (C,)
_COUNTED_ROWS = 1024  # and columns of a tile in which masked pairs are counted


class Masks(NamedTuple):
    """Numbers of rows and columns that decide which pairs are masked; fastest on the host.

    Args:
        keys: A pair with equal numbers in any of these is masked.
        kept: But one with equal numbers in these is not; None: all are.
        always: And one with equal numbers in these is, whatever else; None: there are none.
    """

    keys: tuple[Keys, ...]
    kept: Keys | None = None
    always: Keys | None = None

    @property
    def numbers(self) -> Tensor:
        """Return the first numbers of the columns."""
        first = self.keys[0] if self.keys else self.always
        assert first is not None
        return first[1]

    def select(self, rows: Tensor | slice, columns: Tensor | slice) -> "Masks":
        """Select rows and columns of numbers (N, V): (n V,) and (m V,), row by row."""

        def some(keys: Keys) -> Keys:
            return keys[0][rows].flatten(), keys[1][columns].flatten()

        return Masks(
            tuple(map(some, self.keys)),
            self.kept and some(self.kept),
            self.always and some(self.always),
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
        self.tile_rows = tile_rows
        self.device = device
        self._keys = [self._blocks(keys) for keys in masks.keys]
        self._kept = None if masks.kept is None else self._blocks(masks.kept)
        self._always = None if masks.always is None else self._blocks(masks.always)
        self._rows, self._columns = (len(numbers) for numbers in masks.always or masks.keys[0])

    def tile(self, i: int, j: int) -> Tensor | None:
        """Return which pairs of row block i and column block j are masked, bool; None: none is."""
        masked: Tensor | None = None
        for rows, columns in self._keys:
            masked = _either(masked, _equal(rows[i], columns[j]))
        if masked is not None and self._kept is not None:
            kept = _equal(self._kept[0][i], self._kept[1][j])
            masked = masked if kept is None else masked.logical_and_(kept.logical_not_())
        if self._always is not None:
            masked = _either(masked, _equal(self._always[0][i], self._always[1][j]))
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


class Classes(NamedTuple):
    """Images that are positives of each other; on the host.

    Args:
        class_index: (N,) int64, the class of each image; (N, 2) of its views, where some show
            images of two.
        sizes: (classes,) int64, images of each class; views, where the index is of views.
    """

    class_index: Tensor
    sizes: Tensor


class Anchors(NamedTuple):
    """Who is whose negative in the global batch of N images; on the host, where ids come from.

    Args:
        counts: images of each rank.
        masks: numbers of the views (N, 2), which are rows and columns alike; None: an anchor's own
            image alone is masked.
        negatives: float64, how many views are not masked for an anchor of each image (N,), or of
            each view (N, 2), on the views' device; None: 2N - 2.
        classes: further positives; they stand among the negatives in `negatives` and in the sums.
    """

    counts: tuple[int, ...]
    masks: Masks | None = None
    negatives: Tensor | None = None
    classes: Classes | None = None

    @property
    def images(self) -> int:
        """N, on all ranks."""
        return sum(self.counts)

    @property
    def mean_unmasked(self) -> float | Tensor:
        """Mean number of views that are not masked; a tensor where it is on a device."""
        if self.negatives is None:
            return 2 * self.images - 2
        mean = self.negatives.mean()
        return mean if mean.device.type != "cpu" else float(mean)

    @property
    def mean_negatives(self) -> float | Tensor:
        """Mean number of negatives of an anchor: views that are not masked, less positives."""
        if self.classes is None:
            return self.mean_unmasked
        index, sizes = self.classes
        if index.dim() == 1:
            positives = 2 * (sizes[index] - 1).double().mean()
        else:
            of_own_pair = (index[:, :1] == index[:, 1:]).double()
            positives = (sizes[index].double() - 1 - of_own_pair).mean()
        return self.mean_unmasked - float(positives)

    @property
    def masked_pairs(self) -> int | Tensor:
        """Ordered (anchor, view of another row) pairs that are masked."""
        if self.negatives is None:
            return 0
        pairs = 2 * self.images * (2 * self.images - 2 - self.mean_unmasked)
        return round(pairs) if isinstance(pairs, float) else pairs.round()


def gather_anchors(
    z: Tensor,
    ids: Tensor | None,
    groups: Tensor | None = None,
    without_id: Tensor | None = None,
    classes: Classes | None = None,
) -> Anchors:
    """Find who must not be whose negative: views of equal ids, and of equal groups >= 0.

    Where the two views of a row show different images, an image that one view shows is no negative
    of the other view either: there it is the positive.
    Found on the host: a device that has the ids is waited for. Collective.

    Args:
        z: (B, D), for the row count.
        ids: (B,) int64 of the images, or (B, 2) of their views, or None: all different.
        groups: (B,), (B, 2), or (B, 2, K) int64: views that share a number >= 0 in any of the K are
            no negatives.
        without_id: (B,) bool, rows whose id counts for nothing.
        classes: positives, which are never masked; their index of views (N, 2), on the host.

    Raises:
        ValueError: no rank has a row.
    """
    counts = row_counts(z.shape[0])
    images = sum(counts)
    if images == 0:
        raise ValueError("a contrastive loss of an empty batch is not defined")

    def gathered(x: Tensor) -> Tensor:
        return _of_images(all_gather_rows(x.cpu(), counts))

    # equal ids; groups, whose missing numbers fall back to ids
    image = None if ids is None else _dense(gathered(ids))
    if image is not None and without_id is not None:
        image = torch.where(gathered(without_id), 2 * images + torch.arange(images), image)
    numbers = [] if image is None else [image]
    if groups is not None:
        alone = torch.arange(images) if image is None else image
        parts = groups.unbind(2) if groups.dim() == 3 else [groups]
        numbers = [_of_images(_or_else(gathered(part), alone)) for part in parts]
    # groups of one image each need no mask but that of the image's own views
    numbers = [part for part in map(_dense, numbers) if part.dim() == 2 or part.max() < images - 1]
    if classes is None and not numbers:
        return Anchors(counts)
    if classes is None and len(numbers) == 1 and numbers[0].dim() == 1:
        (group,) = numbers
        sizes = group.bincount()
        keys = group[:, None].expand(-1, 2)
        return Anchors(counts, Masks(((keys, keys),)), (2 * images - 2 * sizes[group]).double())
    masks = _several_masks(image, numbers, images, classes)
    return Anchors(counts, masks, _count_unmasked(masks, counts, z.device), classes)


def _of_images(numbers: Tensor) -> Tensor:
    """Take one number an image, (N, 2) -> (N,), where the views of every row have the same."""
    paired = numbers.dim() == 2 and bool((numbers[:, 0] == numbers[:, 1]).all())
    return numbers[:, 0] if paired else numbers


def _dense(numbers: Tensor) -> Tensor:
    """Number the values that occur, ascending from 0."""
    index: Tensor = torch.unique(numbers, return_inverse=True)[1]
    return index


def _or_else(numbers: Tensor, others: Tensor) -> Tensor:
    """Replace numbers below 0 by `others`, apart from all that are not; (N,) or (N, 2) each."""
    if numbers.dim() > others.dim():
        others = others[:, None].expand_as(numbers)
    elif numbers.dim() < others.dim():
        numbers = numbers[:, None].expand_as(others)
    return torch.where(numbers < 0, numbers.numel() + others, _dense(numbers))


def _several_masks(
    image: Tensor | None, numbers: list[Tensor], images: int, classes: Classes | None
) -> Masks:
    """Mask by several numbers of the images (N,) or views (N, 2), and by the images themselves."""

    def of_views(part: Tensor) -> Tensor:
        return part[:, None].expand(-1, 2) if part.dim() == 1 else part

    keys = [(of_views(part), of_views(part)) for part in numbers]
    if classes is None and any(part.dim() == 1 for part in numbers):
        return Masks(tuple(keys))  # which mask the views of a row and what these show elsewhere
    if image is not None and image.dim() == 2:
        other = image.flip(1)  # what the other view of the row shows, which is the positive
        keys += [(other, image), (image, other)]
    always = of_views(torch.arange(images))
    kept = None if classes is None else (of_views(classes.class_index),) * 2
    return Masks(tuple(keys), kept, (always, always))


def _count_unmasked(masks: Masks, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Count the views that are not masked for each view, (N, 2). Collective."""
    first = sum(counts[: current_rank().rank])
    mine = slice(first, first + counts[current_rank().rank])
    of_mine = masks.select(mine, slice(None))
    masked = MaskTiles(of_mine, _COUNTED_ROWS, device).count().view(-1, 2)  # (B, 2)
    unmasked = 2 * sum(counts) - masked
    return all_gather_rows(unmasked, counts).to(wide_dtype(device))
