"""What a data set has beside its shards: dataset.json, and in .build how far a build has come.

.build/SPLIT.jsonl holds the plan of a split, then a line for each finished shard. A part of a build
over several machines has its own in .build/part-3-of-16, and there part.json once it is finished.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from sslpipe.data.columns import Kind
from sslpipe.data.image_type import Colour
from sslpipe.data.index import SCHEMA_VERSIONS, Manifest, ShardFile, load_index, manifest_text
from sslpipe.errors import DataError
from sslpipe.portable import (
    open_regular,
    read_regular,
    sha256_of,
    write_atomically,
)
from sslpipe.sharding.report import Group

FOLDER = ".build"

# --- dataset.json


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write dataset.json into the folder, atomically, in the oldest schema that holds it."""
    write_atomically(folder / "dataset.json", manifest_text(manifest), fsync=True)


def open_manifest(folder: Path, name: str | None = None) -> Manifest:
    """Read the manifest of a folder; where it has none yet, return one without splits."""
    if (folder / "dataset.json").exists():
        return load_index(folder).manifest
    return Manifest(
        schema_version=SCHEMA_VERSIONS[0], name=name or folder.resolve().name, splits={}
    )


def merge_classes(known: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Return a data set's class names with those of a new split. Raises: DataError for others."""
    if not known or not new:
        return known or new
    extra = [name for name in new if name not in known]
    if extra:
        raise DataError(
            f"classes {', '.join(extra[:5])} are not among the {len(known)} of dataset.json; "
            "build all splits in one run, so that they share one list of classes"
        )
    return known


# --- the record of a split


class Part(NamedTuple):
    """Which shards one of several machines writes: every `total`-th one; `number` from 1 on."""

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
    """Exact sums over pixels, of values 0 to 255 by channel: no order of adding matters."""

    pixels: int
    sums: list[int]
    squares: list[int]


class Done(BaseModel):
    """One finished shard; `entry`, its line in dataset.json, is None where every image was bad."""

    model_config = ConfigDict(frozen=True)
    shard: int
    entry: ShardFile | None
    moments: Moments
    bad: list[str]  # "NAME: reason" for each image that was skipped
    remarks: list[Group] = []  # images that lose something or are unusual, see `remarks_on`

    def is_unharmed(self, folder: Path) -> bool:
        """Say whether shard and sidecar are in the folder, with their sha256."""
        entry = self.entry
        return entry is None or all(
            (folder / name).is_file() and sha256_of(folder / name) == sha256
            for name, sha256 in ((entry.file, entry.sha256), (entry.offsets, entry.offsets_sha256))
        )


class Record:
    """How far the build of a split has come: its plan, then a line for each finished shard."""

    def __init__(self, folder: Path, split: str, part: Part | None = None) -> None:
        self._folder, self._within = folder, (FOLDER, part.folder) if part else (FOLDER,)
        self.path = folder.joinpath(*self._within, f"{split}.jsonl")

    def plan(self) -> str | None:
        """Return the fingerprint of the plan that it follows; '' for a damaged one."""
        return _recorded_plan(self.path)

    def write(self, plan: str, done: Iterable[Done] = ()) -> None:
        """Write it, with the shards that are finished."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"plan": plan}), *(each.model_dump_json() for each in done)]
        write_atomically(self.path, "".join(f"{line}\n" for line in lines), fsync=True)

    def append(self, done: Done) -> None:
        """Add a finished shard and put it on disk."""
        with open(self.path, "a+b", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")  # after the line that a kill cut short
            file.write(done.model_dump_json().encode() + b"\n")
            os.fsync(file.fileno())

    def finished(self) -> dict[int, Done]:
        """Return its shards, by number, that are in the folder and unharmed."""
        done: dict[int, Done] = {}
        text = read_regular(self.path).decode(errors="replace") if self.path.exists() else ""
        for line in text.splitlines()[1:]:
            try:
                finished = Done.model_validate_json(line)
            except ValidationError:  # the line that a kill cut short
                continue
            if finished.is_unharmed(self._folder):
                done[finished.shard] = finished
        return done


def is_held(folder: Path, manifest: Manifest, split: str, plan: str, part: Part | None) -> bool:
    """Say whether a folder has shards of a split that a build of this plan did not write."""
    recorded = Record(folder, split).plan()
    if recorded is not None:
        return recorded != plan
    if split in manifest.splits:
        return True
    others = {_recorded_plan(record) for record in _part_records(folder, split)} - {None}
    if part is not None and others:
        return others != {plan}
    return bool(others) or (folder.is_dir() and bool(_shards_in(folder, split)))


def forget_split(folder: Path, split: str) -> None:
    """Remove a split's shards, sidecars, build records and unfinished files."""
    records = [Record(folder, split).path, *_part_records(folder, split)]
    for path in [*_shards_in(folder, split), *records]:
        path.unlink(missing_ok=True)


def _shards_in(folder: Path, split: str) -> list[Path]:
    """List a split's shards, sidecars and unfinished files by their names."""
    own = re.compile(rf"\.?{re.escape(split)}-\d{{6}}\.(tar|offsets\.npy)(\..+)?")
    return [path for path in sorted(folder.iterdir()) if own.fullmatch(path.name)]


def _part_records(folder: Path, split: str) -> list[Path]:
    return sorted((folder / FOLDER).glob(f"part-*-of-*/{split}.jsonl"))


def _recorded_plan(record: Path) -> str | None:
    if not record.exists():
        return None
    try:
        with open_regular(record) as file:
            first = file.readline()
        return str(json.loads(first)["plan"]) if first else None
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# --- part.json


class SplitRecord(BaseModel):
    """A split of the whole build, and the fingerprint of what decides its bytes."""

    model_config = ConfigDict(frozen=True)
    split: str
    plan: str


class PartFile(BaseModel):
    """A finished part, or with `part` None a whole build; see `shared`."""

    model_config = ConfigDict(frozen=True)
    name: str | None
    source: str
    license: str
    classes: tuple[str, ...]
    splits: list[SplitRecord]
    missing: dict[str, list[str]]  # files that a list names and that are not there
    columns: dict[str, Kind] = {}  # whose values are in the shards
    channels: tuple[str, ...] | None = None  # of images that are not 8-bit RGB
    range: tuple[float, float] | None = None  # their low and high value; None: measured
    background: Colour | None = None  # what transparent parts were put on; None: alpha dropped
    part: Part | None
    done: dict[str, list[Done]]  # its shards, by split
    left_out: list[Group] = []  # of the source, for the report
    doubts: list[str] = []

    def shared(self) -> dict[str, object]:
        """Return what all parts of one build have in common."""
        own = self.model_dump(exclude={"part", "done", "left_out", "doubts"})
        return {**own, "number of parts": self.part and self.part.total}


def part_path(folder: Path, part: Part) -> Path:
    """Return where a part says that it is finished."""
    return folder / FOLDER / part.folder / "part.json"


def load_parts(folder: Path) -> list[PartFile]:
    """Read the finished parts in a folder, by number. Raises DataError for a damaged file."""
    found = []
    for path in sorted((folder / FOLDER).glob("part-*-of-*/part.json")):
        try:
            part_file = PartFile.model_validate_json(read_regular(path))
        except (OSError, ValidationError) as error:
            raise DataError(f"{path} cannot be read; build that part again") from error
        if part_file.part is None or part_path(folder, part_file.part) != path:
            raise DataError(f"{path} is of part {part_file.part}; build that part again")
        found.append(part_file)
    return sorted(found, key=lambda each: each.part or Part(0, 0))
