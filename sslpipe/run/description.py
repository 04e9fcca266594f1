"""What describes a run: recipe.json, data.json and run.json, with their sha256 in MANIFEST.json."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator

from sslpipe.data.image_type import ImageType
from sslpipe.data.index import Level, Spread, check_statistics
from sslpipe.errors import UserError
from sslpipe.files import Int64, Stored, Tree, json_text, read_json
from sslpipe.portable import explain_file_error, sha256_of, write_atomically

T = TypeVar("T")

MANIFEST = "MANIFEST.json"
DESCRIPTION = ("recipe.json", "data.json", "run.json")
_REWRITE = (
    "the run's own `sslpipe train` command, started again, writes it anew (a run that is done "
    "trains no further step); or restore a copy"
)


class Trackers(Stored):
    """Where a run's numbers are copied to: a part of [run]."""

    trackers: tuple[str, ...] = ()


class Outline(Stored):
    """What is used of a recipe.json without building what it names."""

    name: str | None = None
    steps: Annotated[int, Field(ge=1, le=2**53)]
    run: Trackers = Trackers()


class DataDescription(Stored):
    """data.json, what dataset.json says beside its shards; in part."""

    name: str
    license: str
    classes: tuple[str, ...]
    mean: tuple[Level, ...]
    std: tuple[Spread, ...]
    image: ImageType | None = None
    samples: dict[str, Int64]  # of each split
    index_sha256: str

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        check_statistics(self.image, self.mean, self.std)
        return self


class Environment(Stored):
    """Where a run was trained, in part."""

    cuda_device: str | None
    machine: str


class StartDescription(Stored):
    """Which weights a run started from, in part."""

    source: str = ""
    part: str = ""  # of a join, which one was trained; "": the weights are of one network


class RunDescription(Stored):
    """run.json; also `command`."""

    precision: str
    world: int
    environment: Environment
    init: StartDescription | None = None
    plugins: tuple[str, ...] = ()  # modules of `--plugin`


def write_description(run_dir: Path, trees: Mapping[str, Tree]) -> None:
    """Write what describes the run, then MANIFEST.json with the sha256 of each file.

    The manifest of an earlier start goes first: what a kill between two writes leaves is whole,
    and belongs to no manifest.

    Args:
        run_dir: The run directory.
        trees: Content of each file of DESCRIPTION.
    """
    texts = {name: json_text(tree) for name, tree in trees.items()}
    manifest = {name: [hashlib.sha256(text.encode()).hexdigest()] for name, text in texts.items()}
    (run_dir / MANIFEST).unlink(missing_ok=True)
    for name, text in {**texts, MANIFEST: json_text(manifest)}.items():
        try:
            write_atomically(run_dir / name, text)
        except OSError as error:
            raise UserError(explain_file_error(error, run_dir / name)) from error


def read_description(run_dir: Path, name: str, kind: type[T]) -> T:
    """Read a file of DESCRIPTION, as MANIFEST.json has it.

    Args:
        run_dir: The run directory.
        name: Of the file.
        kind: What it must hold.

    Raises:
        UserError: It, or the manifest, is missing or damaged; names the file and the remedy.
    """
    path = run_dir / name
    content = read_json(path, kind, remedy=_REWRITE)
    manifest = run_dir / MANIFEST
    if manifest.exists():  # else single files of a run were copied
        listed = read_json(manifest, dict[str, list[str]], remedy=_REWRITE)
        if set(listed) != {*DESCRIPTION}:
            raise UserError(f"{manifest} is damaged (it does not list {DESCRIPTION}); {_REWRITE}")
        if sha256_of(path) not in listed[name]:
            raise UserError(
                f"{path} is not the file that {MANIFEST} beside it names (by its sha256): one of "
                f"them is damaged; {_REWRITE}"
            )
    return content


def plugins_of(run_dir: Path) -> list[str]:
    """Return the modules of `--plugin` that a run was made with, as its run.json has them."""
    try:
        return list(read_description(run_dir, "run.json", RunDescription).plugins)
    except UserError:  # none yet, or who needs it says what is wrong with it
        return []
