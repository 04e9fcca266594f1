"""Losses that compare rows with groups of rows: clusters, their means, a tree of classes."""

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from sslpipe.metric_learning.losses.metric_loss import MetricLoss, NumClasses
from sslpipe.metric_learning.losses.pairwise import (
    LabelledRows,
    Pairs,
    PerAnchor,
    occurrence,
    per_row,
)
from sslpipe.metric_learning.losses.tiled import NEVER, centered_columns
from sslpipe.metric_learning.losses.triplet import triplet_sums
from sslpipe.precision import to_float64
from sslpipe.registry.part import Dim


class Groups(NamedTuple):
    """Hold the labelled columns of a batch, put together by label (and cluster)."""

    means: Tensor  # (G, D) with gradient to all ranks' rows
    sizes: Tensor  # (G,)
    labels: Tensor  # (G,) int64
    column_group: Tensor  # (M,) int64 in 0..G-1; -1 for a column without a label


def group(columns: Tensor, labels: Tensor, clusters: Tensor | None = None) -> Groups:
    """Group columns (M, D) by labels (M,); clusters (M,) int64 part a label further."""
    keys = torch.stack([labels, torch.zeros_like(labels) if clusters is None else clusters], 1)
    known = labels >= 0
    distinct, place = torch.unique(keys[known], dim=0, return_inverse=True)
    column_group = torch.full_like(labels, -1).masked_scatter_(known, place)
    sizes = place.bincount(minlength=len(distinct)).to(columns.dtype)
    sums = columns.new_zeros(len(distinct), columns.shape[1]).index_add(0, place, columns[known])
    return Groups(sums / sizes[:, None], sizes, distinct[:, 0], column_group)


class MagnetLoss(MetricLoss):
    """Pull rows to their cluster's mean, away from the means of other classes' clusters.

    [D2(r, mu_r) / 2s2 + alpha + log sum over clusters of other classes e^{-D2(r, mu) / 2s2}]+. mu:
    a cluster's mean in the global batch; s2: mean squared distance of the rows to their own mean
    (divisor: rows - 1). Rows keep their lengths.

    Source:
        Rippel et al. 2015, arXiv:1511.05939, section 3.2.
    """

    alpha: float = 1.0
    """The margin; not given in a confirmed source."""
    clusters_per_class: Annotated[int, Field(ge=1, le=10_000)] = 1
    """A class is parted into so many clusters of the batch's rows by k-means."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        parts = None
        if self.clusters_per_class > 1:
            parts = k_means(batch.columns.detach(), batch.column_labels, self.clusters_per_class)
        batch = batch.centered()
        groups = group(batch.columns, batch.column_labels, parts)
        known = groups.column_group >= 0
        if not len(groups.means):
            return [per_row(batch.anchors.sum(1) * 0, batch.labels >= 0)]
        centres = groups.means[groups.column_group.clamp_min(0)]  # (M, D)
        spread = (batch.columns - centres).square().sum(1).masked_fill(~known, 0).sum()
        # where all rows of each cluster are one, s2 = 0: it is kept above rounding, at any scale
        info = torch.finfo(spread.dtype)
        rows = batch.columns.detach()[known]
        least = (info.eps * (rows - rows.mean(0)).square().sum(1).mean()).clamp_min(info.tiny)
        scale = 0.5 / torch.maximum(spread / (known.sum() - 1).clamp_min(1), least)

        mine = slice(batch.first, batch.first + len(batch.labels))
        x = -scale * batch._replace(columns=groups.means).distances("squared")  # (n, G)
        other = (batch.labels[:, None] != groups.labels) & known[mine, None]
        to_own = x.gather(1, groups.column_group[mine, None].clamp_min(0))[:, 0]
        others = x.masked_fill(~other, NEVER[x.dtype]).logsumexp(1)
        return [per_row((self.alpha + others - to_own).clamp_min(0), other.any(1))]


@torch.no_grad()
def k_means(x: Tensor, labels: Tensor, k: int, rounds: int = 10) -> Tensor:
    """Find clusters 0..k-1 within each label: (M, D), (M,) -> (M,) int64. Deterministic.

    Starts from a row of the label and, k - 1 times, the row farthest from all chosen ones.
    """
    out = torch.zeros_like(labels)
    for label in torch.unique(labels[labels >= 0]).tolist():
        rows = (labels == label).nonzero()[:, 0]
        part = centered_columns(x[rows])  # distances know no origin, rounding does
        centers = part[:1]
        while len(centers) < min(k, len(part)):
            farthest = _apart(part, centers).amin(1).argmax()
            centers = torch.cat([centers, part[farthest, None]])
        for _ in range(rounds):
            nearest = _apart(part, centers).argmin(1)
            sizes = nearest.bincount(minlength=len(centers))[:, None]
            sums = torch.zeros_like(centers).index_add_(0, nearest, part)
            centers = torch.where(sizes > 0, sums / sizes.clamp_min(1), centers)
        out[rows] = _apart(part, centers).argmin(1)
    return out


def _apart(x: Tensor, centers: Tensor) -> Tensor:
    """(n, D), (k, D) -> (n, k) distances, made of differences: near rows keep their digits."""
    return torch.cdist(x, centers, compute_mode="donot_use_mm_for_euclid_dist")


class HardClusterLoss(MetricLoss):
    """Compare each class mean's farthest member with the nearest other mean.

    [margin + D(mean, farthest member) - D(mean, nearest other mean)]+ for each class. Means,
    members and classes are those of the global batch; D Euclidean. An item is a class, and stands
    with the anchor that is the class's first row.
    """

    margin: float = 0.2
    """Of the hinge. No paper is known for this loss; margin and distance are those of
    `BatchHardLoss`."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        batch = batch.centered()
        groups = group(batch.columns, batch.column_labels)
        to_means = batch._replace(anchors=groups.means).distances("euclidean")  # (G, M)
        member = (
            groups.column_group == torch.arange(len(groups.means), device=to_means.device)[:, None]
        )
        between = batch._replace(anchors=groups.means, columns=groups.means)
        apart = between.distances("euclidean").clone().fill_diagonal_(torch.inf)
        mine = slice(batch.first, batch.first + len(batch.labels))
        first = (occurrence(batch.column_labels)[mine] == 0) & (batch.labels >= 0)
        if len(groups.means) < 2:
            return [per_row(batch.anchors.sum(1) * 0, torch.zeros_like(first))]
        farthest = to_means.masked_fill(~member, -torch.inf).max(1).values  # (G,)
        values = (self.margin + farthest - apart.min(1).values).clamp_min(0)
        return [per_row(values[groups.column_group[mine].clamp_min(0)], first)]


class HierarchicalTripletLoss(MetricLoss):
    """Give each pair of classes a margin of its own: 1/2 [D2(a, p) - D2(a, n) + margin(y_a, y_n)]+.

    Over all triplets, rows of length 1; margin = beta + d_H(y_a, y_n) - s(y_a). d_H is the level at
    which a tree of the classes merges the two, s the mean squared distance within the anchor's
    class. The tree has the levels d_l = l (4 - d_0) / levels + d_0, d_0 the mean of s; classes (or
    what they merged into) nearer than d_l, by the mean squared distance of their rows, are one node
    from level l on. Both follow from the mean unit row of each class, of which a running mean is
    kept, updated in training from the global batch; the authors take it from an epoch's end.

    Source:
        Ge et al. 2018, arXiv:1810.06951, section 3.
    """

    num_classes: NumClasses
    """C."""
    dim: Dim
    """D of the embeddings."""
    beta: float = 0.1
    """The constant part of the margin."""
    levels: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Of the tree."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The weight of a new batch in the running means."""
    normalize: bool = True

    def setup(self) -> None:
        super().setup()
        self.means = nn.Buffer(torch.zeros(self.num_classes, self.dim))
        self.seen = nn.Buffer(torch.zeros(self.num_classes, dtype=torch.bool))
        # of the pairs behind a squared mean, the share of a row with itself: 1/n after one batch
        self.self_share = nn.Buffer(torch.zeros(self.num_classes))

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        if self.training:
            self._follow(batch)
        known = batch.labels.clamp_min(0)
        columns = batch.column_labels.clamp_min(0)
        margins = self.margins().to(batch.anchors.dtype)[known][:, columns]  # (n, M)
        d = batch.distances("squared")
        return [triplet_sums(d, d - margins, pairs).times(0.5)]

    def margins(self) -> Tensor:
        """Return (C, C): margin of an anchor of class i against a negative of class j."""
        # the mean squared distance within a class counts the distance of 0 of a row from itself
        others = (1 - self.self_share).clamp_min(torch.finfo(self.means.dtype).eps)
        between = squared_distances_of_rows(self.means)
        spread = between.diagonal() / others
        spread = spread.masked_fill(self.self_share >= 1, 0)  # a class with one row so far
        start = float(spread[self.seen].mean()) if bool(self.seen.any()) else 0.0
        merged = merge_levels(between, self.levels, start)
        margins = self.beta + merged - spread[:, None]
        both = self.seen[:, None] & self.seen
        return torch.where(both, margins, self.beta)

    @torch.no_grad()
    def _follow(self, batch: LabelledRows) -> None:
        rows = len(batch.column_labels) - batch.references
        columns = batch.columns[:rows].detach()
        labels = batch.column_labels[:rows]
        before = self.seen.clone()
        sizes = follow_means(
            means=self.means, seen=self.seen, rows=columns, labels=labels, momentum=self.momentum
        )
        new = 1 / sizes.clamp(min=1)
        running = (1 - self.momentum) ** 2 * self.self_share + self.momentum**2 * new
        share = torch.where(before, running, new)
        self.self_share.copy_(torch.where(sizes > 0, share, self.self_share))


def follow_means(
    means: Tensor, seen: Tensor, rows: Tensor, labels: Tensor, momentum: float
) -> Tensor:
    """Move the means (C, D) of the labels among `rows` (M, D), in place; the first is taken whole.

    The host does not wait for the device: no shape depends on the labels.

    Args:
        means: (C, D) running means of unit rows; zeros where none has been seen.
        seen: (C,) bool, which means there are already.
        rows: (M, D); those that are all zeros have no direction, and are skipped.
        labels: (M,) int64, < 0 for none.
        momentum: The weight of the new rows.

    Returns:
        (C,) how many of `rows` each label has.
    """
    is_taken = (labels >= 0) & (rows != 0).any(1)
    place = labels.clamp(min=0)
    rows = torch.where(is_taken[:, None], rows, 0).to(means.dtype)  # skipped ones may be NaN
    # rows of a label are added up at the first of them
    numbers = torch.arange(len(rows), device=rows.device)
    is_same = (place[:, None] == place) & is_taken
    first = torch.where(is_same, numbers, len(rows)).amin(1).clamp(max=len(rows) - 1)
    is_first = (first == numbers) & is_taken
    sums = torch.zeros_like(rows).index_add_(0, first, rows)
    counts = means.new_zeros(len(rows)).index_add_(0, first, is_taken.to(means.dtype))
    new = sums / counts.clamp(min=1)[:, None]
    # old + momentum (new - old), or new
    old = means[place]
    change = torch.where(seen[place, None], momentum * (new - old), new - old)
    means.index_add_(0, place, torch.where(is_first[:, None], change, 0))
    sizes = means.new_zeros(len(means)).index_add_(0, place, is_taken.to(means.dtype))
    seen |= sizes > 0
    return sizes


def squared_distances_of_rows(means: Tensor, part: Tensor | None = None) -> Tensor:
    """Compute the mean squared distance of the unit rows behind two means: (C, D) -> (C, C).

    2 - 2 m_i m_j in float64, as near collapse it is a small difference. part (A,): the classes to
    compare with all, (A, C); None: all.
    """
    wide = to_float64(means)
    some = wide if part is None else wide[part.to(wide.device)]
    return (2 - 2 * some @ wide.T).to(means)


def merge_levels(between: Tensor, levels: int, start: float) -> Tensor:
    """Find the threshold of the level that first merges two classes: (C, C) -> (C, C).

    Level l merges what is nearer than d_l = l (4 - start) / levels + start, through others too: the
    smallest possible largest step of a path between the classes decides. 0 on the diagonal.
    """
    from scipy.cluster.hierarchy import cophenet, single  # here: 0.2 s that most do not need
    from scipy.spatial.distance import squareform

    reach = torch.zeros_like(between)  # largest step on the path in a minimum spanning tree
    if len(between) > 1:
        first, second = torch.triu_indices(len(between), len(between), 1)
        condensed = between[first, second].nan_to_num().clamp_min(0).cpu().double().numpy()
        reach = torch.from_numpy(squareform(cophenet(single(condensed)))).to(between)
    numbers = torch.arange(levels + 1, device=between.device, dtype=between.dtype)
    thresholds = numbers * (4 - start) / levels + start
    level = torch.searchsorted(thresholds, reach, right=True).clamp(1, levels)
    return thresholds[level].fill_diagonal_(0)
