"""Miners: which pairs or triplets of a batch a loss sees. MINERS names them for recipes.

A miner is a module `(batch, pairs, *, loss) -> pairs`, called without gradient on rows as the loss
prepared them; loss(pairs) is what the loss would be on some of them, for the one miner that asks.
Random ones draw from (seed, call, row of the global batch): the same on any number of processes;
the number of the call is a buffer, so a resumed run draws on.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sslpipe.metric_learning.losses.pairwise import Batch, Distance, Pairs, hardest_pairs
from sslpipe.metric_learning.miners.triplets import (
    AngularMiner,
    DistanceWeighted,
    Loss,
    RandomNegative,
    TripletsOfAKind,
    only_at,
    uniform_rows,
    unit_rows,
)
from sslpipe.random import permutation


class AllPairs(nn.Module):
    """Everything: for each anchor K - 1 positives, each with all negatives."""

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        return pairs


class OnePerClass(nn.Module):
    """For each anchor one random negative of each other class: the tuples of tuplet losses."""

    calls: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        draws = uniform_rows(self.seed, self.calls, batch, len(batch.column_labels))
        draws = draws.masked_fill(~pairs.negative, -1)  # (n, M)
        place = torch.unique(batch.column_labels, return_inverse=True)[1].expand(len(draws), -1)
        best = draws.new_full(draws.shape, -1).scatter_reduce_(1, place, draws, "amax")
        chosen = pairs.negative & (draws == best.gather(1, place))
        return pairs._replace(negative=chosen)


class BatchHard(nn.Module):
    """For each anchor its farthest positive and its nearest negative.

    Source: Hermans et al. 2017, arXiv:1703.07737, eq. 5.
    """

    def __init__(self, distance: Distance = "euclidean") -> None:
        super().__init__()
        self.distance = distance

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        d = batch.distances(self.distance)
        both = (pairs.positive.any(1) & pairs.negative.any(1))[:, None]
        farthest = d.masked_fill(~pairs.positive, -torch.inf).argmax(1)
        nearest = d.masked_fill(~pairs.negative, torch.inf).argmin(1)
        return Pairs(
            only_at(farthest, pairs.positive & both), only_at(nearest, pairs.negative & both)
        )


class Packaged(nn.Module):
    """Rows of the global batch come as anchor, positive, negative, anchor, positive, negative."""

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        row = torch.arange(len(batch.labels), device=batch.labels.device)[:, None] + batch.first
        column = torch.arange(len(batch.column_labels), device=batch.labels.device)
        anchor = row % 3 == 0
        positive = pairs.positive & anchor & (column == row + 1)
        negative = pairs.negative & anchor & (column == row + 2)
        whole = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
        return Pairs(positive & whole, negative & whole)


class MultiSimilarityMiner(nn.Module):
    """Negatives with S > min over positives - epsilon, positives with S < max negative + epsilon.

    S: cosines. Source: Wang et al. 2019, arXiv:1904.06627, eq. 10 and 11.
    """

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        s = unit_rows(batch).similarities()
        lowest = s.masked_fill(~pairs.positive, torch.inf).amin(1, keepdim=True)
        highest = s.masked_fill(~pairs.negative, -torch.inf).amax(1, keepdim=True)
        return Pairs(
            pairs.positive & (s - self.epsilon < highest),
            pairs.negative & (s + self.epsilon > lowest),
        )


class PairMargin(nn.Module):
    """Positives farther than `positive` and negatives nearer than `negative`."""

    def __init__(
        self, positive: float = 0.2, negative: float = 0.8, distance: Distance = "euclidean"
    ) -> None:
        super().__init__()
        self.positive, self.negative, self.distance = positive, negative, distance

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        d = batch.distances(self.distance)
        return Pairs(pairs.positive & (d > self.positive), pairs.negative & (d < self.negative))


class HardestShare(nn.Module):
    """The share of positives that are farthest and the share of negatives that are nearest.

    Shares are of the global batch's pairs; ties at the bound are all kept.
    Source: Yuan et al. 2017, arXiv:1611.05720 (hard-aware deeply cascaded embedding), section 3.
    """

    def __init__(self, share: float = 0.5, distance: Distance = "euclidean") -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ValueError(f"share = {share} must lie in 0..1, 0 excluded")
        self.share, self.distance = share, distance

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        return hardest_pairs(batch, pairs, self.share, self.share, self.distance)


class MaximumLoss(nn.Module):
    """Of `trials` random subsets of `rows` rows of the batch the one with the largest loss."""

    calls: Tensor

    def __init__(self, rows: int, trials: int = 5, seed: int = 0) -> None:
        super().__init__()
        if rows < 2 or trials < 1:
            raise ValueError(f"rows = {rows} and trials = {trials} must be at least 2 and 1")
        self.rows, self.trials, self.seed = rows, trials, seed
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        assert loss is not None, "MetricLoss gives it"
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


class Curriculum(nn.Module):
    """Another miner from the step `steps` on: easy first, harder later.

    first, then: names of MINERS, with their defaults.
    """

    calls: Tensor

    def __init__(self, first: str = "all", then: str = "batch_hard", steps: int = 1000) -> None:
        super().__init__()
        self.steps = steps
        self.first, self.then = MINERS[first](), MINERS[then]()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        miner = self.first if int(self.calls) < self.steps else self.then
        self.calls += 1
        mined: Pairs = miner(batch, pairs, loss=loss)
        return mined


MINERS: dict[str, Callable[..., nn.Module]] = {
    "all": AllPairs,
    "angular": AngularMiner,
    "batch_hard": BatchHard,
    "curriculum": Curriculum,
    "distance_weighted": DistanceWeighted,
    "hardest_share": HardestShare,
    "maximum_loss": MaximumLoss,
    "multi_similarity": MultiSimilarityMiner,
    "one_per_class": OnePerClass,
    "packaged": Packaged,
    "pair_margin": PairMargin,
    "random_negative": RandomNegative,
    "triplets": TripletsOfAKind,
}
