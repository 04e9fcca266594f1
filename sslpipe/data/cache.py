"""Blocks of remote shards on a local disk, up to a limit; the least recently used go first."""

import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from sslpipe.errors import UserError
from sslpipe.portable import make_folder, remove_abandoned, replacing

BLOCK_BYTES = 8 * 2**20
BLOCK = re.compile(r"[0-9a-f]{64}\.block")  # nothing else in the folder is the cache's to delete
KEPT_SHARE = 0.9  # of the limit, after blocks were dropped: not a few at every read


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
            make_folder(self.folder, path.parent.name)
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
