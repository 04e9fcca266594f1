"""Configured: what losses, heads and miners share; MetricLoss: what all losses do."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import torch
from torch import Tensor, nn

from sslpipe.distributed import current_rank, global_mean, global_sum
from sslpipe.errors import did_you_mean
from sslpipe.metric_learning.losses.pairwise import (
    LabelCounts,
    LabelledRows,
    Pairs,
    References,
    compare,
    labelled_rows,
    unit,
)
from sslpipe.precision import wide_dtype

Reduction = Literal["mean", "mean_active", "sum", "none"]


class Configured(nn.Module):
    """Remember the constructor's arguments: for the repr, and to refuse those that do not exist.

    `settings` maps each argument's name to its value, defaults included.

    Raises:
        TypeError: an argument is unknown; the message names the nearest one.
        ValueError: one whose type is a Literal has another value.
    """

    __signature__: ClassVar[inspect.Signature]
    settings: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take the signature from the constructor."""
        super().__init_subclass__(**kwargs)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
        cls.__signature__ = inspect.Signature(own)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check and remember the arguments."""
        parameters = cls.__signature__.parameters
        for name in kwargs:
            if name not in parameters:
                raise TypeError(
                    f"{cls.__name__} takes no {name}{did_you_mean(name, parameters)}; "
                    f"it takes: {', '.join(parameters) or 'nothing'}"
                )
        self = super().__new__(cls)
        bound = cls.__signature__.bind_partial(*args, **kwargs)  # a copy is made without any
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            kind = parameters[name].annotation
            if get_origin(kind) is Literal and value not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name} = {value!r} must be one of {choices}")
        object.__setattr__(self, "settings", dict(bound.arguments))
        return self

    def __init__(self) -> None:
        super().__init__()  # nn.Module's own signature takes anything

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({arguments})"


class MetricLoss(Configured):
    """Compute a loss of labelled embeddings, compared over all ranks.

    A subclass defines `row_terms`, its formula: a static method `(batch, pairs, *, settings)`, or
    the class of a module `(batch, pairs)` with weights of its own, whose constructor takes the
    settings. It returns a sequence of `PerAnchor` terms, which are added up. These settings are the
    arguments of the loss's constructor, with two more; their defaults, what the paper does, stand
    in the class statement: `class TripletLoss(MetricLoss, normalize=True)`.

    Args:
        normalize: Bring rows to length 1 first.
        reduction: Of each term, "mean" over its items (pairs, triplets or anchors, as the loss
            says) of the global batch; "mean_active" over those above 0, which makes a step's size
            independent of how many there are; "sum"; "none": (n,) sums of this rank's anchors.

    Shape:
        embeddings (n, D), labels (n,) int64, < 0 for none -> (), equal on all ranks. n may differ
        between them. A batch without an item gives 0. Everything is float32 at least, also under
        autocast, and float64 where rows keep their lengths. Gradient: W times the part of this
        rank's rows and of what it says about the others', so that DDP's mean equals one process.

    After a call `last_count` and `last_active` hold the items of the global batch and those above 0
    (of the first term). Collective: all ranks call it.
    """

    row_terms: ClassVar[Callable[..., Any]]
    _defaults: ClassVar[dict[str, Any]] = {"normalize": False, "reduction": "mean"}

    def __init_subclass__(
        cls, *, normalize: bool | None = None, reduction: Reduction = "mean", **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if normalize is not None:
            cls._defaults = {"normalize": normalize, "reduction": reduction}
        keyword = inspect.Parameter.KEYWORD_ONLY
        settings = [
            p.replace(kind=keyword)
            for p in inspect.signature(cls.row_terms).parameters.values()
            if p.name not in ("batch", "pairs")
        ]
        settings += [inspect.Parameter(k, keyword, default=v) for k, v in cls._defaults.items()]
        cls.__signature__ = inspect.Signature(settings)

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        conventions = {**self.settings, **settings}
        self.normalize: bool = conventions.pop("normalize")
        self.reduction: Reduction = conventions.pop("reduction")
        if self.reduction not in ("mean", "mean_active", "sum", "none"):
            raise ValueError(
                f"reduction = {self.reduction!r} must be 'mean', 'mean_active', 'sum' or 'none'"
            )
        self._counted: Tensor | None = None
        missing = [name for name in self.__signature__.parameters if name not in self.settings]
        if missing:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
        row_terms: Any = type(self).row_terms
        is_module = inspect.isclass(row_terms)  # with weights of its own
        self.rule: Callable[..., Any] = row_terms(**conventions) if is_module else row_terms
        self.conventions = {} if is_module else conventions
        if not is_module and current_rank().world_size == 1:  # a rule may communicate
            self._try_out()

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
        x, labels = labelled_rows(embeddings, labels, self.settings.get("num_classes"))
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
        terms = self.rule(batch, pairs, **self.conventions)
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

    def _try_out(self) -> None:
        """Compute the terms of four rows: a setting that they refuse is an error at once."""
        rows = torch.eye(4, 60)
        labels = torch.tensor([0, 0, 1, 1])
        same = labels[:, None] == labels
        pairs = Pairs(same & ~torch.eye(4, dtype=torch.bool), ~same)
        self.rule(LabelledRows(rows, rows, labels, labels, 0, 0), pairs, **self.conventions)
