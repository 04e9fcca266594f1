"""What of a split's shards is finished: .build/SPLIT.jsonl, the plan and then a line a shard.

A part of a build over several machines has .build/part-3-of-16/SPLIT.jsonl for its own shards.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from sslpipe.data.index import ShardFile
from sslpipe.errors import DataError
from sslpipe.portable import (
    make_folder,
    open_regular,
    open_to_append,
    read_regular,
    sha256_of,
    write_atomically,
)

FOLDER = ".build"


class Part(NamedTuple):
    """Which shards one of several machines writes: every `total`-th one.

    Args:
        number: 1 to `total`.
        total: How many parts there are.
    """

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @property
    def folder(self) -> str:
        """Name its folder inside .build."""
        return f"part-{self.number}-of-{self.total}"

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read "3/16". Raises DataError."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.total:
            raise DataError(f"--part {text!r} is not I/N with 1 <= I <= N, as in 3/16")
        return part


class Moments(BaseModel):
    """Exact sums over pixels of RGB values 0 to 255, so that no order of adding matters.

    Args:
        pixels: How many.
        sums: Of the values, by channel.
        squares: Of the squared values, by channel.
    """

    pixels: int
    sums: list[int]
    squares: list[int]


class Done(BaseModel):
    """One finished shard, a line of the build record.

    Args:
        shard: Its number.
        entry: Its line in dataset.json; None where every image was bad.
        moments: Of its pixels.
        bad: "NAME: reason" for each image that was skipped.
        transparent: How many images have transparent parts and were put on no colour.
        conversions: Of images that are not 8-bit grey or RGB: kind -> (count, lowest value,
            highest value); see `conversion_of`.
    """

    model_config = ConfigDict(frozen=True)
    shard: int
    entry: ShardFile | None
    moments: Moments
    bad: list[str]
    transparent: int = 0  # records of earlier versions do not say
    conversions: dict[str, tuple[int, int, int]] = {}

    @model_serializer(mode="wrap")
    def _without_none(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `conversions` where there are none: most records stay as they were."""
        tree: dict[str, Any] = write(self)
        return tree if self.conversions else {k: v for k, v in tree.items() if k != "conversions"}


def record_path(folder: Path, split: str, part: Part | None = None) -> Path:
    """Return where the record of a split is; None: of a whole build, or of merged parts."""
    return folder / FOLDER / (part.folder if part else "") / f"{split}.jsonl"


def recorded_plan(record: Path) -> str | None:
    """Return the fingerprint of the plan that a record follows; '' for a damaged one."""
    if not record.exists():
        return None
    try:
        with open_regular(record) as file:
            first = file.readline()
        return str(json.loads(first)["plan"]) if first else None
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def start_record(record: Path, fingerprint: str) -> None:
    """Write the record of a plan without a shard, where there is none."""
    if recorded_plan(record) is None:
        write_record(record, fingerprint, [])


def write_record(record: Path, fingerprint: str, done: Iterable[Done]) -> None:
    """Write the record of a plan with the shards that are finished."""
    above = record.parent if record.parent.name == FOLDER else record.parent.parent
    make_folder(above.parent, FOLDER, *record.parent.relative_to(above).parts)
    lines = [json.dumps({"plan": fingerprint}), *(each.model_dump_json() for each in done)]
    write_atomically(record, "".join(f"{line}\n" for line in lines), fsync=True)


def append(record: Path, done: Done) -> None:
    """Add a finished shard and put it on disk."""
    with open_to_append(record) as file:
        file.seek(0, os.SEEK_END)
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # after the line that a kill cut short
        file.write(done.model_dump_json().encode() + b"\n")
        os.fsync(file.fileno())


def read_finished(folder: Path, record: Path) -> dict[int, Done]:
    """Return the shards of a record, by number, that are in the folder and unharmed."""
    if not record.exists():
        return {}
    done = {}
    for line in read_regular(record).decode(errors="replace").splitlines()[1:]:
        try:
            finished = Done.model_validate_json(line)
        except ValidationError:  # the line that a kill cut short
            continue
        if is_unharmed(folder, finished):
            done[finished.shard] = finished
    return done


def is_unharmed(folder: Path, done: Done) -> bool:
    """Say whether a finished shard and its sidecar are in the folder, with their sha256."""
    entry = done.entry
    return entry is None or (
        _has_sha256(folder / entry.file, entry.sha256)
        and _has_sha256(folder / entry.offsets, entry.offsets_sha256)
    )


def shards_in(folder: Path, split: str) -> list[Path]:
    """List a split's shards, sidecars and unfinished files by their names."""
    own = re.compile(rf"\.?{re.escape(split)}-\d{{6}}\.(tar|offsets\.npy)(\..+)?")
    return [path for path in sorted(folder.iterdir()) if own.fullmatch(path.name)]


def part_records(folder: Path, split: str) -> list[Path]:
    """List the records that parts of a build have of a split."""
    return sorted((folder / FOLDER).glob(f"part-*-of-*/{split}.jsonl"))


def forget_split(folder: Path, split: str) -> None:
    """Remove a split's shards, sidecars, build records and unfinished files."""
    records = [record_path(folder, split), *part_records(folder, split)]
    for path in [*shards_in(folder, split), *records]:
        path.unlink(missing_ok=True)


def _has_sha256(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256
