"""Miners of triplets: for each positive pair, which negatives go with it.

What they keep is a boolean for each anchor, positive and column: bits, and no list of triplets.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from sslpipe.metric_learning.losses.pairwise import (
    Distance,
    LabelledRows,
    Pairs,
    Slots,
    positive_slots,
)
from sslpipe.metric_learning.miners.base import Loss, Miner, RandomMiner, only_at, unit_rows

Pick = Literal["all", "hardest", "random"]


class TripletMiner(RandomMiner):
    """Select triplets by where the negative lies against the positive.

    Args:
        kind: "semi_hard" d_ap < d_an < d_ap + margin; "hard" d_an < d_ap; "violating"
            d_an < d_ap + margin; "easy" d_an >= d_ap + margin.
        margin: See kind.
        distance: "squared", "euclidean" or "cosine"; the paper's are squared, of unit rows.
        pick: "all" such negatives of a positive, its "hardest" (nearest to the anchor), or a
            "random" one.
        seed: Of the draws.

    Source:
        Schroff et al. 2015, arXiv:1503.03832, section 3.2.
    """

    def __init__(
        self,
        kind: Literal["semi_hard", "hard", "violating", "easy"] = "semi_hard",
        margin: float = 0.2,
        distance: Distance = "squared",
        pick: Pick = "all",
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.kind, self.margin, self.distance = kind, margin, distance
        self.pick: Pick = pick

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        d = batch.distances(self.distance)
        slots = positive_slots(pairs.positive)
        near = slots.take(d)
        triplets = pairs.negative.new_zeros(*near.shape, d.shape[1])  # (n, P, M)
        if self.pick == "random":
            draws = self.uniform_rows(batch, near.shape[1])
        for p in range(near.shape[1]):  # one positive at a time: nothing but bits of size n P M
            at = near[:, p, None]
            fits = pairs.negative & slots.filled[:, p, None]
            if self.kind == "easy":
                fits &= d >= at + self.margin
            else:
                fits &= d < (at if self.kind == "hard" else at + self.margin)
                if self.kind == "semi_hard":
                    fits &= d > at
            if self.pick == "hardest":
                fits = only_at(d.masked_fill(~fits, torch.inf).argmin(1), fits)
            elif self.pick == "random":
                fits = only_at(sample(fits.to(d.dtype), draws[:, p, None])[:, 0], fits)
            triplets[:, p] = fits
        return with_triplets(pairs, slots, triplets)


class SemiHardMiner(TripletMiner):
    """Select semi-hard triplets: d_ap < d_an < d_ap + margin.

    Args:
        margin: Of the distances.
        distance: "squared", "euclidean" or "cosine"; the paper's are squared, of unit rows.
        pick: "all" such negatives of a positive, its "hardest", or a "random" one.
        seed: Of the draws.

    Source:
        Schroff et al. 2015, arXiv:1503.03832, section 3.2.
    """

    def __init__(
        self, margin: float = 0.2, distance: Distance = "squared", pick: Pick = "all", seed: int = 0
    ) -> None:
        super().__init__("semi_hard", margin, distance, pick, seed)


class RandomNegativeMiner(RandomMiner):
    """Draw for each positive pair a negative, all with the same probability.

    Args:
        seed: Of the draws.
    """

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        weights = pairs.negative.to(batch.anchors.dtype)
        return _one_negative_each(self, batch, pairs, weights)


class DistanceWeightedMiner(RandomMiner):
    """Draw for each positive pair a negative with probability ~ 1 / q(d), d its distance.

    q(d) ~ d^(D-2) (1 - d^2/4)^((D-3)/2) is the density of distances between random points of the
    sphere, so all distances become equally likely. An anchor with no negative inside `limit` draws
    from all its negatives.

    Args:
        cutoff: Distances are raised to it.
        limit: Negatives beyond it are masked.
        seed: Of the draws.

    Source:
        Wu et al. 2017, arXiv:1706.07567, section 3.2; cutoff and limit: the released code.
    """

    def __init__(self, cutoff: float = 0.5, limit: float = 1.4, seed: int = 0) -> None:
        super().__init__(seed)
        if not 0 < cutoff < limit <= 2:
            raise ValueError(f"cutoff = {cutoff}, limit = {limit}: 0 < cutoff < limit <= 2 needed")
        self.cutoff, self.limit = cutoff, limit

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        return _one_negative_each(self, batch, pairs, self.weights(batch, pairs))

    def weights(self, batch: LabelledRows, pairs: Pairs) -> Tensor:
        """(n, M): what each negative's probability is proportional to, the row's largest 1."""
        dim = batch.anchors.shape[1]
        d = unit_rows(batch).distances("euclidean")
        inside = pairs.negative & (d < self.limit)
        d = d.clamp(self.cutoff, self.limit)
        log_q = (dim - 2) * d.log() + (dim - 3) / 2 * torch.log1p(-d.square() / 4)
        log_weights = (-log_q).masked_fill(~inside, -torch.inf)
        best = log_weights.amax(1, keepdim=True).masked_fill(~inside.any(1, keepdim=True), 0)
        weights = (log_weights - best).exp()
        return torch.where(inside.any(1, keepdim=True), weights, pairs.negative.to(d.dtype))


class AngularMiner(Miner):
    """Keep triplets with atan(D(a, p) / (2 D(n, (a + p) / 2))) > angle, rows of length 1.

    Args:
        angle_deg: In degrees, above 0 and below 90.

    Source:
        None confirmed; the rule is that of the angular loss's constraint (Wang et al. 2017).
    """

    def __init__(self, angle_deg: float = 20.0) -> None:
        super().__init__()
        if not 0 < angle_deg < 90:
            raise ValueError(f"angle_deg = {angle_deg} must lie between 0 and 90")
        self.steepness = 4 * math.tan(math.radians(angle_deg)) ** 2

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        batch = unit_rows(batch)
        d2 = batch.distances("squared")
        everyone = batch._replace(anchors=batch.columns).distances("squared")  # (M, M)
        slots = positive_slots(pairs.positive)
        near = slots.take(d2)
        triplets = pairs.negative.new_zeros(*near.shape, d2.shape[1])
        for p in range(near.shape[1]):
            at = near[:, p, None]  # Apollonius: squared distance of n from the middle of a and p
            middle = 0.5 * (d2 + everyone[slots.columns[:, p]]) - 0.25 * at
            fits = at > self.steepness * middle.clamp_min(0)
            triplets[:, p] = fits & pairs.negative & slots.filled[:, p, None]
        return with_triplets(pairs, slots, triplets)


def with_triplets(pairs: Pairs, slots: Slots, triplets: Tensor) -> Pairs:
    """Pairs with those triplets (n, P, M) alone, and what takes part in none masked."""
    keep = triplets.any(2)  # (n, P)
    positive = torch.zeros_like(pairs.positive)
    rows, places = keep.nonzero(as_tuple=True)
    positive[rows, slots.columns[rows, places]] = True
    if not torch.equal(keep, slots.filled):  # the positives that stay move together
        order = torch.sort((~keep).to(torch.uint8), dim=1, stable=True).indices
        order = order[:, : max(1, int(keep.sum(1).max()) if len(keep) else 0)]
        triplets = triplets.gather(1, order[:, :, None].expand(-1, -1, triplets.shape[2]))
    return Pairs(positive, triplets.any(1), triplets)


def _one_negative_each(
    miner: RandomMiner, batch: LabelledRows, pairs: Pairs, weights: Tensor
) -> Pairs:
    slots = positive_slots(pairs.positive)
    draws = miner.uniform_rows(batch, slots.columns.shape[1])
    chosen = sample(weights, draws)  # (n, P)
    fits = slots.filled & pairs.negative.any(1, keepdim=True)
    triplets = pairs.negative.new_zeros(*chosen.shape, weights.shape[1])
    return with_triplets(pairs, slots, triplets.scatter_(2, chosen[:, :, None], fits[:, :, None]))


def sample(weights: Tensor, draws: Tensor) -> Tensor:
    """(n, M) weights, (n, P) numbers in [0, 1) -> (n, P) columns, with probability ~ weight."""
    sums = weights.double().cumsum(1)
    chosen = torch.searchsorted(sums, draws.double() * sums[:, -1:], right=True)
    return chosen.clamp_max(weights.shape[1] - 1)
