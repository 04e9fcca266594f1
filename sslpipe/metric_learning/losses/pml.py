"""Losses that are rare enough to come from pytorch-metric-learning (the extra `pml`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, gather_with_grad
from sslpipe.errors import UserError, did_you_mean
from sslpipe.metric_learning.losses.base import Configured
from sslpipe.metric_learning.losses.pairwise import References, occurrence, unit

# Their class, and what it is built with: num_classes and dim under its own names.
DELEGATED: dict[str, dict[str, str]] = {
    "DynamicSoftMarginLoss": {},
    "FastAPLoss": {},
    "HistogramLoss": {},
    "InstanceLoss": {},
    "ManifoldLoss": {"K": "num_classes", "l": "dim"},
    "P2SGradLoss": {"num_classes": "num_classes", "descriptors_dim": "dim"},
    "PNPLoss": {},
    "RankedListLoss": {},
    "SignalToNoiseRatioContrastiveLoss": {},
    "SmoothAPLoss": {},
    "SubCenterArcFaceLoss": {"num_classes": "num_classes", "embedding_size": "dim"},
    "ThresholdConsistentMarginLoss": {},
    "VICRegLoss": {},
}
TAKE_REFERENCES = ("SignalToNoiseRatioContrastiveLoss", "ThresholdConsistentMarginLoss")
AS_THEY_ARE = ("InstanceLoss", "VICRegLoss")  # of logits; of lengths: not of directions
REFUSED = {
    "swap": "it reads another row's distance when there are references",
    "efficient": "its gradient over several processes is not that of one",
}


class DelegatedLoss(Configured):
    """Compute a loss of pytorch-metric-learning, on the global batch, on all ranks alike.

    Rows are brought to length 1 first (not for losses of logits or of lengths) and are float32,
    also under autocast. Rows with a label < 0 are skipped. ManifoldLoss takes the labels as its
    meta classes; VICRegLoss compares each class's first row with its second; SmoothAPLoss wants
    classes of equal size. There is no last_active. DynamicSoftMarginLoss keeps a histogram outside
    its state. Each rank computes the whole batch's loss, so that DDP's mean of the gradients is one
    process's. Collective: all ranks call it.

    Args:
        name: One of DELEGATED.
        num_classes: For those with weights.
        dim: For those with weights.
        arguments: Its own.

    Raises:
        UserError: the name is not delegated, an argument is refused, or the extra `pml` is missing.
    """

    def __init__(
        self,
        name: str,
        num_classes: int | None = None,
        dim: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        own = dict(arguments or {})
        if name not in DELEGATED:
            raise UserError(
                f"name = {name!r} is not delegated{did_you_mean(name, DELEGATED)}; delegated: "
                f"{', '.join(DELEGATED)}; the usual ones are entries of METRIC_LOSSES"
            )
        for key in REFUSED.keys() & own.keys():
            raise UserError(f"arguments.{key} is refused: {REFUSED[key]}")
        try:
            from pytorch_metric_learning import losses
        except ImportError as error:
            raise UserError(
                f"{name} comes from pytorch-metric-learning: pip install 'sslpipe[pml]'"
            ) from error
        sizes = {"num_classes": num_classes, "dim": dim}
        for key, ours in DELEGATED[name].items():
            if sizes[ours] is None:
                raise UserError(f"{name} needs {ours}")
            own.setdefault(key, sizes[ours])
        if name == "InstanceLoss" and num_classes and dim and dim < num_classes:
            raise UserError(
                f"InstanceLoss takes rows as logits: dim = {dim} < {num_classes} classes"
            )
        self.name = name
        self.loss = getattr(losses, name)(**own)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ids: Tensor | None = None,
        ref: References | None = None,
        miner: nn.Module | None = None,
    ) -> Tensor:
        """Return the loss of the global batch.

        ref is for those in TAKE_REFERENCES, which then compare the rows with these only, as the
        library does; references of samples that are in the batch are skipped.
        """
        if miner is not None:
            raise UserError(f"{self.name} takes no miner: its items are not pairs of ours")
        if ref is not None and self.name not in TAKE_REFERENCES:
            raise UserError(f"{self.name} takes no references; those that do: {TAKE_REFERENCES}")
        with torch.autocast(embeddings.device.type, enabled=False):
            x = embeddings.float()
            x = gather_with_grad(x if self.name in AS_THEY_ARE else unit(x))
            labels = all_gather_rows(labels)
            known = labels >= 0
            rows = (x[known], labels[known])
            with torch.random.fork_rng(devices=[], enabled=True):
                torch.manual_seed(0)  # some draw: all ranks must draw the same
                if ref is None:
                    return self._batch_loss(*rows)
                if ids is not None:
                    new = ~torch.isin(ref.ids, all_gather_rows(ids))
                    ref = References(ref.embeddings[new], ref.labels[new], ref.ids[new])
                others = unit(ref.embeddings.float())
                loss: Tensor = self.loss(*rows, ref_emb=others, ref_labels=ref.labels.clone())
                return loss

    def _batch_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor
        if self.name == "ManifoldLoss":
            loss = self.loss(x, indices_tuple=labels)
        elif self.name == "VICRegLoss":
            order = torch.argsort(labels, stable=True)
            place = occurrence(labels)[order]
            first, second = order[place == 0], order[place == 1]
            paired = torch.isin(labels[first], labels[second])
            loss = self.loss(x[first[paired]], ref_emb=x[second])
        else:
            loss = self.loss(x, labels)
        return loss
