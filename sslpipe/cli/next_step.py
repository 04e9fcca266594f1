"""The last line of a command: what to type next, with the user's own paths, as it stands.

It goes to stderr, so that what is piped stays as it is, and comes from the first process alone.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sslpipe.cli.terminal import say_once
from sslpipe.data.index import DatasetIndex, manifest_url
from sslpipe.registry.plugins import requested
from sslpipe.run.console import LastingStream

# of a clone: any images, on any machine
FIRST_RECIPE = Path("recipes/my_images_small.toml")
ADAPTING = Path("recipes/adapt_mobile.toml")  # the same, from existing weights


def say_next(*words: object, when: str = "") -> None:
    """Print `Next: sslpipe WORDS`.

    Args:
        words: Of the command; those that need it are quoted.
        when: What must happen before, as in " when the job has ended".
    """
    plugins = [word for name in requested() for word in ("--plugin", name)]
    say_next_program("sslpipe", *plugins, *words, when=when)


def say_next_program(*words: object, when: str = "") -> None:
    """Print `Next: WORDS`, the command of another program; see `say_next`."""
    _say(f"Next{when}", words)


def _say(title: str, words: Sequence[object]) -> None:
    # scripts know what comes next; a command whose output is lost has nothing after it
    if os.environ.get("SSLPIPE_NEXT") != "0" and _output_arrived():
        say_once(f"{title}: {shlex.join(map(str, words))}")


def _output_arrived() -> bool:
    """Write what is pending on stdout; whether none of the output was lost."""
    stream = sys.stdout
    if stream is not None:
        stream.flush()
    return not (isinstance(stream, LastingStream) and stream.error)


def say_same(option: str) -> None:
    """Print `Next: ` this process's own command with a further option; see `say_next`."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    say_next_program("sslpipe", *words[:end], option, *words[end:])


def after_shards(folder: Path, splits: Sequence[str]) -> None:
    """Look at the images of a data set that was written or indexed."""
    split = [] if "train" in splits else ["--split", splits[0]]
    say_next("shards", "show", folder, *split, "--out", "samples.png")


def after_a_look(data: str | Path, *overrides: str) -> None:
    """Check what a training of a data set will do, from random or existing weights.

    Said where there are recipes to name.

    Args:
        data: dataset.json or its folder, a path or a URL.
        overrides: Of the recipe.
    """
    if FIRST_RECIPE.is_file():
        say_next("check", FIRST_RECIPE, "--data", manifest_url(data), *overrides)
    if ADAPTING.is_file():
        start = ["--init", "WEIGHTS.pth", "--data", manifest_url(data)]
        _say("Or, from existing weights", ["sslpipe", "check", ADAPTING, *start, *overrides])


def training(
    recipe: Path,
    overrides: Sequence[str] | None,
    data: str,
    init: str | None = None,
    checkpoint: str | None = None,
    weights: str | None = None,
) -> list[object]:
    """Return what `check`, `preview` and `train` share of their words."""
    start = [] if init is None else ["--init", init]
    start += [] if checkpoint is None else ["--checkpoint", checkpoint]
    start += [] if weights is None else ["--weights", weights]
    return [recipe, *(overrides or []), "--data", data, *start]


def new_run_dir(name: str) -> Path:
    """Return a run directory that is not there yet: runs/NAME, runs/NAME-2, ..."""
    tries = (Path("runs") / (name if k == 1 else f"{name}-{k}") for k in range(1, 1000))
    return next(path for path in tries if not path.exists())


def after_train(run_dir: Path, data: str, index: DatasetIndex) -> None:
    """Measure the run, where the data set has labels to measure with; else embed and show it."""
    both = {"train", "test"} <= {*index.manifest.splits}
    if both and (index.split("test").labels >= 0).any():
        out = run_dir / "eval.json"
        say_next("evaluate", "suite", run_dir, "--data", data, "--out", out)
    elif both:
        splits = ["--split", "train", "--split", "test"]
        features = run_dir / "features" / "{split}.safetensors"
        say_next("embed", run_dir, "--data", data, *splits, "--out", features)
    else:
        say_next("report", run_dir, "--data", data)


def after_embed(files: dict[str, Path], data: str, index: DatasetIndex) -> None:
    """Score the features, by each other where there is one split; without labels look at them."""
    last = [*files][-1]
    run_dir = files[last].parent.parent
    unlabelled = bool((index.split(last).labels < 0).any())
    if unlabelled and last == "test" and (run_dir / "recipe.json").is_file():
        say_next("report", run_dir, "--data", data)
    elif unlabelled:
        where = files[last].with_name("outliers")
        say_next("curate", "outliers", files[last], "--data", data, "--out", where)
    elif {"train", "test"} <= {*files}:
        k = min(20, len(index.split("train")))
        say_next("evaluate", "knn", files["train"], files["test"], "--k", k)
    else:
        k = min(20, len(index.split(last)) - 1)
        say_next("evaluate", *_itself("knn", files[last]), "--k", k)


def after_evaluation(name: str, train: Path, test: Path) -> None:
    """Show the run that the features are of; else measure them in another way."""
    run_dir = test.parent.parent
    if (run_dir / "recipe.json").is_file():
        say_next("report", run_dir)
    elif name == "geometry":  # the last of them
        return
    elif train == test:
        say_next("evaluate", *_itself("retrieval" if name == "knn" else "geometry", test))
    else:
        say_next("evaluate", "linear" if name == "knn" else "geometry", train, test)


def _itself(name: str, file: Path) -> list[object]:
    """Return the words of an evaluation of one file, each row against all others."""
    return [name, file, file, *([] if name == "geometry" else ["--exclude-same-id"])]


def after_suite(model: str | None, data: str | None) -> None:
    """Show a run; of other weights write the features that were measured."""
    if model is None or data is None:
        return
    if (Path(model) / "recipe.json").is_file():
        say_next("report", model, "--data", data)
    else:
        splits = ["--split", "train", "--split", "test"]
        say_next("embed", model, "--data", data, *splits, "--out", "features/{split}.safetensors")


def after_report(run_dir: Path) -> None:
    """Write the backbone for other programs, beside the rest of the run."""
    if not (run_dir / "backbone").exists():
        say_next("export", run_dir, "--out", run_dir / "backbone")
