"""What a part of a build over several machines leaves: .build/part-3-of-16/part.json."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sslpipe.data.column_files import Kind
from sslpipe.errors import DataError
from sslpipe.portable import read_regular, write_atomically
from sslpipe.sharding.record import FOLDER, Done, Part


class SplitRecord(BaseModel):
    """A split of the whole build.

    Args:
        split: Its name.
        plan: Fingerprint of what decides its bytes.
    """

    model_config = ConfigDict(frozen=True)
    split: str
    plan: str


class PartFile(BaseModel):
    """A finished part, or with `part` None a whole build; all but `part` and `done` is shared.

    Args:
        name: Of the data set, where it was named.
        source: For dataset.json.
        license: For dataset.json.
        classes: Names by label.
        splits: In the order of dataset.json.
        missing: Files that a list names and that are not there, by split.
        columns: Kinds of the columns, by name; their values are in the shards.
        part: Which part.
        done: The part's shards, by split.
    """

    model_config = ConfigDict(frozen=True)
    name: str | None
    source: str
    license: str
    classes: tuple[str, ...]
    splits: list[SplitRecord]
    missing: dict[str, list[str]]
    columns: dict[str, Kind] = {}
    part: Part | None
    done: dict[str, list[Done]]

    def shared(self) -> dict[str, object]:
        """Return what all parts of one build have in common."""
        number_of_parts = None if self.part is None else self.part.total
        own = self.model_dump(exclude={"part", "done"})
        return {**own, "number of parts": number_of_parts}


def part_path(folder: Path, part: Part) -> Path:
    """Return where a part says that it is finished."""
    return folder / FOLDER / part.folder / "part.json"


def save_part(folder: Path, part_file: PartFile) -> None:
    """Write that a part is finished."""
    assert part_file.part is not None
    write_atomically(part_path(folder, part_file.part), part_file.model_dump_json(), fsync=True)


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
