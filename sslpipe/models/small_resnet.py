"""A small ResNet, for small images and CPUs."""

from collections.abc import Sequence

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Args:
        in_width: channels in.
        width: channels out.
        stride: of the first convolution.

    Source:
        He et al. 2015, arXiv:1512.03385, fig. 2.
    """

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != width:
            projection = nn.Conv2d(in_width, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute (B, width, H / stride, W / stride) from x (B, in_width, H, W)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


def make_small_resnet(widths: Sequence[int], blocks: int, stem_stride: int) -> nn.Sequential:
    """Build the network: images (B, 3, H, W) -> features (B, widths[-1]).

    Args:
        widths: Channels of each stage; each but the first halves the resolution.
        blocks: In each stage.
        stem_stride: Of the first convolution, 2 or 4; its kernel is twice as wide.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 2 * stem_stride, stem_stride, stem_stride // 2, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(inplace=True),
    ]
    in_width = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(in_width, width, stride))
            in_width = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # torchvision's rule for ResNets
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network
