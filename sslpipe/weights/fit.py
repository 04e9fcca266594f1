"""Put tensors into a backbone, all of it or none.

A file's tensors are read in each spelling that its network is known in: its own library's, blocks
in chunks, modules numbered by an nn.Sequential, EfficientNet-PyTorch's names, and what timm's own
filter makes of them. The first spelling that fits the whole network counts.
"""

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import WeightsError, listed
from sslpipe.models.backbones import PREFIXES, Backbone
from sslpipe.models.channels import first_convolution
from sslpipe.models.pooling import is_pooling
from sslpipe.models.transfer import Tensors, for_network

Report = dict[str, Any]  # "loaded": how many; "missing", "unexpected", "resized": lists of keys

# names of modules that only wrap another: DistributedDataParallel and AveragedModel, torch.compile,
# activation checkpointing, FSDP, Lightning Fabric, FairScale
WRAPPERS = frozenset(
    [
        "module",
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_forward_module",
        "_fpw_module",
    ]
)
# what files carry beside a backbone, whatever their program: heads, and tables that are computed
HEADS = ("classifier", "fc", "head", "head_dist", "heads", "last_linear")
_COMPUTED = (
    "attn_mask", "num_batches_tracked", "relative_coords_table", "relative_position_index"
)  # fmt: skip
_PRETEXT = ("mask_token", "masked_embed", "decoder_")  # of masked autoencoders and iBOT
AVERAGED_NORM = "fc_norm.weight"  # of a vision transformer that averages before its last norm
_UNCOUNTED = (*_COMPUTED, "running_mean", "running_var")  # tensors that are no parameters
_CHUNKED = re.compile(r"blocks\.(\d+)\.(\d+)\.")
_TF_STEM = "_conv_stem.weight"  # a key of EfficientNet-PyTorch
_SHOWN = 3  # keys of each side that a message names


def plain_key(key: str) -> str:
    """Return a key without the names of wrappers, wherever they stand in it."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _is_counter(key: str) -> bool:
    """Return whether a key is of a counter of BatchNorm, which old files have not."""
    return key.endswith("num_batches_tracked")


@dataclass(frozen=True)
class Match:
    """A file's tensors beside a network's, in the spelling that fits best."""

    spelling: str  # "" for the network's own keys
    stored: Tensors  # with the network's keys where they fit; others as the file has them
    expected: Tensors  # of the network, without a learned pooling
    foreign: list[str]  # keys of the file that belong to a larger network

    @cached_property
    def missing(self) -> list[str]:
        """Keys of the network that the file lacks."""
        return [key for key in self.expected if key not in self.stored]

    @cached_property
    def wrong(self) -> list[str]:
        """Keys of both, of other shapes."""
        shared = [key for key in self.expected if key in self.stored]
        return [key for key in shared if self.stored[key].shape != self.expected[key].shape]

    @property
    def left(self) -> list[str]:
        """Keys of the file that lie beside the network: heads, computed tables."""
        inside = {*self.expected, *self.foreign}
        return [key for key in self.stored if key not in inside]

    @property
    def lacking(self) -> list[str]:
        """The missing keys without counters."""
        return [key for key in self.missing if not _is_counter(key)]

    @property
    def counted(self) -> int:
        """How many tensors the network has without counters."""
        return sum(not _is_counter(key) for key in self.expected)

    @property
    def fitting(self) -> int:
        """How many of these fit."""
        misfits = {*self.missing, *self.wrong}
        return self.counted - sum(not _is_counter(key) for key in misfits)

    @property
    def is_whole(self) -> bool:
        """Whether the file has the whole network, and no larger one."""
        return not (self.lacking or self.wrong or self.foreign)


def match_tensors(backbone: Backbone, kind: str, tensors: Mapping[str, Tensor]) -> Match:
    """Compare tensors with a backbone's network, of the kind `kind`; nothing is loaded."""
    network = backbone.network
    expected = {key: t for key, t in network.state_dict().items() if not is_pooling(key)}
    named = {plain_key(key): key for key in expected}
    matches = []
    for spelling, spelled in _spellings(kind, network, tensors):
        stored = {named.get(key, key): tensor for key, tensor in spelled.items()}
        stored = _with_three_channels(expected, stored)
        foreign = _foreign(kind, network, expected, stored)
        matches.append(Match(spelling, stored, expected, foreign))
        if matches[-1].is_whole:
            return matches[-1]
    return max(matches, key=lambda match: match.fitting)  # the first of equals


def _foreign(kind: str, network: nn.Module, expected: Tensors, stored: Tensors) -> list[str]:
    """List the keys of a file that belong to a larger network of the kind."""
    words = {_word(key) for key in expected}
    others = [key for key in stored if key not in expected and not is_leftover(key)]
    foreign = [key for key in others if _is_inside(key, words)]
    heads = _heads(kind, network) if foreign else ()
    return [key for key in foreign if key not in heads]


def fit_tensors(backbone: Backbone, kind: str, tensors: Mapping[str, Tensor], what: str) -> Report:
    """Load tensors into a backbone's network, in place; a learned pooling stays as it is.

    Position tables of other sizes are resized as timm resizes them.

    Args:
        backbone: Of the architecture of the tensors.
        kind: Its name in recipes.
        tensors: With the keys of a known spelling, a classifier's with them.
        what: Names the source in messages.

    Raises:
        WeightsError: Less than the whole backbone fits; nothing was loaded then.
    """
    match = match_tensors(backbone, kind, tensors)
    stored = match.stored
    expected = match.expected
    if not match.is_whole:
        raise WeightsError(f"{what}{_why_not_whole(backbone, kind, match)}")
    loaded = {key: stored[key] for key in expected if key in stored}
    for key, tensor in loaded.items():
        _check_values(key, tensor, expected[key], what)
    backbone.network.load_state_dict(loaded, strict=False)
    renamed = bool(stored.keys() - tensors.keys())
    dropped = [] if renamed else [key for key in tensors if key not in stored]
    return {
        "loaded": len(loaded),
        "missing": match.missing,
        "unexpected": [*match.left, *dropped],
        "resized": [k for k in expected if k in tensors and tensors[k].shape != expected[k].shape],
    }


def _why_not_whole(backbone: Backbone, kind: str, match: Match) -> str:
    """Return why less than the whole network fits: with the remedy where there is one."""
    if match.wrong == ["conv1.weight"] and backbone.stem is not None:
        first = match.stored["conv1.weight"].shape
        expected = match.expected["conv1.weight"].shape
        if len(first) == 4 and first[2:] != expected[2:]:
            stem = "imagenet" if first[-1] == 7 else "small"
            return (
                f": its first convolution is {first[-1]}x{first[-2]}, and the stem "
                f"{backbone.stem!r} of this backbone has {expected[-1]}x{expected[-2]}; set "
                f"backbone.stem = {stem!r}"
            )
    if _TF_STEM in match.stored and kind.startswith("timm/efficientnet"):
        return (
            f": EfficientNet-PyTorch pads as TensorFlow does, and {kind} does not; name "
            f"timm/tf_{kind.removeprefix('timm/')}"
        )
    if AVERAGED_NORM in match.stored and match.lacking == ["norm.weight", "norm.bias"]:
        return (
            ": its last norm is fc_norm, behind the average of the patches; set "
            "backbone.global_pool = 'avg'"
        )
    parts = [f"it has no {_first(match.lacking)}"] if match.lacking else []
    for key in match.wrong[:1]:
        shape = tuple(match.stored[key].shape)
        parts.append(f"its {key} is {shape}, not {tuple(match.expected[key].shape)}")
    if match.foreign:
        parts.append(f"the backbone has no {_first(match.foreign)}")
    if match.lacking and not match.fitting:  # all lie deeper, as of another network in a wrapper
        deeper = (key for key in match.stored if key.endswith("." + match.lacking[0]))
        for key in [*deeper][:1]:
            parts.append(f"it has {key!r}: was another architecture trained, or a part saved?")
    misfits = "; ".join(parts)
    return f" does not fit {kind}: {match.fitting} of {match.counted} tensors do; {misfits}"


def _check_values(key: str, tensor: Tensor, expected: Tensor, what: str) -> None:
    """Raise WeightsError where a tensor's numbers are of another type, or damaged."""
    if tensor.is_floating_point() != expected.is_floating_point():
        raise WeightsError(f"{what}: {key} is of type {tensor.dtype}, not {expected.dtype}")
    if not torch.isfinite(tensor).all():
        raise WeightsError(f"{what}: {key} has values that are not finite; it is damaged")
    if key.endswith("running_var") and bool((tensor < 0).any()):
        raise WeightsError(f"{what}: {key} has negative variances; it is damaged")


def check_tensors(tensors: Mapping[str, Tensor], what: str) -> None:
    """Check that all are plain tensors with values. Raises: WeightsError."""
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise WeightsError(f"{what}: {key} was saved without its values, on the meta device")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise WeightsError(f"{what}: {key} is sparse, nested or quantised; save it dense")
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() < 2):
            raise WeightsError(
                f"{what}: {key} is of type {tensor.dtype}, which no backbone has; save it as "
                "float32, float16 or bfloat16"
            )


def is_leftover(key: str) -> bool:
    """Return whether a key is of a head, of a computed table or of a pretext task, by its name."""
    first = key.split(".")[0]
    last = key.split(".")[-1]
    return first in HEADS or last in _COMPUTED or is_pretext(key)


def is_pretext(key: str) -> bool:
    """Return whether a key is of a masked autoencoder's or iBOT's own task, by its name."""
    return key.startswith(_PRETEXT)


def _word(key: str) -> str:
    """Return the first word of a key: "layer" of layer5.0.bn1.weight, "norm" of norm_pre.bias."""
    return re.split(r"[^A-Za-z]", key, maxsplit=1)[0]


def _is_inside(key: str, words: Collection[str]) -> bool:
    """Return whether a key that a network has not is of a larger one: another block, a token.

    What lies beside an encoder has a name of its own: linear, projection_head, prototypes, queue.
    `words` are the first words of the network's keys.
    """
    if "." not in key and ("token" in key or "embed" in key):
        return True
    return _word(key) in words


def _heads(kind: str, network: nn.Module) -> frozenset[str]:
    """Return the keys that the architecture has with its classifier and a backbone has not."""
    if kind.partition("/")[0] not in ("timm", "torchvision"):
        return frozenset()
    # what a timm network would be rebuilt with by timm itself
    stated: Any = getattr(network, "_model_args", {})
    arguments = {key: value for key, value in stated.items() if key != "num_classes"}
    try:
        whole = skeleton(kind, arguments)
    except Exception:  # timm's hundreds of constructors fail in every way
        return frozenset()
    return frozenset(whole.state_dict().keys() - network.state_dict().keys())


def _spellings(
    kind: str, network: nn.Module, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensors]]:
    """Read tensors in each spelling that a network is known in, the network's own first."""
    stored = {plain_key(key): tensor for key, tensor in tensors.items()}
    yield "", stored
    expected = network.state_dict()
    joined = stored
    if not any(_CHUNKED.match(key) for key in expected) and any(
        _CHUNKED.match(key) for key in stored
    ):
        joined = _without_chunks(stored)
        yield "blocks in chunks", joined
    numbers = {str(n): name for n, (name, _) in enumerate(network.named_children())}
    if all(key.partition(".")[0] in numbers for key in stored):
        renamed = {}
        for key, tensor in stored.items():
            number, _, rest = key.partition(".")
            renamed[f"{numbers[number]}.{rest}"] = tensor
        yield "numbered modules", renamed
    # padded as TensorFlow pads: timm's networks without tf_ have the same tensors, and do not
    if _TF_STEM in stored and kind.startswith("timm/tf_") and len(stored) >= len(expected):
        yield "EfficientNet-PyTorch", _of_efficientnet_pytorch(kind, expected, stored)
    converted = for_network(kind, network, joined)
    if converted is not joined:
        yield "", converted


def _without_chunks(stored: Tensors) -> Tensors:
    """Number blocks through that DINOv2 keeps in chunks, as blocks.CHUNK.BLOCK."""
    pairs = {(int(m[1]), int(m[2])) for key in stored if (m := _CHUNKED.match(key))}
    places = {pair: place for place, pair in enumerate(sorted(pairs))}

    def joined(match: re.Match[str]) -> str:
        return f"blocks.{places[int(match[1]), int(match[2])]}."

    return {_CHUNKED.sub(joined, key, count=1): tensor for key, tensor in stored.items()}


def _of_efficientnet_pytorch(kind: str, expected: Tensors, stored: Tensors) -> Tensors:
    """Give the tensors of EfficientNet-PyTorch timm's names: both have the same order.

    A tensor takes a name only where the last part of both names and the shapes are equal.
    """
    whole = skeleton(kind).state_dict() if kind.startswith("timm/") else expected
    renamed: Tensors = {}
    if len(whole) != len(stored):
        return stored
    for (key, wanted), (file_key, tensor) in zip(whole.items(), stored.items(), strict=True):
        is_head = key.partition(".")[0] in HEADS  # of any number of classes
        same_part = key.rpartition(".")[2] == file_key.rpartition(".")[2]
        same = same_part and (is_head or tensor.shape == wanted.shape)
        renamed[key if same else file_key] = tensor
    return renamed


def _with_three_channels(expected: Mapping[str, Tensor], stored: Tensors) -> Tensors:
    """Repeat a first convolution of grey images for RGB: the same output where R = G = B."""
    adapted = dict(stored)
    for key, tensor in expected.items():
        kernel = stored.get(key)
        grey = kernel is not None and kernel.ndim == tensor.ndim == 4 and kernel.shape[1] == 1
        if kernel is not None and grey and tensor.shape == (len(kernel), 3, *kernel.shape[2:]):
            adapted[key] = kernel.repeat(1, 3, 1, 1) / 3  # (O, 1, H, W) -> (O, 3, H, W)
    return adapted


def skeleton(kind: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """Build a classifier of timm or torchvision, with no memory for its weights if that works."""
    import timm
    import torchvision

    family, _, name = kind.partition("/")
    create = timm.create_model if family == "timm" else torchvision.models.get_model
    build = partial(create, name, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                network: nn.Module = build()
        except (NotImplementedError, RuntimeError):  # its constructor reads what it computes
            network = build()
        return network


def holds_network(backbone: Backbone, match: Match) -> bool:
    """Return whether a match has the whole network, or a larger one of which it is a part.

    The first layer may differ: it is for other channels, or a ResNet's for small images.
    """
    first = first_convolution(backbone.network)
    allowed = set() if first is None else {f"{first[0]}.weight"}
    return not match.lacking and {*match.wrong} <= allowed


def _first(keys: list[str]) -> str:
    return listed(list(map(repr, keys)), _SHOWN)


def torchvision_kind(tensors: Mapping[str, Tensor]) -> str | None:
    """Name the classifier of torchvision whose tensors these are: each one, by key and shape.

    No tensor is missing and none is beside them, its 1,000 classes included. That is no guess:
    torchvision has no second network of such tensors.
    """
    import torchvision

    models = torchvision.models
    stored = {key: t for key, t in tensors.items() if not _is_counter(key)}
    count = sum(t.numel() for key, t in stored.items() if key.rpartition(".")[2] not in _UNCOUNTED)
    for name in models.list_models(module=models):
        if not name.startswith(PREFIXES):
            continue
        if count not in {each.meta["num_params"] for each in models.get_model_weights(name)}:
            continue
        expected = skeleton(f"torchvision/{name}").state_dict()
        shapes = {k: t.shape for k, t in expected.items() if not _is_counter(k)}
        if shapes == {key: tensor.shape for key, tensor in stored.items()}:
            return f"torchvision/{name}"
    return None
