"""A backbone to use, with everything that an export writes beside it."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.evaluation.whiten import Whitening
from sslpipe.models.backbones import Backbone
from sslpipe.models.state import module_sha256
from sslpipe.recipe.base import Component, Pixels, Positive, Section
from sslpipe.recipe.pretrain import Projector


class Config(Section):
    """The keys of config.json; unknown ones are an error, as a newer format has a higher version.

    Args:
        format_version: 1.
        backbone: Kind and arguments that build the same network, with the stem of the training.
        crop_px: Side of the images that the network was built for.
        num_features: Length of a feature vector.
        view: Arguments of EvalView; features are those of images seen through it.
        weights_sha256: `module_sha256` of the backbone.
        facts: Run name, recipe, digest, steps, data set, labels that a fine-tuning saw, and
            evaluation numbers, for people.
        projector: Settings of the projector, where it was requested.
        projector_sha256: `module_sha256` of the projector.
        whitening_sha256: Of whitening.safetensors, which `sslpipe whiten` adds.
    """

    format_version: Literal[1]
    backbone: Component
    crop_px: Pixels
    num_features: Positive
    view: dict[str, Any]
    weights_sha256: str
    facts: dict[str, Any]
    projector: Projector | None = None
    projector_sha256: str | None = None
    whitening_sha256: str | None = None


class FrozenBackbone(nn.Module):
    """A backbone to use: in eval mode, without gradient, with the view that its features need.

    Args:
        backbone: Normalised images -> features.
        view: Images of any size -> normalised images of the size that the network was built for.
        config: What an export writes beside the weights.
        projector: (B, num_features) -> (B, out_dim), what the loss saw; None if not requested.
        whitening: Applied by `encode`; None: none.
    """

    def __init__(
        self,
        backbone: Backbone,
        view: EvalView,
        config: Config,
        projector: nn.Sequential | None = None,
        whitening: Whitening | None = None,
    ) -> None:
        super().__init__()
        self.whitening = whitening
        self.backbone, self.view, self.config = backbone, view, config
        self.projector = projector
        self.num_features = backbone.num_features
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Compute features, neither normalised nor whitened.

        Shape:
            images: (B, 3, S, S) normalised floats; the result: (B, num_features).
        """
        features: Tensor = self.backbone(images)  # (B, F)
        return features

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Compute features of images as they are, through `view` and its crops.

        Whitened where the export has a whitening. Without gradient.

        Shape:
            images: (B, 3, H, W) uint8 RGB, all of one size; the result: (B, num_features).
        """
        sizes = torch.tensor(images.shape[-2:]).expand(len(images), 2)
        features = self.view.reduced(self.forward(self.view(images, sizes)))
        return features if self.whitening is None else self.whitening.apply(features)


def freeze(
    backbone: Backbone,
    component: Component,
    view: EvalView,
    metadata: dict[str, Any],
    projector: nn.Sequential | None = None,
    projector_config: Projector | None = None,
) -> FrozenBackbone:
    """Wrap a backbone with everything that an export writes.

    Args:
        backbone: The network with its weights.
        component: What it was built from.
        view: The view that its features need.
        metadata: `Config.facts`.
        projector: Exported too, if any.
        projector_config: What the projector was built from.
    """
    arguments = component.arguments
    if backbone.stem is not None:  # resolved, so that a later rule for "auto" changes nothing
        arguments["stem"] = backbone.stem
    config = Config(
        format_version=1,
        backbone=Component.model_validate({"kind": component.kind, **arguments}),
        crop_px=view.crop_px,
        num_features=backbone.num_features,
        view=view.config(),
        weights_sha256=module_sha256(backbone),
        facts=metadata,
        projector=projector_config if projector is not None else None,
        projector_sha256=module_sha256(projector) if projector is not None else None,
    )
    return FrozenBackbone(backbone, view, config, projector)
