"""Supervised contrastive loss: every view of the same label is a positive."""

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows
from sslpipe.losses.engine.contrast import (
    Anchors,
    Engine,
    Sums,
    anchors_of,
    check_settings,
    check_views,
    contrast,
)
from sslpipe.losses.engine.products import Products


class SupConLoss(nn.Module):
    """Mean over an anchor's positives of -log of their share among all other views ("out" form).

    Positives of an anchor: its image's other view and, where its label is >= 0, all views of that
    label. Label -1 is "unlabelled": only its own other view is positive, and it is a negative of
    all others, except of unlabelled images with the same sample id. Without labels this is NT-Xent.
    Everything else as in NTXentLoss: mean over 2N anchors, products, tile_rows, processes,
    gradient, errors. `last_negatives` does not count positives.
    Source: Khosla et al. 2020, arXiv:2004.11362, eq. 2 (their loss times 1: no tau / base_tau).
    """

    def __init__(
        self,
        temperature: float = 0.1,
        products: Products = "float32",
        tile_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_settings(temperature, products, tile_rows)
        self.engine = Engine(temperature, products, tile_rows)
        self.masked_pairs = 0
        self.last_negatives = 0.0

    def extra_repr(self) -> str:
        return f"{self.engine}"

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        check_views(z_a, z_b, ids, labels)
        if labels is None:
            labels = torch.full_like(z_a[:, 0], -1, dtype=torch.int64)
        anchors = anchors_of(z_a, ids, own=labels >= 0)
        labels = all_gather_rows(labels, anchors.counts)  # (N,)
        alone = labels.amax() + 1 + torch.arange(anchors.images, device=labels.device)
        _, of_image, images = torch.unique(
            torch.where(labels >= 0, labels, alone), return_inverse=True, return_counts=True
        )
        positives = 2 * images[of_image] - 1  # (N,)

        def row_loss(v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
            del anchors
            v_a, v_b = v.unbind(1)
            own = (v_a * v_b).sum(1, keepdim=True)  # (N, 1)
            total = torch.logaddexp(own, sums[0])  # (N, 2), over all other views
            of_class = v.new_zeros(len(images), v.shape[2]).index_add(0, of_image, v_a + v_b)
            others = of_class[of_image][:, None] - v  # (N, 2, D): the sum of an anchor's positives
            values: Tensor = total - (v * others).sum(2) / positives[:, None]  # (N, 2)
            return values.mean()

        self.masked_pairs = anchors.masked_pairs
        extra = 2 * (images[of_image] - 1).double().mean()  # positives among other images' views
        self.last_negatives = anchors.mean_negatives - float(extra)
        return contrast(z_a, z_b, anchors, row_loss, self.engine)
