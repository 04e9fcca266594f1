"""Candidates of `sslpipe choose`: networks at sizes, what they cost, and their kept features."""

import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.arguments import Progress
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import DataError, UserError, one_line
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, embed
from sslpipe.evaluation.feature_files import save_embeddings
from sslpipe.evaluation.features import saved_embeddings
from sslpipe.evaluation.few_shot import by_class
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.files import json_text
from sslpipe.models.backbones import JOIN
from sslpipe.random import permutation
from sslpipe.search.ranking import Names
from sslpipe.weights.source import parse_source

FEW = 8  # images of a class that are kept whole
TIMED = 8  # images of the forward pass that is timed
TIMED_S = 2.0  # seconds after which three passes are enough


class Candidate(NamedTuple):
    """A network at a size."""

    name: str  # of its rows: the architecture or run, and the size
    source: str  # SOURCE or SOURCE@PX, as `load_backbone` takes it
    model: FrozenBackbone  # as it was loaded, on the device
    ms: float  # milliseconds that the network takes for an image on this device
    megabytes: float  # of its weights

    @property
    def identity(self) -> tuple[str, dict[str, Any]]:
        """Weights and view: what makes two candidates one."""
        return self.model.config.weights_sha256, self.model.view.config()


def at_sizes(source: str, px: Sequence[int]) -> list[str]:
    """Return a source at each size; one that names its own, and a join, as it is."""
    parsed = parse_source(source)
    has_size = not px or parsed.px is not None or parsed.scheme == JOIN
    return [source] if has_size else [f"{source}@{size}" for size in px]


def load_candidate(
    source: str, taken: Collection[Candidate], device: torch.device | str
) -> Candidate:
    """Load a candidate and take its time.

    Raises:
        UserError: It cannot be read, takes no images of this size, is flattened, or `taken`.
    """
    model = load_backbone(source)
    if model.whitening is not None:
        raise UserError("it is flattened already; name what it was made from")
    name = f"{model.name}@{model.view.crop_px}"
    if any(name == other.name for other in taken):
        name = f"{name} of {source}"
    megabytes = sum(tensor.nbytes for tensor in model.backbone.state_dict().values()) / 1e6
    one = Candidate(name=name, source=source, model=model.to(device), ms=0.0, megabytes=megabytes)
    for other in taken:
        if one.identity == other.identity:
            raise UserError(f"it is {other.name} again: the same weights and view")
    return one._replace(ms=_milliseconds(one.model, device))


def labels_seen(sources: Iterable[str], index: DatasetIndex, split: str) -> NDArray[np.int64]:
    """Return the labels of this split by which a candidate was trained, sorted.

    A source that cannot be read has none; it is reported where it is loaded.
    """
    seen: set[int] = set()
    for source in sources:
        if parse_source(source).scheme != "sslpipe":
            continue
        with suppress(UserError):
            facts = load_backbone(source).config.facts
            labels = facts.get("classes_seen", [])
            if labels and facts["recipe"]["data"]["split"] == split:
                is_same = index.has_sha256(facts["data"]["index_sha256"])
                seen.update(labels if is_same else [])
    return np.array(sorted(seen), np.int64)


@torch.no_grad()
def _milliseconds(model: FrozenBackbone, device: torch.device | str) -> float:
    """Time the network on black images, the fastest pass of three to ten. Raises: UserError."""
    images = torch.zeros(TIMED, *model.view.image_shape, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    times: list[float] = []
    try:
        while len(times) < 3 or (len(times) < 10 and sum(times) < TIMED_S):
            started = time.perf_counter()
            float(model(images).sum())  # a GPU is waited for
            times.append(time.perf_counter() - started)
    except RuntimeError as error:  # of layers that find too few pixels, or of memory
        raise UserError(
            f"its network takes no images of {model.view.crop_px} px here: {one_line(str(error))}"
        ) from error
    return 1000 * min(times) / TIMED


def sample_ids(rows: Split, most: int, seed: int) -> NDArray[np.int64]:
    """Choose sample ids, sorted: all, or up to `most`.

    Of a large class as many as all can have, but FEW or more; then random classes, and last images
    of no class.
    """
    if len(rows) <= most:
        return np.arange(len(rows), dtype=np.int64)
    shuffled = permutation(len(rows), (seed, 2))
    labels = rows.labels
    members, places = by_class(shuffled[labels[shuffled] >= 0], labels)
    known, counts = np.unique(labels[members], return_counts=True)
    cap = max(FEW, most // max(1, len(known)))
    # classes in random order, as long as they fit
    order = permutation(len(known), (seed, 3))
    kept = known[order[np.cumsum(np.minimum(counts, cap)[order]) <= most]]
    labelled = members[np.isin(labels[members], kept) & (places < cap)]
    unlabelled = shuffled[labels[shuffled] < 0]
    return np.sort(np.concatenate([labelled, unlabelled[: most - len(labelled)]]))


def embed_kept(
    one: Candidate,
    view: EvalView,
    split: Split,
    ids: NDArray[np.int64],
    folder: Path,
    options: EmbedOptions,
    *,
    progress: Progress,
    say: Callable[[str], None],
) -> tuple[Embeddings, str]:
    """Embed images by a candidate, or read the features that an earlier call kept in `folder`.

    Args:
        one: The network.
        view: Its own, or `CornerViews` of it.
        split: Where the images are.
        ids: (n,) the samples, sorted.
        folder: Has a file for all that decides the features, whose hash is returned, too.
        options: As in `embed`.
        progress: Makes the progress bar.
        say: Called where a kept file is damaged; it is made anew.
    """
    identity = {
        **one.model.features_metadata(split),
        "view": view.config(),
        "ids": hashlib.sha256(ids.tobytes()).hexdigest(),
    }
    key = hashlib.sha256(json_text(identity).encode()).hexdigest()
    file = folder / f"{key[:16]}.safetensors"
    try:
        if (known := saved_embeddings(file, identity, split, whole=False)) is not None:
            return known, key
    except DataError as error:
        say(str(error))
    title = one.name if view is one.model.view else f"{one.name}: corners"
    with progress(title, len(ids)) as advance:
        made = embed(
            one.model.backbone, view, split, options, ids=ids, network=one.name, progress=advance
        )
    save_embeddings(file, made, identity)
    return made, key


def rows_to_rank(candidates: Collection[Candidate]) -> list[Names]:
    """Return each candidate; then joins of a network's sizes, and of two at their largest."""
    sizes = _by_weights(candidates)
    pairs = itertools.combinations(sizes, 2)
    joins = [*two_sizes(candidates), *((a[-1].name, b[-1].name) for a, b in pairs)]
    return [*((one.name,) for one in candidates), *joins]


def two_sizes(candidates: Collection[Candidate]) -> list[Names]:
    """Return the joins of a network's smallest size and its largest."""
    return [(sizes[0].name, sizes[-1].name) for sizes in _by_weights(candidates) if len(sizes) > 1]


def _by_weights(candidates: Collection[Candidate]) -> list[list[Candidate]]:
    """Return the sizes of each network, ascending; a join stands beside no other."""
    by_weights: dict[str, list[Candidate]] = {}
    for one in candidates:
        if one.model.config.backbone.kind != JOIN:
            by_weights.setdefault(one.model.config.weights_sha256, []).append(one)
    return [
        sorted(sizes, key=lambda each: each.model.view.crop_px) for sizes in by_weights.values()
    ]
