"""Small JSON files of a run, read whole or named as damaged.

A record is an object on one line, in a file of its own (lock, heartbeat) or as a line of a log.
What describes a run (DESCRIPTION) has its sha256 in RUN/MANIFEST.json.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, Never

from sslpipe.errors import UserError
from sslpipe.portable import explain_file_error, read_regular, sha256_of, write_atomically

Tree = dict[str, Any]

MANIFEST = "MANIFEST.json"
MOST_BYTES = 2**26  # of a JSON file that is read whole
DESCRIPTION = ("recipe.json", "data.json", "run.json")
_REWRITE = (
    "the run's own `sslpipe train` command, started again, writes it anew (a run that is done "
    "trains no further step); or restore a copy"
)


def parse_object(raw: bytes) -> Tree:
    """Parse the JSON of one object. Raises: ValueError, in one line, for whatever else it is."""
    try:
        tree = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__}, not an object")
    return tree


def read_object(path: Path, remedy: str = "restore a copy") -> Tree:
    """Read a JSON file that holds an object. Raises: UserError with the file and the remedy."""
    try:
        return parse_object(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from error


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that a float can hold; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def check_types(record: Tree, kinds: Mapping[str, type]) -> Tree:
    """Return the entries that `kinds` names (int, float: any number, str). Raises: ValueError."""
    for key, kind in kinds.items():
        value = record.get(key)
        good = isinstance(value, str) if kind is str else is_number(value)
        if not good or (kind is int and not isinstance(value, int)):
            raise ValueError(f"{key} is {value!r:.40}, not {kind.__name__}")
    return {key: record[key] for key in kinds}


def read_records(path: Path, kinds: Mapping[str, type]) -> tuple[list[Tree], int]:
    """Read the lines of a log of records; it need not be there.

    Returns:
        The records that have what `check_types` wants, in order, and how many lines were skipped:
        cut off by a kill, or damaged. A file that cannot be read at all counts as one.
    """
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        return [], 0
    except OSError:
        return [], 1
    records = []
    skipped = 0
    for line in raw.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = parse_object(line)
            check_types(record, kinds)
        except ValueError:
            skipped += 1
        else:
            records.append(record)
    return records, skipped


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


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a log, a line each."""
    with open_log(path) as file:
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())


def write_description(run_dir: Path, trees: Mapping[str, Tree]) -> None:
    """Write what describes the run, and before it MANIFEST.json with the sha256 of each file.

    The sha256 of a file that is still there stays beside the new one: a kill between two writes
    leaves files that are as the manifest has them.

    Args:
        run_dir: The run directory.
        trees: Content of each file of DESCRIPTION.
    """
    texts = {name: json.dumps(tree, indent=1) + "\n" for name, tree in trees.items()}
    try:
        before = _read_manifest(run_dir)
    except UserError:
        before = {}
    manifest = {}
    for name, text in texts.items():
        manifest[name] = [hashlib.sha256(text.encode()).hexdigest()]
        if (run_dir / name).is_file():
            old = sha256_of(run_dir / name)
            manifest[name] += [old] if old in before.get(name, []) else []
    for name, text in {MANIFEST: json.dumps(manifest, indent=1) + "\n", **texts}.items():
        try:
            write_atomically(run_dir / name, text)
        except OSError as error:
            raise UserError(explain_file_error(error, run_dir / name)) from error


def read_description(run_dir: Path, name: str) -> Tree:
    """Read a file of DESCRIPTION, as MANIFEST.json has it.

    Raises:
        UserError: It, or the manifest, is missing or damaged; names the file and the remedy.
    """
    path = run_dir / name
    tree = read_object(path, _REWRITE)
    if (run_dir / MANIFEST).exists():  # else single files of a run were copied
        known = _read_manifest(run_dir)[name]
        if hashlib.sha256(read_regular(path)).hexdigest() not in known:
            raise UserError(
                f"{path} is not the file that {MANIFEST} beside it names (by its sha256): one of "
                f"them is damaged; {_REWRITE}"
            )
    return tree


def plugins_of(run_dir: Path) -> list[str]:
    """Return the modules of `--plugin` that a run was made with, as its run.json has them."""
    try:
        named = read_description(run_dir, "run.json").get("plugins")
    except UserError:  # none yet, or who needs it says what is wrong with it
        return []
    return named if isinstance(named, list) else []


def _read_manifest(run_dir: Path) -> dict[str, list[str]]:
    path = run_dir / MANIFEST
    if not path.exists():
        return {}
    tree = read_object(path, _REWRITE)
    if set(tree) != {*DESCRIPTION} or not all(isinstance(sums, list) for sums in tree.values()):
        raise UserError(f"{path} is damaged (it does not list {DESCRIPTION}); {_REWRITE}")
    return tree


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")
