"""Bytes from a path or a URL, with retries for what is remote; blocks of these kept on a disk."""

import hashlib
import io
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError, UserError
from sslpipe.faults import fault
from sslpipe.portable import (
    open_regular,
    read_at,
    read_regular,
    remove_abandoned,
    replacing,
    sha256_of,
)

T = TypeVar("T")

SCHEMES = ("http", "https", "s3", "gs", "file")  # through fsspec; everything else is refused
RETRIES = 5
FIRST_WAIT_S = 0.5  # doubled at each retry, and up to half as long again, by chance
STALL_S = 60.0  # a connection that sends nothing for so long is tried again
BLOCK_BYTES = 8 * 2**20
BLOCK = re.compile(r"[0-9a-f]{64}\.block")  # nothing else in the folder is the cache's to delete
KEPT_SHARE = 0.9  # of the limit, after blocks were dropped: not a few at every read
_ONE_HEADER = threading.Lock()


def scheme(url: str) -> str:
    """Read the URL's scheme, '' for a path. Raises: DataError for one that is not allowed."""
    if url.startswith("pipe:"):
        raise DataError(
            f"{url!r} would run a shell command, which no file can allow: where you trust the data "
            "set, train with --allow-pipe, or load_index(..., allow_pipe=True)"
        )
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
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
    """Say whether reading it needs a network. Raises: DataError as `scheme`."""
    return scheme(url) not in ("", "file")


def size_of(url: str) -> int | None:
    """Ask for a file's bytes; None where there is none. Raises: DataError where nobody answers."""
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


def read_bytes(url: str) -> bytes:
    """Read the whole file. Raises: DataError where it cannot be read."""
    try:
        if (path := local_path(url)) is not None:
            return read_regular(path)
        filesystem, path = _filesystem(url)
        return bytes(_retry(lambda: filesystem.cat_file(path), url))
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise _cannot_read(url, error) from error


def download(url: str, path: Path) -> None:
    """Copy a remote file to a path. Raises: DataError where it cannot be read."""
    filesystem, remote = _filesystem(url)
    try:
        _retry(lambda: filesystem.get_file(remote, str(path)), url)
    except (OSError, ValueError) as error:
        raise _cannot_read(url, error) from error


def load_array(file: str | BinaryIO, *, mapped: bool = False) -> NDArray[Any]:
    """Read or map a .npy file, one thread at a time. Raises: many kinds, where it is damaged.

    numpy evaluates the header as Python, where a second thread may fail (python/cpython 106905).
    """
    with _ONE_HEADER:
        array: NDArray[Any] = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
        return array


def npy_bytes(array: NDArray[Any]) -> bytes:
    """Return what a .npy file of the array holds."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def read_array(
    url: str,
    sha256: str,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    remedy: str,
    *,
    size: int | None = None,
) -> NDArray[Any]:
    """Read a .npy file that dataset.json names, by its sha256; in `shape`, None stands for any.

    `remedy` says what to do where it is damaged. With its `size` in bytes a local file is mapped.

    Raises: DataError where it is missing, another file, or no array of this type.
    """
    mapped = size is not None and not scheme(url)
    raw = b"" if mapped else read_bytes(url)
    there = size_of(url) if mapped else len(raw)
    if there is None:
        raise DataError(f"{url} is missing; {remedy}")
    if size not in (None, there):
        raise DataError(f"{url} has {there} bytes, not the index's {size}; {remedy}")
    try:
        digest = sha256_of(Path(url)) if mapped else hashlib.sha256(raw).hexdigest()
    except OSError as error:
        raise _cannot_read(url, error) from error
    if digest != sha256:
        raise DataError(f"{url}: its sha256 is not the one in dataset.json; {remedy}")
    try:
        array = load_array(url, mapped=True) if mapped else load_array(io.BytesIO(raw))
    except Exception as error:  # numpy raises many kinds for a damaged header
        raise DataError(f"{url} is not a .npy file: {error}; {remedy}") from None
    wanted = tuple("any" if side is None else side for side in shape)
    found = tuple(w if w == "any" else s for s, w in zip(array.shape, wanted, strict=False))
    if array.dtype != dtype or array.ndim != len(wanted) or found != wanted:
        raise DataError(f"{url}: {array.dtype} {array.shape}, not {dtype} {wanted}; {remedy}")
    return array


def read_range(url: str, start: int, end: int) -> bytes:
    """Read bytes `start` (inclusive) to `end` (exclusive), by one read or range request.

    Raises: DataError where they cannot be read, or fewer come back.
    """
    fault("storage.read_range")
    try:
        if (local := local_path(url)) is not None:
            with open_regular(local) as file:
                raw = read_at(file.fileno(), end - start, start)
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
        return fsspec.core.url_to_fs(url, **_options(url))  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec names the store's package: "Install s3fs to access S3"
        raise DataError(f"cannot read {url}: {error}") from error


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
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            if attempt == RETRIES or not is_remote(url):
                text = f"{type(error).__name__}: {error} (tried {attempt + 1} times)"
                raise _Unreachable(text) from error
            time.sleep(FIRST_WAIT_S * 2**attempt * random.uniform(1.0, 1.5))
    raise AssertionError(url)


class DiskCache:
    """Serves byte ranges of files from blocks on disk; what is missing is fetched once.

    A disk that is full or gone costs speed, not the run. Safe to use from several threads. The
    folder may be shared by the processes of a machine and by runs; `limit_bytes` is of all blocks.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.cache_dir: {folder} cannot be made: {error.strerror}") from error
        for each in folder.glob("??"):
            remove_abandoned(each)
        self._used_bytes = sum(size for _, size, _ in self._blocks())

    def read(
        self, name: str, size: int, start: int, end: int, fetch: Callable[[int, int], bytes]
    ) -> bytes:
        """Read bytes start to end (exclusive) of a file of `size` bytes, whose sha256 is `name`.

        `fetch` gives the bytes of a range; neighbouring blocks that are missing are one call.
        """
        numbers = range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        blocks = {number: self._load(name, number, size) for number in numbers}
        missing = [number for number, block in blocks.items() if block is None]
        while missing:
            first = missing[0]
            run = [number for k, number in enumerate(missing) if number == first + k]
            missing = missing[len(run) :]
            begin, stop = first * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, size)
            raw = fetch(begin, stop)
            for number in run:
                at = number * BLOCK_BYTES - begin
                blocks[number] = raw[at : at + BLOCK_BYTES]
                self._store(name, number, raw[at : at + BLOCK_BYTES])
        whole = b"".join(block for block in blocks.values() if block is not None)
        offset = start - numbers.start * BLOCK_BYTES
        return whole[offset : offset + end - start]

    def _path(self, name: str, number: int) -> Path:
        digest = hashlib.sha256(f"{name} {number} {BLOCK_BYTES}".encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.block"

    def _load(self, name: str, number: int, size: int) -> bytes | None:
        path = self._path(name, number)
        try:
            raw = path.read_bytes()
            os.utime(path)  # used now
        except OSError:
            return None
        whole = len(raw) == min(BLOCK_BYTES, size - number * BLOCK_BYTES)
        return raw if whole else None

    def _store(self, name: str, number: int, raw: bytes) -> None:
        path = self._path(name, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, sweep=False) as temporary:
                temporary.write_bytes(raw)
        except OSError:
            return
        with self._lock:
            self._used_bytes += len(raw)
            if self._used_bytes > self.limit_bytes:
                self._drop()

    def _drop(self) -> None:
        """Delete the blocks used longest ago; others may do so at the same time."""
        blocks = sorted(self._blocks())
        self._used_bytes = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if self._used_bytes <= KEPT_SHARE * self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            self._used_bytes -= size

    def _blocks(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every block there is."""
        blocks = []
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*.block"):
            if not BLOCK.fullmatch(path.name) or path.parent.is_symlink():
                continue
            try:
                status = path.stat()
            except OSError:  # another process dropped it
                continue
            blocks.append((status.st_mtime, status.st_size, path))
        return blocks
