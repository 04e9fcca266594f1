"""Activation checkpointing: blocks keep their inputs, and backward computes the rest again.

A network's own switch is used where its library has one; torchvision's has none.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from sslpipe.errors import RecipeError
from sslpipe.models.backbones import Backbone
from sslpipe.models.libraries import TransformersTower
from sslpipe.models.tuning import block_names

KEY = "run.activation_checkpointing"
# torchvision's networks of blocks in a row that have no BatchNorm, and the class of these blocks
_BLOCKS = {
    "ConvNeXt": ("CNBlock",),
    "SwinTransformer": ("SwinTransformerBlock", "SwinTransformerBlockV2"),
    "VisionTransformer": ("EncoderBlock",),
}


class CheckpointedSequential(nn.Sequential):
    """A row of blocks of which each keeps its input alone, while `enabled`."""

    enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the blocks one after the other make of x."""
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.enabled else block(x)
        return x


def checkpoint_activations(backbone: Backbone, kind: str, *, enabled: bool = True) -> None:
    """Keep only the inputs of a backbone's blocks for backward, which computes the rest again.

    The weights of a step are the same to the last bit on a CPU: dropout draws the same numbers
    again. What is computed twice is one forward, as with data.micro_batch.

    Args:
        backbone: Changed in place; the keys of its state dict stay.
        kind: Its backbone.kind, for messages.
        enabled: False: switch it off again.

    Raises:
        RecipeError: The network has BatchNorms, whose statistics would move twice a step, or its
            library cannot do it.

    Source:
        Chen et al. 2016, arXiv:1604.06174.
    """
    network = backbone.network
    if any(isinstance(module, _BatchNorm) for module in network.modules()):
        raise RecipeError(
            f"{KEY} = true: {kind!r} has BatchNorms, whose running statistics would move twice a "
            "step; leave it out, and set data.micro_batch (pretraining), or a smaller batch"
        )
    if isinstance(network, TransformersTower):
        done = network.checkpoint_activations(enabled)
    elif hasattr(network, "set_grad_checkpointing"):  # of timm and open_clip
        done = _by_switch(network, enabled)
    else:
        done = _by_rows(network, enabled)
    if not done:
        raise RecipeError(
            f"{KEY} = true: {kind!r} has no row of blocks that its library can checkpoint; leave "
            "it out, and set data.micro_batch (pretraining), or a smaller batch"
        )


def checkpointed_blocks(backbone: Backbone) -> list[nn.Module]:
    """List the blocks of a backbone with activation checkpointing, of which backward makes one."""
    network = backbone.network
    if not isinstance(network, TransformersTower):
        return [network.get_submodule(name) for name in block_names(network)]
    switched = [m for m in network.modules() if getattr(m, "gradient_checkpointing", False)]
    return [m for m in switched if not {*m.modules()}.intersection(switched) - {m}]  # the innermost


def _by_switch(network: nn.Module, enabled: bool) -> bool:
    """Use the switch of a network; return whether it has one that works."""
    try:
        network.set_grad_checkpointing(enabled)  # type: ignore[operator]
    except (AssertionError, AttributeError, NotImplementedError):  # how timm's refuse
        return False
    return True


def _by_rows(network: nn.Module, enabled: bool) -> bool:
    """Replace a torchvision network's rows of blocks; return whether there are any."""
    blocks = _BLOCKS.get(type(network).__name__, ())
    rows = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Sequential)
        and len(module)
        and all(type(child).__name__ in blocks for child in module)
    }
    for name, row in rows.items():
        if not isinstance(row, CheckpointedSequential):
            row = CheckpointedSequential(OrderedDict(row.named_children()))
            network.set_submodule(name, row)
        row.enabled = enabled
    return bool(rows)
