"""What a command refuses in under a second: it is checked before torch is imported.

The library checks the same and more when it reads; here stands what needs only names and small
files.
"""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from sslpipe.cli.options import COLUMN_OPTIONS, EVALUATE
from sslpipe.data.column_files import find_column
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.storage import is_remote
from sslpipe.errors import DataError, UserError, did_you_mean, shown
from sslpipe.weights.source import parse_source

FEATURE_SUFFIXES = (".safetensors", ".npz")
OTHERS = (  # for the help of a MODEL
    "an export, a folder or file of weights (timm, torchvision, transformers, MoCo, DINO, VISSL, "
    "lightly, solo-learn), KIND@FILE, or, with a network, timm:NAME, torchvision:NAME, "
    "hf-hub:OWNER/NAME"
)
MOST_SEED = 2**63 - 1
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def open_split(location: str, split: str, *, allow_pipe: bool = False) -> DatasetIndex:
    """Read a data set's index, and check that a split of it is there.

    Args:
        location: dataset.json or its folder, a path or a URL.
        split: Its name; its files are checked where they are local.
        allow_pipe: Whether shards may be the output of commands.

    Raises:
        DataError: The index is wrong, the split is not in it, or a shard is missing.
    """
    index = load_index(location, allow_pipe=allow_pipe)
    index.split(split)
    if not is_remote(index.folder):  # else a request a shard: once is enough
        index.check_files(split)
    return index


def check_evaluate(words: Sequence[str]) -> None:
    """Check what the words behind `sslpipe evaluate` name, as far as they tell by themselves.

    The values of an evaluation's options are checked by its function, which needs torch.

    Raises:
        UserError: An option is unknown, a file of embeddings, a data set's index or a model is not
            there, or --out cannot be written.
    """
    if "--help" in words:
        return
    known = EVALUATE.get(words[0])  # None: an evaluation of a package, or none at all
    for option in (
        word.partition("=")[0] for word in words[1:] if word.startswith("--") and word != "--"
    ):
        if known is not None and option not in known:
            hint = did_you_mean(option, sorted(known))
            raise UserError(f"No such option: {option} of `evaluate {words[0]}`{hint}")
    if words[0] in ("suite", "sgd-augmented") and len(words) > 1 and not words[1].startswith("-"):
        check_model(words[1])
    values = dict(pairwise(words))  # option -> the word behind it
    for option in ("--out", "--per-query"):
        for out in _given(words, option):
            check_file(Path(out), option)
    for seed in _given(words, "--seed"):
        if re.fullmatch(r"[+-]?[0-9]+", seed) and not 0 <= int(seed) <= MOST_SEED:
            raise UserError(f"--seed {shown(seed)}: a seed is 0 to 2^63 - 1")
    if "--data" in values:
        columns = load_index(values["--data"]).manifest.columns
        for option, name in pairwise(words):
            if option in COLUMN_OPTIONS:
                find_column(columns, name, values["--data"])
    for option, word in pairwise(words):
        if option == "--against":
            check_model(word)
    elsewhere = {word for option, word in pairwise(words) if option in _NO_EMBEDDINGS}
    others = (word for word in words if not word.startswith("-") and word not in elsewhere)
    check_features(Path(word) for word in others if word.endswith(FEATURE_SUFFIXES))


def _given(words: Sequence[str], option: str) -> list[str]:
    """Return the values of an option, as OPTION VALUE and as OPTION=VALUE."""
    apart = [word for before, word in pairwise(words) if before == option]
    return [*apart, *(w.partition("=")[2] for w in words if w.startswith(f"{option}="))]


def check_export(path: Path) -> None:
    """Raise UserError where a path is not an export's folder."""
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds no config.json; name the folder of an export")


def check_model(source: str | Path | None) -> None:
    """Raise UserError where it is no source of weights: no export, run, file or name of one."""
    if source is not None:
        parse_source(source)


def check_init(source: str | None, run_dir: Path | None = None) -> None:
    """Raise UserError where an --init is no source of weights, and the run keeps none."""
    if source is not None and (run_dir is None or not (run_dir / "init").is_dir()):
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


# options of an evaluation whose word is no file of embeddings
_NO_EMBEDDINGS = ("--gallery", "--query", "--out", "--features", "--against")
