"""MetricLoss: one module around a rule; what all losses of pairs, triplets and tuples share."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sslpipe.distributed import current_rank, global_mean, global_sum
from sslpipe.metric_learning.losses.pairwise import (
    Batch,
    Pairs,
    PerAnchor,
    References,
    compare,
    unit,
)

Rule = Callable[..., Sequence[PerAnchor]]  # (batch, pairs, **conventions) -> terms, added up
Reduction = Literal["mean", "mean_active", "sum", "none"]


class MetricLoss(nn.Module):
    """A loss of labelled embeddings, compared over all ranks.

    rule: the formula, a function `(batch, pairs, **conventions)` or a module `(batch, pairs)` with
    weights of its own. normalize: rows are brought to length 1 first.
    reduction, of each term of the rule: "mean" over its items (pairs, triplets or anchors, as the
    rule says) of the global batch; "mean_active" over those above 0, which makes a step's size
    independent of how many there are; "sum"; "none": (n,) sums of this rank's anchors.
    Shapes: embeddings (n, D), labels (n,) int64, < 0 for none -> (), equal on all ranks; n may
    differ between them. A batch without an item gives 0.
    ids (n,) and ref: further columns, see `References`. miner: narrows the pairs down, see MINERS.
    Gradient: W times the part of this rank's rows and of what it says about the others', so that
    DDP's mean equals one process. Everything is float32 at least, also under autocast.
    After a call: `last_count` and `last_active`, items of the global batch and those above 0
    (of the rule's first term).
    Collective: all ranks call it.
    """

    def __init__(
        self, rule: Rule, *, normalize: bool, reduction: Reduction = "mean", **conventions: Any
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "mean_active", "sum", "none"):
            raise ValueError(
                f"reduction = {reduction!r} must be 'mean', 'mean_active', 'sum' or 'none'"
            )
        self.rule, self.normalize, self.reduction = rule, normalize, reduction
        self.conventions = conventions
        self.last_count = self.last_active = 0.0

    def extra_repr(self) -> str:
        settings = {"normalize": self.normalize, "reduction": self.reduction, **self.conventions}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ids: Tensor | None = None,
        ref: References | None = None,
        miner: nn.Module | None = None,
    ) -> Tensor:
        if embeddings.dim() != 2 or labels.shape != embeddings.shape[:1]:
            raise ValueError(
                f"embeddings must be (n, D) and labels (n,), got {tuple(embeddings.shape)} "
                f"and {tuple(labels.shape)}"
            )
        if labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64, got {labels.dtype}")
        with torch.autocast(embeddings.device.type, enabled=False):
            x = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
            if self.normalize:
                x = unit(x)
                if ref is not None:
                    ref = ref._replace(embeddings=unit(ref.embeddings.to(x.dtype)))
            batch, pairs = compare(x, labels, ids, ref)
            if miner is not None:
                with torch.no_grad():
                    pairs = miner(batch, pairs, loss=lambda some: self._reduce(batch, some))
            return self._reduce(batch, pairs)

    def _reduce(self, batch: Batch, pairs: Pairs) -> Tensor:
        terms = self.rule(batch, pairs, **self.conventions)
        totals = torch.stack([term.total.sum() for term in terms])  # (T,)
        counts = torch.stack([term.items.sum() for term in terms]).to(totals.dtype)
        actives = torch.stack([term.active.sum() for term in terms]).to(totals.dtype)
        everyone = global_sum(torch.stack([counts[0], actives[0]]))
        self.last_count, self.last_active = everyone.tolist()
        if self.reduction == "none":
            return torch.stack([term.total for term in terms]).sum(0)
        if self.reduction == "sum":
            world = torch.full_like(counts, 1 / current_rank().world_size)
            return global_mean(totals, world).sum()
        return global_mean(totals, actives if self.reduction == "mean_active" else counts).sum()


def loss_of(
    rule: Callable[..., Any], *, normalize: bool, reduction: Reduction = "mean"
) -> Callable[..., MetricLoss]:
    """The constructor of MetricLoss for one rule; it takes the rule's conventions by name.

    rule: a function `(batch, pairs, *, conventions)`, or the class of a module whose constructor
    takes them. normalize, reduction: what the paper does; both are arguments of the constructor.
    A setting that the rule refuses is an error here: the rule is tried on a batch of four rows.
    """
    is_module = inspect.isclass(rule)
    settings = [p for p in inspect.signature(rule).parameters.values() if p.name not in _GIVEN]
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (("normalize", normalize), ("reduction", reduction))
    ]

    def construct(**arguments: Any) -> MetricLoss:
        frame = {p.name: arguments.pop(p.name, p.default) for p in own}
        unknown = arguments.keys() - {p.name for p in settings}
        if unknown:
            raise TypeError(f"{rule.__name__} takes no {', '.join(sorted(unknown))}")
        if is_module:
            return MetricLoss(rule(**arguments), **frame)
        loss = MetricLoss(rule, **frame, **arguments)
        if current_rank().world_size == 1:  # a rule may communicate
            _try_out(loss)
        return loss

    construct.__doc__, construct.__name__ = rule.__doc__, rule.__name__
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in settings] + own
    construct.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return construct


_GIVEN = ("batch", "pairs")


def _try_out(loss: MetricLoss) -> None:
    rows, labels = torch.eye(4, 60), torch.tensor([0, 0, 1, 1])
    same = labels[:, None] == labels
    pairs = Pairs(same & ~torch.eye(4, dtype=torch.bool), ~same)
    loss.rule(Batch(rows, rows, labels, labels, 0, 0), pairs, **loss.conventions)
