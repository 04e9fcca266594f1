"""Measure a backbone beside its start, others, pixels and random weights: an eval.json.

For `sslpipe.suite` and the command: what is loaded, embedded and compared; the numbers are of
`evaluation.table`.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from sslpipe.arguments import Progress, Say, checked, silent
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.reader import OnBad, Quarantined
from sslpipe.distributed import pick_device
from sslpipe.errors import as_output, as_path, check_count, for_caller, shown
from sslpipe.evaluation.advice import advise
from sslpipe.evaluation.comparison import BASELINES
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, embed
from sslpipe.evaluation.embed_file import embed_to_file
from sslpipe.evaluation.features import (
    data_metadata,
    pixel_features,
    random_backbone,
    saved_embeddings,
)
from sslpipe.evaluation.protocols import SEED, Pair
from sslpipe.evaluation.suite_file import check_split, features_name, own_name, with_own_name
from sslpipe.evaluation.table import Leaks, Others, check_labelled, run_suite
from sslpipe.export.load import FrozenBackbone, load_backbone, weights_text
from sslpipe.export.saved import Config
from sslpipe.files import json_text, parse_object, write_json
from sslpipe.report.other_networks import Other, load_compared, table_of
from sslpipe.run.trackers import log_evaluation
from sslpipe.satellites import offered

MOST_KEPT_BYTES = 2**30  # of a split's features that are left in the run
MOST_KEPT_PIXELS = 2**28  # bytes
OF_A_CHECKPOINT = ("checkpoint", "step", "checkpoint_reason")  # facts of a backbone

Sets = dict[str, Pair | Callable[[], Pair]]  # name -> train and test, or what embeds them


class SuiteReport(dict[str, Any]):
    """What stands in an eval.json; shown as the command does: the answer, and its table in %."""

    def __repr__(self) -> str:
        name = own_name(self["facts"], [row["features"] for row in self["rows"]])
        table: dict[str, list[str]] = {}
        for row in with_own_name(self["rows"], name):
            cells = table.setdefault(features_name(row), [])
            if row["column"] is not None:
                low, high = (100 * end for end in row["interval95"])
                cells.append(f"{row['column']} {100 * row['value']:.1f} [{low:.1f}, {high:.1f}]")
        rows = [f"{name}: {', '.join(cells)}" for name, cells in table.items()]
        missing = [f"not measured: {for_caller(text)}" for text in self["left_out"]]
        return "\n".join([*advise(self), *rows, *missing])


def warn_bad(bad: Quarantined) -> None:
    """Warn of a sample that cannot be decoded."""
    warnings.warn(f"{bad.key!r} of {bad.shard} has no row: {bad.reason}", stacklevel=2)


@checked
def suite(
    model: FrozenBackbone | str | Path,
    data: DatasetIndex | str | Path,
    split: str = "test",
    *,
    out: str | Path | None = None,
    against: Sequence[str | Path] = (),
    baselines: bool = True,
    leakage: bool = True,
    checkpoint: str | None = None,
    batch_size: int = 256,
    num_workers: int = 2,
    device: str = "auto",
    say: Say | None = None,
    progress: Progress | None = None,
    on_bad: OnBad | None = None,
) -> SuiteReport:
    """Measure a backbone beside pixels, random weights and others, as `evaluate suite` does.

    >>> report = sslpipe.suite("runs/photos", "out/photos", out="runs/photos/eval.json")
    >>> print(report)  # the verdict and a line a number; report["rows"] has all

    Of a run the features are left in it, and its trackers get the numbers. After Ctrl-C
    (KeyboardInterrupt) the report has what was measured, and "incomplete".

    Args:
        model: What `load_backbone` takes, or returns; it is not moved.
        data: The data set's index, or the path or URL of its dataset.json.
        split: The split to score; the labels to learn from are those of the split train.
        out: The JSON file to write; None: none.
        against: Other weights to compare with; a run is always compared with its start.
        baselines: Also measure pixels and random weights.
        leakage: Find test samples that are also in train, and score without them, too.
        checkpoint: Of a run, "step-00000012": this one instead of its newest.
        batch_size: Images embedded at a time.
        num_workers: Threads that decode.
        device: Where to compute: "auto", "cpu", "cuda" or "mps".
        say: Called with what comes next; None: nobody is.
        progress: Makes a progress bar for each set; None: there is none.
        on_bad: Called with each sample that cannot be decoded; None: it is warned of.

    Returns:
        What stands in an eval.json, as a dictionary; see `sslpipe.evaluation.suite_file`:
        "verdict", "rows" (a number each), "against", "baselines", "left_out", "leakage", "facts".

    Raises:
        UserError: A model, the data set or the device cannot be had, or they do not fit.
    """
    say = say or (lambda text: None)
    progress = progress or silent
    file = None if out is None else as_output(out, "out")
    check_split(split)
    check_count(batch_size, "batch_size")
    check_count(num_workers, "num_workers", least=0)
    options = EmbedOptions(
        device=pick_device(device, f"device = {device!r}"),
        batch_size=batch_size,
        num_workers=num_workers,
        on_bad=on_bad or warn_bad,
    )
    index = load_index(data)
    folder = Path(model) if isinstance(model, str | Path) else None
    compared = [str(as_path(source, "against")) for source in against]
    # what can be refused, before anything is embedded
    rows = index.split("train")
    queries = index.split(split)
    for each in (rows, queries):
        index.check_files(each.name)
        check_labelled(each.name, each.labels)
    source = copy.deepcopy(model) if isinstance(model, FrozenBackbone) else model
    backbone = load_backbone(source, checkpoint=checkpoint)
    if chosen := weights_text(backbone):
        say(chosen)
    others, not_compared = load_compared(compared, folder, backbone, {"ssl", *BASELINES})
    for loaded in (backbone, *(other.backbone for other in others if not other.is_start)):
        for note in loaded.notes:
            say(note)
    backbone, (train, test) = backbone.matched(rows, queries)
    known_as = own_name(backbone.config.facts, ("ssl", *BASELINES, *(o.name for o in others)))
    # features, the most wanted first: what is interrupted has these
    by_turn = sorted(others, key=lambda other: not other.is_start)
    metadata = {"seed": SEED, **model_metadata(backbone, (train, test), by_turn)}
    embedder = Embedder(train=train, test=test, options=options, say=say, progress=progress)
    not_measured = seen_in_training(backbone.config.facts, test)
    view = backbone.view
    saved = {} if folder is None else embedder.kept(folder, backbone)
    sets: Sets = {"ssl": embedder.embed(known_as, backbone.backbone, view, saved)}
    # what it has to beat: each is embedded when its turn comes
    quiet = embedder.quiet
    for other in by_turn:
        sets[other.name] = partial(quiet.embed_other, other)
    sets["random"] = partial(quiet.embed_untrained, backbone.config, view)
    sets["pixels"] = partial(quiet.pixels, view, not_measured)
    leaks = find_leaks(sets, embedder) if leakage else None
    if not baselines:
        for name in BASELINES:
            del sets[name]
    # the numbers
    measured = run_suite(
        sets,
        metadata,
        Others(
            names=[other.name for other in others],
            start=next((other.name for other in others if other.is_start), None),
            missing=not_compared,
        ),
        known_as=known_as,
        not_measured=not_measured,
        leaks=leaks,
        device=options.device,
        say=say,
        progress=progress,
    )
    report = SuiteReport(parse_object(json_text(measured)))  # as a reader of the file has it
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, report)
    if folder is not None:
        copy_to_trackers(folder, report, say)
    return report


def copy_to_trackers(model: Path, report: dict[str, Any], say: Say) -> None:
    """Copy the numbers of a run's own features to the trackers of its recipe; else do nothing."""
    if not (model / "recipe.json").is_file():
        return
    values = {
        f"{features_name(row)}/{row['column']}": row["value"]
        for row in report["rows"]
        if row["column"] is not None and row["features"] == "ssl"
    }
    log_evaluation(
        model,
        values,
        step=report["facts"]["step"],
        warn=lambda text: say(f"warning: {text}"),
    )


@dataclass(frozen=True)
class Embedder:
    """Embeds train and test, and tells of it, by each network that is compared."""

    train: Split
    test: Split
    options: EmbedOptions
    say: Say
    progress: Progress

    @property
    def quiet(self) -> Embedder:
        """The same, after the first network: bad samples have been reported."""
        return replace(self, options=replace(self.options, on_bad=lambda bad: None))

    def embed(
        self,
        name: str,
        network: nn.Module,
        view: EvalView,
        saved: Mapping[str, Embeddings] = MappingProxyType({}),
    ) -> Pair:
        """Embed both by one network, which is moved to the device.

        `name` is the network's in titles and messages; `saved` has features by split that are
        known.
        """
        network = network.to(self.options.device)
        rows = dict(saved)
        for split in (self.train, self.test):
            if split.name in saved:
                continue
            with self.progress(f"{name}: {split.name}", len(split)) as advance:
                rows[split.name] = embed(
                    network, view, split, self.options, network=name, progress=advance
                )
        return rows[self.train.name], rows[self.test.name]

    def embed_other(self, other: Other) -> Pair:
        """Embed both by another network, through its own view."""
        model, (train, test) = other.backbone.matched(self.train, self.test)
        return replace(self, train=train, test=test).embed(other.name, model.backbone, model.view)

    def embed_untrained(self, config: Config, view: EvalView) -> Pair:
        """Embed both by a network of random weights."""
        network = random_backbone(config.backbone, config.crop_px, SEED)
        return self.embed("random", network, view)

    def pixels(self, view: EvalView, left_out: list[str]) -> Pair:
        """Take the pixels as features; `left_out` gets a sentence where they are too many."""
        train, test = pixel_features((self.train, self.test), view, self.options, left_out=left_out)
        return train, test

    def kept(self, run_dir: Path, backbone: FrozenBackbone) -> dict[str, Embeddings]:
        """Read RUN/features/SPLIT, by split, where it is just what would be embedded now.

        A file that is not there is written, if it is not too large: `report` and `search` read it.
        """
        writable = (run_dir / "recipe.json").is_file() and os.access(run_dir, os.W_OK)
        known = {}
        for split in (self.train, self.test):
            file = run_dir / "features" / f"{split.name}.safetensors"
            metadata = backbone.features_metadata(split)
            small = len(split) * backbone.num_features * 4 <= MOST_KEPT_BYTES
            new = writable and small and not file.exists()
            if new:
                embed_to_file(
                    out=file,
                    backbone=backbone.backbone.to(self.options.device),
                    view=backbone.view,
                    split=split,
                    facts=metadata,
                    options=self.options,
                    bar=partial(self.progress, f"embed {split.name}"),
                )
            rows = saved_embeddings(file, metadata, split)
            if rows is not None:
                known[split.name] = rows
                self.say(f"{split.name}: {'written to' if new else 'read from'} {file}")
        return known


def find_leaks(sets: Sets, embedder: Embedder) -> Leaks | None:
    """Find the test samples that are in train; pixels that it needs as features stay in `sets`.

    A satellite looks for them; where there is none, a line says so.
    """
    finders = offered("leaks")
    if not finders:
        embedder.say("no check whether test samples are in train, too: this installation has none")
        return None

    def pixels() -> Pair:
        made = sets["pixels"]
        if callable(made):
            made = made()
            if sum(rows.features.nbytes for rows in made) <= MOST_KEPT_PIXELS:
                sets["pixels"] = made  # else made again, in seconds, when their turn comes
        return made

    leaks: Leaks = finders[0].find_leaks(
        (embedder.train, embedder.test),
        sets["ssl"],
        pixels,
        num_workers=embedder.options.num_workers,
        progress=embedder.progress,
    )
    return leaks


def seen_in_training(facts: dict[str, Any], test: Split) -> list[str]:
    """Return a sentence where a model may have been trained on test images; [] where it was not.

    `facts` are those of a run or an export; other weights do not say what they were trained on.
    """
    trained_on = table_of(facts, "data")
    if not trained_on:
        return []
    if not test.index.has_sha256(trained_on.get("index_sha256")):
        return [
            "whether the model was trained on some of these test images: its own data set, "
            f"{shown(trained_on.get('name'))}, is another one, or was this one before it was built "
            "anew, which may have moved images from train to test"
        ]
    if table_of(table_of(facts, "recipe"), "data").get("split") == test.name:
        return [f"new images: the model was trained on this split, {test.name}"]
    return []


def model_metadata(
    backbone: FrozenBackbone, splits: tuple[Split, Split], others: Sequence[Other]
) -> dict[str, Any]:
    """Return what eval.json says of where the features come from: weights, view, data."""
    config = backbone.config
    recipe = table_of(backbone.config.facts, "recipe")
    return {
        "name": config.facts.get("name", ""),
        "backbone": config.backbone.model_dump(),
        "backbone_sha256": config.weights_sha256,
        "view": backbone.view.config(),
        "canvas_px": backbone.view.canvas_px,
        **data_metadata(splits[1]),
        **{key: config.facts[key] for key in OF_A_CHECKPOINT if key in config.facts},
        **({"steps": recipe["steps"]} if "steps" in recipe else {}),
        "train_split": splits[0].name,
        "classes": list(splits[0].index.manifest.classes),
        **({"against": [other.metadata() for other in others]} if others else {}),
    }
