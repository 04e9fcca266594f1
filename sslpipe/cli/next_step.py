"""What to type next: a normal day, the last line of every `--help`, and of what a command prints.

The line after a command has the user's own paths and works as it stands. It goes to stderr, so that
what is piped stays as it is, and comes from the first process alone.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sslpipe.cli.terminal import break_command, list_examples, say_once
from sslpipe.errors import UserError
from sslpipe.run.console import LastingStream
from sslpipe.satellites import gather

if TYPE_CHECKING:
    from sslpipe.data.index import DatasetIndex

# any images, on any machine
FIRST_RECIPE = Path("recipes/my_images_diet.toml")
ANY_WEIGHTS = "timm/NAME@WEIGHTS.pth"
LEAST_CLASSES = 4  # that labels can teach something
MOST_FITTED = 10**4  # samples: a larger data set is not planned on for a hint, which takes seconds
ADAPTING = Path("recipes/adapt_mobile.toml")  # the same, from pretrained weights

_TRAIN = "sslpipe train RECIPE --data DIR/dataset.json --run-dir RUN"
_SUITE = "sslpipe evaluate suite RUN --data DIR/dataset.json --out RUN/eval.json"
_REPORT = "sslpipe report RUN --data DIR/dataset.json"
_CHECK = "sslpipe check RECIPE --data DIR/dataset.json"

DAY = """Self-supervised contrastive pretraining of image encoders. A normal day:

  sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1
      convert images to shards
  sslpipe check RECIPE --data out/photos/dataset.json
      see what a training will do and cost
  sslpipe train RECIPE --data out/photos/dataset.json --run-dir runs/photos
      train; the same command resumes
  sslpipe evaluate suite runs/photos --data out/photos/dataset.json --out runs/photos/eval.json
      did it help? With intervals, beside baselines
  sslpipe report runs/photos --data out/photos/dataset.json
      show the run in one HTML file

All commands: sslpipe --help. Options and examples: sslpipe COMMAND --help.
What a setting of a recipe means: sslpipe check --explain KEY."""

# command -> what is typed after it: a row for each of `app.COMMANDS`; a sub-command without a row
# has that of its group; satellites add theirs
_CORE = {
    "shards": _CHECK,
    "shards build": f"sslpipe shards show DIR --out samples.png, then {_CHECK}",
    "shards verify": "sslpipe shards build DIR --root IMAGES --skip-bad --overwrite",
    "check": f"sslpipe preview RECIPE --data DIR/dataset.json, then {_TRAIN}",
    "preview": _TRAIN,
    "train": f"sslpipe status RUN while it runs, then {_SUITE}",
    "status": f"when it is done, {_SUITE}",
    "runs": "sslpipe status RUN",
    "slurm": "sslpipe status RUN",
    "embed": "sslpipe evaluate knn TRAIN.safetensors TEST.safetensors",
    "whiten": "sslpipe embed EXPORT --data DIR/dataset.json --split test --out test.safetensors",
    "evaluate": _REPORT,
    "report": "sslpipe export RUN --out FOLDER",
    "export": "sslpipe embed FOLDER --data DIR/dataset.json --split test --out test.safetensors",
}
NEXT: dict[str, str] = gather("commands", "NEXT", _CORE)


def add_next(name: str, command: Any) -> None:
    """End the help of a command, "train" or "shards build", with its examples and the next command.

    The command's epilog is changed, once.
    """
    command.epilog = command.epilog or list_examples([f"sslpipe {name}"])
    following = NEXT.get(name) or NEXT.get(name.partition(" ")[0])
    if following is not None and "Next: " not in command.epilog:
        first, *then = following.split(", then ")
        lines = [break_command(f"Next: {first}", indent=0)]
        lines += [f"  {break_command(f'then {each}', indent=2)}" for each in then]
        command.epilog += "\n\n\b\n" + ",\n".join(lines)


def plugin_words() -> list[str]:
    """Return the words `--plugin MODULE` that this process was started with."""
    plugins = sys.modules.get("sslpipe.registry.plugins")  # else none was asked for
    names = [] if plugins is None else plugins.requested()
    return [word for name in names for word in ("--plugin", name)]


def say_next(words: Sequence[object], when: str = "") -> None:
    """Print `Next: sslpipe WORDS`; `when` something has happened, " when the job has ended"."""
    say_next_program(["sslpipe", *plugin_words(), *words], title=f"Next{when}")


def say_next_program(words: Sequence[object], title: str = "Next") -> None:
    """Print `Next: WORDS`, the command of another program; see `say_next`."""
    stream = sys.stdout
    if stream is not None:
        stream.flush()
    # scripts know what comes next; a command whose output is lost has nothing after it
    lost = isinstance(stream, LastingStream) and stream.error is not None
    if os.environ.get("SSLPIPE_NEXT") != "0" and not lost:
        say_once(f"{title}: {shlex.join(map(str, words))}")


def check_words(
    recipe: Path, data: str | Path, overrides: Sequence[str] = (), init: object = None
) -> list[object]:
    """Return the words of a `check` that can be typed as they are.

    Args:
        recipe: A shipped one. Settings that this data set needs are added: those of a small one,
            and a split where none is called train.
        data: The data set.
        overrides: Of the recipe.
        init: The weights, or a placeholder of such; None: random ones.
    """
    from sslpipe.api import fitting_settings
    from sslpipe.data.index import load_index, manifest_url

    index = load_index(str(data))
    if "train" not in index.manifest.splits:
        overrides = [f"data.split={next(iter(index.manifest.splits))}", *overrides]
    shards = [shard for split in index.manifest.splits.values() for shard in split]
    fitting = ""
    if sum(shard.samples for shard in shards) <= MOST_FITTED:
        fitting = fitting_settings(recipe, overrides, index, from_weights=init is not None)
    start = [] if init is None else ["--init", init]
    return ["check", recipe, *start, "--data", manifest_url(data), *overrides, *fitting.split()]


def after_a_look(data: str | Path, *overrides: str) -> None:
    """Check a training of a data set, from random and pretrained weights, if recipes are there."""
    from sslpipe.recipe.reading import shipped_recipe

    if (first := shipped_recipe(FIRST_RECIPE)) is not None:
        say_next(check_words(first, data, overrides))
    if (adapting := shipped_recipe(ADAPTING)) is not None:
        words = check_words(adapting, data, overrides, init=ANY_WEIGHTS)
        say_next_program(["sslpipe", *words], title="Or, from pretrained weights")
    if not overrides:  # a training by labels has no such settings
        after_labels(data)


def after_labels(data: str | Path, column: str | None = None) -> None:
    """Check a training by labels, where a data set has classes of several images.

    Args:
        data: The data set.
        column: Whose values are the classes; None: the labels.
    """
    import numpy as np

    from sslpipe.data.index import load_index, relabelled
    from sslpipe.data.subsets import with_a_partner
    from sslpipe.recipe.reading import labelled_recipes

    recipes = labelled_recipes(column)
    if not recipes:
        return
    index = load_index(str(data))
    splits = index.manifest.splits
    split = index.split("train" if "train" in splits else next(iter(splits)))
    labels = relabelled(split, column).labels
    classes = len(np.unique(labels[labels >= 0]))
    if classes < LEAST_CLASSES or not with_a_partner(labels):
        return
    title = f"Or, by the labels of {classes:,} classes"
    if column is not None:
        title = f"Or, by the {classes:,} values of {column} as classes"
    for recipe, settings in recipes:
        words = check_words(recipe, data, settings, init=ANY_WEIGHTS)
        say_next_program(["sslpipe", *words], title=title)


def new_run_dir(name: str) -> Path:
    """Return a run directory that is not there yet: runs/NAME, runs/NAME-2, ..."""
    tries = (Path("runs") / (name if k == 1 else f"{name}-{k}") for k in range(1, 1000))
    return next(path for path in tries if not path.exists())


def after_train(run_dir: Path, data: str, index: "DatasetIndex") -> None:
    """Measure the run, where the data set has labels to measure with; else look at neighbours.

    One that trained a part of a join is to stand beside the other parts again.
    """
    from sslpipe.run.description import RunDescription, read_description

    both = {"train", "test"} <= {*index.manifest.splits}
    if both and (index.split("test").labels >= 0).any():
        say_next(["evaluate", "suite", run_dir, "--data", data, "--out", run_dir / "eval.json"])
    elif "test" in index.manifest.splits:  # the report shows the neighbours of these
        out = run_dir / "features" / "test.safetensors"
        say_next(["embed", run_dir, "--data", data, "--split", "test", "--out", out])
    else:
        say_next(["report", run_dir, "--data", data])
    start = None
    with suppress(UserError):  # a finished run is none the worse for a hint that is not there
        start = read_description(run_dir, "run.json", RunDescription).init
    if start is not None and start.part and "choose" in NEXT:
        splits = index.manifest.splits
        split = [] if "train" in splits else ["--split", next(iter(splits))]
        words = ["choose", start.source, run_dir, "--data", data, *split]
        say_next(
            [*words, "--out", f"{run_dir}-joined"],
            when=", to join it with the other parts of its start",
        )


def after_embed(files: Mapping[str, Path], model: Path, data: str, index: "DatasetIndex") -> None:
    """Measure features by the labels of their splits, where these have any; else search them."""
    import numpy as np

    from sslpipe.data.subsets import with_a_partner

    labels = {split: index.split(split).labels for split in files}
    labelled = [split for split in files if with_a_partner(labels[split])]
    tests = [split for split in labelled if split != "train"]
    # of classes that train has; kNN can find no others
    trained = labels.get("train", np.zeros(0, np.int64))
    known = [split for split in tests if (np.intersect1d(labels[split], trained) >= 0).any()]
    if known:
        say_next(["evaluate", "knn", files["train"], files[known[0]]])
    elif labelled:
        file = files[[*tests, *labelled][0]]
        say_next(["evaluate", "retrieval", file, file, "--exclude-same-id"])
    elif "search" in NEXT:
        (file, *_) = files.values()
        say_next(["search", file, "QUERY.jpg", "--model", model, "--data", data])
