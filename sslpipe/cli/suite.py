"""What `sslpipe evaluate suite` embeds, compares with, keeps and prints."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import typer
from rich.console import Console

from sslpipe.cli.embed import features_metadata
from sslpipe.cli.suite_tables import print_suite
from sslpipe.cli.terminal import progress, report_bad, say, show
from sslpipe.curate.leaks import Leaks
from sslpipe.curate.leaks import find_leaks as find_leaks_in
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.embed import Embeddings, check_comparable, embed_to_file, load_embeddings
from sslpipe.evaluation.features import (
    data_metadata,
    embed_pair,
    embed_pixels,
    random_backbone,
    saved_embeddings,
)
from sslpipe.evaluation.leakage import leakage_sentence
from sslpipe.evaluation.protocols import Pair
from sslpipe.evaluation.suite_file import own_name
from sslpipe.evaluation.verdict import BASELINES, unfinished
from sslpipe.export.load import FrozenBackbone, checkpoint_metadata, load_backbone
from sslpipe.recipe.base import Component
from sslpipe.recipe.shortened import shortened_note
from sslpipe.weights.source import HUBS, parse_source

LONGEST_NAME = 40
MOST_KEPT_BYTES = 2**30  # of a split's features that are left in the run
MOST_KEPT_PIXELS = 2**28  # bytes

Sets = dict[str, Pair | Callable[[], Pair]]  # name -> train and test, or what embeds them


def print_report(report: dict[str, Any], out: Path) -> None:
    """Print the answer, the tables, and what is missing; end where sets are."""
    if note := unfinished(report["facts"]):
        Console().print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    show(report["verdict"])
    print_suite(report)
    if "leakage" in report:
        show(leakage_sentence(report["leakage"]))
    for sentence in report["left_out"]:
        show(f"not measured: {sentence}")
    show(f"{len(report['rows'])} numbers in {out}")
    if missing := report.get("incomplete", {}):
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        again = "the same command measures all that is missing"
        say(f"error: not in {out}: {reasons}; {again}", "red")
        raise typer.Exit(2)


def on_device(pair: Pair | Callable[[], Pair], device: str) -> Pair | Callable[[], Pair]:
    """Move features, or those that a function will return."""

    def moved(made: Pair) -> Pair:
        return made[0].to(device), made[1].to(device)

    if callable(pair):
        make = pair
        return lambda: moved(make())
    return moved(pair)


class Other(NamedTuple):
    """A network to compare with: the name of its rows, what was given, and what was loaded."""

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
    """What a model is compared with; by name what its training started from; why not with that."""

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
    """Make a readable name of a source's last part, and of more of it while that one is taken."""
    parts = [part for part in re.split(r"[:/\\]+", source) if part.strip(".")] or ["other"]
    suffix = r"\.(safetensors|pth|pt|bin|onnx|tar)(?=(@\d+)?$)"
    parts[-1] = re.sub(suffix, "", parts[-1]) or parts[-1]
    parts = [re.sub(r"[^\w.+-]+", "-", part) for part in parts]
    tries = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
    tries = [name[-LONGEST_NAME:].strip("-") for name in tries]
    tries += [f"{tries[0]}-{number}" for number in range(2, len(taken) + 3)]
    return next(name for name in tries if name not in taken)


def embed_model(
    model: Path,
    backbone: FrozenBackbone,
    index: DatasetIndex,
    splits: tuple[Split, Split],
    compared: Compared,
    untrained_seed: int | None,
    canvas_px: int | None,
    **options: Any,
) -> Sets:
    """Embed both splits by a model; what it has to beat and other networks when their turn comes.

    Args:
        model: The export or run.
        backbone: What was loaded of it.
        index: The data set.
        splits: Train and test of it.
        compared: The other networks.
        untrained_seed: Of the random weights; None: no baseline of them.
        canvas_px: As in `embed`; None: by each view.
        options: batch_size, num_workers and device of `embed`.
    """
    config, canvas = backbone.config, canvas_px or backbone.view.canvas_px
    untrained = None
    if untrained_seed is not None:
        untrained = random_backbone(config.backbone, config.crop_px, untrained_seed)
    options |= {"on_bad": report_bad}
    # features that lie in a run just as they would be embedded are read; an export has none
    folder = model / "features"
    writable = (model / "recipe.json").is_file() and os.access(model, os.W_OK)
    saved = {}
    for split in splits:
        file = folder / f"{split.name}.safetensors"
        facts = features_metadata(backbone, backbone.view, index, split.name)
        small = len(split) * config.num_features * 4 <= MOST_KEPT_BYTES
        named = {"title": f"embed {split.name}", "new": writable and small, **options}
        rows = _kept_rows(file, backbone, facts, split, canvas, **named)
        if rows is not None:
            saved[split.name] = rows
            say(f"{split.name}: read from {file}")
    own: dict[str, Any] = {"view": backbone.view, "splits": splits, "canvas_px": canvas, **options}
    own["progress"] = progress
    names = ("ssl", *BASELINES, *(other.name for other in compared.others))
    known_as = own_name(config.facts, names)
    sets: Sets = {"ssl": embed_pair(known_as, backbone.backbone, saved=saved, **own)}
    # the start first: each is embedded when its turn comes, and kept once it is measured
    kept = folder / "against" if writable else None
    for other in sorted(compared.others, key=lambda other: other.name != compared.start):
        sets[other.name] = partial(embed_other, other, index, splits, kept, canvas_px, **options)
    if untrained is not None:
        sets["random"] = partial(embed_pair, "random", untrained, **own)
    sets["pixels"] = partial(embed_pixels, **own)
    return sets


def model_metadata(
    backbone: FrozenBackbone,
    index: DatasetIndex,
    names: tuple[str, str],
    others: Sequence[Other],
    canvas_px: int | None,
) -> dict[str, Any]:
    """Return what eval.json says of where the features come from: weights, view, data."""
    config = backbone.config
    trained = config.facts.get("recipe")
    recipe = trained if isinstance(trained, dict) else {}
    note = shortened_note(recipe)
    return {
        "name": config.facts.get("name", ""),
        "backbone": config.backbone.model_dump(),
        "backbone_sha256": config.weights_sha256,
        "view": backbone.view.config(),
        "canvas_px": canvas_px or backbone.view.canvas_px,
        **data_metadata(index, names[1]),
        **checkpoint_metadata(backbone),
        **({"step": config.facts["step"]} if "step" in config.facts else {}),
        **({"steps": recipe["steps"]} if "steps" in recipe else {}),
        **({"shortened": note} if note else {}),
        "train_split": names[0],
        "classes": list(index.manifest.classes),
        **({"against": [other.metadata() for other in others]} if others else {}),
    }


def embed_other(
    other: Other,
    index: DatasetIndex,
    splits: tuple[Split, Split],
    folder: Path | None,
    canvas_px: int | None,
    **options: Any,
) -> Pair:
    """Embed train and test by a network, through its own view; what a file holds is read.

    In `folder` lies a file for each network, view, data set and split; None: none is kept. Without
    canvas_px it is the view's; options: batch_size, num_workers and device of `embed`.
    """
    if folder is None:
        with TemporaryDirectory() as temporary:
            return embed_other(other, index, splits, Path(temporary), canvas_px, **options)
    config, view = other.backbone.config, other.backbone.view
    canvas = canvas_px or view.canvas_px
    options["on_bad"] = lambda bad: None  # reported with the first features
    pair = []
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
        named = {"title": f"{other.name}: {split.name}", "network": other.name, **options}
        rows = _kept_rows(file, other.backbone, facts, split, canvas, ours=True, **named)
        assert rows is not None
        pair.append(rows)
    return pair[0], pair[1]


def _kept_rows(
    file: Path,
    model: FrozenBackbone,
    facts: dict[str, Any],
    split: Split,
    canvas_px: int,
    *,
    title: str,
    new: bool = True,
    ours: bool = False,
    **options: Any,
) -> Embeddings | None:
    """Read a file of features where they are just what would be embedded now.

    `facts` decide them, beside the canvas. A file that is not there is written where `new`; one
    that nobody else writes, `ours`, is made anew where it is damaged or differs, and may lack
    samples that could not be decoded. None where there is no such file.
    """
    identity = {**facts, "canvas_px": canvas_px, "dtype": "float32"}
    try:
        rows = saved_embeddings(file, identity, split, whole=not ours)
    except DataError as error:
        if not ours:
            raise
        say(str(error))
        rows = None
    if rows is not None or not (new and (ours or not file.exists())):
        return rows
    embed_to_file(
        file,
        model.backbone.to(options["device"]),
        model.view,
        split,
        facts,
        canvas_px=canvas_px,
        bar=partial(progress, title),
        **options,
    )
    return saved_embeddings(file, identity, split, whole=not ours)


def find_leaks(splits: tuple[Split, Split], sets: Sets, num_workers: int) -> Leaks:
    """Find the test samples that are in train; pixels that it needs as features stay in `sets`."""
    rows = sets["ssl"]
    assert not callable(rows)  # it is embedded at once

    def pixels() -> Pair:
        made = sets["pixels"]
        if callable(made):
            say("pixels: features")
            made = made()
            if sum(rows.features.nbytes for rows in made) <= MOST_KEPT_PIXELS:
                sets["pixels"] = made  # else made again, in seconds, when their turn comes
        return made

    return find_leaks_in(splits, rows, pixels, num_workers=num_workers, progress=progress)


def load_features(texts: Sequence[str], taken: Collection[str]) -> Sets:
    """Read the features of each NAME=TRAIN,TEST, whose names must differ from those taken."""
    found: Sets = {}
    for text in texts:
        name, _, files = text.partition("=")
        train_file, comma, test_file = files.partition(",")
        if not (name and train_file and comma and test_file):
            raise DataError(f"--features {text!r} is not NAME=TRAIN.safetensors,TEST.safetensors")
        (train, train_facts), (test, test_facts) = map(load_embeddings, (train_file, test_file))
        check_comparable(train_facts, test_facts, itself=False)
        if name in (*found, *taken):
            raise DataError(f"--features {name}=: the name {name} is taken; give it another one")
        found[name] = train, test
    return found
