"""What of a backbone that starts from weights is trained, when, and at which rate: its blocks."""

from collections.abc import Callable, Iterator

from torch import nn

from sslpipe.models.backbones import Backbone
from sslpipe.models.pooling import is_pooling
from sslpipe.recipe.sections import Tune

PREFIX = "backbone.network."  # of the parameters of weights, in the models that runs train
# children by which torchvision, timm, transformers and open_clip hold a row of blocks
_ROWS_OF_BLOCKS = {"blocks", "features", "layers", "resblocks", "stages"}
_WRAPPERS = {"model", "encoder", "transformer", "vision_model"}  # which may stand around the rows


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
        if _holds_blocks(name, child):
            yield from _walk(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _holds_blocks(name: str, module: nn.Module) -> bool:
    """Whether a module is a row of blocks, or has one, perhaps inside of wrappers."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return True
    children = dict(module.named_children())
    if any(inner in _ROWS_OF_BLOCKS for inner in children):
        return True
    if isinstance(children.get("layer"), nn.ModuleList):  # a Sequential of this name is a block's
        return True
    return name in _WRAPPERS and any(
        inner in _WRAPPERS and _holds_blocks(inner, child) for inner, child in children.items()
    )


def block_of(parameter: str, blocks: list[str]) -> int:
    """Find which of the blocks a parameter's name lies in; 0 where in none, see `block_names`."""
    if is_pooling(parameter):
        return len(blocks) - 1
    matches = [number for number, name in enumerate(blocks) if parameter.startswith(f"{name}.")]
    return matches[0] if matches else 0


def layer_numbers(network: nn.Module) -> dict[str, int]:
    """Return parameter's name -> the number of its layer, from 0 at the input on.

    A timm network's layers are those of its own `group_matcher`, as in
    `timm.optim.param_groups_layer_decay`; another network's are the blocks of `block_names`.
    """
    matcher = getattr(network, "group_matcher", None)
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


def freeze_layers(
    backbone: Backbone, *, frozen: bool, last_blocks: int | None, batchnorm: bool
) -> None:
    """Freeze layers of the pretrained network, in place; the embedding stays in training.

    Frozen blocks are in eval mode: neither their statistics nor their dropout change.

    Args:
        backbone: Whose network.
        frozen: Freeze all of them.
        last_blocks: Freeze all but so many of the last; None: none.
        batchnorm: All BatchNorms are in eval mode.
    """
    network = backbone.network
    names = block_names(network)
    first_trained = len(names) if frozen else max(0, len(names) - (last_blocks or len(names)))
    for name, parameter in network.named_parameters():
        if block_of(name, names) < first_trained:
            parameter.requires_grad_(False)
    for name in names[:first_trained]:
        network.get_submodule(name).eval()
    for module in network.modules():
        if batchnorm and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def learning_rate_scale(
    backbone: Backbone,
    *,
    backbone_lr: float,
    layer_decay: float,
    loss_lr: float = 1.0,
) -> Callable[[str], float]:
    """Return the function from a parameter's name in a run's model to its learning rate's factor.

    Args:
        backbone: The model's.
        backbone_lr: Factor of the network's last block.
        layer_decay: Each block before it gets so much of the next one's.
        loss_lr: Factor of a fine-tuning's losses' own weights. That of an embedding layer and a
            projector is 1.
    """
    numbers = layer_numbers(backbone.network)
    last = max(numbers.values())

    def scale(name: str) -> float:
        if name.startswith("losses."):
            return loss_lr
        if not name.startswith(PREFIX):
            return 1.0
        return backbone_lr * layer_decay ** (last - numbers[name.removeprefix(PREFIX)])

    return scale


def ramped_prefix(tune: Tune) -> str | None:
    """Return how the names of parameters begin that tune.ramp_steps slows; None: none are."""
    return PREFIX if tune.ramp_steps else None
