"""What `sslpipe evaluate suite` embeds, compares with, keeps and prints."""

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.cli.options import Embedding
from sslpipe.cli.terminal import percent, progress, report_bad, say, show, text_table
from sslpipe.data.index import Split
from sslpipe.data.reader import OnBad
from sslpipe.errors import UserError
from sslpipe.evaluation.advice import advise
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.embed_file import embed_to_file
from sslpipe.evaluation.features import (
    data_metadata,
    embed_pair,
    embed_pixels,
    random_backbone,
    saved_embeddings,
)
from sslpipe.evaluation.protocols import Pair
from sslpipe.evaluation.result import measured_columns
from sslpipe.evaluation.suite import Leaks
from sslpipe.evaluation.suite_file import features_name, own_name, with_own_name
from sslpipe.evaluation.verdict import (
    BASELINES,
    RECALL,
    form_names,
    leakage_sentence,
    unfinished,
    verdict_text,
)
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.run.console import SafeConsole
from sslpipe.run.trackers import log_evaluation
from sslpipe.satellites import offered

AGAIN_S = 1.0  # a Ctrl-C so much later than the first signal ends what is being written
LONGEST_NAME = 40
MOST_KEPT_BYTES = 2**30  # of a split's features that are left in the run
MOST_KEPT_PIXELS = 2**28  # bytes

Sets = dict[str, Pair | Callable[[], Pair]]  # name -> train and test, or what embeds them


def print_report(report: dict[str, Any], out: Path) -> None:
    """Print the answer, the tables, and what is missing; end where sets are."""
    if note := unfinished(report["facts"]):
        SafeConsole().print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for sentence in advise(report):
        show(sentence)
    print_suite(report)
    show(report["verdict"])
    if "leakage" in report:
        show(leakage_sentence(report["leakage"]))
    for sentence in report["left_out"]:
        show(f"not measured: {sentence}")
    show(f"{len(report['rows'])} numbers in {out}")
    if missing := report.get("incomplete", {}):
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        say(f"error: not in {out}: {reasons}; run the same command again", "red")
        raise typer.Exit(130 if "interrupted" in missing.values() else 2)


def copy_to_trackers(model: Path, report: dict[str, Any]) -> None:
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
        warn=lambda text: say(f"warning: {text}", "yellow"),
    )


def renamed(text: str, own: str) -> str:
    """Put the model's own name into a line of the suite."""
    return re.sub(r"(?<![\w.-])ssl(?![\w.-])", lambda found: own, text)


def print_suite(report: dict[str, Any]) -> None:
    """Print the suite's tables; a log file gets lines wide enough for an interval in a cell."""
    own = own_name(report["facts"], [row["features"] for row in report["rows"]])
    tables = {"rows", "against"} & report.keys()
    report = {**report, **{table: with_own_name(report[table], own) for table in tables}}
    printer = SafeConsole()
    if not printer.is_terminal:
        printer = SafeConsole(width=110)
    printer.print(suite_table(report))
    for row in report["rows"]:
        if row["column"] is not None and not row["details"].get("converged", True):
            show(f"* {row['features']}, {row['column']}: the fit did not converge")
    if report.get("against"):
        printer.print(against_table(report["against"]))


def suite_table(report: dict[str, Any]) -> Table:
    """Rows: features, plain and flattened. Columns: those of the report; percent and interval."""
    columns = measured_columns(report)
    queries = next((row["queries"] for row in report["rows"] if row["column"] is not None), 0)
    what = "Shares" if RECALL in columns else "Top-1 accuracy"
    title = f"{what} in %, 95 % interval; {queries} test samples"
    cells: dict[str, dict[str, str]] = {}
    for row in report["rows"]:
        line = cells.setdefault(features_name(row), {})
        if row["column"] is not None:
            mark = "" if row["details"].get("converged", True) else " *"
            line[row["column"]] = percent(row["value"], row["interval95"]) + mark
    rows = [[name, *(line.get(each, "–") for each in columns)] for name, line in cells.items()]
    return text_table(["features", *columns], rows, title=title)


def against_table(compared: Sequence[dict[str, Any]]) -> Table:
    """Rows: a measure of a network each, first the one that decides and has the answer."""
    several = len({each["features"] for each in compared}) > 1
    table = Table(title="Against other networks: shares in %, differences in points with 95 %")
    table.add_column("against", overflow="fold")
    table.add_column("measure")
    for heading in ("ours", "theirs", "difference", "over"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer")
    for each in compared:
        if each["primary"]:
            table.add_section()
        name = each["against"] + (f" ({each['features']})" if several else "")
        low, high = (100 * end for end in each["interval95"])
        table.add_row(
            Text(name if each["primary"] else ""),
            f"{each['measure']}, {' / '.join(dict.fromkeys(form_names(each)))}",
            f"{100 * each['value']:.1f}",
            f"{100 * each['against_value']:.1f}",
            f"{100 * each['difference']:+.1f} ({low:+.1f}, {high:+.1f})",
            f"{each['count']:,} {each['unit']}",
            verdict_text(each),
        )
    return table


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C raise KeyboardInterrupt, and a later Ctrl-C again.

    Schedulers and `timeout` often send SIGTERM twice: the second one must not cost what is written
    after the first.
    """
    last = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        again = last > 0
        last = last or time.monotonic()
        if not again or (number == signal.SIGINT and time.monotonic() - last > AGAIN_S):
            raise KeyboardInterrupt

    both = (signal.SIGTERM, signal.SIGINT)
    kinds = [kind for kind in both if signal.getsignal(kind) is not signal.SIG_IGN]
    before = [signal.signal(kind, stop) for kind in kinds]
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {out} is not written")
        raise typer.Exit(130) from None
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


class Other(NamedTuple):
    """A network to compare with: the name of its rows, what was given, and what was loaded."""

    name: str
    source: str
    backbone: FrozenBackbone
    is_start: bool = False  # of the model's own training

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


def load_compared(
    sources: Sequence[str], model: str | Path, backbone: FrozenBackbone, taken: Collection[str]
) -> tuple[list[Other], tuple[str, ...]]:
    """Load the networks of --against, and the weights that the model's own training started from.

    Those are one of --against with the recorded sha256, or what the run keeps in RUN/init; where
    they are not to be had, a sentence says so. So it does where a network has the weights of
    another one, as the best of a run may be its start, by their hash. `taken` are names that rows
    of eval.json have.

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
    start, said = _find_start(model, backbone, others, names)
    if start is not None:
        named = start.name in names
        others = [start if other.name == start.name else other for other in others]
        others += [] if named else [start]
    different: list[Other] = []
    for other in others:
        if same_network(other.backbone, backbone, any_view=other.is_start):
            said.append(_same_weights_text(other, own_name(backbone.config.facts, names)))
        elif twin := next((e for e in different if same_network(e.backbone, other.backbone)), None):
            said.append(_same_weights_text(other, twin.name))
        else:
            different.append(other)
    return different, tuple(said)


def same_network(one: FrozenBackbone, other: FrozenBackbone, any_view: bool = False) -> bool:
    """Return whether two models are the same weights, flattened alike, and see images alike."""

    def identity(model: FrozenBackbone) -> tuple[Any, ...]:
        view = {} if any_view else model.view.config()
        return model.config.weights_sha256, model.config.whitening_sha256, view

    return identity(one) == identity(other)


def _same_weights_text(other: Other, name: str) -> str:
    start = ", which it started from," if other.is_start else ""
    sha256 = other.backbone.config.weights_sha256[:16]
    return (
        f"{name} and {other.name}{start} are the same weights (sha256 {sha256}): they are measured "
        "once, and there is nothing to compare."
    )


def _find_start(
    model: str | Path, backbone: FrozenBackbone, others: Sequence[Other], names: Collection[str]
) -> tuple[Other | None, list[str]]:
    """Find the weights that a model's own training started from, as `load_compared` says."""
    facts = backbone.config.facts
    sha256 = str(_table(facts, "recipe").get("init") or "")
    if not sha256:  # random weights, or no training of ours
        return None, []
    for other in others:
        if other.backbone.config.weights_sha256 == sha256:
            return other._replace(is_start=True), []
    source = str(_table(facts, "init").get("source") or "")
    kept = Path(model) / "init"
    try:
        if not kept.is_dir():
            raise UserError("it is not kept with the model")
        start = load_backbone(kept)
        if start.config.weights_sha256 != sha256:
            raise UserError("what is there now are others")
    except UserError as error:
        named = f"{source or 'weights'} with sha256 {sha256[:16]}"
        return None, [f"Not compared with its own start, {named}: {error}; name it with --against."]
    return Other(short_name(source or "start", names), source, start, is_start=True), []


def _table(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of an export's metadata, which may be anything: {} where it is not one."""
    table = facts.get(key)
    return table if isinstance(table, dict) else {}


def short_name(source: str, taken: Collection[str]) -> str:
    """Make a readable name of a source's last part, and of more of it while that one is taken."""
    parts = [part for part in re.split(r"[:/\\]+", source) if part.strip(".")] or ["other"]
    suffix = r"\.(safetensors|pth|pt|bin|tar)(?=(@\d+)?$)"
    parts[-1] = re.sub(suffix, "", parts[-1]) or parts[-1]
    parts = [re.sub(r"[^\w.+-]+", "-", part) for part in parts]
    tries = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
    tries = [name[-LONGEST_NAME:].strip("-") for name in tries]
    tries += [f"{tries[0]}-{number}" for number in range(2, len(taken) + 3)]
    return next(name for name in tries if name not in taken)


def embed_model(
    model: Path,
    backbone: FrozenBackbone,
    splits: tuple[Split, Split],
    others: Sequence[Other],
    *,
    embedding: Embedding,
    untrained_seed: int | None,
    left_out: list[str],
) -> Sets:
    """Embed both splits by a model; what it has to beat and other networks when their turn comes.

    Without a seed there is no baseline of random weights. `left_out` gets a sentence on pixels that
    are too many. The device of `embedding` is torch's.
    """
    config = backbone.config
    kept = {each.name: _kept_features(model, backbone, each, embedding) for each in splits}
    saved = {name: rows for name, rows in kept.items() if rows is not None}
    names = ("ssl", *BASELINES, *(other.name for other in others))
    known_as = own_name(config.facts, names)
    sets: Sets = {
        "ssl": _embed_both(
            known_as,
            backbone.backbone,
            view=backbone.view,
            splits=splits,
            embedding=embedding,
            on_bad=report_bad,
            saved=saved,
        )
    }
    for other in others:  # each is embedded when its turn comes
        sets[other.name] = partial(embed_other, other, splits, embedding)
    if untrained_seed is not None:
        sets["random"] = partial(
            _embed_both,
            "random",
            random_backbone(config.backbone, config.crop_px, untrained_seed),
            view=backbone.view,
            splits=splits,
            embedding=embedding,
            on_bad=report_bad,
        )
    sets["pixels"] = partial(
        embed_pixels,
        view=backbone.view,
        splits=splits,
        left_out=left_out,
        canvas_px=backbone.view.canvas_px,
        batch_size=embedding.batch_size,
        num_workers=embedding.num_workers,
        device=embedding.device,
    )
    return sets


def _embed_both(
    name: str,
    network: nn.Module,
    *,
    view: EvalView,
    splits: tuple[Split, Split],
    embedding: Embedding,
    on_bad: OnBad,
    saved: Mapping[str, Embeddings] = MappingProxyType({}),
) -> Pair:
    """Embed train and test by a network; `saved` has features by split that are known."""
    return embed_pair(
        name,
        network,
        view=view,
        splits=splits,
        saved=saved,
        progress=progress,
        canvas_px=view.canvas_px,
        batch_size=embedding.batch_size,
        num_workers=embedding.num_workers,
        device=embedding.device,
        on_bad=on_bad,
    )


def _kept_features(
    model: Path, backbone: FrozenBackbone, split: Split, embedding: Embedding
) -> Embeddings | None:
    """Read RUN/features/SPLIT where it is just what would be embedded now; None where it is not.

    A file that is not there is written, if it is not too large: `report` and `search` read it.
    """
    file = model / "features" / f"{split.name}.safetensors"
    canvas_px = backbone.view.canvas_px
    facts = backbone.features_metadata(backbone.view, split)
    writable = (model / "recipe.json").is_file() and os.access(model, os.W_OK)
    small = len(split) * backbone.num_features * 4 <= MOST_KEPT_BYTES
    new = writable and small and not file.exists()
    if new:
        (model / "features").mkdir(exist_ok=True)
        embed_to_file(
            file,
            backbone.backbone.to(embedding.device),
            backbone.view,
            split,
            facts,
            canvas_px=canvas_px,
            bar=partial(progress, f"embed {split.name}"),
            batch_size=embedding.batch_size,
            num_workers=embedding.num_workers,
            device=embedding.device,
            on_bad=report_bad,
        )
    rows = saved_embeddings(file, {**facts, "canvas_px": canvas_px}, split)
    if rows is not None:
        say(f"{split.name}: {'written to' if new else 'read from'} {file}")
    return rows


def model_metadata(
    backbone: FrozenBackbone, splits: tuple[Split, Split], others: Sequence[Other]
) -> dict[str, Any]:
    """Return what eval.json says of where the features come from: weights, view, data."""
    config = backbone.config
    recipe = _table(backbone.config.facts, "recipe")
    return {
        "name": config.facts.get("name", ""),
        "backbone": config.backbone.model_dump(),
        "backbone_sha256": config.weights_sha256,
        "view": backbone.view.config(),
        "canvas_px": backbone.view.canvas_px,
        **data_metadata(splits[1]),
        **backbone.checkpoint_metadata,
        **{key: config.facts[key] for key in ("step", "checkpoint_reason") if key in config.facts},
        **({"steps": recipe["steps"]} if "steps" in recipe else {}),
        "train_split": splits[0].name,
        "classes": list(splits[0].index.manifest.classes),
        **({"against": [other.metadata() for other in others]} if others else {}),
    }


def embed_other(other: Other, splits: tuple[Split, Split], embedding: Embedding) -> Pair:
    """Embed train and test by another network, through its own view."""
    train, test = splits
    model, (own_train, own_test) = other.backbone.matched(train, test)
    return _embed_both(
        other.name,
        model.backbone,
        view=model.view,
        splits=(own_train, own_test),
        embedding=embedding,
        on_bad=lambda bad: None,  # reported with the first features
    )


def find_leaks(splits: tuple[Split, Split], sets: Sets, num_workers: int) -> Leaks | None:
    """Find the test samples that are in train; pixels that it needs as features stay in `sets`.

    A satellite looks for them; where there is none, a line says so.
    """
    finders = offered("leaks")
    if not finders:
        say("no check whether test samples are in train, too: this installation has none")
        return None
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

    leaks: Leaks = finders[0].find_leaks(
        splits, rows, pixels, num_workers=num_workers, progress=progress
    )
    return leaks
