"""Bytes from a path or a URL: whole files, sizes and ranges, with retries for what is remote."""

import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sslpipe.errors import DataError
from sslpipe.faults import fault

T = TypeVar("T")

SCHEMES = ("http", "https", "s3", "gs", "file")  # through fsspec; everything else is refused
RETRIES = 4  # with 0.5, 1, 2 and 4 s between them


def scheme(url: str) -> str:
    """The URL's scheme, '' for a path. Raises: DataError for one that is not allowed."""
    if url.startswith("pipe:"):
        raise DataError(
            f"{url!r} would run a shell command; set run.allow_pipe = true if that is what you want"
        )
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if not match:
        return ""
    if match[1].lower() not in SCHEMES:
        raise DataError(f"{url!r}: scheme {match[1]!r} is not allowed; use {', '.join(SCHEMES)}")
    return match[1].lower()


def join(folder: str, name: str) -> str:
    """`name` under `folder`, unless it is a URL or an absolute path itself."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) or name.startswith(("pipe:", "/")):
        return name
    return f"{folder.rstrip('/')}/{name}" if folder else name


def size_of(url: str) -> int | None:
    """Bytes of the file, or None where there is none."""
    if not scheme(url):
        return os.path.getsize(url) if os.path.isfile(url) else None
    filesystem, path = _filesystem(url)
    try:
        size = _retry(lambda: filesystem.size(path), url)
    except FileNotFoundError:
        return None
    return int(size)


def read_bytes(url: str) -> bytes:
    """The whole file. Raises: DataError where it cannot be read."""
    try:
        if not scheme(url):
            with open(url, "rb") as file:
                return file.read()
        filesystem, path = _filesystem(url)
        return bytes(_retry(lambda: filesystem.cat_file(path), url))
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise DataError(f"cannot read {url}: {error}") from error


def read_range(url: str, start: int, end: int) -> bytes:
    """Bytes start (inclusive) to end (exclusive), one read or range request.

    Raises: DataError where they cannot be read, or fewer come back.
    """
    fault("storage.read_range")
    try:
        if not scheme(url):
            with open(url, "rb") as file:
                raw = os.pread(file.fileno(), end - start, start)
        else:
            filesystem, path = _filesystem(url)
            raw = bytes(_retry(lambda: filesystem.cat_file(path, start=start, end=end), url))
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise DataError(f"cannot read {url}: {error}") from error
    if len(raw) != end - start:
        raise DataError(
            f"{url}: bytes {start}-{end} were asked for and {len(raw)} came; it is truncated"
        )
    return raw


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec names the store's package: "Install s3fs to access S3"
        raise DataError(f"cannot read {url}: {error}") from error


def _retry(call: Callable[[], T], url: str) -> T:
    for attempt in range(RETRIES + 1):
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError:
            if attempt == RETRIES:
                raise
            time.sleep(0.5 * 2**attempt)
    raise AssertionError(url)
