"""MetricLoss: what all losses do."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from sslpipe.distributed import current_rank, global_mean, global_sum, row_counts
from sslpipe.losses.base import check_shares
from sslpipe.metric_learning.losses.pairwise import (
    LabelCounts,
    LabelledPart,
    LabelledRows,
    Pairs,
    PerAnchor,
    References,
    compare,
    labelled_rows,
    unit,
)
from sslpipe.precision import wide_dtype
from sslpipe.registry.part import Derived

Reduction = Literal["mean", "mean_active", "sum", "none"]
AboveZero = Annotated[float, Field(ge=1e-12, le=1e12)]  # its inverse is a float32, too


def _in_radians(angle: float) -> float:
    """Return an angle. Raises: ValueError for one that can be meant in degrees alone."""
    if abs(angle) > math.pi:
        raise ValueError(
            f"{angle:g} is no angle in radians, which are at most pi; {angle:g} degrees are "
            f"{math.radians(angle):.4g}"
        )
    return angle


Radians = Annotated[float, AfterValidator(_in_radians)]
NumClasses = Annotated[int, Field(ge=1), Derived()]


class MetricLoss(LabelledPart):
    """Compute a loss of labelled embeddings, compared over all ranks.

    A subclass declares its settings as fields, and defines `row_terms`, its formula. Weights of its
    own are made in `setup`. Where the paper differs from these defaults, it says
    `normalize: bool = True`.

    Shape:
        embeddings (n, D), labels (n,) int64, < 0 for none -> (), equal on all ranks. n may differ
        between them. A batch without an item gives 0. Everything is float32 at least, also under
        autocast, and float64 where rows keep their lengths. Gradient: W times the part of this
        rank's rows and of what it says about the others', so that DDP's mean equals one process.

    After a call `last_count` and `last_active` hold the items of the global batch and those above 0
    (of the first term). Collective: all ranks call it.
    """

    normalize: bool = False
    """Bring rows to length 1 first."""
    reduction: Reduction = "mean"
    """Of each term: mean over its items (pairs, triplets or anchors, as the loss says) of the
    global batch; mean_active over those above 0, which makes a step's size independent of how many
    there are; sum; none, (n,) sums of this rank's anchors."""

    def setup(self) -> None:
        super().setup()
        self._counted: Tensor | None = None  # of the last call

    @abstractmethod
    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> Sequence[PerAnchor]:
        """Compute the paper's formula: terms, which are added up."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ids: Tensor | None = None,
        ref: References | None = None,
        miner: nn.Module | None = None,
        counts: LabelCounts | None = None,
    ) -> Tensor:
        """Return the loss of this rank's rows, compared with the rows of all ranks.

        Args:
            embeddings: (n, D) of any float dtype.
            labels: (n,) int64; rows with a label < 0 are in no pair.
            ids: (n,) int64, which sample each row shows: no pair with a reference of the same id.
            ref: Further columns, from a queue.
            miner: Narrows the pairs down, see MINERS.
            counts: Of the labels; None: they are counted where a loss needs it.
        """
        x, labels = labelled_rows(
            embeddings,
            labels,
            num_classes=getattr(self, "num_classes", None),
            dim=getattr(self, "dim", None),
        )
        if self._counted is None and ids is None:  # at the first call
            check_shares(x, row_counts(len(x)))
        with torch.autocast(x.device.type, enabled=False):
            dtype = x.dtype
            if self.normalize:
                x = unit(x)
                if ref is not None:
                    ref = ref._replace(embeddings=unit(ref.embeddings.to(x.dtype)))
            else:  # a long row costs short ones their digits, and its square leaves float32
                x = x.to(wide_dtype(x.device))
            batch, pairs = compare(x, labels, ids, ref)
            batch = batch._replace(unit=self.normalize)
            if ref is None and counts is not None:
                pairs = pairs._replace(most_positives=counts.most_positives)
            if not len(batch.columns):  # no rows on any rank
                self._counted = None
                return 0 * (x.sum(1) if self.reduction == "none" else x.sum()).to(dtype)
            if miner is not None:
                with torch.no_grad():
                    pairs = miner(batch, pairs, loss=lambda some: self._reduce(batch, some))
            return self._reduce(batch, pairs).to(dtype)

    def _reduce(self, batch: LabelledRows, pairs: Pairs) -> Tensor:
        terms = self.row_terms(batch, pairs)
        totals = torch.stack([term.total.sum() for term in terms])  # (T,)
        counts = torch.stack([term.items.sum() for term in terms]).to(totals.dtype)
        actives = torch.stack([term.active.sum() for term in terms]).to(totals.dtype)
        self._counted = global_sum(torch.stack([counts[0], actives[0]]))
        if self.reduction == "none":
            return torch.stack([term.total for term in terms]).sum(0)
        if self.reduction == "sum":
            world = torch.full_like(counts, 1 / current_rank().world_size)
            return global_mean(totals, world).sum()
        return global_mean(totals, actives if self.reduction == "mean_active" else counts).sum()

    @property
    def last_count(self) -> float:
        """Items of the last call's global batch; on CUDA, to read it waits for the device."""
        return 0.0 if self._counted is None else float(self._counted[0])

    @property
    def last_active(self) -> float:
        """Those of them above 0; on CUDA, to read it waits for the device."""
        return 0.0 if self._counted is None else float(self._counted[1])
