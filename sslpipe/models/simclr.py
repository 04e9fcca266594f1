"""SimCLR's network: a backbone for features, a projector for the loss."""

from torch import Tensor, nn

from sslpipe.errors import RecipeError
from sslpipe.models.backbones import Backbone
from sslpipe.recipe.pretrain import Projector


def build_projector(num_features: int, projector: Projector) -> nn.Sequential:
    """Build an MLP (B, num_features) -> (B, out_dim) with ReLU between its linear layers.

    With BatchNorm, every linear layer is followed by one and has no bias of its own; the last
    BatchNorm has neither scale nor shift. SimCLR's code keeps a learned scale there (`center=False`
    only); MoCo v3's drops both, as here: the loss normalises z, and a shift would move every z
    towards one point.

    Raises:
        RecipeError: Without layers, an out_dim that is not num_features.

    Source:
        Chen et al. 2020, arXiv:2002.05709, section 4.2; Chen et al. 2021, arXiv:2104.02057.
    """
    if not projector.num_layers and projector.out_dim != num_features:
        raise RecipeError(
            f"projector.num_layers = 0: the loss compares the backbone's {num_features} features "
            f"themselves; set projector.out_dim = {num_features}, now {projector.out_dim}"
        )
    widths = [num_features, *[projector.hidden_dim] * (projector.num_layers - 1), projector.out_dim]
    layers: list[nn.Module] = []
    for layer in range(projector.num_layers):
        is_last = layer == projector.num_layers - 1
        layers.append(nn.Linear(widths[layer], widths[layer + 1], bias=not projector.batchnorm))
        if projector.batchnorm:
            layers.append(nn.BatchNorm1d(widths[layer + 1], affine=not is_last))
        if not is_last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class SimCLR(nn.Module):
    """Backbone and projector; weights as torch and torchvision initialise them.

    Args:
        backbone: images -> features.
        projector: the recipe's section.

    Source:
        Chen et al. 2020, arXiv:2002.05709, fig. 2.
    """

    def __init__(self, backbone: Backbone, projector: Projector) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = build_projector(backbone.num_features, projector)

    def forward(self, views: Tensor) -> Tensor:
        """Compute z (2B, D) of views (2B, 3, S, S), not normalised; the loss normalises."""
        h = self.backbone(views)  # (2B, F)
        z: Tensor = self.projector(h)  # (2B, D)
        return z
