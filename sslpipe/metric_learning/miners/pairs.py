"""Miners of pairs: which positives and negatives of an anchor a loss sees."""

import torch
from torch import Tensor

from sslpipe.metric_learning.losses.pairwise import Distance, LabelledRows, Pairs, hardest_pairs
from sslpipe.metric_learning.miners.base import Loss, Miner, RandomMiner, only_at, unit_rows
from sslpipe.random import permutation


class AllPairsMiner(Miner):
    """Keep everything: for each anchor K - 1 positives, each with all negatives."""

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        return pairs


class OnePerClassMiner(RandomMiner):
    """Draw for each anchor one random negative of each other class: the tuples of tuplet losses.

    Args:
        seed: Of the draws.
    """

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        draws = self.uniform_rows(batch, len(batch.column_labels))
        draws = draws.masked_fill(~pairs.negative, -1)  # (n, M)
        place = torch.unique(batch.column_labels, return_inverse=True)[1].expand(len(draws), -1)
        best = draws.new_full(draws.shape, -1).scatter_reduce_(1, place, draws, "amax")
        chosen = pairs.negative & (draws == best.gather(1, place))
        return pairs._replace(negative=chosen)


class BatchHardMiner(Miner):
    """Keep for each anchor its farthest positive and its nearest negative.

    Args:
        distance: "euclidean", "squared" or "cosine".

    Source:
        Hermans et al. 2017, arXiv:1703.07737, eq. 5.
    """

    def __init__(self, distance: Distance = "euclidean") -> None:
        super().__init__()
        self.distance = distance

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        d = batch.distances(self.distance)
        both = (pairs.positive.any(1) & pairs.negative.any(1))[:, None]
        farthest = d.masked_fill(~pairs.positive, -torch.inf).argmax(1)
        nearest = d.masked_fill(~pairs.negative, torch.inf).argmin(1)
        return _narrowed(
            pairs, only_at(farthest, pairs.positive & both), only_at(nearest, pairs.negative & both)
        )


class PackagedMiner(Miner):
    """Read rows of the global batch as anchor, positive, negative, anchor, positive, negative."""

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        row = torch.arange(len(batch.labels), device=batch.labels.device)[:, None] + batch.first
        column = torch.arange(len(batch.column_labels), device=batch.labels.device)
        anchor = row % 3 == 0
        positive = pairs.positive & anchor & (column == row + 1)
        negative = pairs.negative & anchor & (column == row + 2)
        whole = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
        return _narrowed(pairs, positive & whole, negative & whole)


class MultiSimilarityMiner(Miner):
    """Keep pairs that are hard against the anchor's other kind; S: cosines.

    Negatives with S > min over positives - epsilon, positives with S < max negative + epsilon.

    Args:
        epsilon: The tolerance.

    Source:
        Wang et al. 2019, arXiv:1904.06627, eq. 10 and 11.
    """

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        self.epsilon = epsilon

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        s = unit_rows(batch).similarities()
        lowest = s.masked_fill(~pairs.positive, torch.inf).amin(1, keepdim=True)
        highest = s.masked_fill(~pairs.negative, -torch.inf).amax(1, keepdim=True)
        positive = pairs.positive & (s - self.epsilon < highest)
        return _narrowed(pairs, positive, pairs.negative & (s + self.epsilon > lowest))


class PairMarginMiner(Miner):
    """Keep positives farther than `positive` and negatives nearer than `negative`.

    Args:
        positive: Distance above which a positive is kept.
        negative: Distance below which a negative is kept.
        distance: "euclidean", "squared" or "cosine".
    """

    def __init__(
        self, positive: float = 0.2, negative: float = 0.8, distance: Distance = "euclidean"
    ) -> None:
        super().__init__()
        self.positive, self.negative, self.distance = positive, negative, distance

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        d = batch.distances(self.distance)
        positive = pairs.positive & (d > self.positive)
        return _narrowed(pairs, positive, pairs.negative & (d < self.negative))


class HardestShareMiner(Miner):
    """Keep the share of positives that are farthest and the share of negatives that are nearest.

    Shares are of the global batch's pairs; ties at the bound are all kept. Collective.

    Args:
        share: In 0..1, 0 excluded.
        distance: "euclidean", "squared" or "cosine".

    Source:
        Yuan et al. 2017, arXiv:1611.05720 (hard-aware deeply cascaded embedding), section 3.
    """

    def __init__(self, share: float = 0.5, distance: Distance = "euclidean") -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ValueError(f"share = {share} must lie in 0..1, 0 excluded")
        self.share, self.distance = share, distance

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        return hardest_pairs(batch, pairs, self.share, self.share, self.distance)


class MaximumLossMiner(RandomMiner):
    """Keep, of random subsets of the batch's rows, the one with the largest loss.

    Used in a loss only, which it asks.

    Args:
        rows: Of a subset, at least 2.
        trials: How many subsets.
        seed: Of the draws.
    """

    def __init__(self, rows: int, trials: int = 5, seed: int = 0) -> None:
        super().__init__(seed)
        if rows < 2 or trials < 1:
            raise ValueError(f"rows = {rows} and trials = {trials} must be at least 2 and 1")
        self.rows, self.trials = rows, trials

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        if loss is None:
            raise ValueError("this miner compares losses: use it in one, loss(..., miner=miner)")
        size = len(batch.column_labels) - batch.references
        subsets = []
        for trial in range(self.trials):
            order = permutation(size, self.seed, int(self.calls), trial)[: self.rows].copy()
            inside = pairs.negative.new_zeros(len(batch.column_labels))
            inside[torch.from_numpy(order).to(inside.device)] = True
            own = inside[batch.first : batch.first + len(batch.labels), None]
            inside[size:] = True  # references
            subsets.append(Pairs(pairs.positive & inside & own, pairs.negative & inside & own))
        self.calls += 1
        values = [float(loss(subset).sum()) for subset in subsets]
        return subsets[max(range(self.trials), key=values.__getitem__)]


def _narrowed(pairs: Pairs, positive: Tensor, negative: Tensor) -> Pairs:
    """Keep fewer pairs of each kind, any triplet of them."""
    return Pairs(positive, negative, most_positives=pairs.most_positives)
