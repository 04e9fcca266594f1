"""DIET: each image is a class of its own, which one linear layer names; no negatives."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from sslpipe.distributed import global_mean, to_device
from sslpipe.losses.base import Objective, check_views
from sslpipe.registry.part import Derived


class DietLoss(Objective):
    """Cross entropy of a view's outputs with the image that it shows, the target smoothed.

    The projector is the classifier: one linear layer with an output for each image of the split
    (`projector.num_layers = 1`, `batchnorm = false`, `out_dim = 0`). It is held and exchanged
    whole, so memory bounds the number of images; exports leave it out.

    Source:
        Balestriero 2023, arXiv:2302.10260, section 2; here over two views a step.
    """

    embeds = False

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Share of the target that all images get alike."""
    dim: Annotated[int | None, Derived()] = None
    """Number of outputs, to be checked before a call; none: a call checks them."""

    def setup(self) -> None:
        """Nothing is named yet."""
        super().setup()
        self._right: Tensor = torch.zeros(())

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Compute the global mean over all 2N views; ids are needed. See `Objective.forward`."""
        check_views(z_a=z_a, z_b=z_b, ids=ids, labels=labels, groups=groups)
        if ids is None or ids.dim() != 1:
            raise ValueError("ids (B,) are needed: they say which image both views of a row show")
        outputs = torch.cat([z_a, z_b])  # (2B, images)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        target = to_device(ids, outputs.device).repeat(2)
        self._right = (outputs.detach().argmax(1) == target).double().mean()
        smoothing = self.label_smoothing
        total = cross_entropy(outputs, target, label_smoothing=smoothing, reduction="sum")
        return global_mean(total, torch.full_like(total, len(outputs)))

    def refuses(self, samples: int, *, paired: bool) -> str | None:
        """Return why not: too few outputs for the images, or [pairs]. See `Objective.refuses`."""
        if paired:
            return "names each view by its own image, so that [pairs] has no meaning; leave it out"
        if self.dim is not None and self.dim < samples:
            return (
                f"needs an output for each of the split's {samples} images; set "
                "projector.num_layers=1 projector.batchnorm=false projector.out_dim=0"
            )
        return None

    def stats(self) -> dict[str, float]:
        """Return `named_right`: the share of this rank's views whose largest output is theirs."""
        return {"named_right": float(self._right)}
