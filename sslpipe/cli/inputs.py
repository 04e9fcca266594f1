"""What a command reads and checks first: a mistake is reported before torch is imported.

The library checks the same and more when it reads; here stands what needs only names and small
files.
"""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from sslpipe.cli.options import MOST_SEED
from sslpipe.errors import DataError, UserError, did_you_mean, shown

if TYPE_CHECKING:
    from sslpipe.data.index import DatasetIndex
    from sslpipe.recipe import FinetuneRecipe, Recipe

FEATURE_SUFFIXES = (".safetensors", ".npz")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def open_data(location: str, *splits: str, allow_pipe: bool = False) -> "DatasetIndex":
    """Read a data set's index, and check that some of its splits are there.

    Args:
        location: dataset.json or its folder, a path or a URL.
        splits: Their names; their files are checked where they are local.
        allow_pipe: Whether shards may be the output of commands.

    Raises:
        DataError: The index is wrong, a split is not in it, or a shard is missing.
    """
    from sslpipe.data.index import load_index
    from sslpipe.data.storage import is_remote

    index = load_index(location, allow_pipe=allow_pipe)
    for split in splits:
        index.split(split)
        if not is_remote(index.folder):  # else a request a shard: once is enough
            index.check_files(split)
    return index


def recorded_in(path: Path) -> Path | None:
    """Return the run directory that a path is, or whose recipe.json it is; None for a recipe."""
    run_dir = path.parent if path.name == "recipe.json" else path
    return run_dir if (run_dir / "recipe.json").is_file() else None


def load_recipe_or_run(path: Path, overrides: Sequence[str]) -> "Recipe | FinetuneRecipe":
    """Read a recipe, or the one that a run has recorded, with overrides. Raises: UserError."""
    from sslpipe.recipe import load_recipe, parse_recipe
    from sslpipe.recipe.reading import RECORDED, apply_overrides
    from sslpipe.registry.plugins import made_with
    from sslpipe.run.records import plugins_of, read_description

    run_dir = recorded_in(path)
    if run_dir is None:
        return load_recipe(path, overrides)
    with made_with(plugins_of(run_dir)):
        tree = read_description(run_dir, RECORDED)
        apply_overrides(tree, overrides)
        return parse_recipe(tree, f"{run_dir}/{RECORDED}", recorded=True, overrides=overrides)


def parse_ids(texts: Sequence[str] | None) -> list[int] | None:
    """Read what --ids gave, separated by commas; in brackets, too. Raises: UserError."""
    if not texts:
        return None
    ids = [word for text in texts for word in re.split(r"[\s,]+", text.strip(" \t[],"))]
    for word in ids:
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise UserError(f"--ids {shown(word)} is no sample's id; write numbers, as in 469,523")
    return [int(word) for word in ids]


# of what takes two embeddings
_FILES = "data device erase gallery help out pca query whiten whiten-power"
_MODEL = "batch-size canvas-px checkpoint data device help num-workers out test-split train-split"
_MODEL += " weights"
# The options of each evaluation, which are the arguments of its function. That one needs torch; a
# test compares both.
EVALUATE = {
    name: {f"--{word}" for word in text.split()}
    for name, text in {
        "suite": f"{_MODEL} against baselines columns features leakage no-baselines no-leakage "
        "search seed",
        "few-shot": f"{_FILES} by draws k labels-per-class search seed temperature vote",
        "geometry": f"{_FILES} most-rows pairs seed",
        "knn": f"{_FILES} by exclude-same exclude-same-id k no-exclude-same-id search temperature "
        "vote",
        "linear": f"{_FILES} by exclude-same grid holdout seed",
        "nuisance": f"{_FILES} column holdout most-rows probe seed",
        "retrieval": f"{_FILES} by cross denominator exclude-same exclude-same-id ignore k lone "
        "no-exclude-same-id per-query similarity",
        "ridge": f"{_FILES} by exclude-same grid holdout seed",
        "sgd": f"{_FILES} batch-size epochs holdout rates seed",
        "verification": f"{_FILES} far folds pairs seed",
    }.items()
}
_COLUMN_OPTIONS = ("--by", "--column", "--columns", "--cross", "--erase", "--exclude-same")
_NO_EMBEDDINGS = ("--gallery", "--query", "--out", "--features", "--against")


def check_evaluate(words: Sequence[str]) -> None:
    """Check what the words behind `sslpipe evaluate` name, as far as they tell by themselves.

    The values of an evaluation's options are checked by its function, which needs torch.

    Raises:
        UserError: An option is unknown, a file of embeddings, a data set's index or a model is not
            there, or --out cannot be written.
    """
    if "--help" in words:
        return
    name, pairs = words[0], list(pairwise(words))  # a word and the one behind it
    known = EVALUATE.get(name)  # None: an evaluation of a package, or none at all
    for word in words[1:]:
        option = word.partition("=")[0]
        if word.startswith("--") and word != "--" and known is not None and option not in known:
            hint = did_you_mean(option, sorted(known))
            raise UserError(f"No such option: {option} of `evaluate {name}`{hint}")

    def given(option: str) -> list[str]:
        """The values of an option, as OPTION VALUE and as OPTION=VALUE."""
        start = f"{option}="
        apart = [word for before, word in pairs if before == option]
        return apart + [word.removeprefix(start) for word in words if word.startswith(start)]

    if name == "suite" and len(words) > 1 and not words[1].startswith("-"):
        check_model(words[1])
    for option in ("--out", "--per-query"):
        for out in given(option):
            check_file(Path(out), option)
    for seed in given("--seed"):
        if re.fullmatch(r"[+-]?[0-9]+", seed) and not 0 <= int(seed) <= MOST_SEED:
            raise UserError(f"--seed {shown(seed)}: a seed is 0 to 2^63 - 1")
    for data in given("--data"):
        from sslpipe.data.column_files import find_column

        columns = open_data(data).manifest.columns
        for option in _COLUMN_OPTIONS:
            for column in given(option):
                find_column(columns, column, data)
    for source in given("--against"):
        check_model(source)
    elsewhere = {word for option, word in pairs if option in _NO_EMBEDDINGS}
    others = (word for word in words if not word.startswith("-") and word not in elsewhere)
    check_features(Path(word) for word in others if word.endswith(FEATURE_SUFFIXES))


def check_export(path: Path) -> None:
    """Raise UserError where a path is not an export's folder."""
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds no config.json; name the folder of an export")


def check_model(source: str | Path | None) -> None:
    """Raise UserError where it is no source of weights: no export, run, file or name of one."""
    from sslpipe.weights.source import parse_source

    if source is not None:
        parse_source(source)


def check_init(source: str | None, run_dir: Path | None = None) -> None:
    """Raise UserError where an --init is no source of weights, and the run keeps none."""
    if run_dir is None or not (run_dir / "init").is_dir():
        check_model(source)


def check_run(run_dir: Path) -> None:
    """Raise UserError where a path is not the directory of a run that has begun."""
    if not (run_dir / "recipe.json").is_file():
        raise UserError(
            f"{run_dir} holds no run: there is no recipe.json; name the --run-dir of "
            "`sslpipe train`, once it has begun"
        )


def check_folder(folder: Path, option: str = "--out") -> None:
    """Raise UserError where no files can be written into a folder, which need not be there yet."""
    taken = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    if not taken.is_dir():
        raise UserError(f"{option} {folder}: {taken} is a file; name another folder")
    if not os.access(taken, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: {taken} is read-only; name another folder")


def check_file(file: Path, option: str = "--out") -> None:
    """Raise UserError where a file cannot be written, or replaced."""
    if file.is_dir():
        raise UserError(f"{option} {file} is a folder; name a file")
    check_folder(file.parent, option)


def check_picture(file: Path, option: str = "--out") -> None:
    """Raise UserError where a picture cannot be written to a file, or its name has another end."""
    if file.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(f"{option} {file}: a picture is named {', '.join(IMAGE_SUFFIXES)}")
    check_file(file, option)


def check_features(paths: Iterable[Path | None]) -> None:
    """Raise DataError where a file of embeddings is not there."""
    for path in paths:
        if path is not None and not path.is_file():
            raise DataError(
                f"cannot read embeddings from {path}: there is no such file; write it with "
                "`sslpipe embed`"
            )


def check_choice(option: str, value: str, known: Sequence[str]) -> None:
    """Raise UserError where an option has none of its values."""
    if value not in known:
        raise UserError(f"{option} {value} is unknown; known: {', '.join(known)}")


def find_images(folder: Path) -> list[Path]:
    """Return every image under a folder, sorted. Raises: UserError where there is none."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise UserError(f"{folder} holds no image ({', '.join(IMAGE_SUFFIXES)})")
    return paths


def find_named_images(folder: Path) -> tuple[list[str], list[Path]]:
    """Return the name and the path of every image FOLDER/NAME/*. Raises: UserError."""
    folders = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not folders:
        raise UserError(f"{folder} has no folders; expected one a name, with its images inside")
    pairs = [(each.name, path) for each in folders for path in find_images(each)]
    return [name for name, _ in pairs], [path for _, path in pairs]
