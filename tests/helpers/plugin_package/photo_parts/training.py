"""What decides trained weights: an objective, an augmentation, a backbone."""

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import nn

from sslpipe.augment.op import MaskedOp, named_lanes
from sslpipe.augment.spec import setting
from sslpipe.distributed import gather_with_grad
from sslpipe.losses import Objective
from sslpipe.models.backbones import Backbone, BackboneSettings

SCALE = 1.0


class AlignmentLoss(Objective):
    """Squared distance of the two views, and a hinge on each feature's variance; no negatives."""

    weight: float = 1.0
    """Of the hinge."""
    last_distance = 0.0

    def forward(self, z_a, z_b, *, ids=None, labels=None, groups=None):
        z_a, z_b = gather_with_grad(z_a), gather_with_grad(z_b)  # (N, D), of all processes
        distance = F.mse_loss(z_a, z_b)
        spread = F.relu(1 - z_a.std(0)).mean() + F.relu(1 - z_b.std(0)).mean()
        self.last_distance = float(distance.detach())
        return SCALE * (distance + self.weight * spread)

    def stats(self):
        return {"view_distance": self.last_distance}


class Invert(MaskedOp):
    name = "invert"
    label = "inverted"
    settings: ClassVar = {"invert_prob": setting(0.0, "probability of the negative")}
    params = ("invert",)
    lanes = named_lanes("invert", 1)

    def change(self, views, chunk):
        return 1 - views

    def change_one(self, view, draw, spec):
        return 1 - view


INVERT = Invert()


class TwoLayers(BackboneSettings):
    """Two convolutions and the mean over the image."""

    kind: Literal["two_layers"] = "two_layers"
    width: int = 8
    """Channels of both."""

    def network(self, crop_px: int) -> Backbone:
        width = self.width
        network = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        return Backbone(network, width)
