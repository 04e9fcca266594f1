"""What a data set has beside its shards: dataset.json, and in .build how far a build has come.

.build/SPLIT.jsonl holds the plan of a split, then a line for each finished shard.
"""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sslpipe.data.index import Manifest, ShardFile, load_index, manifest_text
from sslpipe.errors import DataError, listed
from sslpipe.files import Stored, json_text, open_log, parse_json, read_lines
from sslpipe.portable import open_regular, sha256_of, write_atomically
from sslpipe.sharding.build_report import Group

FOLDER = ".build"

# --- dataset.json


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write dataset.json into the folder, atomically, in the oldest schema that holds it."""
    write_atomically(folder / "dataset.json", manifest_text(manifest), fsync=True)


def open_manifest(folder: Path, name: str | None = None) -> Manifest:
    """Read the manifest of a folder; where it has none yet, return one without splits."""
    if (folder / "dataset.json").exists():
        return load_index(folder).manifest
    return Manifest(schema_version=1, name=name or folder.resolve().name, splits={})


def merge_classes(known: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Return a data set's class names with those of a new split. Raises: DataError for others."""
    if not known or not new:
        return known or new
    extra = [name for name in new if name not in known]
    if extra:
        raise DataError(
            f"classes {listed(extra, 5)} are not among the {len(known)} of dataset.json; "
            "build all splits in one run, so that they share one list of classes"
        )
    return known


# --- the record of a split


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
    bad: dict[int, str]  # "NAME: reason" of each image that was skipped, by its number
    digests: Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")] = ""  # of its images, in order
    remarks: list[Group] = []  # images that lose something or are unusual, see `remarks_on`

    def is_unharmed(self, folder: Path) -> bool:
        """Return whether shard and sidecar are in the folder, with their sha256."""
        entry = self.entry
        return entry is None or all(
            (folder / name).is_file() and sha256_of(folder / name) == sha256
            for name, sha256 in ((entry.file, entry.sha256), (entry.offsets, entry.offsets_sha256))
        )


class _Begun(Stored):
    """The first line of a record."""

    plan: str


class Record:
    """How far the build of a split has come: its plan, then a line for each finished shard."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder = folder
        self.path = folder / FOLDER / f"{split}.jsonl"

    def plan(self) -> str | None:
        """Return the fingerprint of the plan that it follows; '' for a damaged one."""
        if not self.path.exists():
            return None
        try:
            with open_regular(self.path) as file:
                first = file.readline()
            return parse_json(first, _Begun).plan if first else None
        except (OSError, ValueError):
            return ""

    def write(self, plan: str) -> None:
        """Begin it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json_text(_Begun(plan=plan), indent=None), fsync=True)

    def append(self, done: Done) -> None:
        """Add a finished shard and put it on disk."""
        with open_log(self.path) as file:
            file.write(json_text(done, indent=None).encode())
            os.fsync(file.fileno())

    def finished(self) -> dict[int, Done]:
        """Return its shards, by number, that are in the folder and unharmed."""
        done: dict[int, Done] = {}
        for finished in read_lines(self.path, Done)[0]:  # without one that a kill cut short
            if finished.is_unharmed(self._folder):
                done[finished.shard] = finished
        return done


def recorded_digests(folder: Path) -> dict[str, bytes]:
    """Return the digests of images that builds into a folder noted, by the sha256 of the shard."""
    return {
        done.entry.sha256: bytes.fromhex(done.digests)
        for path in sorted((folder / FOLDER).glob("*.jsonl"))
        for done in read_lines(path, Done)[0]
        if done.entry is not None
    }


def forget_split(folder: Path, split: str) -> None:
    """Remove a split's shards, sidecars, build records and unfinished files."""
    for path in [*shards_in(folder, split), Record(folder, split).path]:
        path.unlink(missing_ok=True)


def shards_in(folder: Path, split: str) -> list[Path]:
    """List a split's shards, sidecars and unfinished files by their names."""
    pattern = re.compile(rf"\.?{re.escape(split)}-\d{{6}}\.(tar|offsets\.npy)(\..+)?")
    return [path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)]
