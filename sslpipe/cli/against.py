"""`--against SOURCE`: networks that others trained, embedded as they want their images."""

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sslpipe.cli.terminal import progress, say
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
        UserError: One of --against is given twice, or cannot be loaded.
    """
    others: list[Other] = []
    names = {*taken}
    for source in sources:
        if any(source == other.source for other in others):
            raise UserError(f"--against {source} is given twice; leave one out")
        others.append(Other(short_name(source, names), source, load_backbone(source)))
        names.add(others[-1].name)
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
    name = short_name(source or "start", names)
    return Compared([*others, Other(name, source, start)], name)


def _load_start(kept: Path, source: str, backbone: FrozenBackbone) -> FrozenBackbone:
    """Load the start from where the run keeps it, or from a path. Raises: UserError."""
    if kept.is_dir():
        return load_backbone(kept)
    if not source or parse_source(source).scheme in HUBS:
        raise UserError("it is not kept with the model")
    config = backbone.config
    arguments = dict(config.backbone.arguments)
    for added in ("embedding_dim", "normalize"):  # by a fine-tuning
        arguments.pop(added, None)
    component = Component.model_validate({"kind": config.backbone.kind, **arguments})
    return load_backbone(source, component=component, crop_px=config.crop_px)


def _table(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of an export's facts, which may be anybody's: {} where it is none."""
    table = facts.get(key)
    return table if isinstance(table, dict) else {}


def short_name(source: str, taken: Collection[str]) -> str:
    """Make a readable name of a source's last part, and of more of it while that one is taken.

    Args:
        source: "timm:resnet50", "weights/vit_s.pth", ...
        taken: Names that others have.
    """
    parts = [part for part in re.split(r"[:/\\]+", source) if part.strip(".")] or ["other"]
    suffix = r"\.(safetensors|pth|pt|bin|onnx|tar)(?=(@\d+)?$)"
    parts[-1] = re.sub(suffix, "", parts[-1]) or parts[-1]
    parts = [re.sub(r"[^\w.+-]+", "-", part) for part in parts]
    tries = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
    tries = [name[-LONGEST_NAME:].strip("-") for name in tries]
    tries += [f"{tries[0]}-{number}" for number in range(2, len(taken) + 3)]
    return next(name for name in tries if name not in taken)


def embed_other(
    other: Other,
    index: DatasetIndex,
    splits: tuple[Split, Split],
    folder: Path,
    canvas_px: int | None,
    **options: Any,
) -> tuple[Embeddings, Embeddings]:
    """Embed both splits by a network, through its own view; what a file holds is read.

    Args:
        other: The network.
        index: The data set.
        splits: Train and test.
        folder: Of the files, one for each network, view, data set and split.
        canvas_px: As in `embed`; None: by the network's view.
        options: batch_size, num_workers and device of `embed`.

    Returns:
        Features of train and test.
    """
    view, config = other.backbone.view, other.backbone.config
    canvas = canvas_px or view.canvas_px
    network = other.backbone.backbone.to(options["device"])
    options["on_bad"] = lambda bad: None  # reported with the first features

    def rows_of(split: Split) -> Embeddings:
        facts = {
            "backbone_sha256": config.weights_sha256,
            "backbone": config.backbone.model_dump(),
            "view": view.config(),
            **data_metadata(index, split.name),
        }
        identity = {**facts, "canvas_px": canvas, "dtype": "float32"}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        file = folder / f"{key[:16]}-{split.name}.safetensors"
        try:
            known = saved_embeddings(file, identity, split, whole=False)
        except DataError as error:  # damaged: reported, and embedded anew
            say(str(error))
            known = None
        if known is not None:
            return known
        embed_to_file(
            file,
            network,
            view,
            split,
            facts,
            network=other.name,
            canvas_px=canvas,
            bar=partial(progress, f"{other.name}: {split.name}"),
            **options,
        )
        return load_embeddings(file)[0]

    return rows_of(splits[0]), rows_of(splits[1])
