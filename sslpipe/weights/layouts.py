"""Find an encoder in a checkpoint: the longest prefix under which its whole network fits.

A checkpoint's tables become one table of tensors by path, "state_dict.backbone.conv1.weight",
without the names of wrappers. Of a teacher (or an average) and a student the teacher is taken, of
an encoder and its momentum copy the encoder. What lies beside it is listed as left.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sslpipe.errors import WeightsError
from sslpipe.models.backbones import Backbone
from sslpipe.models.transfer import Tensors
from sslpipe.weights.files import MOST_NESTED, Tree
from sslpipe.weights.fit import (
    Match,
    holds_network,
    is_pretext,
    match_tensors,
    plain_key,
    torchvision_kind,
)

MOST_PREFIX = 12  # parts of a prefix that are looked at
# words in the path of a teacher or an average, which programs evaluate; and of copies that they do
# not evaluate: MoCo's key encoder, BYOL's target, DINO's student
_TAKEN = frozenset(["teacher", "ema", "averaged", "average", "avg", "swa"])
_COPIES = frozenset(["student", "momentum", "target", "k", "key", "m"])
_OPTIMIZERS = frozenset(["optim", "optimizer", "optimizers"])  # have an average of each gradient
# what solo-learn has beside its encoder, whose ResNets of small images have no max-pool
_SOLO = frozenset(["projector", "classifier", "momentum_backbone", "momentum_encoder"])


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a file, by path without wrappers, and where its tables begin."""

    tensors: Tensors
    tables: frozenset[str]  # paths of tables: "", "state_dict", "model_ema"

    def under(self, prefix: str) -> Tensors:
        """Return the tensors under a prefix, without it; all for ""."""
        if not prefix:
            return self.tensors
        start = f"{prefix}."
        return {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}

    def prefixes(self, least: int) -> list[str]:
        """List the prefixes with this many numbers under them, best first: see `_rank`."""
        sizes = {"": 0}
        for key, tensor in self.tensors.items():
            parts = key.split(".")[:-1][:MOST_PREFIX]
            for end in range(len(parts) + 1):
                prefix = ".".join(parts[:end])
                sizes[prefix] = sizes.get(prefix, 0) + tensor.numel()
        large = [prefix for prefix in sizes if sizes[prefix] >= least]
        return sorted((each for each in large if not _words(each) & _OPTIMIZERS), key=_rank)


@dataclass(frozen=True)
class Encoder:
    """An encoder's place in a checkpoint."""

    prefix: str
    tensors: Tensors  # under it, without it
    match: Match
    is_found: bool = True  # the whole network is there; else most of it, for a message
    is_plain: bool = False  # a model's own file, not a part of a larger model or of a pretext task
    beside: Sequence[str] = ()  # keys elsewhere in the file
    notes: Sequence[str] = ()  # what was chosen, for people
    stem: str | None = None  # of a ResNet whose first convolution is 3x3, if the program is known


def open_checkpoint(tree: Tree, what: str) -> Checkpoint:
    """Gather the named tensors of a checkpoint's tables.

    Raises:
        WeightsError: There are none; or one name has two values, with and without a wrapper.
    """
    tensors: Tensors = {}
    tables = set()
    meta = tree.get("meta")
    if isinstance(meta, dict) and "mmengine_version" in meta and "ema_state_dict" in tree:
        # MMEngine saves the average as state_dict, and as ema_state_dict what is trained
        tree = {**tree, "student": tree["ema_state_dict"]}
        del tree["ema_state_dict"]
    for table, key, tensor in _walk(tree, "", 0):
        path = plain_key(f"{table}.{key}" if table else key)
        if tensor.is_nested:
            raise WeightsError(f"{what}: {path} is nested; save it dense")
        known = tensors.get(path)
        if known is not None and known is not tensor and not _equal(known, tensor):
            raise WeightsError(
                f"{what} holds {path!r} twice, with other values; save the encoder's state dict "
                "alone"
            )
        tensors[path] = tensor
        tables.add(plain_key(table))
    if not tensors:
        keys = ", ".join(map(repr, list(tree)[:5]))
        raise WeightsError(f"{what} holds no table of tensors; it has {keys or 'nothing'}")
    return Checkpoint(tensors, frozenset(tables))


def _walk(value: Mapping[Any, Any], path: str, depth: int) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (path of the table, key, tensor), of tables whose keys are text."""
    if depth > MOST_NESTED or not all(isinstance(key, str) for key in value):
        return
    for key, inner in value.items():
        if isinstance(inner, Tensor):
            yield path, key, inner
            continue
        if isinstance(inner, list | tuple):
            inner = {str(place): each for place, each in enumerate(inner)}
        if isinstance(inner, Mapping):
            yield from _walk(inner, f"{path}.{key}" if path else key, depth + 1)


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and (one.is_meta or torch.equal(one, other))


def _words(prefix: str) -> set[str]:
    return {word for word in re.split(r"[^A-Za-z]+", prefix.lower()) if word}


def _rank(prefix: str) -> tuple[int, int]:
    """Sort key of prefixes: a teacher first, a copy last; of one kind the longest first."""
    words = _words(prefix)
    rank = 1
    if words & _TAKEN:
        rank = 0
    elif words & _COPIES:
        rank = 2
    depth = len(prefix.split(".")) if prefix else 0
    return rank, -depth


def find_encoder(
    checkpoint: Checkpoint, backbone: Backbone, kind: str, what: str
) -> Encoder | None:
    """Find the longest prefix under which a whole network fits; None: there is none.

    The first layer may be for other channels or smaller images.

    Raises:
        WeightsError: Two places of one rank hold it, with other values.
    """
    numbers = sum(t.numel() for t in backbone.network.state_dict().values())
    fitting: list[tuple[str, Tensors, Match]] = []
    for prefix in checkpoint.prefixes(least=numbers // 2):
        tensors = checkpoint.under(prefix)
        match = match_tensors(backbone, kind, tensors)
        if holds_network(backbone, match):
            fitting.append((prefix, tensors, match))
    if not fitting or fitting[0][2].foreign:  # no student in place of a teacher that is larger
        return None
    prefix, tensors, match = fitting[0]
    for other, _, rival in fitting[1:]:
        if _rank(other) == _rank(prefix) and not _same(match, rival):
            raise WeightsError(
                f"{what} holds two such networks, {prefix!r} and {other!r}, with other values; "
                "save the encoder's state dict alone"
            )
    others = [other for other, _, _ in fitting[1:]]
    beside = [key for key in checkpoint.tensors if not key.startswith(_inside(prefix))]
    pretext = any(is_pretext(key) for key in match.left)
    student = bool(_words(prefix) & (_COPIES | {"teacher"}))
    return Encoder(
        prefix=prefix,
        tensors=tensors,
        match=match,
        is_plain=prefix in checkpoint.tables and not pretext and not student,
        beside=beside,
        notes=_notes(checkpoint, prefix, others),
        stem="small" if _is_of_solo_learn(prefix, beside) else None,
    )


def nearest(checkpoint: Checkpoint, backbone: Backbone, kind: str) -> Encoder:
    """Return the place where most of a network fits, for a message; "" where nothing does."""
    numbers = sum(t.numel() for t in backbone.network.state_dict().values())
    places = []
    for prefix in ("", *checkpoint.prefixes(least=numbers // 2)):
        tensors = checkpoint.under(prefix)
        match = match_tensors(backbone, kind, tensors)
        places.append(Encoder(prefix, tensors, match, is_found=False))
    best = max(places[1:], key=lambda place: place.match.fitting, default=places[0])
    return best if best.match.fitting else places[0]


def classifier_of_torchvision(checkpoint: Checkpoint) -> str | None:
    """Name the classifier of torchvision that a file holds whole, whatever wrapped it."""
    for prefix in checkpoint.prefixes(least=1):
        kind = torchvision_kind(checkpoint.under(prefix))
        if kind is not None:
            return kind
    return None


def _same(one: Match, other: Match) -> bool:
    """Return whether two places hold the same weights."""
    keys = [key for key in one.expected if key in one.stored and key in other.stored]
    return all(_equal(one.stored[key], other.stored[key]) for key in keys)


def _inside(prefix: str) -> str:
    """Return how the keys under a prefix begin."""
    return f"{prefix}." if prefix else ""


def _notes(checkpoint: Checkpoint, prefix: str, others: Sequence[str]) -> list[str]:
    """Return which place of a checkpoint was taken, and which copies of it were not."""
    notes = []
    if prefix not in checkpoint.tables or len(checkpoint.tables) > 1:
        notes.append(f"the encoder is what lies under {prefix!r}")
    if _words(prefix) & _TAKEN:
        notes.append(f"the teacher or average is taken, {prefix!r}")
    copies = [other for other in others if not _inside(prefix).startswith(_inside(other))]
    if copies:
        notes.append(f"copies of it are left: {', '.join(map(repr, copies))}")
    return notes


def _is_of_solo_learn(prefix: str, beside: Sequence[str]) -> bool:
    """Return whether an encoder is solo-learn's, by its name and what stands on its level."""
    level, _, name = prefix.rpartition(".")
    start = _inside(level)
    around = {k.removeprefix(start).partition(".")[0] for k in beside if k.startswith(start)}
    return name in ("backbone", "encoder") and bool(around & _SOLO)
