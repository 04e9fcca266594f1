"""Small JSON files: parsed strictly, checked by a class of their fields, written whole.

What stands in a file is a `Stored` class beside the code that writes it, or a plain type, as
`dict[str, str]`. Whatever else a file holds (no UTF-8, NaN, nesting without end, a number in
quotes) is one line that names the file, the key, its value and the remedy.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from sslpipe.errors import DataError, UserError, did_you_mean, listed, shown
from sslpipe.portable import read_regular, write_atomically

T = TypeVar("T")
Tree = dict[str, Any]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

MOST_BYTES = 2**26  # of a JSON file that is read whole
MOST_REASONS = 5  # of one file that are reported


class Stored(BaseModel):
    """What a small file, a line of a log, or a part of one holds; other keys are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


# --- reading


def parse_json(raw: bytes | str, kind: type[T]) -> T:
    """Parse JSON and check its types. Raises: ValueError in one line: each key, value, reason."""
    try:
        from_json(raw, allow_inf_nan=False)  # also where `kind` takes any value
    except ValueError as error:
        raise ValueError(f"it is not JSON of UTF-8: {error}") from None
    try:
        content: T = _adapter(cast(Any, kind)).validate_json(raw)
    except ValidationError as error:
        raise ValueError(explain(error, kind)) from None
    return content


def parse_object(raw: bytes | str) -> Tree:
    """Parse the JSON of one object, whatever it holds. Raises: ValueError in one line."""
    return parse_json(raw, Tree)


def read_json(
    path: Path,
    kind: type[T],
    *,
    remedy: str = "restore a copy",
    error: type[UserError] = DataError,
) -> T:
    """Read a small JSON file.

    Args:
        path: Of the file.
        kind: What it must hold: a `Stored` class, or a plain type.
        remedy: Ends the message.
        error: What is raised, in one line, where it cannot be read or holds anything else.
    """
    try:
        raw = read_regular(path, MOST_BYTES)
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror}; {remedy}") from reason
    try:
        return parse_json(raw, kind)
    except ValueError as reason:
        raise error(f"{path} is damaged ({reason}); {remedy}") from None


def explain(error: ValidationError, kind: type) -> str:
    """Return in one line what is wrong with a file: each key, its value, and why."""
    return listed([_reason(item, kind) for item in error.errors()], MOST_REASONS, "; ")


def _reason(item: ErrorDetails, kind: type) -> str:
    key = ".".join(map(str, item["loc"])) or "the content"
    match item["type"]:
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            known = kind.model_fields if issubclass(kind, BaseModel) else ()
            return f"unknown key {key}{did_you_mean(key, known)}"
        case "value_error" | "assertion_error":
            return f"{key}: {item['ctx']['error']}"
    return f"{key} = {shown(item['input'])}: {item['msg'].lower()}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# --- writing


def json_text(value: Any, indent: int | None = 1) -> str:
    """Write plain values, or a `Stored`, as JSON that `parse_json` reads, with a line end.

    What JSON has no word for is changed: numbers that are not finite become null, and halves of
    characters, as in names of files that are not UTF-8, question marks.
    """
    tree = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    text = json.dumps(_finite(tree), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="replace").decode() + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file whole or not at all, as `json_text` has it."""
    write_atomically(path, json_text(value))


# --- logs: a `Stored` a line


def read_lines(path: Path, kind: type[T]) -> tuple[list[T], int]:
    """Read the lines of a log; it need not be there.

    Returns:
        The lines that hold what `kind` wants, in order, and how many were skipped: cut off by a
        kill, or damaged. A file that cannot be read at all counts as one.
    """
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        return [], 0
    except OSError:
        return [], 1
    lines = []
    skipped = 0
    for line in raw.split(b"\n"):
        if not line.strip():
            continue
        try:
            lines.append(parse_json(line, kind))
        except ValueError:
            skipped += 1
    return lines, skipped


def open_log(path: Path) -> FileIO:
    """Open a log to append to, unbuffered; what a kill cut off becomes a line alone."""
    try:
        with ExitStack() as stack:
            file = stack.enter_context(open(path, "a+b", buffering=0))
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            stack.pop_all()  # the caller closes it
            return file
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; move it away") from error


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a log, a line each."""
    with open_log(path) as file:
        file.write("".join(json_text(record, indent=None) for record in records).encode())
