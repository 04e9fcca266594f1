"""Bytes from a path or a URL, with retries for what is remote."""

import io
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError, install
from sslpipe.faults import fault
from sslpipe.portable import (
    open_regular,
    read_regular,
)

T = TypeVar("T")

SCHEMES = ("http", "https", "s3", "gs", "file")  # through fsspec; everything else is refused
RETRIES = 5
FIRST_WAIT_S = 0.5  # doubled at each retry, and up to half as long again, by chance
STALL_S = 60.0  # a connection that sends nothing for so long is tried again
CACHED = "filecache::"  # before a URL that the user typed: fsspec keeps whole files on a disk
_ONE_HEADER = threading.Lock()


def scheme(url: str) -> str:
    """Read the URL's scheme, '' for a path. Raises: DataError for one that is not allowed."""
    if url.startswith("pipe:"):  # webdataset's
        raise DataError(f"{url!r} would run a shell command, which no file can do; name a tar file")
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url.removeprefix(CACHED))
    if not match:
        return ""
    if match[1].lower() not in SCHEMES:
        raise DataError(f"{url!r}: scheme {match[1]!r} is not allowed; use {', '.join(SCHEMES)}")
    return match[1].lower()


def join(folder: str, name: str) -> str:
    """Place `name` under `folder`, unless it is a URL or an absolute path itself."""
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) or name.startswith("pipe:")
    if is_url or name.startswith("/") or os.path.isabs(name):  # "C:/..." is one where that is so
        return name
    return f"{folder.rstrip('/')}/{name}" if folder else name


def local_path(url: str) -> str | None:
    """Return the path of a file on this machine, None for others. Raises: DataError as `scheme`."""
    if scheme(url) == "file":
        return url2pathname(urlsplit(url).path)
    return None if scheme(url) else url


def is_remote(url: str) -> bool:
    """Return whether reading it needs a network. Raises: DataError as `scheme`."""
    return scheme(url) not in ("", "file")


def size_of(url: str) -> int | None:
    """Ask for a file's bytes; None where there is none. Raises: DataError without an answer."""
    if (local := local_path(url)) is not None:
        return os.path.getsize(local) if os.path.isfile(local) else None
    filesystem, path = _filesystem(url)

    def size_there() -> Any:
        try:
            return filesystem.size(path)
        except FileNotFoundError as error:  # fsspec's word for an HTTP server that is down, too
            if scheme(url).startswith("http") and not _is_absent(error.__cause__):
                raise _Unreachable(str(error.__cause__)) from error
            raise

    try:
        size = _retry(size_there, url)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot_read(url, error) from error
    if size is None:
        raise DataError(f"{url}: the server does not say how many bytes it has")
    return int(size)


def read_bytes(url: str, most_bytes: int | None = None) -> bytes:
    """Read the whole file.

    Args:
        url: A path or URL.
        most_bytes: The largest size; a longer file is refused before more of it is here, whatever
            a server says of its length. None: any.

    Raises:
        DataError: It cannot be read, or is too large.
    """
    try:
        if (path := local_path(url)) is not None:
            return read_regular(path, most_bytes)
        filesystem, path = _filesystem(url)
        if most_bytes is None:
            return bytes(_retry(lambda: filesystem.cat_file(path), url))
        if url.startswith(CACHED):  # which keeps whole files, before anybody knows their size
            raise DataError(f"cannot read {url}: {CACHED} is for data sets; name the URL without")
        return _retry(lambda: _read_at_most(filesystem, path, url, most_bytes), url)
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise _cannot_read(url, error) from error


def _read_at_most(filesystem: Any, path: str, url: str, most_bytes: int) -> bytes:
    """Read a remote file. Raises: DataError once it has more bytes."""
    file = _AtMost(most_bytes, url)
    if scheme(url) in ("http", "https"):  # a server may ignore a range: count what comes
        filesystem.get_file(path, file)
    else:
        file.write(filesystem.cat_file(path, start=0, end=most_bytes + 1))
    return file.getvalue()


class _AtMost(io.BytesIO):
    """A file in memory that refuses to grow beyond some bytes."""

    def __init__(self, most_bytes: int, url: str) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._url = url

    def write(self, raw: Any) -> int:
        """Append. Raises: DataError where the file becomes too large."""
        if self.tell() + len(raw) > self._most_bytes:
            raise DataError(
                f"cannot read {self._url}: it has more than {self._most_bytes:,} bytes, the limit "
                "of an image"
            )
        return super().write(raw)


def download(url: str, path: Path) -> None:
    """Copy a remote file to a path. Raises: DataError where it cannot be read."""
    filesystem, remote = _filesystem(url)
    try:
        _retry(lambda: filesystem.get_file(remote, str(path)), url)
    except (OSError, ValueError) as error:
        raise _cannot_read(url, error) from error


def load_array(file: str | IO[bytes]) -> NDArray[Any]:
    """Read a .npy file, one thread at a time. Raises: many kinds, where it is damaged.

    numpy evaluates the header as Python, where a second thread may fail (python/cpython 106905).
    """
    with _ONE_HEADER:
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        return array


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, whether in Fortran's order, and dtype of a .npy file, one thread at a time.

    The file is left where the values begin. Raises: ValueError where it is damaged.
    """
    with _ONE_HEADER:
        first = np.lib.format.read_magic(file)[0] == 1
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        return read(file)


def npy_bytes(array: NDArray[Any]) -> bytes:
    """Return what a .npy file of the array holds."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def read_range(url: str, start: int, end: int) -> bytes:
    """Read bytes `start` (inclusive) to `end` (exclusive), by one read or range request.

    Raises: DataError where they cannot be read, or fewer come back.
    """
    fault("storage.read_range")
    try:
        if (local := local_path(url)) is not None:
            with open_regular(local) as file:
                file.seek(start)
                raw = file.read(end - start)  # all of it, where one read of a network gives less
        else:
            filesystem, path = _filesystem(url)

            def whole_range() -> bytes:
                raw = bytes(filesystem.cat_file(path, start=start, end=end))
                if is_remote(url) and len(raw) < end - start:  # a connection lost, perhaps
                    raise OSError(f"bytes {start}-{end} were requested and {len(raw)} came")
                return raw

            raw = _retry(whole_range, url)
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise _cannot_read(url, error) from error
    if len(raw) > end - start:
        raise DataError(f"{url}: the server does not serve ranges; copy the shards to a disk")
    if len(raw) < end - start:
        raise DataError(
            f"{url}: bytes {start}-{end} were requested and {len(raw)} came; it is truncated"
        )
    return raw


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        options = _options(url)
        if url.startswith(CACHED):  # each part of the chain has its own
            options = {scheme(url): options}
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec names the store's package: "Install s3fs to access S3"
        raise DataError(f"cannot read {url}: {error}; {install('remote')}") from error


def _options(url: str) -> dict[str, Any]:
    """What each store calls its time limit, and that its own retries are off: ours count."""
    if scheme(url) in ("http", "https"):
        from aiohttp import ClientTimeout

        limit = ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S)
        return {"client_kwargs": {"timeout": limit}}
    if scheme(url) == "s3":
        limits = {"connect_timeout": STALL_S, "read_timeout": STALL_S}
        return {"config_kwargs": {**limits, "retries": {"max_attempts": 1}}}
    return {}


class _Unreachable(OSError):
    """What a store's package raised, in words; many are no OSError."""


def _is_absent(cause: BaseException | None) -> bool:
    """Whether a server said that there is no such file."""
    from aiohttp import ClientResponseError

    if isinstance(cause, ClientResponseError):
        return cause.status in (404, 410)
    return cause is None or isinstance(cause, FileNotFoundError)


def _cannot_read(url: str, error: Exception) -> DataError:
    return DataError(f"cannot read {url}: {error}")


def _retry(call: Callable[[], T], url: str) -> T:
    """The call's value; tried again, after a while, where it fails, but not for a missing file.

    Every error counts as one that may pass: each store's package has its own.
    """
    for attempt in range(RETRIES + 1):
        try:
            return call()
        except (FileNotFoundError, PermissionError, DataError):
            raise
        except Exception as error:
            if attempt == RETRIES or not is_remote(url):
                text = f"{type(error).__name__}: {error} (tried {attempt + 1} times)"
                raise _Unreachable(text) from error
            time.sleep(FIRST_WAIT_S * 2**attempt * random.uniform(1.0, 1.5))
    raise AssertionError(url)
