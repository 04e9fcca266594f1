"""Put tensors into a backbone, all of it or none; tell an architecture from keys and shapes.

`architectures.json` has a fingerprint of every classifier of timm and torchvision; a candidate
counts only after the weights fit it. Written anew for later versions of both libraries by:

    python -m sslpipe.weights.fit
"""

import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import WeightsError
from sslpipe.models.backbones import PREFIXES, Backbone
from sslpipe.models.pooling import is_pooling

Tensors = dict[str, Tensor]
Report = dict[str, Any]  # "loaded": how many; "missing", "unexpected", "resized": lists of keys

# what files carry beside a backbone, whatever their program: heads, and tables that are computed
HEADS = ("classifier", "fc", "head", "head_dist", "heads", "last_linear")
_COMPUTED = ("attn_mask", "num_batches_tracked", "relative_position_index")
_PRETEXT = ("mask_token", "decoder_")  # of masked autoencoders and iBOT
_TABLES = ("pos", "freqs")  # words in names of tables whose size follows the image's
INDEX = Path(__file__).with_name("architectures.json")
_SHOWN = 3  # keys of each side that a message names


def fit_tensors(backbone: Backbone, kind: str, tensors: Mapping[str, Tensor], what: str) -> Report:
    """Load tensors into a backbone's network, in place; a learned pooling stays as it is.

    Position tables of other sizes are resized as timm resizes them.

    Args:
        backbone: Of the architecture of the tensors.
        kind: Its name in recipes.
        tensors: With the keys of the architecture's own library, a classifier's with them.
        what: Names the source in messages.

    Raises:
        WeightsError: Less than the whole backbone fits; nothing was loaded then.
    """
    network = backbone.network
    family, _, architecture = kind.partition("/")
    own = {key: t for key, t in network.state_dict().items() if not is_pooling(key)}
    given = dict(tensors)
    if not all(key in given and given[key].shape == own[key].shape for key in own):
        given = _converted(family, architecture, network, given)
    given = _with_three_channels(own, given)
    # what is missing on each side
    missing = [key for key in own if key not in given]
    unexpected = [key for key in given if key not in own]
    wrong = [key for key in own if key in given and given[key].shape != own[key].shape]
    lacking = [key for key in missing if not key.endswith("num_batches_tracked")]
    foreign = [key for key in unexpected if not is_leftover(key)]
    if foreign and not lacking and not wrong and family in ("timm", "torchvision"):
        # what the architecture has with its classifier, as timm itself would rebuild it
        stated: Any = getattr(network, "_model_args", {})
        arguments = {key: value for key, value in stated.items() if key != "num_classes"}
        heads = skeleton(kind, **arguments).state_dict().keys() - network.state_dict().keys()
        foreign = [key for key in foreign if key not in heads]
    if lacking or foreign or wrong:
        _refuse_stem(backbone, own, given, wrong, what)
        fitting = len(own) - len(lacking) - len(wrong)
        parts = [f"it has no {_first(lacking)}"] if lacking else []
        for key in wrong[:1]:
            parts.append(f"its {key} is {tuple(given[key].shape)}, not {tuple(own[key].shape)}")
        parts += [f"the backbone has no {_first(foreign)}"] if foreign else []
        said = f"{fitting} of {len(own)} tensors do; {'; '.join(parts)}"
        raise WeightsError(f"{what} does not fit {kind}: {said}")
    for key in [key for key in own if key in given]:
        if given[key].is_floating_point() != own[key].is_floating_point():
            raise WeightsError(f"{what}: {key} is of type {given[key].dtype}, not {own[key].dtype}")
        if not torch.isfinite(given[key]).all():
            raise WeightsError(f"{what}: {key} has values that are not finite; it is damaged")
        if key.endswith("running_var") and bool((given[key] < 0).any()):
            raise WeightsError(f"{what}: {key} has negative variances; it is damaged")
    network.load_state_dict({key: given[key] for key in own if key in given}, strict=False)
    dropped = [] if given.keys() - tensors.keys() else [key for key in tensors if key not in given]
    return {
        "loaded": len(own) - len(missing),
        "missing": missing,
        "unexpected": [*unexpected, *dropped],
        "resized": [k for k in own if k in tensors and tensors[k].shape != own[k].shape],
    }


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
    """Say whether a key is of a head, of a computed table or of a pretext task, by its name."""
    first, last = key.split(".")[0], key.split(".")[-1]
    return first in HEADS or last in _COMPUTED or first.startswith(_PRETEXT)


def _converted(family: str, architecture: str, network: nn.Module, given: Tensors) -> Tensors:
    """Rename and resize as the architecture's own library does for files of other layouts."""
    if family == "timm":
        import timm

        module = sys.modules[timm.models.model_entrypoint(architecture).__module__]
        names = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")
        convert = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        if convert is None:
            return given
        takes_model = len(inspect.signature(convert).parameters) > 1
        try:
            converted = convert(dict(given), network) if takes_model else convert(dict(given))
        except Exception:  # it may rely on keys that this file has not: the keys will be named
            return given
        return {key: t for key, t in converted.items() if isinstance(t, Tensor)}
    key = "encoder.pos_embedding"  # torchvision's position table, (1, 1 + n n, D)
    own, table = network.state_dict().get(key), given.get(key)
    if family != "torchvision" or own is None or table is None or table.shape == own.shape:
        return given
    theirs, ours = (round((t.shape[1] - 1) ** 0.5) for t in (table, own))
    if table.shape != (1, 1 + theirs**2, own.shape[2]):
        return given
    from timm.layers import resample_abs_pos_embed

    return {**given, key: resample_abs_pos_embed(table, [ours, ours], num_prefix_tokens=1)}


def _with_three_channels(own: Mapping[str, Tensor], given: Tensors) -> Tensors:
    """Repeat a first convolution of grey images for RGB: the same output where R = G = B."""
    adapted = dict(given)
    for key, tensor in own.items():
        theirs = given.get(key)
        grey = theirs is not None and theirs.ndim == tensor.ndim == 4 and theirs.shape[1] == 1
        if theirs is not None and grey and tensor.shape == (len(theirs), 3, *theirs.shape[2:]):
            adapted[key] = theirs.repeat(1, 3, 1, 1) / 3  # (O, 1, H, W) -> (O, 3, H, W)
    return adapted


def skeleton(kind: str, **arguments: Any) -> nn.Module:
    """Build a classifier of timm or torchvision, with no memory for its weights if that works."""
    import timm
    import torchvision

    family, _, name = kind.partition("/")
    create = timm.create_model if family == "timm" else torchvision.models.get_model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                network: nn.Module = create(name, **arguments)
        except (NotImplementedError, RuntimeError):  # its constructor reads what it computes
            network = create(name, **arguments)
        return network


def _refuse_stem(
    backbone: Backbone, own: Tensors, given: Tensors, wrong: list[str], what: str
) -> None:
    """Raise WeightsError, with the remedy, where all that does not fit is a ResNet's stem."""
    if wrong != ["conv1.weight"] or backbone.stem is None:
        return
    first, ours = given["conv1.weight"], own["conv1.weight"]
    if first.ndim == 4 and first.shape[2:] != ours.shape[2:]:
        theirs = "imagenet" if first.shape[-1] == 7 else "small"
        raise WeightsError(
            f"{what}: its first convolution is {first.shape[-1]}x{first.shape[-2]}, and the stem "
            f"{backbone.stem!r} of this backbone has {ours.shape[-1]}x{ours.shape[-2]}; set "
            f"backbone.stem = {theirs!r}"
        )


def _first(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Hash keys and shapes of a backbone.

    Without what a classifier adds, and without the sizes of position tables.
    """
    lines = [
        key if any(word in key for word in _TABLES) else f"{key} {tuple(tensor.shape)}"
        for key, tensor in tensors.items()
        if not is_leftover(key)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def candidates(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the kinds of networks with these keys and shapes, torchvision's first."""
    index: dict[str, list[str]] = json.loads(INDEX.read_text())
    first = tensors.get("conv1.weight")
    if first is not None and first.shape[2:] == (3, 3) and fingerprint(tensors) not in index:
        # a ResNet with the stem for small images
        large = torch.empty(*first.shape[:2], 7, 7, device="meta")
        tensors = {**tensors, "conv1.weight": large}
    return index.get(fingerprint(tensors), [])


def write_index() -> None:
    """Write the fingerprint of every backbone of torchvision and timm that can be built here."""
    import timm
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    kinds = [f"torchvision/{name}" for name in names if name.startswith(PREFIXES)]
    kinds += [f"timm/{name}" for name in timm.list_models()]
    found: dict[str, list[str]] = {}
    for kind in kinds:
        arguments = {"num_classes": 0} if kind.startswith("timm/") else {}
        try:
            network = skeleton(kind, **arguments)
        except Exception as error:  # timm's hundreds of constructors fail in every way
            print(f"{kind}: {type(error).__name__}: {error}"[:200])
            continue
        found.setdefault(fingerprint(network.state_dict()), []).append(kind)
    lines = [f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found)]
    INDEX.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_index()
