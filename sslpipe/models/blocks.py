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


def layer_numbers(network: nn.Module, *, by_library: bool) -> dict[str, int]:
    """Return parameter's name -> the number of its layer, from 0 at the input on.

    Args:
        network: Of a backbone.
        by_library: A timm network's layers are those of its own `group_matcher`, as in
            `timm.optim.param_groups_layer_decay`; the blocks of `block_names` where it has none.
    """
    matcher = getattr(network, "group_matcher", None) if by_library else None
    if matcher is not None:
        from timm.models import group_parameters

        groups = group_parameters(network, matcher(coarse=False), reverse=True)
        numbers: dict[str, int] = {str(name): int(number) for name, number in groups.items()}
        return numbers
    blocks = block_names(network)
    return {name: block_of(name, blocks) for name, _ in network.named_parameters()}


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers the module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())
