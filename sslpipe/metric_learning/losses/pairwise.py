"""Who is compared with whom: the anchors of this rank with the rows of all, as dense matrices.

Every loss of pairs, triplets or tuples is a rule over three things made here: a matrix of distances
or similarities (n anchors x M columns), a boolean matrix of positives and one of negatives.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, current_rank, gather_with_grad, row_counts
from sslpipe.errors import UserError, shown
from sslpipe.metric_learning.losses.tiled import (
    NEVER,
    centered_columns,
    distances,
    middle_row,
)
from sslpipe.registry.part import Part

Distance = Literal["euclidean", "squared", "cosine"]


class References(NamedTuple):
    """Hold rows from outside the batch, a queue's say: without gradient, equal on all ranks."""

    embeddings: Tensor  # (R, D)
    labels: Tensor  # (R,) int64
    ids: Tensor  # (R,) int64


class LabelledRows(NamedTuple):
    """Hold anchors, this rank's rows, and columns: all ranks' in rank order, then references."""

    anchors: Tensor  # (n, D) float32 at least
    columns: Tensor  # (M, D), with gradient to every rank's rows, without to references
    labels: Tensor  # (n,) int64, < 0: none
    column_labels: Tensor  # (M,) int64
    first: int  # the column that is anchor 0
    references: int  # the last so many columns
    unit: bool = False  # whether all rows have length 1, or are all zeros

    def similarities(self) -> Tensor:
        """Return (n, M) dot products: cosines where the loss normalises."""
        return self.anchors @ self.columns.T

    def relative_similarities(self) -> Tensor:
        """Return (n, M) dot products less a number of each anchor's own.

        For rules that know differences of an anchor's similarities only: they keep their digits
        where the columns share an offset, or are all nearly one. Of rows of length 1, the product
        is 1 - d^2 / 2; it is taken from the distance, as near 1 rounding is larger than it. A dead
        row, all zeros, is no such row: with it the product is 0.
        """
        if self.unit:
            dead = (self.columns == 0).all(1)  # (M,)
            return self.distances("squared") / -2 - 0.5 * dead
        return self.anchors @ centered_columns(self.columns).T

    def centered(self) -> "LabelledRows":
        """Subtract `middle_row` from all rows: distances stay, and keep their digits."""
        if not len(self.columns):
            return self
        center = middle_row(self.columns)
        return self._replace(anchors=self.anchors - center, columns=self.columns - center)

    def distances(self, kind: Distance) -> Tensor:
        """Return (n, M) distances.

        Args:
            kind: "euclidean"; "squared", of the Euclidean distance; "cosine", 1 - dot product of
                unit rows.

        A common offset costs no digits: see `tiled.distances`.
        """
        if kind == "cosine":
            return 1 - self.similarities()
        if kind not in ("euclidean", "squared"):
            raise ValueError(
                f"distance = {kind!r} is unknown; known: 'euclidean', 'squared', 'cosine'"
            )
        return distances(self.anchors, self.columns, squared=kind == "squared")


class LabelCounts(NamedTuple):
    """What the host knows of a step's labels: on CUDA, to count them would wait for the device."""

    unlabelled: int  # of this rank's rows
    most_positives: int  # no row has more among all ranks' rows


class Pairs(NamedTuple):
    """Hold the pairs that count. A miner takes pairs or triplets away; it never adds one.

    triplets holds, for the anchor's p-th positive in column order, which negatives form a triplet
    with it; None: every positive with every negative. Only losses of triplets look at it, so
    `positive` and `negative` hold what is left in at least one triplet. most_positives is what the
    host knows of an anchor's positives without looking at the device: never more than so many.
    """

    positive: Tensor  # (n, M) bool
    negative: Tensor  # (n, M) bool
    triplets: Tensor | None = None  # (n, P, M) bool
    most_positives: int | None = None

    def slots(self) -> "Slots":
        """Put the positives of each anchor side by side, their columns ascending; M > 0.

        With most_positives nothing is counted on a CUDA device, which would wait, and there are so
        many slots.
        """
        positive = self.positive
        most_positives = self.most_positives
        if most_positives is None or not positive.is_cuda:
            most_positives = int(positive.sum(1).max()) if len(positive) else 0
        columns = positive.shape[1]
        width = max(1, min(most_positives, columns))
        early = torch.arange(columns, 0, -1, dtype=torch.int32, device=positive.device)
        first = (positive * early).topk(width, dim=1).values  # the columns, counted from the end
        filled = first > 0
        return Slots((columns - first.long()).masked_fill_(~filled, 0), filled)


def labelled_rows(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int | None = None,
    dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Check embeddings (n, D) and labels (n,); return them in float32 at least, and in int64.

    Args:
        embeddings: Of any float dtype; a numpy array or a list is taken too.
        labels: int64, < 0 for none; a numpy array or a list is taken too.
        num_classes: Labels must be below it; on CUDA, where to look would wait, kernels assert it.
        dim: D must be it.

    Raises:
        ValueError: naming the shape, the dtype or the label.
    """
    embeddings = torch.as_tensor(embeddings)
    try:
        labels = torch.as_tensor(labels, device=embeddings.device)
    except (TypeError, ValueError) as error:  # texts, rows of different lengths
        raise ValueError(
            f"labels = {shown(labels)} are no integers (n,): {error}; number them, as in "
            "numpy.unique(labels, return_inverse=True)[1]"
        ) from None
    if embeddings.dim() != 2 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"embeddings must be (n, D) and labels (n,), got {tuple(embeddings.shape)} "
            f"and {tuple(labels.shape)}"
        )
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(
            f"embeddings are {tuple(embeddings.shape)}, but dim = {dim}; make the loss with "
            f"dim={embeddings.shape[1]}"
        )
    if not embeddings.dtype.is_floating_point:
        raise ValueError(f"embeddings must be of a float dtype, got {embeddings.dtype}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}; convert them with .long()")
    looks = num_classes is not None and len(labels) and not labels.is_cuda
    if num_classes is not None and looks and (top := int(labels.max())) >= num_classes:
        raise ValueError(f"label {top} is out of range: num_classes = {num_classes}")
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), labels


class LabelledPart(Part):
    """What is called with embeddings and labels by place, and all else by its name."""

    def __call__(self, *rows: Tensor, **known: Any) -> Any:
        """Call `forward`. Raises: UserError, for a third argument by place, and for no miner."""
        miner = known.get("miner")
        if len(rows) > 2:
            raise UserError(
                f"{type(self).__name__} takes embeddings and labels by place and all else by its "
                "name; call loss(embeddings, labels, miner=miner), with the miner itself, not what "
                "it returns"
            )
        if miner is not None and not isinstance(miner, nn.Module):
            raise UserError(
                f"miner = {shown(miner)} is no miner; give one that is made, as in "
                "loss(embeddings, labels, miner=SemiHardMiner())"
            )
        return super().__call__(*rows, **known)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer in x's dtype, whatever the dtype of its weights."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def compare(
    embeddings: Tensor, labels: Tensor, ids: Tensor | None, ref: References | None
) -> tuple[LabelledRows, Pairs]:
    """Gather the batch over the ranks (collective) and find its positives and negatives.

    A row is no pair with itself, nor with a reference of the same id: an old copy of it.

    Args:
        embeddings: (n, D); n may differ between ranks.
        labels: (n,) int64; rows with a label < 0 are in no pair.
        ids: (n,) int64, which sample each row shows.
        ref: Further columns.
    """
    counts = row_counts(embeddings.shape[0])
    rank = current_rank().rank
    columns = gather_with_grad(embeddings)
    column_labels = all_gather_rows(labels, counts)
    references = 0
    if ref is not None:
        references = ref.embeddings.shape[0]
        columns = torch.cat([columns, ref.embeddings.detach().to(columns.dtype)])
        column_labels = torch.cat([column_labels, ref.labels])
    first = sum(counts[:rank])
    batch = LabelledRows(
        anchors=embeddings,
        columns=columns,
        labels=labels,
        column_labels=column_labels,
        first=first,
        references=references,
    )

    positive = labels[:, None] == column_labels
    negative = ~positive
    positive.diagonal(first).fill_(False)
    if column_labels.is_cuda or bool((column_labels < 0).any()):  # there, to look would wait
        known = (labels >= 0)[:, None] & (column_labels >= 0)
        positive &= known
        negative &= known
    if ref is not None and ids is not None:
        other = ids[:, None] != ref.ids
        positive[:, -references:] &= other
        negative[:, -references:] &= other
    return batch, Pairs(positive, negative)


def unit(x: Tensor) -> Tensor:
    """Bring rows (n, D) to length 1, at any scale; a zero row stays zero and gets no gradient."""
    largest = x.detach().abs().amax(1, keepdim=True)
    # a constant factor: directions know no length
    x = x * (1 / largest).masked_fill(largest < torch.finfo(x.dtype).tiny, 0)
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / torch.where(length > 0, length, 1)


class PerAnchor(NamedTuple):
    """Hold one term of a loss: its items (pairs, triplets, anchors), added up for each anchor."""

    total: Tensor  # (n,) with gradient
    items: Tensor  # (n,) how many
    active: Tensor  # (n,) how many with a value above 0

    def times(self, factor: float) -> "PerAnchor":
        """Weigh the values."""
        return self._replace(total=factor * self.total)

    def plus(self, other: "PerAnchor") -> "PerAnchor":
        """Take the items of both as those of one term."""
        return PerAnchor(
            total=self.total + other.total,
            items=self.items + other.items,
            active=self.active + other.active,
        )


def per_pair(values: Tensor, mask: Tensor) -> PerAnchor:
    """Add up values (n, M) of the pairs of `mask` (n, M), the term's items."""
    values = values.masked_fill(~mask, 0)
    return PerAnchor(values.sum(1), mask.sum(1), (values.detach() > 0).sum(1))


def per_row(values: Tensor, mask: Tensor) -> PerAnchor:
    """Keep values (n,) of the anchors of `mask` (n,), the term's items."""
    values = values.masked_fill(~mask, 0)
    return PerAnchor(values, mask.long(), (values.detach() > 0).long())


class Slots(NamedTuple):
    """Hold each anchor's positives side by side: P >= 1 is small where the columns M are many."""

    columns: Tensor  # (n, P) int64; 0 where there is none
    filled: Tensor  # (n, P) bool

    def take(self, x: Tensor) -> Tensor:
        """Gather (n, M) -> (n, P)."""
        return x.gather(1, self.columns)

    def lse(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Take `masked_lse` over the positives: (n, M) -> (n,)."""
        return (scale * self.take(x)).masked_fill(~self.filled, NEVER[x.dtype]).logsumexp(1)


def occurrence(labels: Tensor) -> Tensor:
    """Number each label's rows: (M,) -> (M,) int64, 0 for its first, 1 for its second, ..."""
    ordered, order = labels.sort(stable=True)
    start = torch.searchsorted(ordered, ordered)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - start
    return place


def hardest_pairs(
    batch: LabelledRows,
    pairs: Pairs,
    positive_share: float,
    negative_share: float,
    distance: Distance,
) -> Pairs:
    """Select as `HardestShareMiner` does, with a share for each kind. Collective."""
    rows = len(batch.column_labels) - batch.references
    everyone = batch._replace(anchors=batch.columns[:rows]).distances(distance).detach()  # (N, M)
    square = everyone[:, :rows]
    everyone[:, :rows] = torch.maximum(square, square.T)  # of a pair both ways, to the last digit
    mine = slice(batch.first, batch.first + len(batch.labels))
    kept = []
    for mask, share, sign in (
        (pairs.positive, positive_share, -1),
        (pairs.negative, negative_share, 1),
    ):
        hardness_first = sign * everyone[all_gather_rows(mask.to(torch.uint8)).bool()]
        keep = math.ceil(share * len(hardness_first))
        if keep == 0:
            kept.append(mask)
            continue
        bound = hardness_first.kthvalue(keep).values
        kept.append(mask & (sign * everyone[mine] <= bound))
    return Pairs(kept[0], kept[1])
