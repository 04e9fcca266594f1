"""Tell an architecture from keys and shapes, for weights that name none.

`architectures.json` has a fingerprint of every classifier of timm and torchvision; a candidate
counts only after the weights fit it. Written anew for later versions of both libraries by:

    python -m sslpipe.weights.architectures
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.weights.fit import is_leftover, skeleton

INDEX = Path(__file__).with_suffix(".json")
_TABLES = ("pos", "freqs")  # words in names of tables whose size follows the image's


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

    from sslpipe.models.backbones import PREFIXES

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
