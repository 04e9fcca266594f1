"""`--against SOURCE`: networks that others trained, embedded as they want their images."""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sslpipe.cli.progress import progress
from sslpipe.cli.terminal import console
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.embed import Embeddings, embed_to_file, load_embeddings
from sslpipe.evaluation.features import data_metadata, saved_embeddings
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.recipe.base import Component
from sslpipe.weights.source import HUBS, parse_source

LONGEST_NAME = 40


class Other(NamedTuple):
    """A network to compare with.

    Args:
        name: Of its rows in eval.json.
        source: What was given, as `load_backbone` takes it.
        backbone: With its own view.
    """

    name: str
    source: str
    backbone: FrozenBackbone

    def metadata(self) -> dict[str, str]:
        """Return what eval.json says of it."""
        facts = self.backbone.config.facts
        own = "digest" in facts  # a run of ours or its export, which may have had a start, too
        return {
            "name": self.name,
            "source": self.source,
            "sha256": self.backbone.config.weights_sha256,
            "format": "sslpipe" if own else str(_table(facts, "init").get("format", "sslpipe")),
        }


class Compared(NamedTuple):
    """What a model is compared with.

    Args:
        others: The networks.
        start: Name of the one that the model's training started from; None: there was none, or it
            cannot be had.
        not_compared: A sentence where it cannot.
    """

    others: list[Other]
    start: str | None = None
    not_compared: tuple[str, ...] = ()


def load_compared(
    sources: Sequence[str], model: str | Path, backbone: FrozenBackbone, taken: Collection[str]
) -> Compared:
    """Load the networks of --against, and the weights that the model's own training started from.

    Those are one of --against with the recorded sha256, or what the run keeps in RUN/init, or the
    recorded source, where that is a path; a name in a file from strangers fetches nothing.

    Args:
        sources: As `load_backbone` takes them.
        model: The run or export.
        backbone: What was loaded of it.
        taken: Names that rows of eval.json have already.

    Raises:
        UserError: One of --against cannot be loaded.
    """
    others = load_others(sources, taken)
    facts = backbone.config.facts
    sha256 = str(_table(facts, "recipe").get("init") or "")
    if not sha256:  # random weights, or no training of ours
        return Compared(others)
    for other in others:
        if other.backbone.config.weights_sha256 == sha256:
            return Compared(others, other.name)
    source = str(_table(facts, "init").get("source") or "")
    try:
        start = _load_start(Path(model) / "init", source, backbone)
        if start.config.weights_sha256 != sha256:
            raise UserError("what is there now are others")
    except UserError as error:
        named = f"{source or 'weights'} with sha256 {sha256[:16]}"
        said = f"Not compared with its own start, {named}: {error}; name it with --against."
        return Compared(others, None, (said,))
    name = short_name(source or "start", {*taken, *(other.name for other in others)})
    return Compared([*others, Other(name, source, start)], name)


def _load_start(kept: Path, source: str, backbone: FrozenBackbone) -> FrozenBackbone:
    """Load the start from where the run keeps it, or from a path. Raises: UserError."""
    if kept.is_dir():
        return load_backbone(kept)
    if not source:
        raise UserError("it is not kept with the model")
    if parse_source(source).scheme in HUBS:
        raise UserError("it is not kept with the model")
    config = backbone.config
    arguments = {
        key: value
        for key, value in config.backbone.arguments.items()
        if key not in ("embedding_dim", "normalize")  # of a fine-tuning, which adds them
    }
    component = Component.model_validate({"kind": config.backbone.kind, **arguments})
    return load_backbone(source, component=component, crop_px=config.crop_px)


def _table(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of an export's facts, which may be anybody's: {} where it is none."""
    table = facts.get(key)
    return table if isinstance(table, dict) else {}


def load_others(sources: Sequence[str], taken: Collection[str]) -> list[Other]:
    """Load the networks of --against, before anything is embedded.

    Args:
        sources: As `load_backbone` takes them.
        taken: Names that rows of eval.json have already.

    Raises:
        UserError: One is given twice, or cannot be loaded.
    """
    others: list[Other] = []
    for source in sources:
        if any(source == other.source for other in others):
            raise UserError(f"--against {source} is given twice; leave one out")
        name = short_name(source, {*taken, *(other.name for other in others)})
        others.append(Other(name, source, load_backbone(source)))
    return others


def short_name(source: str, taken: Collection[str]) -> str:
    """Make a readable name of a source's last part, and of more of it while that one is taken.

    Args:
        source: "timm:resnet50", "weights/vit_s.pth", ...
        taken: Names that others have.
    """
    parts = [part for part in re.split(r"[:/\\]+", source) if part.strip(".")] or ["other"]
    parts[-1] = re.sub(r"\.(safetensors|pth|pt|bin|onnx|tar)$", "", parts[-1]) or parts[-1]
    parts = [re.sub(r"[^\w.+-]+", "-", part) for part in parts]
    tries = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
    tries = [name[-LONGEST_NAME:].strip("-") for name in tries]
    tries += [f"{tries[0]}-{number}" for number in range(2, len(taken) + 3)]
    return next(name for name in tries if name not in taken)


@contextmanager
def features_folder(model: Path) -> Iterator[Path]:
    """Yield where features of other networks are kept: in a run, so that they are made once.

    For an export, which is not written to, it is a temporary folder.
    """
    if (model / "recipe.json").is_file() and os.access(model, os.W_OK):
        yield model / "features" / "against"
    else:
        with TemporaryDirectory() as temporary:
            yield Path(temporary)


def embed_others(
    others: Iterable[Other],
    index: DatasetIndex,
    splits: Sequence[Split],
    *,
    folder: Path,
    canvas_px: int | None,
    device: str,
    **options: Any,
) -> dict[str, tuple[Embeddings, Embeddings]]:
    """Embed both splits by each network, through its own view; what a file holds is read.

    Args:
        others: The networks.
        index: The data set.
        splits: Train and test.
        folder: Of the files, one for each network, view, data set and split.
        canvas_px: As in `embed`; None: by each network's view.
        device: Where to compute.
        options: batch_size and num_workers of `embed`.

    Returns:
        Name -> features of train and test.
    """
    sets: dict[str, tuple[Embeddings, Embeddings]] = {}
    for other in others:
        view, config = other.backbone.view, other.backbone.config
        canvas = canvas_px or view.canvas_px
        network = other.backbone.backbone.to(device)
        rows = []
        for split in splits:
            facts = {
                "backbone_sha256": config.weights_sha256,
                "backbone": config.backbone.model_dump(),
                "view": view.config(),
                **data_metadata(index, split.name),
            }
            identity = {**facts, "canvas_px": canvas, "dtype": "float32"}
            key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
            file = folder / f"{key[:16]}-{split.name}.safetensors"
            known = _read(file, identity, split)
            if known is None:
                embed_to_file(
                    file,
                    network,
                    view,
                    split,
                    facts,
                    network=other.name,
                    canvas_px=canvas,
                    device=device,
                    bar=partial(progress, f"{other.name}: {split.name}"),
                    on_bad=lambda bad: None,  # reported with the first features
                    **options,
                )
                known, _ = load_embeddings(file)
            rows.append(known)
        sets[other.name] = (rows[0], rows[1])
    return sets


def _read(file: Path, identity: dict[str, Any], split: Split) -> Embeddings | None:
    """Read the features of an earlier suite; a damaged file is reported, and then embedded anew."""
    try:
        return saved_embeddings(file, identity, split, whole=False)
    except DataError as error:
        console.print(str(error), highlight=False, markup=False, soft_wrap=True)
        return None
