"""DIET as a plug-in: each image is a class of its own, named by one linear layer; no negatives.

Balestriero 2023, arXiv:2302.10260. The projector is that layer: `projector.num_layers = 1`,
`projector.batchnorm = false`, `projector.out_dim` the number of images of the split. One process.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sslpipe.losses import LOSSES, Objective


class DietLoss(Objective):
    """Cross entropy of the outputs with the sample's id, smoothed, over both views.

    Args:
        label_smoothing: Share of the target that goes to all images alike; the paper's 0.8.
        temperature: What the outputs are divided by; the paper's 1.
    """

    ids_on_device = True

    def __init__(self, label_smoothing: float = 0.8, temperature: float = 1.0) -> None:
        super().__init__()
        self.label_smoothing, self.temperature = label_smoothing, temperature

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Compute the mean over both views of all images."""
        assert ids is not None
        outputs = torch.cat([z_a, z_b]).float() / self.temperature  # (2B, images)
        target = ids.to(outputs.device, non_blocking=True).repeat(2)
        return cross_entropy(outputs, target, label_smoothing=self.label_smoothing)

    def unlike(
        self, ids: Tensor | None, labels: Tensor | None = None, groups: Tensor | None = None
    ) -> str | None:
        return None


LOSSES["diet"] = DietLoss
