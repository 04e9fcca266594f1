"""A backbone's blocks from the input to the output: for layer-wise learning rates and freezing."""

from collections.abc import Iterator

from torch import nn

from sslpipe.models.pooling import is_pooling

# children by which torchvision and timm hold a row of blocks
_ROWS_OF_BLOCKS = {"blocks", "features", "layers", "stages"}


def block_names(network: nn.Module) -> list[str]:
    """List the names of the submodules that are the blocks, in forward order.

    A residual block, a transformer layer, a convolution outside of them and its norm count as one
    each. Parameters outside all of them (a class token, position tables) belong to the first, a
    learned pooling to the last.
    """
    return list(_walk(network, ""))


def _walk(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if all(is_pooling(parameter) for parameter, _ in child.named_parameters()):
            continue
        holds_blocks = isinstance(child, nn.Sequential | nn.ModuleList) or any(
            inner in _ROWS_OF_BLOCKS for inner, _ in child.named_children()
        )
        if holds_blocks:
            yield from _walk(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def block_of(parameter: str, blocks: list[str]) -> int:
    """Find which of the blocks a parameter's name lies in; 0 where in none, see `block_names`."""
    if is_pooling(parameter):
        return len(blocks) - 1
    matches = [number for number, name in enumerate(blocks) if parameter.startswith(f"{name}.")]
    return matches[0] if matches else 0


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers the module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())
