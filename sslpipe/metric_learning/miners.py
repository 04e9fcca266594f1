"""Miners: which pairs or triplets of a batch a loss sees.

For fine-tuning recipes (`miner.kind` is a name of MINERS) and for notebooks: alone,
`SemiHardMiner()(embeddings, labels)`, or in a loss, `loss(embeddings, labels, miner=miner)`. Start
with `Miner`; a new one is a class with `select` and a line in MINERS. What miners of triplets keep
is a boolean for each anchor, positive and column: bits, and no list of triplets.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from sslpipe.metric_learning.losses.pairwise import (
    Distance,
    LabelledRows,
    Pairs,
    Slots,
    compare,
    hardest_pairs,
    labelled_rows,
    unit,
)
from sslpipe.precision import wide_dtype
from sslpipe.random import permutation, uniform
from sslpipe.registry import Table
from sslpipe.registry.part import Part

Loss = Callable[[Pairs], Tensor]
TripletKind = Literal["semi_hard", "hard", "violating", "easy", "semi_hard_or_easy"]


class Miner(Part):
    """Select pairs or triplets of a batch; never add one.

    A subclass defines `select`. `RandomMiner` is for those that draw.
    """

    def forward(
        self, rows: LabelledRows | Tensor, pairs: Pairs | Tensor, *, loss: Loss | None = None
    ) -> Pairs:
        """Return the pairs that are left, as boolean masks `.positive` and `.negative` (n, M).

        Args:
            rows: Embeddings (n, D), compared as they are: bring them to length 1 first where the
                loss does. A loss gives what it has prepared instead.
            pairs: Labels (n,) int64, < 0 for none; a loss gives all pairs instead.
            loss: What the loss would be on some pairs, for the one miner that asks.

        In one process M = n. Miners of triplets fill `.triplets` too; see `Pairs`. Without
        gradient. Collective: all ranks call it.
        """
        with torch.no_grad():
            if not isinstance(rows, LabelledRows):
                rows, labels = labelled_rows(rows, cast(Tensor, pairs))
                rows, pairs = compare(rows.to(wide_dtype(rows.device)), labels, None, None)
            pairs = cast(Pairs, pairs)
            return self.select_by_loss(rows, pairs, loss) if len(rows.columns) else pairs

    def select_by_loss(self, batch: LabelledRows, pairs: Pairs, loss: Loss | None) -> Pairs:
        """Return what `select` does; the one miner that compares losses does it here."""
        return self.select(batch, pairs)

    @abstractmethod
    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        """Return those of `pairs` that a loss shall see; called without gradient."""


class RandomMiner(Miner):
    """Draw from (seed, call, row of the global batch): the same on any number of processes.

    The number of the call is a buffer, so a resumed run draws on.
    """

    seed: int = 0
    """Of the draws."""

    def setup(self) -> None:
        super().setup()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def uniform_rows(self, batch: LabelledRows, lanes: int) -> Tensor:
        """Return (n, lanes) float64 in [0, 1), named by global rows; the next call draws others."""
        rows = range(batch.first, batch.first + len(batch.labels))
        numbers = torch.from_numpy(
            uniform(seed=self.seed, epoch=int(self.calls), ids=list(rows), view=0, lanes=lanes)
        )
        self.calls.add_(1)
        return numbers.to(batch.anchors.device)

    def one_negative_each(self, batch: LabelledRows, pairs: Pairs, weights: Tensor) -> Pairs:
        """Draw a negative for each positive pair, with probability ~ its weight (n, M)."""
        slots = pairs.slots()
        chosen = sample(weights, self.uniform_rows(batch, slots.columns.shape[1]))  # (n, P)
        fits = slots.filled & pairs.negative.any(1, keepdim=True)
        triplets = pairs.negative.new_zeros(*chosen.shape, weights.shape[1])
        triplets.scatter_(2, chosen[:, :, None], fits[:, :, None])
        return with_triplets(pairs, slots, triplets)


class AllPairsMiner(Miner):
    """Keep everything: for each anchor K - 1 positives, each with all negatives."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        return pairs


class OnePerClassMiner(RandomMiner):
    """Draw for each anchor one random negative of each other class: the tuples of tuplet losses."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        draws = self.uniform_rows(batch, len(batch.column_labels))
        draws = draws.masked_fill(~pairs.negative, -1)  # (n, M)
        place = torch.unique(batch.column_labels, return_inverse=True)[1].expand(len(draws), -1)
        best = draws.new_full(draws.shape, -1).scatter_reduce_(1, place, draws, "amax")
        chosen = pairs.negative & (draws == best.gather(1, place))
        return pairs._replace(negative=chosen)


class BatchHardMiner(Miner):
    """Keep for each anchor its farthest positive and its nearest negative.

    Source:
        Hermans et al. 2017, arXiv:1703.07737, eq. 5.
    """

    distance: Distance = "euclidean"
    """"euclidean", "squared" or "cosine"."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        d = batch.distances(self.distance)
        both = (pairs.positive.any(1) & pairs.negative.any(1))[:, None]
        farthest = d.masked_fill(~pairs.positive, -torch.inf).argmax(1)
        nearest = d.masked_fill(~pairs.negative, torch.inf).argmin(1)
        return pairs._replace(
            positive=only_at(farthest, pairs.positive & both),
            negative=only_at(nearest, pairs.negative & both),
        )


class PackagedMiner(Miner):
    """Read rows of the global batch as anchor, positive, negative, anchor, positive, negative."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        row = torch.arange(len(batch.labels), device=batch.labels.device)[:, None] + batch.first
        column = torch.arange(len(batch.column_labels), device=batch.labels.device)
        anchor = row % 3 == 0
        positive = pairs.positive & anchor & (column == row + 1)
        negative = pairs.negative & anchor & (column == row + 2)
        whole = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
        return pairs._replace(positive=positive & whole, negative=negative & whole)


class MultiSimilarityMiner(Miner):
    """Keep pairs that are hard against the anchor's other kind; S: cosines.

    Negatives with S > min over positives - epsilon, positives with S < max negative + epsilon.

    Source:
        Wang et al. 2019, arXiv:1904.06627, eq. 10 and 11.
    """

    epsilon: float = 0.1
    """The tolerance."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        s = unit_rows(batch).similarities()
        lowest = s.masked_fill(~pairs.positive, torch.inf).amin(1, keepdim=True)
        highest = s.masked_fill(~pairs.negative, -torch.inf).amax(1, keepdim=True)
        positive = pairs.positive & (s - self.epsilon < highest)
        negative = pairs.negative & (s + self.epsilon > lowest)
        return pairs._replace(positive=positive, negative=negative)


class PairMarginMiner(Miner):
    """Keep positives farther than `positive` and negatives nearer than `negative`."""

    positive: float = 0.2
    """Distance above which a positive is kept."""
    negative: float = 0.8
    """Distance below which a negative is kept."""
    distance: Distance = "euclidean"
    """"euclidean", "squared" or "cosine"."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        d = batch.distances(self.distance)
        positive = pairs.positive & (d > self.positive)
        negative = pairs.negative & (d < self.negative)
        return pairs._replace(positive=positive, negative=negative)


class HardestShareMiner(Miner):
    """Keep the share of positives that are farthest and the share of negatives that are nearest.

    Shares are of the global batch's pairs; ties at the bound are all kept. Collective.

    Source:
        Yuan et al. 2017, arXiv:1611.05720 (hard-aware deeply cascaded embedding), section 3.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the pairs of each kind."""
    distance: Distance = "euclidean"
    """"euclidean", "squared" or "cosine"."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        return hardest_pairs(
            batch=batch,
            pairs=pairs,
            positive_share=self.share,
            negative_share=self.share,
            distance=self.distance,
        )


class MaximumLossMiner(RandomMiner):
    """Keep, of random subsets of the batch's rows, the one with the largest loss.

    Used in a loss only, which it asks.
    """

    rows: Annotated[int, Field(ge=2)]
    """Of a subset."""
    trials: Annotated[int, Field(ge=1, le=10_000)] = 5
    """How many subsets."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        raise ValueError("this miner compares losses: use it in one, loss(..., miner=miner)")

    def select_by_loss(self, batch: LabelledRows, pairs: Pairs, loss: Loss | None) -> Pairs:
        if loss is None:
            return self.select(batch, pairs)  # which refuses
        size = len(batch.column_labels) - batch.references
        subsets = []
        for trial in range(self.trials):
            order = permutation(size, (self.seed, int(self.calls), trial))[: self.rows].copy()
            inside = pairs.negative.new_zeros(len(batch.column_labels))
            inside[torch.from_numpy(order).to(inside.device)] = True
            anchored = inside[batch.first : batch.first + len(batch.labels), None]
            inside[size:] = True  # references
            both = inside & anchored
            subsets.append(Pairs(pairs.positive & both, pairs.negative & both))
        self.calls.add_(1)
        values = [float(loss(subset).sum()) for subset in subsets]
        return subsets[max(range(self.trials), key=values.__getitem__)]


class TripletMiner(Miner):
    """Select triplets by where the negative lies against the positive.

    Source:
        Schroff et al. 2015, arXiv:1503.03832, section 3.2.
    """

    triplets: TripletKind = "semi_hard"
    """"semi_hard" d_ap < d_an < d_ap + margin; "hard" d_an < d_ap; "violating" d_an < d_ap +
    margin; "easy" d_an >= d_ap + margin; "semi_hard_or_easy" d_ap < d_an, which others call
    semi-hard."""
    margin: float = 0.2
    """See triplets."""
    distance: Distance = "squared"
    """"squared", "euclidean" or "cosine"; the paper's are squared, of unit rows."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        d = batch.distances(self.distance)
        slots = pairs.slots()
        near = slots.take(d)
        triplets = pairs.negative.new_zeros(*near.shape, d.shape[1])  # (n, P, M)
        for p in range(near.shape[1]):  # one positive at a time: nothing but bits of size n P M
            at = near[:, p, None]
            fits = pairs.negative & slots.filled[:, p, None]
            if self.triplets in ("semi_hard", "semi_hard_or_easy"):
                fits &= d > at
            if self.triplets in ("semi_hard", "violating"):
                fits &= d < at + self.margin
            if self.triplets == "hard":
                fits &= d < at
            if self.triplets == "easy":
                fits &= d >= at + self.margin
            triplets[:, p] = fits
        return with_triplets(pairs, slots, triplets)


class SemiHardMiner(TripletMiner):
    """Select semi-hard triplets: d_ap < d_an < d_ap + margin.

    Source:
        Schroff et al. 2015, arXiv:1503.03832, section 3.2.
    """


class RandomNegativeMiner(RandomMiner):
    """Draw for each positive pair a negative, all with the same probability."""

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        return self.one_negative_each(batch, pairs, pairs.negative.to(batch.anchors.dtype))


class DistanceWeightedMiner(RandomMiner):
    """Draw for each positive pair a negative with probability ~ 1 / q(d), d its distance.

    q(d) ~ d^(D-2) (1 - d^2/4)^((D-3)/2) is the density of distances between random points of the
    sphere, so all distances become equally likely. An anchor with no negative inside `limit` draws
    from all its negatives.

    Source:
        Wu et al. 2017, arXiv:1706.07567, section 3.2; cutoff and limit: the released code.
    """

    cutoff: float = 0.5
    """Distances are raised to it."""
    limit: float = 1.4
    """Negatives beyond it are masked."""

    def setup(self) -> None:
        super().setup()
        if not 0 < self.cutoff < self.limit <= 2:
            raise ValueError(
                f"cutoff = {self.cutoff}, limit = {self.limit}: 0 < cutoff < limit <= 2 needed"
            )

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        return self.one_negative_each(batch, pairs, self.weights(batch, pairs))

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

    Source:
        None confirmed; the rule is that of the angular loss's constraint (Wang et al. 2017).
    """

    angle_deg: Annotated[float, Field(gt=0, lt=90)] = 20.0
    """In degrees."""

    def setup(self) -> None:
        super().setup()
        self.steepness = 4 * math.tan(math.radians(self.angle_deg)) ** 2

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        batch = unit_rows(batch)
        d2 = batch.distances("squared")
        everyone = batch._replace(anchors=batch.columns).distances("squared")  # (M, M)
        slots = pairs.slots()
        near = slots.take(d2)
        triplets = pairs.negative.new_zeros(*near.shape, d2.shape[1])
        for p in range(near.shape[1]):
            at = near[:, p, None]  # Apollonius: squared distance of n from the middle of a and p
            middle = 0.5 * (d2 + everyone[slots.columns[:, p]]) - 0.25 * at
            fits = at > self.steepness * middle.clamp_min(0)
            triplets[:, p] = fits & pairs.negative & slots.filled[:, p, None]
        return with_triplets(pairs, slots, triplets)


class CurriculumMiner(Miner):
    """Change to another miner after some steps: easy first, harder later."""

    first: str = "all"
    """A name of MINERS, with its defaults."""
    then: str = "batch_hard"
    """The one from step `steps` on."""
    steps: int = 1000
    """Calls of the first."""

    def setup(self) -> None:
        super().setup()
        self.easy = MINERS[self.first]()
        self.hard = MINERS[self.then]()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def select(self, batch: LabelledRows, pairs: Pairs) -> Pairs:
        return self.select_by_loss(batch, pairs, None)

    def select_by_loss(self, batch: LabelledRows, pairs: Pairs, loss: Loss | None) -> Pairs:
        miner = self.easy if int(self.calls) < self.steps else self.hard
        self.calls.add_(1)
        return miner.select_by_loss(batch, pairs, loss)


def only_at(columns: Tensor, mask: Tensor) -> Tensor:
    """Keep the mask's entries (n, M) at one column (n,) of each row alone."""
    return torch.zeros_like(mask).scatter_(1, columns[:, None], True) & mask


def unit_rows(batch: LabelledRows) -> LabelledRows:
    """Bring anchors and columns to length 1."""
    return batch._replace(anchors=unit(batch.anchors), columns=unit(batch.columns))


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


def sample(weights: Tensor, draws: Tensor) -> Tensor:
    """(n, M) weights, (n, P) numbers in [0, 1) -> (n, P) columns, with probability ~ weight."""
    sums = weights.double().cumsum(1)
    chosen = torch.searchsorted(sums, draws.double() * sums[:, -1:], right=True)
    return chosen.clamp_max(weights.shape[1] - 1)


MINERS: Table[type[Miner]] = Table(
    "miner",
    {
        "all": AllPairsMiner,
        "angular": AngularMiner,
        "batch_hard": BatchHardMiner,
        "curriculum": CurriculumMiner,
        "distance_weighted": DistanceWeightedMiner,
        "hardest_share": HardestShareMiner,
        "maximum_loss": MaximumLossMiner,
        "multi_similarity": MultiSimilarityMiner,
        "one_per_class": OnePerClassMiner,
        "packaged": PackagedMiner,
        "pair_margin": PairMarginMiner,
        "random_negative": RandomNegativeMiner,
        "triplets": TripletMiner,
    },
    "sslpipe.miners",
)

__all__ = ["MINERS", "CurriculumMiner", "MaximumLossMiner", "Miner"]
__all__ += ["AllPairsMiner", "BatchHardMiner", "HardestShareMiner", "MultiSimilarityMiner"]
__all__ += ["OnePerClassMiner", "PackagedMiner", "PairMarginMiner"]
__all__ += ["AngularMiner", "DistanceWeightedMiner", "RandomNegativeMiner"]
__all__ += ["SemiHardMiner", "TripletMiner"]
