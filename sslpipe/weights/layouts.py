"""How programs name an encoder's tensors in their checkpoints: LAYOUTS, the first that fits.

A layout turns a file's tree into tensors with the keys of torchvision's or timm's own networks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sslpipe.errors import WeightsError
from sslpipe.weights.files import Tree, is_state_dict
from sslpipe.weights.fit import HEADS

Tensors = dict[str, Tensor]


@dataclass
class Encoder:
    """The tensors of one encoder, with the keys of a library's network.

    Args:
        format: The name of the layout, for reports.
        tensors: Key -> tensor; a classifier may be among them.
        kinds: Architectures that have these keys, if the layout knows; the first is usual.
        dropped: Keys of the file that are not the encoder's.
        notes: Sentences for people: what was chosen.
        stem: Of a ResNet whose first convolution is 3x3, if the layout knows it.
    """

    format: str
    tensors: Tensors
    kinds: tuple[str, ...] = ()
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stem: str | None = None


def find_encoder(tree: Tree, what: str) -> Encoder:
    """Find the encoder in a file's tree.

    Raises:
        WeightsError: There is no table of tensors in it.
    """
    state = _state_dict(tree)
    if state is None:
        keys = ", ".join(map(repr, list(tree)[:5]))
        raise WeightsError(f"{what} holds no table of tensors; it has {keys or 'nothing'}")
    tensors = {_plain(key): tensor for key, tensor in state.items()}
    for layout in LAYOUTS:
        found = layout(tensors)
        if found is not None:
            return found
    return Encoder("state dict", tensors)


def _state_dict(tree: Tree) -> Any:
    """Return the table of tensors of a checkpoint: averaged weights where it has them."""
    if is_state_dict(tree):
        return tree
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):  # the order of timm
        if is_state_dict(tree.get(key)):
            return tree[key]
    return None


def _plain(key: str) -> str:
    """Return a key without the prefixes of DistributedDataParallel and torch.compile."""
    for prefix in ("module.", "_orig_mod.", "module."):
        key = key.removeprefix(prefix)
    return key


def _efficientnet_pytorch(tensors: Tensors) -> Encoder | None:
    """EfficientNet and its Lite variants by EfficientNet-PyTorch: timm's order, other names."""
    if not {"_conv_stem.weight", "_blocks.0._depthwise_conv.weight"} <= tensors.keys():
        return None
    from timm import create_model, list_models

    from sslpipe.models.limits import within_memory

    squeezed = any("._se_reduce." in key for key in tensors)
    names = list_models("tf_efficientnet_b?" if squeezed else "tf_efficientnet_lite?")
    for name in names:
        with within_memory("backbone"):
            own = create_model(name).state_dict()
        # EfficientNet-PyTorch names no classifier apart: the orders are compared whole
        pairs = list(zip(own.items(), tensors.items(), strict=False))
        same = len(own) == len(tensors) and all(
            a.shape == b.shape and _leaf(key) == _leaf(other)
            for (key, a), (other, b) in pairs
            if key.partition(".")[0] not in HEADS
        )
        if same:
            renamed = {key: tensor for (key, _), (_, tensor) in pairs}
            return Encoder("EfficientNet-PyTorch", renamed, (f"timm/{name}",))
    return None


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


LAYOUTS: tuple[Callable[[Tensors], Encoder | None], ...] = (_efficientnet_pytorch,)
