"""Losses in which a positive competes with negatives, or all pairs of an anchor, through a softmax.

Each is a `MetricLoss`: its formula is `row_terms(batch, pairs) -> terms`. All in O(n
M) memory: negatives enter through one log-sum-exp a row, positives side by side (`Pairs.slots`).
"""

import math
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sslpipe.distributed import gather_with_grad, global_sum
from sslpipe.gradients import first_order
from sslpipe.metric_learning.losses.metric_loss import AboveZero, MetricLoss, Radians
from sslpipe.metric_learning.losses.pairwise import (
    LabelledRows,
    Pairs,
    PerAnchor,
    Slots,
    occurrence,
    per_pair,
    per_row,
)
from sslpipe.metric_learning.losses.tiled import NEVER, centered_columns, masked_lse, tiles

SINE_LIMIT = 2e-7  # of its square: the root of less has too steep a slope


class InfoNCELoss(MetricLoss):
    """Compare each positive pair with the anchor's negatives.

    -log of e^{s_p/t} / (e^{s_p/t} + sum over negatives e^{s_n/t}). Other positives of the anchor
    are not in its sum. Similarities s are cosines where rows are normalised (MoCo).

    Source:
        Oord et al. 2018, arXiv:1807.03748, eq. 4; temperature: He et al. 2020, MoCo, eq. 1.
    """

    temperature: AboveZero = 0.07
    """t, what similarities are divided by."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        slots = pairs.slots()
        negatives = masked_lse(s, pairs.negative, 1 / self.temperature)
        values = F.softplus(negatives[:, None] - slots.take(s) / self.temperature)  # (n, P)
        return [per_pair(values, slots.filled)]


class LabelledNTXentLoss(MetricLoss):
    """Compare each positive pair with all rows but the anchor: -log of e^{s_p/t} / their sum.

    With two rows a label this is SimCLR's loss, `sslpipe.NTXentLoss`; with more, other positives
    stay in the sum.

    Source:
        Chen et al. 2020, arXiv:2002.05709, eq. 1.
    """

    temperature: AboveZero = 0.1
    """t, what similarities are divided by."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        slots = pairs.slots()
        everyone = masked_lse(s, pairs.positive | pairs.negative, 1 / self.temperature)
        return [per_pair(everyone[:, None] - slots.take(s) / self.temperature, slots.filled)]


class LabelledSupConLoss(MetricLoss):
    """Average over an anchor's positives the -log of e^{s_p/t} / sum over all rows but the anchor.

    An anchor without a positive is no item.

    Source:
        Khosla et al. 2020, arXiv:2004.11362, eq. 2 and 3.
    """

    temperature: AboveZero = 0.1
    """t, what similarities are divided by."""
    form: Literal["out", "in"] = "out"
    """Where the mean stands, "out"side or "in"side the logarithm; "in" is lower and was found to
    train worse."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        slots = pairs.slots()
        positives = slots.filled.sum(1)
        everyone = masked_lse(s, pairs.positive | pairs.negative, 1 / self.temperature)
        if self.form == "out":
            near = slots.take(s).masked_fill(~slots.filled, 0) / self.temperature
            mean = near.sum(1) / positives.clamp_min(1)
        else:
            mean = slots.lse(s, 1 / self.temperature) - positives.clamp_min(1).to(s.dtype).log()
        return [per_row(everyone - mean, positives > 0)]


class NCALoss(MetricLoss):
    """Raise the probability p that an anchor's random neighbour has its label: -log p or 1 - p.

    p = sum over positives e^{-scale D2} / sum over all but the anchor.

    Source:
        Goldberger et al. 2004, NeurIPS 17, eq. 3 and 6.
    """

    form: Literal["log", "expected"] = "log"
    """"log"; "expected" is the share of anchors whose stochastic neighbour has another label."""
    scale: float = 1.0
    """Of the squared distances."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances("squared")
        slots = pairs.slots()
        gap = masked_lse(d, pairs.negative, -self.scale) - slots.lse(
            d, -self.scale
        )  # log of (1 - p) / p
        values = F.softplus(gap) if self.form == "log" else torch.sigmoid(gap)
        return [per_row(values, slots.filled[:, 0])]


class NPairLoss(MetricLoss):
    """Let a class's first row find its second among those of other classes.

    log(1 + sum over j of e^{x_i x+_j - x_i x+_i}). One pair a class: rows after the second are not
    used. Rows keep their lengths.

    Source:
        Sohn 2016, NeurIPS 29, section 3.
    """

    l2_weight: float = 0.002
    """Of the penalty |x_i|^2 + |x+_i|^2 a pair (not given in the paper)."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        place = occurrence(batch.column_labels)
        rows = (place[batch.first : batch.first + len(batch.labels)] == 0).nonzero()[:, 0]  # (A,)
        seconds = (place == 1).nonzero()[:, 0]  # (B,)
        anchors = batch.anchors[rows]
        partners = batch.columns[seconds]
        # differences of an anchor's products alone count; taken so, they keep their digits
        s = anchors @ centered_columns(partners).T  # (A, B)
        at = rows[:, None], seconds
        # one partner at most
        is_partner = pairs.positive[at]
        other = pairs.negative[at]
        one = is_partner.to(s.dtype)
        gap = masked_lse(s, other) - (one * s).sum(1) if len(seconds) else s.sum(1)
        penalty = anchors.square().sum(1) + one @ partners.square().sum(1)
        values = F.softplus(gap) + self.l2_weight * penalty  # (A,)
        everyone = values.new_zeros(len(batch.labels)).index_put((rows,), values)
        paired = torch.zeros_like(batch.labels, dtype=torch.bool).index_put(
            (rows,), is_partner.any(1)
        )
        return [per_row(everyone, paired)]


class TupleMaxLoss(MetricLoss):
    """Let the hardest of n negatives decide: [max over negatives S - S_p]+ for each positive."""

    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.relative_similarities()
        hardest = s.masked_fill(~pairs.negative, NEVER[s.dtype]).amax(1, keepdim=True)
        slots = pairs.slots()
        filled = slots.filled & pairs.negative.any(1, keepdim=True)
        return [per_pair((hardest - slots.take(s)).clamp_min(0), filled)]


class MultiSimilarityLoss(MetricLoss):
    """Weigh each pair by its own similarity and by those of the anchor's other pairs.

    1/alpha log(1 + sum_P e^{-alpha (S - base)}) + 1/beta log(1 + sum_N e^{beta (S - base)}). Mean
    over the batch's anchors, also over those of which a miner kept no pair.

    Source:
        Wang et al. 2019, arXiv:1904.06627, eq. 15.
    """

    alpha: AboveZero = 2.0
    """Steepness for positives."""
    beta: AboveZero = 50.0
    """Steepness for negatives."""
    base: float = 1.0
    """The similarity at which a pair counts half; the released code has 0.5."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        slots = pairs.slots()
        pull = F.softplus(slots.lse(s, -self.alpha) + self.alpha * self.base) / self.alpha
        push = (
            F.softplus(masked_lse(s, pairs.negative, self.beta) - self.beta * self.base) / self.beta
        )
        return [per_row(pull + push, batch.labels >= 0)]


class UnifiedLoss(MetricLoss):
    """Compare every negative of an anchor with every positive.

    log(1 + sum over negatives and positives of e^{gamma (s_n - s_p + margin)}).

    Source:
        Sun et al. 2020, arXiv:2002.10857, eq. 1.
    """

    gamma: float = 80.0
    """Scale of the similarities."""
    margin: float = 0.4
    """By which positives should be more similar."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        slots = pairs.slots()
        gap = (
            masked_lse(s, pairs.negative, self.gamma)
            + slots.lse(s, -self.gamma)
            + self.gamma * self.margin
        )
        return [per_row(F.softplus(gap), slots.filled[:, 0] & pairs.negative.any(1))]


class CircleLoss(MetricLoss):
    """Weigh each similarity of `UnifiedLoss` by how far it is from its optimum.

    log(1 + sum_n e^{gamma a_n (s_n - m)} sum_p e^{-gamma a_p (s_p - 1 + m)}), a_n = [s_n + m]+ and
    a_p = [1 + m - s_p]+ without gradient.

    Source:
        Sun et al. 2020, arXiv:2002.10857, sections 3.1 and 3.2.
    """

    gamma: float = 80.0
    """Scale; the default is for fine-grained classes, 256 for faces."""
    margin: float = 0.4
    """M; the default is for fine-grained classes, 0.25 for faces."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        slots = pairs.slots()
        near = slots.take(s)  # (n, P)
        push = self.gamma * (s.detach() + self.margin).clamp_min(0) * (s - self.margin)
        pull = (
            -self.gamma * (1 + self.margin - near.detach()).clamp_min(0) * (near - 1 + self.margin)
        )
        gap = masked_lse(push, pairs.negative) + masked_lse(pull, slots.filled)
        return [per_row(F.softplus(gap), slots.filled[:, 0] & pairs.negative.any(1))]


class LiftedStructureLoss(MetricLoss):
    """Compare each positive pair with all negatives of both its rows: 1/2 [J]+^2.

    J = D_ij + log(sum_k e^{alpha - D_ik} + sum_l e^{alpha - D_jl}), k and l negatives of i and j; D
    Euclidean, rows keep their lengths. The smooth bound that is trained with, not the maximum.

    Source:
        Song et al. 2016, arXiv:1511.06452, eq. 4.
    """

    alpha: float = 1.0
    """The margin."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances("euclidean")
        mine = self.alpha + masked_lse(d, pairs.negative, -1.0)  # (n,)
        columns = gather_with_grad(mine)
        if batch.references:
            rows = batch.columns[-batch.references :]
            labels = batch.column_labels[-batch.references :]
            other = (labels[:, None] != batch.column_labels) & (batch.column_labels >= 0)
            far = batch._replace(anchors=rows).distances("euclidean")
            columns = torch.cat([columns, self.alpha + masked_lse(far, other, -1.0)])
        slots = pairs.slots()
        j = slots.take(d) + torch.logaddexp(mine[:, None], columns[slots.columns])  # (n, P)
        return [per_pair(0.5 * j.clamp_min(0).square(), slots.filled)]


class TupletMarginLoss(MetricLoss):
    """Compare each positive, a margin farther in angle, with the anchor's negatives.

    log(1 + sum over negatives e^{scale (cos th_an - cos(th_ap - margin))}) for each positive. All
    negatives of the batch take part; `OnePerClassMiner` gives the paper's tuples, one of each other
    class. The second term is the intra-pair variance, [(1 - epsilon) E_p - cos_ap]+^2 over
    positives plus [cos_an - (1 + epsilon) E_n]+^2 over negatives, E the mean cosine of each kind in
    the global batch.

    Source:
        Yu and Tao 2019, ICCV, section 3.
    """

    scale: float = 64.0
    """Of the cosines."""
    margin: Radians = 0.1
    """In radians."""
    variance_weight: float = 0.5
    """Of the intra-pair variance; 0: without it."""
    epsilon: float = 0.01
    """Its tolerance."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        s = batch.similarities()
        relative = batch.relative_similarities()
        slots = pairs.slots()
        cosines = slots.take(s)  # (n, P)
        # cos(th - self.margin) without acos: a small angle is read off the distance, not the cosine
        d = slots.take(batch.distances("euclidean"))
        near = d * (1 - d.square() / 4).clamp_min(SINE_LIMIT).sqrt()
        far = (1 - cosines.square()).clamp_min(SINE_LIMIT).sqrt()
        sines = torch.where(cosines > 0.5, near, far)
        # cosines near 1 keep their digits less 1: both sides of the softmax are taken less base, a
        # constant of rows of length 1
        base = (s - relative).detach().mean(1, keepdim=True)  # (n, 1)
        if not batch.unit:
            base = (batch.anchors @ batch.columns.detach().mean(0))[:, None]
        sums = math.cos(self.margin) * slots.take(relative) + (math.cos(self.margin) - 1) * base
        sums = sums + math.sin(self.margin) * sines  # (n, P)
        negatives = masked_lse(relative, pairs.negative, self.scale)[:, None]
        terms = [per_pair(F.softplus(negatives - self.scale * sums), slots.filled)]
        if self.variance_weight:
            low = (1 - self.epsilon) * _global_mean(cosines, slots.filled) - cosines
            high = s - (1 + self.epsilon) * _global_mean(s, pairs.negative)
            for gap, mask in ((low, slots.filled), (high, pairs.negative)):
                terms.append(per_pair(self.variance_weight * gap.clamp_min(0).square(), mask))
        return terms


class AngularLoss(MetricLoss):
    """Compare positives and negatives by the angle at the negative: log(1 + sum of e^f).

    The sum runs over the anchor's negatives, once for each positive; rows have length 1, and
    f = 4 t (x_a + x_p) x_n - 2 (1 + t) x_a x_p with t = tan^2 of the angle.

    Source:
        Wang et al. 2017, arXiv:1708.01682, section 3.
    """

    angle_deg: Annotated[float, Field(gt=0, lt=90)] = 45.0
    """The angle in degrees, above 0 and below 90; 36 to 55 are usual."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        t = math.tan(math.radians(self.angle_deg)) ** 2
        s = batch.similarities()
        alone = batch.anchors.shape == batch.columns.shape
        everyone = s if alone else batch.columns @ batch.columns.T  # (M, M)
        slots = pairs.slots()
        negatives = cast(Tensor, _NegativesOfPairs.apply(s, everyone, 4 * t, slots, pairs.negative))
        values = F.softplus(negatives - 2 * (1 + t) * slots.take(s))  # (n, P)
        return [per_pair(values, slots.filled & pairs.negative.any(1, keepdim=True))]


class _NegativesOfPairs(torch.autograd.Function):
    """(n, M), (M, M) -> (n, P): log of the sum over a's negatives j of e^{c (s_aj + e_pj)}.

    Made in tiles, forward and again in backward: nothing of size n P M is ever there.
    """

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, everyone: Tensor, c: float, slots: Slots, negative: Tensor
    ) -> Tensor:
        ctx.c = c
        ctx.slots = slots
        ctx.negative = negative
        out = s.new_empty(slots.columns.shape)
        for rows in tiles(len(s), slots.filled.shape[1] * s.shape[1]):
            out[rows] = _exponents(
                s=s, everyone=everyone, c=c, slots=slots, negative=negative, rows=rows
            ).logsumexp(2)
        ctx.save_for_backward(s, everyone, out)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        s, everyone, out = ctx.saved_tensors
        grad = ctx.c * grad.masked_fill(~ctx.slots.filled, 0)
        grad_s = torch.empty_like(s)
        grad_everyone = torch.zeros_like(everyone)
        for rows in tiles(len(s), ctx.slots.filled.shape[1] * s.shape[1]):
            w = _exponents(
                s=s, everyone=everyone, c=ctx.c, slots=ctx.slots, negative=ctx.negative, rows=rows
            )  # (r, P, M)
            w = w.sub_(out[rows, :, None]).exp_().mul_(grad[rows, :, None])
            grad_s[rows] = w.sum(1)
            grad_everyone.index_add_(0, ctx.slots.columns[rows].flatten(), w.flatten(0, 1))
        return grad_s, grad_everyone, None, None, None


def _exponents(
    s: Tensor, everyone: Tensor, c: float, slots: Slots, negative: Tensor, rows: slice
) -> Tensor:
    """(r, P, M); NEVER where the column is no negative."""
    negatives = s[rows].masked_fill(~negative[rows], NEVER[s.dtype])
    return everyone[slots.columns[rows]].add_(negatives[:, None]).mul_(c)


def _global_mean(x: Tensor, mask: Tensor) -> Tensor:
    """() mean over the mask on all ranks; each rank's use of it sends its gradient to all."""
    count = global_sum(mask.sum().to(x.dtype))
    return gather_with_grad(x.masked_fill(~mask, 0).sum()[None]).sum() / count.clamp_min(1)
