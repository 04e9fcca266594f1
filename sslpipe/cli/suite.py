"""What `sslpipe evaluate suite` embeds, keeps and prints."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from sslpipe.cli.against import Compared, Other, embed_other, load_compared
from sslpipe.cli.embed import features_metadata
from sslpipe.cli.suite_tables import print_suite
from sslpipe.cli.terminal import progress, report_bad, say, say_weights, show
from sslpipe.curate.leaks import Leaks
from sslpipe.curate.leaks import find_leaks as find_leaks_in
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings, check_comparable, embed_to_file, load_embeddings
from sslpipe.evaluation.features import (
    data_metadata,
    embed_pair,
    embed_pixels,
    random_backbone,
    saved_embeddings,
    two_splits,
)
from sslpipe.evaluation.leakage import leakage_sentence
from sslpipe.evaluation.protocols import Pair
from sslpipe.evaluation.suite import check_labelled
from sslpipe.evaluation.suite_file import own_name
from sslpipe.evaluation.verdict import unfinished
from sslpipe.export.load import FrozenBackbone, Weights, checkpoint_metadata, load_backbone
from sslpipe.recipe.shortened import shortened_note

AGAIN_S = 1.0  # a Ctrl-C so much later than the first signal ends what is being written
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
        raise typer.Exit(130 if "interrupted" in missing.values() else 2)


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C raise KeyboardInterrupt, and a later Ctrl-C again.

    Schedulers and `timeout` often send SIGTERM twice: the second one must not cost what is written
    after the first.
    """
    last = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        again, last = last > 0, last or time.monotonic()
        if not again or (number == signal.SIGINT and time.monotonic() - last > AGAIN_S):
            raise KeyboardInterrupt

    both = (signal.SIGTERM, signal.SIGINT)
    kinds = [kind for kind in both if signal.getsignal(kind) is not signal.SIG_IGN]
    before = [signal.signal(kind, stop) for kind in kinds]
    try:
        yield
    except KeyboardInterrupt:
        folder = kept_folder(out)
        resumes = f"; the same command resumes from {folder}" if folder.is_dir() else ""
        say(f"interrupted: {out} is not written{resumes}")
        raise typer.Exit(130) from None
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def kept_folder(out: Path) -> Path:
    """Return where the measurements of an unfinished suite are, beside its file."""
    return out.with_name(f".{out.name}.parts")


def on_device(pair: Pair | Callable[[], Pair], device: str) -> Pair | Callable[[], Pair]:
    """Move features, or those that a function will return."""

    def moved(made: Pair) -> Pair:
        return made[0].to(device), made[1].to(device)

    if callable(pair):
        make = pair
        return lambda: moved(make())
    return moved(pair)


def embed_model(
    model: str,
    data: str | None,
    names: tuple[str, str],
    *,
    against: Sequence[str],
    untrained_seed: int | None,
    taken: Collection[str],
    checkpoint: str | None,
    weights: Weights | None,
    canvas_px: int | None,
    **options: Any,
) -> tuple[Sets, dict[str, Any], Compared]:
    """Embed both splits by a model, by what it has to beat and by other networks.

    Args:
        model: An export or run.
        data: The dataset.json.
        names: Of the splits train and test.
        against: Sources of other networks.
        untrained_seed: Of the random weights; None: no baselines.
        taken: Names of features that another network must not get.
        checkpoint: Of a run.
        weights: Of a run.
        canvas_px: As in `embed`; None: by each view.
        options: batch_size, num_workers and device of `embed`.

    Returns:
        Name -> features, what eval.json says of where they come from, and the other networks.
    """
    if data is None:
        raise DataError("a model needs --data DIR/dataset.json to embed")
    # what can be refused, before anything is embedded
    backbone = load_backbone(model, checkpoint=checkpoint, weights=weights)
    say_weights(backbone)
    index = load_index(data)
    config, canvas = backbone.config, canvas_px or backbone.view.canvas_px
    compared = load_compared(against, model, backbone, taken)
    splits = two_splits(index, *names)
    for split in splits:
        check_labelled(split.name, split.labels)
    # the model and what costs nothing; then the others
    untrained = None
    if untrained_seed is not None:
        untrained = random_backbone(config.backbone, config.crop_px, untrained_seed)
    options |= {"on_bad": report_bad}
    folder = Path(model) / "features"  # of a run
    writable = (Path(model) / "recipe.json").is_file() and os.access(model, os.W_OK)
    saved = _features_of_run(folder, writable, backbone, index, splits, canvas, **options)
    own: dict[str, Any] = {"view": backbone.view, "splits": splits, "canvas_px": canvas, **options}
    own["progress"] = progress
    known_as = own_name(config.facts, [*taken, *(other.name for other in compared.others)])
    sets: Sets = {"ssl": embed_pair(known_as, backbone.backbone, saved=saved, **own)}

    def embed_kept(other: Other) -> Pair:
        """Embed by another network; a run keeps the features, an export is not written to."""
        if writable:
            return embed_other(other, index, splits, folder / "against", canvas_px, **options)
        with TemporaryDirectory() as temporary:
            return embed_other(other, index, splits, Path(temporary), canvas_px, **options)

    # the start first: each is embedded when its turn comes, and kept once it is measured
    others = sorted(compared.others, key=lambda other: other.name != compared.start)
    sets |= {other.name: partial(embed_kept, other) for other in others}
    if untrained is not None:
        sets["random"] = partial(embed_pair, "random", untrained, **own)
    sets["pixels"] = partial(embed_pixels, **own)
    # where the features come from: weights, view, data
    trained = config.facts.get("recipe")
    recipe = trained if isinstance(trained, dict) else {}
    note = shortened_note(recipe)
    facts = {
        "name": config.facts.get("name", ""),
        "backbone": config.backbone.model_dump(),
        "backbone_sha256": config.weights_sha256,
        "view": backbone.view.config(),
        "canvas_px": canvas,
        **data_metadata(index, names[1]),
        **checkpoint_metadata(backbone),
        **({"step": config.facts["step"]} if "step" in config.facts else {}),
        **({"steps": recipe["steps"]} if "steps" in recipe else {}),
        **({"shortened": note} if note else {}),
        "train_split": names[0],
        "classes": list(index.manifest.classes),
        **({"against": [other.metadata() for other in others]} if others else {}),
    }
    return sets, facts, compared


def _features_of_run(
    folder: Path,
    writable: bool,
    backbone: FrozenBackbone,
    index: DatasetIndex,
    splits: Sequence[Split],
    canvas_px: int,
    **options: Any,
) -> dict[str, Embeddings]:
    """Read FOLDER/SPLIT.safetensors where they are just what would be embedded now.

    Args:
        folder: RUN/features; an export has no such folder.
        writable: Whether those that are not there are written, for the report of the run, up to
            MOST_KEPT_BYTES a split.
        backbone: The run's.
        index: The data set.
        splits: Of it.
        canvas_px: As they would be embedded.
        options: batch_size, num_workers, device, on_bad of `embed_to_file`.

    Returns:
        Split -> features, of those that are there; each is a line on the console.
    """
    saved = {}
    for split in splits:
        file = folder / f"{split.name}.safetensors"
        facts = features_metadata(backbone, backbone.view, index, split.name)
        small = len(split) * backbone.config.num_features * 4 <= MOST_KEPT_BYTES
        if writable and small and not file.exists():
            embed_to_file(
                file,
                backbone.backbone.to(options["device"]),
                backbone.view,
                split,
                facts,
                canvas_px=canvas_px,
                bar=partial(progress, f"embed {split.name}"),
                **options,
            )
        identity = {**facts, "canvas_px": canvas_px, "dtype": "float32"}
        rows = saved_embeddings(file, identity, split)
        if rows is not None:
            saved[split.name] = rows
            say(f"{split.name}: read from {file}")
    return saved


def find_leaks(data: str, names: tuple[str, str], sets: Sets, num_workers: int) -> Leaks:
    """Find the test samples that are in train; pixels that it needs as features stay in `sets`."""
    index = load_index(data)
    train, test = map(index.split, names)
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

    return find_leaks_in((train, test), rows, pixels, num_workers=num_workers, progress=progress)


def load_features(texts: Sequence[str], taken: Collection[str]) -> Sets:
    """Read the features of each NAME=TRAIN,TEST, whose names must differ from each other's.

    Args:
        texts: As they are typed.
        taken: Further names that they must not have.
    """
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
