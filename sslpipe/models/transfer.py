"""Weights of one network put into another of the same architecture, for images of another size."""

import inspect
import sys

import torch
from torch import Tensor, nn

from sslpipe.errors import WeightsError
from sslpipe.models.backbones import Backbone
from sslpipe.models.pooling import is_pooling

Tensors = dict[str, Tensor]


def copy_weights(source: Backbone, target: Backbone, kind: str, what: str = "--init") -> None:
    """Copy a pretrained network into another, in place.

    Position tables for other crops are resized. An embedding layer of the same width is copied;
    a learned pooling that only one of them has starts anew, or is dropped.

    Args:
        source: The network whose weights are copied.
        target: Of the same architecture.
        kind: Its name in recipes.
        what: Names the source in messages.

    Raises:
        WeightsError: The network is another one, or weights are not finite; nothing is copied.
    """
    tensors = source.network.state_dict()
    expected = target.network.state_dict()
    pooling = {key: tensors.pop(key) for key in list(tensors) if is_pooling(key)}
    shapes = {key: tensor.shape for key, tensor in expected.items() if not is_pooling(key)}
    if {key: tensor.shape for key, tensor in tensors.items()} != shapes:
        tensors = for_network(kind, target.network, tensors)
    for key in {**shapes, **tensors}:
        if key not in tensors or key not in shapes or tensors[key].shape != shapes[key]:
            raise WeightsError(f"{what} does not fit {kind}: its {key} is another one; name others")
        if not torch.isfinite(tensors[key]).all():
            raise WeightsError(f"{what}: {key} has values that are not finite; it is damaged")
    known = {key: value for key, value in pooling.items() if key in expected}
    target.network.load_state_dict({**tensors, **known}, strict=False)
    source_layer = source.embedding
    target_layer = target.embedding
    if source_layer is not None and target_layer is not None and source.taps == target.taps:
        layers = [source_layer.state_dict(), target_layer.state_dict()]
        layer_shapes = [{key: each.shape for key, each in layer.items()} for layer in layers]
        if layer_shapes[0] == layer_shapes[1]:
            target_layer.load_state_dict(layers[0])


def for_network(kind: str, network: nn.Module, tensors: Tensors) -> Tensors:
    """Rename and resize tensors as the architecture's own library does for other layouts."""
    family, _, architecture = kind.partition("/")
    if family == "timm":
        import timm

        module = sys.modules[timm.models.model_entrypoint(architecture).__module__]
        names = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")
        convert = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        if convert is None:
            return tensors
        takes_model = len(inspect.signature(convert).parameters) > 1
        try:
            converted = convert(dict(tensors), network) if takes_model else convert(dict(tensors))
        except Exception:  # it may rely on keys that this file has not: the keys will be named
            return tensors
        return {key: t for key, t in converted.items() if isinstance(t, Tensor)}
    # position tables: of torchvision (1, 1 + n n, D), of open_clip (1 + n n, D)
    key = {"torchvision": "encoder.pos_embedding", "open_clip": "positional_embedding"}.get(family)
    expected = network.state_dict().get(key or "")
    table = tensors.get(key or "")
    if key is None or expected is None or table is None or table.shape == expected.shape:
        return tensors
    if table.ndim != expected.ndim or table.shape[-1] != expected.shape[-1]:
        return tensors
    table_side = round((table.shape[-2] - 1) ** 0.5)
    network_side = round((expected.shape[-2] - 1) ** 0.5)
    if table.shape[-2] != 1 + table_side**2 or expected.shape[-2] != 1 + network_side**2:
        return tensors
    from timm.layers import resample_abs_pos_embed

    rows = table.reshape(1, *table.shape[-2:])
    resized = resample_abs_pos_embed(rows, [network_side, network_side], num_prefix_tokens=1)
    return {**tensors, key: resized.reshape(expected.shape)}
