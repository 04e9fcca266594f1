"""How programs name an encoder's tensors in their checkpoints: prefixes, wrappers, other names.

A checkpoint's tree becomes one encoder with the keys of torchvision's or timm's own networks.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from sslpipe.errors import WeightsError
from sslpipe.models.limits import within_memory
from sslpipe.recipe.base import Component
from sslpipe.weights.files import Tree, is_state_dict
from sslpipe.weights.fit import HEADS

Tensors = dict[str, Tensor]


@dataclass
class Encoder:
    """The tensors of one encoder, with the keys of a library's network."""

    format: str  # the layout, for reports
    tensors: Tensors  # a classifier's may be among them
    component: Component | None = None  # the network, where the layout tells
    dropped: list[str] = field(default_factory=list)  # keys that are not the encoder's
    notes: list[str] = field(default_factory=list)  # what was chosen, for people
    stem: str | None = None  # of a ResNet whose first convolution is 3x3, where the layout tells


class Prefix(NamedTuple):
    """Where a program keeps its encoder."""

    format: str
    encoder: str  # prefix of the encoder's keys
    beside: tuple[str, ...] = ()  # prefixes of others, one of which has to be there, if any
    note: str = ""  # what was chosen, where there is a choice
    stem: str | None = None  # see Encoder


_QUERY = "the query encoder is taken, as {}'s own evaluation does; {} is its momentum copy"
_TEACHER = "the teacher is taken, as DINO's own evaluation does: the momentum copy"
_TRAINED = "the trained encoder is taken; backbone_momentum is its momentum copy"
_ONLINE = (
    "the online encoder is taken, as solo-learn's own evaluation does; {} is its momentum copy"
)
PREFIXES = (
    Prefix("MoCo", "encoder_q.", ("encoder_k.",), _QUERY.format("MoCo v2", "encoder_k")),
    Prefix("MoCo", "encoder_q."),
    Prefix(
        "MoCo v3",
        "base_encoder.",
        ("momentum_encoder.", "predictor."),
        _QUERY.format("MoCo v3", "momentum_encoder"),
    ),
    Prefix("lightly", "teacher_backbone.", ("student_backbone.",), f"{_TEACHER} of the student"),
    Prefix("lightly", "backbone.", ("backbone_momentum.",), _TRAINED),
    Prefix("lightly", "backbone.", ("projection_head.", "prediction_head.", "prototypes.")),
    *(
        Prefix("solo-learn", own, beside, note, "small")
        for own, beside, note in (
            ("backbone.", ("momentum_backbone.",), _ONLINE.format("momentum_backbone")),
            ("backbone.", ("projector.", "classifier."), ""),
            ("encoder.", ("momentum_encoder.",), _ONLINE.format("momentum_encoder")),
            ("encoder.", ("projector.",), ""),
        )
    ),
    Prefix("VISSL", "_feature_blocks."),
    Prefix("VISSL", "base_model._feature_blocks."),
    Prefix("part of a larger model", "backbone."),
    Prefix("part of a larger model", "model."),
)

# modules of torchvision's ResNet as lightly's nn.Sequential(*list(resnet.children())[:-1]) has them
_CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}


def find_encoder(tree: Tree, what: str) -> Encoder:
    """Find the encoder in a checkpoint.

    Raises:
        WeightsError: There is no table of tensors in it.
    """
    state, program, note = _state_dict(tree)
    if state is None:
        tables = ", ".join([repr(key) for key in tree if is_state_dict(tree[key])][:5])
        if tables:
            raise WeightsError(
                f"{what} holds several tables of tensors, {tables}, and none that is known to be "
                "the encoder's; save that one alone"
            )
        keys = ", ".join(map(repr, list(tree)[:5]))
        raise WeightsError(f"{what} holds no table of tensors; it has {keys or 'nothing'}")
    tensors = {_plain(key): tensor for key, tensor in state.items()}
    encoder = _of_efficientnet_pytorch(tensors) or _of_export(tensors) or _unwrapped(tensors)
    if program:
        encoder.format = program
        encoder.notes.insert(0, note)
    return encoder


def _state_dict(tree: Tree) -> tuple[Any, str, str]:
    """Return the table of tensors of a checkpoint, its program, and which one was chosen."""
    trunk = tree.get("classy_state_dict")
    for key in ("base_model", "model", "trunk"):
        trunk = trunk.get(key) if isinstance(trunk, dict) else None
    tables = [value for value in tree.values() if is_state_dict(value)]
    for table, program, note in (
        (tree, "", ""),
        (tree.get("teacher"), "DINO", _TEACHER),
        (trunk, "VISSL", "the trunk of VISSL's base_model is taken"),
        # the order of timm
        (tree.get("state_dict_ema"), "timm", "the averaged weights are taken, state_dict_ema"),
        (tree.get("model_ema"), "timm", "the averaged weights are taken, model_ema"),
        (tree.get("state_dict"), "", ""),
        (tree.get("model"), "", ""),
        # "model_state_dict", "net", ...: every program has a word of its own
        (tables[0] if len(tables) == 1 else None, "", ""),
    ):
        if is_state_dict(table):
            return table, program, note
    return None, "", ""


def _plain(key: str) -> str:
    """Return a key without the prefixes of DistributedDataParallel and torch.compile."""
    for prefix in ("module.", "_orig_mod.", "module."):
        key = key.removeprefix(prefix)
    return key


def _unwrapped(tensors: Tensors) -> Encoder:
    """Take an encoder out of the larger model that it was trained in."""
    for prefix in PREFIXES:
        inner = {
            _plain(key.removeprefix(prefix.encoder)): tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix.encoder)
        }
        others = [key for key in tensors if not key.startswith(prefix.encoder)]
        if not inner or not (not prefix.beside or any(k.startswith(prefix.beside) for k in others)):
            continue
        notes = [prefix.note] if prefix.note else []
        bare = _from_children(inner)
        # lightly and solo-learn differ in this habit where their other modules have one name
        name = "lightly" if bare is not inner else prefix.format
        return Encoder(name, bare, None, others, notes, prefix.stem)
    return Encoder("state dict", tensors)


def _from_children(tensors: Tensors) -> Tensors:
    """Name a ResNet's modules that were numbered by an nn.Sequential; others stay as they are."""
    numbers = {key.partition(".")[0] for key in tensors}
    if not numbers <= _CHILDREN.keys() or "4" not in numbers:
        return tensors
    return {re.sub(r"^\d", lambda m: _CHILDREN[m[0]], key): t for key, t in tensors.items()}


def _of_export(tensors: Tensors) -> Encoder | None:
    """Weights of an export or a run of sslpipe without the files beside them."""
    tensors = {key.removeprefix("backbone."): t for key, t in tensors.items()}
    inner = {k.removeprefix("network."): t for k, t in tensors.items() if k.startswith("network.")}
    others = [key for key in tensors if not key.startswith("network.")]
    alone = all(key.startswith(("embedding.", "projector.", "predictor.")) for key in others)
    # some networks have a part of that name
    if not inner or not alone or any(key[0].isdigit() for key in inner):
        return None
    return Encoder("sslpipe", inner, None, others)


def _of_efficientnet_pytorch(tensors: Tensors) -> Encoder | None:
    """EfficientNet and its Lite variants by EfficientNet-PyTorch: timm's order, other names."""
    if not {"_conv_stem.weight", "_blocks.0._depthwise_conv.weight"} <= tensors.keys():
        return None
    from timm import create_model, list_models

    squeezed = any("._se_reduce." in key for key in tensors)
    for name in list_models("tf_efficientnet_b?" if squeezed else "tf_efficientnet_lite?"):
        with within_memory("backbone"):
            own = create_model(name).state_dict()
        same = len(own) == len(tensors) and all(
            (t.shape == tensors[other].shape or key.partition(".")[0] in HEADS)  # of any classes
            and key.rpartition(".")[2] == other.rpartition(".")[2]
            for (key, t), other in zip(own.items(), tensors, strict=True)
        )
        if same:
            renamed = dict(zip(own, tensors.values(), strict=True))
            return Encoder("EfficientNet-PyTorch", renamed, Component(kind=f"timm/{name}"))
    return None
