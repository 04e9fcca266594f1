"""Losses against learned points: one or more proxies a class, or a running mean of each class."""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, current_rank, gather_with_grad, global_mean
from sslpipe.metric_learning.heads.head import Head, row_mean
from sslpipe.metric_learning.losses.metric_loss import AboveZero
from sslpipe.metric_learning.losses.pairwise import unit
from sslpipe.precision import wide_dtype

TINY_D2 = 1e-12  # a squared distance below this has no direction, and no gradient


class ProxyNCA(Head):
    """Compare each row with one proxy a class; x and p of length 1; row mean.

    -log of e^{-s D2(x, p_y)} over the sum of e^{-s D2(x, p_c)}.

    Source:
        Movshovitz-Attias et al. 2017, arXiv:1703.07464, eq. 6; Teh et al. 2020, arXiv:2004.01113,
        eq. 6.
    """

    form: Literal["paper", "all"] = "paper"
    """"paper" sums over c != y; "all" over every c, as the authors' code and ProxyNCA++ do."""
    scale: AboveZero = 1.0
    """S; 1 is the paper's, 9 is ProxyNCA++'s (its vectors have length 3; a temperature of 1/9)."""

    def setup(self) -> None:
        super().setup()
        start = torch.randn(self.num_classes, self.dim) / 8  # as in the released code
        self.proxies = nn.Parameter(start)

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        cosines = _cosines(x, self.proxies)
        lengths = (x != 0).any(1)[:, None].to(x.dtype) + (self.proxies != 0).any(1)  # 2, or dead
        logits = -self.scale * (lengths - 2 * cosines)  # (B, C)
        of_class = logits.gather(1, labels[:, None])[:, 0]
        if self.form == "paper":
            logits = logits.scatter(1, labels[:, None], -math.inf)
        values = logits.logsumexp(1) - of_class  # (B,)
        return row_mean(values)


class ProxyAnchor(Head):
    """Compare each proxy with all rows of the global batch, its own class's and the others'.

    mean over P+ of log(1 + sum_{x of p} e^{-alpha (s(x, p) - delta)}) + mean over all p of
    log(1 + sum_{x not of p} e^{alpha (s(x, p) + delta)}); s cosine, P+ the classes in the batch.
    Give its proxies a learning rate 100 times the backbone's.

    Source:
        Kim et al. 2020, arXiv:2003.13911, eq. 4 and section 4.2.
    """

    alpha: float = 32.0
    """Scale of the cosines."""
    delta: float = 0.1
    """The margin."""

    def setup(self) -> None:
        super().setup()
        self.proxies = nn.Parameter(torch.empty(self.num_classes, self.dim))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")  # as in the released code

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        everyone = gather_with_grad(x)  # (N, D)
        cosines = _cosines(everyone, self.proxies)  # (N, C)
        is_class = F.one_hot(all_gather_rows(labels), len(self.proxies)).bool()
        one = cosines.new_zeros(1, len(self.proxies))  # log 1
        pull = (-self.alpha * (cosines - self.delta)).masked_fill(~is_class, -math.inf)
        push = (self.alpha * (cosines + self.delta)).masked_fill(is_class, -math.inf)
        pulls = torch.cat([one, pull]).logsumexp(0)  # (C,), 0 for a class not in the batch
        pushes = torch.cat([one, push]).logsumexp(0)
        return pulls.sum() / is_class.any(0).sum().clamp_min(1) + pushes.mean()


class SoftTriple(Head):
    """Classify by a soft maximum over several centres a class; x and w have length 1.

    S_c = sum_k softmax_k(x w_ck / gamma) x w_ck; cross entropy of la (S_c - delta [c = y]), row
    mean, plus tau / (C K (K - 1)) sum_c sum_{s < t} |w_cs - w_ct|: superfluous centres merge.

    Source:
        Qian et al. 2019, arXiv:1909.05235, eq. 5, 7 and 9.
    """

    la: float = 20.0
    """Scale of the similarities."""
    gamma: AboveZero = 0.1
    """Temperature of the softmax over centres."""
    delta: float = 0.01
    """The margin."""
    tau: float = 0.2
    """Weight of the second term."""
    centers: Annotated[int, Field(ge=1, le=10_000)] = 10
    """K."""

    def setup(self) -> None:
        super().setup()
        self.weight = nn.Parameter(torch.empty(self.num_classes, self.centers, self.dim))
        nn.init.uniform_(self.weight, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        w = unit(self.weight.to(x.dtype).flatten(0, 1)).view(self.weight.shape)  # (C, K, D)
        cosines = torch.einsum("bd,ckd->bck", x, w)
        similarity = ((cosines / self.gamma).softmax(2) * cosines).sum(2)  # (B, C)
        margin = self.delta * F.one_hot(labels, len(w)).to(similarity.dtype)
        values = F.cross_entropy(self.la * (similarity - margin), labels, reduction="none")
        loss = row_mean(values)
        if self.centers > 1 and self.tau:
            loss = loss + self.tau * self._spread(w)
        return loss

    def _spread(self, w: Tensor) -> Tensor:
        classes, k, _ = w.shape
        first, second = torch.triu_indices(k, k, 1, device=w.device)
        d2 = (w[:, first] - w[:, second]).square().sum(2)  # (C, K (K - 1) / 2)
        return d2.clamp_min(TINY_D2).sqrt().sum() / (classes * k * (k - 1))


class CenterLoss(Head):
    """Pull rows to their class's centre: weight / 2 times the squared distances.

    Over the global batch. The centres are no parameters: after a training forward
    c_j -= alpha sum_{y_i = j} (c_j - x_i) / (1 + n_j), n_j rows of class j in the global batch.
    They start at 0. It is a second term: alone it pulls everything to one point.

    Source:
        Wen et al. 2016, ECCV, eq. 2 to 5.
    """

    weight: float = 0.003
    """Of the term."""
    alpha: float = 0.5
    """The centres' learning rate."""
    reduction: Literal["sum", "mean"] = "mean"
    """"mean" goes with heads whose cross entropy is a mean, as all here are: `weight` is then the
    paper's lambda. "sum" is the paper's, whose cross entropy is a sum too."""

    def setup(self) -> None:
        super().setup()
        self.centers = nn.Buffer(torch.zeros(self.num_classes, self.dim))

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        apart = x - self.centers[labels].to(x.dtype)  # (B, D)
        d2 = apart.to(wide_dtype(x.device)).square().sum(1)  # (B,); squares leave float32 early
        rows = len(d2) if self.reduction == "mean" else 1 / current_rank().world_size
        loss = self.weight / 2 * global_mean(d2.sum(), d2.new_full((), rows))
        if self.training:
            self._move(all_gather_rows(x), all_gather_rows(labels))
        return loss.to(x.dtype)

    @torch.no_grad()
    def _move(self, x: Tensor, labels: Tensor) -> None:
        x = x.to(self.centers.dtype)
        counts = labels.bincount(minlength=len(self.centers)).to(x.dtype)[:, None]  # (C, 1)
        sums = torch.zeros_like(self.centers).index_add_(0, labels, x)
        self.centers.sub_(self.alpha * (counts * self.centers - sums) / (1 + counts))


def _cosines(x: Tensor, proxies: Tensor) -> Tensor:
    """(B, D), (C, D) -> (B, C)."""
    return unit(x) @ unit(proxies.to(x.dtype)).T
