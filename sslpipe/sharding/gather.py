"""Gather columns: from a source's images before they are written, and from shards after.

A sample's values are in its KEY.json in the shard. So whatever wrote a shard (this build, one that
was stopped, another machine, another program), its columns are read from it.
"""

import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sslpipe.data.index import IMAGE_SUFFIXES
from sslpipe.errors import DataError, did_you_mean, shown
from sslpipe.portable import read_at
from sslpipe.sharding.cells import CellReader, ColumnSpec, Origin
from sslpipe.sharding.columns import Columns, check_name
from sslpipe.sharding.scan import Sample, open_tar, scan_tar
from sslpipe.sharding.sources import Images, SourceOptions

PATTERN_S = 2  # CPU time that --name-pattern may take, and a millisecond for each name
MOST_JSON_BYTES = 2**24  # of a member; what is larger is no description of an image


def columns_of_images(images: Mapping[str, Images], options: SourceOptions) -> dict[str, Columns]:
    """Read the columns of all splits of a source, so that each has one kind.

    Raises: DataError for a column that is not there, a name without a match, a value of another
    kind; all are named.
    """
    known = [*{name: None for own in images.values() for name in own.cells}, *options.in_names]
    for name in options.fields:
        if name not in known:
            raise DataError(
                f"--columns {name!r}: the source has no such column{did_you_mean(name, known)}; "
                f"it has: {', '.join(known) or 'none'}"
            )
    readers = _readers(options, next(iter(images.values())).origin)
    for split, own in images.items():
        matched = match_names(own.names, options.name_pattern)
        for field, reader in readers.items():
            reader.add(split, (matched if field in matched else own.cells)[field], own.names)
    return _by_split(images, readers)


def columns_of_tars(
    shards: Mapping[str, Sequence[Path]],
    options: SourceOptions,
    *,
    required: bool = True,
    workers: int = 2,
    suffixes: Sequence[str] = IMAGE_SUFFIXES,
) -> dict[str, Columns]:
    """Read columns from the samples of tars, by split, in order; nothing else of them is read.

    They are keys of KEY.json, and named groups of an image's name. Raises: DataError as
    `columns_of_images`, where a KEY.json is no object, and with `required` for a key in none.
    """
    fields, readers = options.fields, _readers(options, "typed")

    def read(path: Path) -> tuple[list[str], dict[str, list[object]], set[str]]:
        samples = scan_tar(path, suffixes)
        trees = _read_json(path, samples) if fields else []
        cells = {field: [tree.get(field) for tree in trees] for field in fields}
        return [sample.name for sample in samples], cells, {k for tree in trees for k in tree}

    seen = set[str]()
    with ThreadPoolExecutor(workers) as pool:
        for split, paths in shards.items() if readers else ():
            for path, (names, cells, keys) in zip(paths, pool.map(read, paths), strict=True):
                matched = match_names(names, options.name_pattern)  # here: see _time_limit
                told = [f"{path.name} {name}" for name in names]
                for field, reader in readers.items():
                    reader.add(split, matched[field] if field in matched else cells[field], told)
                seen |= keys
    for field in fields:
        if required and field not in seen:
            raise DataError(
                f"--json-fields {field!r}: no sample has it{did_you_mean(field, seen)}; in their "
                f"JSON is: {', '.join(sorted(seen)[:20]) or 'nothing'}"
            )
    return _by_split(shards, readers)


def match_names(
    names: Sequence[str], pattern: re.Pattern[str] | None
) -> dict[str, list[str | None]]:
    """Match whole names; returns the named groups' texts, None where a group took no part.

    Raises: DataError for a name without a match, or more CPU time than PATTERN_S and 1 ms each.
    """
    if pattern is None:
        return {}
    matches: list[re.Match[str] | None] = []
    try:
        with _time_limit(PATTERN_S + 0.001 * len(names)):
            for name in names:
                matches.append(pattern.fullmatch(name))
    except TimeoutError as error:
        raise DataError(
            f"--name-pattern {pattern.pattern!r} takes too long: stopped at "
            f"{names[len(matches)]!r}, with {len(matches):,} of {len(names):,} names matched; "
            "avoid a repeat inside a repeat, as in (a+)+: write [^/]+ for a part between slashes"
        ) from error
    failed = [name for name, match in zip(names, matches, strict=True) if match is None]
    if failed:
        raise DataError(
            f"--name-pattern {pattern.pattern!r} does not match {len(failed):,} of {len(names):,} "
            f"names, such as {failed[0]!r}; a pattern matches the whole name, and |.* at its end "
            "lets others pass without values"
        )
    return {name: [match[name] for match in matches if match] for name in pattern.groupindex}


@contextmanager
def _time_limit(cpu_s: float) -> Iterator[None]:
    """Raise TimeoutError after so much CPU time: in the main thread, where `re` heeds signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def parse_pattern(text: str) -> re.Pattern[str]:
    """Read --name-pattern. Raises: DataError where it is no pattern, or names no column."""
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise DataError(f"--name-pattern {text!r} is no regular expression: {error}") from error
    if not pattern.groupindex:
        raise DataError(
            f"--name-pattern {text!r} names no column; a group with a name is one: (?P<theme>[^/]+)"
        )
    for name in pattern.groupindex:
        check_name(name)
    return pattern


def _read_json(path: Path, samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Read the KEY.json of samples of a tar; {} where there is none. Raises: DataError."""
    trees = []
    with open_tar(path) as file:
        for sample in samples:
            tree: object = {}
            if sample.json is not None:
                start, size = sample.json
                if size > MOST_JSON_BYTES:
                    raise DataError(f"{path}: {sample.key}.json has {size:,} bytes, too many")
                try:
                    tree = json.loads(read_at(file.fileno(), size, start) or b"{}")
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}: {sample.key}.json is no JSON: {error}") from error
            if not isinstance(tree, dict):
                raise DataError(f"{path}: {sample.key}.json is {shown(tree)}, not an object")
            trees.append(tree)
    return trees


def to_json(columns: Columns, number: int) -> bytes:
    """Write a sample's values as its KEY.json; missing ones are left out; b'' where all are."""
    values = {name: column.cell(number) for name, column in columns.items()}
    tree = {name: value for name, value in values.items() if value is not None}
    return json.dumps(tree, separators=(",", ":")).encode() if tree else b""


def describe(columns: Mapping[str, Columns]) -> list[str]:
    """Say what was read, a line a column: name, kind, how many values are missing."""
    lines = []
    for name in {name: None for own in columns.values() for name in own}:
        own = [each[name] for each in columns.values() if name in each]
        missing, total = sum(int(c.missing.sum()) for c in own), sum(len(c.values) for c in own)
        rest = f", missing in {missing:,} of {total:,} samples" if missing else ""
        lines.append(f"column {name}: {own[0].kind}{rest}")
    return lines


def _readers(options: SourceOptions, origin: Origin) -> dict[str, CellReader]:
    """Make a reader for each column, by its field: those asked for, then all that names hold."""
    wanted = {spec.field: spec for spec in options.columns}
    for name in options.in_names:
        wanted.setdefault(name, ColumnSpec(name, name, None))
    for name in (names := [spec.name for spec in wanted.values()]):
        check_name(name, names)
        if names.count(name) > 1:
            raise DataError(f"two columns are named {name!r}; rename one")
    return {
        field: CellReader(spec, "name" if field in options.in_names else origin)
        for field, spec in wanted.items()
    }


def _by_split(splits: Iterable[str], readers: Mapping[str, CellReader]) -> dict[str, Columns]:
    finished = [(reader.spec.name, reader.finish()) for reader in readers.values()]
    return {
        split: {name: values[split] for name, values in finished if split in values}
        for split in splits
    }
