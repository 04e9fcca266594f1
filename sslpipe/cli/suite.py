"""`sslpipe evaluate suite`: a backbone beside pixels, random weights and other networks."""

import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from sslpipe.cli.against import Compared, Other, embed_others, features_folder, load_compared
from sslpipe.cli.columns import probed_columns
from sslpipe.cli.embed import keep_features, saved_features
from sslpipe.cli.next_step import after_suite
from sslpipe.cli.processes import start_alone
from sslpipe.cli.progress import progress
from sslpipe.cli.recipes import CanvasPx, Checkpoint, Device, NumWorkers, Weights
from sslpipe.cli.suite_tables import print_suite, renamed
from sslpipe.cli.terminal import console, report_bad, say_weights, write_json
from sslpipe.curate.leaks import Leaks, find_leaks
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import check_comparable, load_embeddings
from sslpipe.evaluation.features import (
    data_metadata,
    embed_pair,
    embed_pixels,
    random_backbone,
    two_splits,
)
from sslpipe.evaluation.leakage import leakage_sentence
from sslpipe.evaluation.protocols import Pair
from sslpipe.evaluation.suite import check_labelled, run_suite
from sslpipe.evaluation.suite_file import own_name
from sslpipe.evaluation.verdict import BASELINES, unfinished
from sslpipe.export.load import FrozenBackbone, checkpoint_metadata, load_backbone
from sslpipe.recipe.shortened import shortened_note

AGAIN_S = 1.0  # a Ctrl-C so much later than the first signal ends what is being written

Sets = dict[str, Pair | Callable[[], Pair]]  # name -> train and test, or what embeds them


def suite(
    model: Annotated[
        str | None, typer.Argument(help="A run directory, an export's folder, or other weights.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The dataset.json to embed.")] = None,
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("eval.json"),
    train_split: Annotated[str, typer.Option(help="The split with the labels to learn from.")] = (
        "train"
    ),
    test_split: Annotated[str, typer.Option(help="The split that is scored.")] = "test",
    features: Annotated[
        list[str] | None,
        typer.Option(help="A further set: NAME=TRAIN.safetensors,TEST.safetensors; repeatable."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Other weights to compare with, an export or run or what `sslpipe embed` takes: "
            "the same samples and protocols, its own view; repeatable. The weights that a run "
            "started from are compared with, too, where they can be had.",
        ),
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Measure pixels and random weights, too.")] = True,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Columns of the data set that a linear probe predicts, to see what else the "
            "features know; else its texts of 2 to 50 values, at most 8. Repeatable.",
        ),
    ] = None,
    leakage: Annotated[
        bool,
        typer.Option(help="Look for test samples that are in train, and score without them, too."),
    ] = True,
    search: Annotated[str, typer.Option(help="torch, or faiss: the same neighbours.")] = "torch",
    seed: Annotated[int, typer.Option(help="Of the draws of labels and the hold-out.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Images embedded at a time.")] = 256,
    canvas_px: CanvasPx = None,
    num_workers: NumWorkers = 2,
    device: Device = "auto",
    checkpoint: Checkpoint = None,
    weights: Weights = None,
) -> None:
    """Every evaluation of a backbone beside raw pixels, random weights and other networks.

    One table: kNN with all, 100 and 10 labels per class, plain and whitened, and a linear probe;
    Recall@1 and MAP@R where train has not the classes of test. The same protocols, samples and
    draws for every row. Ctrl-C or SIGTERM writes what is measured; the same command resumes.
    """
    target = start_alone("suite", device)
    sets: Sets = {}  # the most wanted first: what is interrupted has these
    given = _load_features(features or [], taken=() if model is None else ("ssl", *BASELINES))
    probed = probed_columns(model, data, (train_split, test_split), columns)
    if model is None and against:
        raise DataError("--against is compared with a model; name an export or a run before it")
    if model is None and not features:
        raise DataError(
            "nothing is named to evaluate: give a run, an export or other weights with --data, or "
            "--features NAME=TRAIN.safetensors,TEST.safetensors"
        )
    not_measured = [*probed.left_out]
    if leakage and model is None:
        not_measured.append("test samples that are in train: name a model and --data")
    metadata: dict[str, Any] = {"seed": seed}
    compared, leaks = Compared([]), None
    with _stoppable(out):
        if model is not None:
            sets, found, compared = _embed_model(
                model,
                data,
                (train_split, test_split),
                against=against or [],
                untrained_seed=seed if baselines else None,
                taken={"ssl", *BASELINES, *given},
                checkpoint=checkpoint,
                weights=weights,
                canvas_px=canvas_px,
                batch_size=batch_size,
                num_workers=num_workers,
                device=target,
            )
            metadata |= found
            if leakage:
                leaks = _find_leaks(str(data), (train_split, test_split), sets, num_workers)
            if not baselines:
                del sets["pixels"]
        own = own_name(metadata, [*sets, *given])
        last = {name: sets.pop(name) for name in BASELINES if name in sets}
        sets |= given | last
        # the numbers
        report = run_suite(
            {name: _on_device(pair, target) for name, pair in sets.items()},
            metadata,
            against=[other.name for other in compared.others],
            start=compared.start,
            not_compared=compared.not_compared,
            columns=probed.codes,
            not_measured=not_measured,
            leaked=None if leaks is None else leaks.ids,
            leaked_by="" if leaks is None else leaks.how,
            search=search,  # type: ignore[arg-type]
            seed=seed,
            say=lambda text: console.print(renamed(text, own), highlight=False, markup=False),
            progress=lambda title, total: progress(renamed(title, own), total),
            keep=kept_folder(out),
        )
        write_json(out, report)
        if "incomplete" not in report:
            shutil.rmtree(kept_folder(out), ignore_errors=True)
        _print_report(report, out)
    after_suite(model, data)


def _print_report(report: dict[str, Any], out: Path) -> None:
    """Print the answer, the tables, and what is missing; end where sets are."""
    if note := unfinished(report["facts"]):
        Console().print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    Console().print(report["verdict"], highlight=False, markup=False, soft_wrap=True)
    print_suite(report)
    if "leakage" in report:
        Console().print(leakage_sentence(report["leakage"]), highlight=False, markup=False)
    for sentence in report["left_out"]:
        Console().print(f"not measured: {sentence}", highlight=False)
    Console().print(f"{len(report['rows'])} numbers in {out}", highlight=False)
    missing = report.get("incomplete", {})
    if missing:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        text = f"error: not in {out}: {reasons}; the same command measures all that is missing"
        console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130 if "interrupted" in missing.values() else 2)


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
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
        text = f"interrupted: {out} is not written"
        console.print(text + resumes, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


MOST_KEPT_PIXELS = 2**28  # bytes


def kept_folder(out: Path) -> Path:
    """Return where the measurements of an unfinished suite are, beside its file."""
    return out.with_name(f".{out.name}.parts")


def _on_device(pair: Pair | Callable[[], Pair], device: str) -> Pair | Callable[[], Pair]:
    """Move features, or those that a function will return."""

    def moved(made: Pair) -> Pair:
        return made[0].to(device), made[1].to(device)

    if callable(pair):
        make = pair
        return lambda: moved(make())
    return moved(pair)


def _embed_model(
    model: str,
    data: str | None,
    names: tuple[str, str],
    *,
    against: Sequence[str],
    untrained_seed: int | None,
    taken: Collection[str],
    checkpoint: str | None,
    weights: Weights,
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
    own: dict[str, Any] = {"view": backbone.view, "splits": splits, "canvas_px": canvas, **options}
    own |= {"progress": progress, "on_bad": report_bad}
    keep_features(
        Path(model), backbone, index, splits, canvas_px=canvas, on_bad=report_bad, **options
    )
    saved = saved_features(Path(model), backbone, index, splits, canvas)
    known_as = own_name(config.facts, [*taken, *(other.name for other in compared.others)])
    sets: Sets = {"ssl": embed_pair(known_as, backbone.backbone, saved=saved, **own)}

    def embed_other(other: Other) -> Pair:
        with features_folder(Path(model)) as folder:
            kept: dict[str, Any] = {"folder": folder, "canvas_px": canvas_px, **options}
            return embed_others([other], index, splits, **kept)[other.name]

    # the start first: each is embedded when its turn comes, and kept once it is measured
    others = sorted(compared.others, key=lambda other: other.name != compared.start)
    sets |= {other.name: partial(embed_other, other) for other in others}
    if untrained is not None:
        sets["random"] = partial(embed_pair, "random", untrained, **own)
    sets["pixels"] = partial(embed_pixels, **own)
    facts = _origin(backbone, index, names, canvas)
    if others:
        facts["against"] = [other.metadata() for other in others]
    return sets, facts, compared


def _origin(
    backbone: FrozenBackbone, index: DatasetIndex, names: tuple[str, str], canvas_px: int
) -> dict[str, Any]:
    """Return what eval.json says of where the features come from: weights, view, data."""
    config, (train, test) = backbone.config, names
    trained = config.facts.get("recipe")
    recipe = trained if isinstance(trained, dict) else {}
    note = shortened_note(recipe)
    return {
        "name": config.facts.get("name", ""),
        "backbone": config.backbone.model_dump(),
        "backbone_sha256": config.weights_sha256,
        "view": backbone.view.config(),
        "canvas_px": canvas_px,
        **data_metadata(index, test),
        **checkpoint_metadata(backbone),
        **({"step": config.facts["step"]} if "step" in config.facts else {}),
        **({"steps": recipe["steps"]} if "steps" in recipe else {}),
        **({"shortened": note} if note else {}),
        "train_split": train,
        "classes": list(index.manifest.classes),
    }


def _find_leaks(data: str, names: tuple[str, str], sets: Sets, num_workers: int) -> Leaks:
    """Find the test samples that are in train; pixels that it needs as features stay in `sets`."""
    index = load_index(data)
    train, test = map(index.split, names)
    rows = sets["ssl"]
    assert not callable(rows)  # it is embedded at once

    def pixels() -> Pair:
        made = sets["pixels"]
        if callable(made):
            console.print("pixels: features", highlight=False, markup=False)
            made = made()
            if sum(rows.features.nbytes for rows in made) <= MOST_KEPT_PIXELS:
                sets["pixels"] = made  # else made again, in seconds, when their turn comes
        return made

    return find_leaks((train, test), rows, pixels, num_workers=num_workers, progress=progress)


def _load_features(texts: Sequence[str], taken: Collection[str]) -> Sets:
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
