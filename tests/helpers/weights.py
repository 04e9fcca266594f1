"""Networks of other libraries with random weights, and what `load_backbone` makes of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.export.load import FrozenBackbone, load_backbone


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give every tensor of a network, statistics too, values that no constructor gives."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                spread = 0.3 / max(1, tensor[0].numel()) ** 0.5 if tensor.ndim > 1 else 0.1
                centred = tensor.ndim > 1 or name.endswith(("bias", "running_mean"))
                tensor.copy_(noise * spread + (not centred))
                if name.endswith("running_var"):
                    tensor.abs_().add_(0.5)
    return network.eval()


def noise(crop_px: int, count: int = 2) -> Tensor:
    """(B, 3, S, S) floats."""
    return torch.randn(count, 3, crop_px, crop_px, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(model: nn.Module, reference: Any, crop_px: int, count: int = 2) -> float:
    """The largest difference of two networks' features of noise, relative to the largest."""
    ours, theirs = model(noise(crop_px, count)), reference(noise(crop_px, count))
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def saved(tree: Any, folder: Path, name: str = "weights.pth") -> Path:
    torch.save(tree, folder / name)
    return folder / name


def equals(model: FrozenBackbone, network: nn.Module) -> bool:
    """Whether all of a backbone's tensors are those of another network, bit for bit."""
    theirs = network.state_dict()
    ours = model.backbone.network.state_dict()
    return all(torch.equal(t, theirs[key]) for key, t in ours.items())


def init_of(path: str | Path, **options: Any) -> dict[str, Any]:
    report: dict[str, Any] = load_backbone(path, **options).config.facts["init"]
    return report
