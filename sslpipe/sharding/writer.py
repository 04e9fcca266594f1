"""Images -> shards of one split: planned ahead, written in parallel, gone on with after a kill.

The plan (which image lies where) is a pure function of the source and the options. Each finished
shard is one line of .build/SPLIT.jsonl, so that the same command does not write it again.
"""

import hashlib
import io
import json
import math
import os
import re
import tarfile
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import ShardFile, Triple
from sslpipe.errors import DataError
from sslpipe.portable import sha256_of, sync, write_atomically
from sslpipe.random import permutation
from sslpipe.sharding.manifest import shard_file
from sslpipe.sharding.members import reduced, to_member
from sslpipe.sharding.scan import BLOCK, offsets_of, scan_tar
from sslpipe.sharding.scatter import draw_placement, place
from sslpipe.sharding.sources import Images

WRITER_VERSION = 1  # raised when the same plan gives other bytes
STATISTICS_PX = 256  # mean and std are taken of images reduced to fit this

Advance = Callable[[int], None]


class Layout(NamedTuple):
    """What, besides the source, decides the bytes of the shards."""

    seed: int
    samples_per_shard: int
    max_shard_bytes: int
    scatter: bool
    resize_shorter_px: int | None = None


class Part(NamedTuple):
    """A split to write: images of the source by their numbers there, and that source's split."""

    images: Images
    numbers: NDArray[np.int64]
    origin: str


class Moments(BaseModel):
    """Exact sums over pixels of RGB values 0 to 255, so that no order of adding matters."""

    pixels: int
    sums: list[int]
    squares: list[int]


class Done(BaseModel):
    """One finished shard, a line of the build record; entry: None where every image was bad."""

    shard: int
    entry: ShardFile | None
    moments: Moments
    bad: list[str]


def write_split(
    folder: Path,
    split: str,
    part: Part,
    layout: Layout,
    *,
    workers: int,
    skip_bad: bool,
    advance: Advance,
) -> list[Done]:
    """Write what is missing of a split's shards and return all of them, in shard order.

    Files are the same for any number of workers. Raises: DataError naming an image that cannot be
    decoded (skip_bad: it is left out and listed in Done.bad), or a record of another plan.
    """
    plan = _plan(split, part, layout)
    record = folder / ".build" / f"{split}.jsonl"
    done = _read_record(folder, record, _fingerprint(split, part, layout))
    advance(sum(len(plan[k]) for k in done))
    lock, stop = threading.Lock(), threading.Event()

    def write(shard: int) -> None:
        finished = _write_shard(folder, split, shard, plan[shard], part, layout, skip_bad, stop)
        with lock:
            done[shard] = finished
            with open(record, "a") as file:
                file.write(finished.model_dump_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        advance(len(plan[shard]))

    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(write, shard) for shard in range(len(plan)) if shard not in done]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # Ctrl-C, too, must not wait for the shards still queued
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[shard] for shard in range(len(plan))]


def mean_and_std(shards: list[Done]) -> tuple[Triple, Triple]:
    """Mean and standard deviation over all pixels, RGB in [0, 1], rounded to 6 digits."""
    pixels = sum(d.moments.pixels for d in shards)
    mean, std = [], []
    for channel in range(3):
        total = sum(d.moments.sums[channel] for d in shards)
        squares = sum(d.moments.squares[channel] for d in shards)
        mean.append(round(total / (255 * pixels), 6))
        variance = (pixels * squares - total**2) / (255 * pixels) ** 2  # exact up to the division
        std.append(round(max(math.sqrt(variance), 1 / 255), 6))  # views are divided by it
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def forget_split(folder: Path, split: str) -> None:
    """Remove a split's shards, sidecars, build record and unfinished files."""
    own = re.compile(rf"\.?{re.escape(split)}-\d{{6}}\.(tar|offsets\.npy)(\.tmp)?")
    for path in sorted(folder.iterdir()):
        if own.fullmatch(path.name):
            path.unlink()
    (folder / ".build" / f"{split}.jsonl").unlink(missing_ok=True)


def _plan(split: str, part: Part, layout: Layout) -> list[NDArray[np.int64]]:
    """Source numbers of each shard's images: shuffled, then cut by count and by bytes."""
    order = part.numbers[permutation(len(part.numbers), layout.seed, zlib.crc32(split.encode()))]
    blocks = -(-part.images.sizes // BLOCK) + 1
    sizes = BLOCK * (blocks + np.where(part.images.labels >= 0, 2, 0))  # in the tar
    cuts, count, filled = [], 0, 0
    for at, number in enumerate(order):
        if count == layout.samples_per_shard or (
            count and filled + sizes[number] > layout.max_shard_bytes
        ):
            cuts.append(at)
            count = filled = 0
        count, filled = count + 1, filled + int(sizes[number])
    return list(np.split(order, cuts))


def _fingerprint(split: str, part: Part, layout: Layout) -> str:
    images = part.images
    options = [value for value in layout if value is not None]
    digest = hashlib.sha256(json.dumps([WRITER_VERSION, split, part.origin, *options]).encode())
    for number in part.numbers.tolist():
        row = [number, images.names[number], int(images.labels[number]), int(images.sizes[number])]
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _read_record(folder: Path, record: Path, fingerprint: str) -> dict[int, Done]:
    """Shards that are finished and unharmed, by number; starts the record where there is none."""
    lines = record.read_text().splitlines() if record.exists() else []
    if not lines:
        record.parent.mkdir(exist_ok=True)
        write_atomically(record, json.dumps({"plan": fingerprint}) + "\n", fsync=True)
        return {}
    if json.loads(lines[0]) != {"plan": fingerprint}:
        raise DataError(
            f"{folder} already holds {record.stem} shards of other images or options; "
            "choose another folder, or give --overwrite to replace them"
        )
    done = {}
    for line in lines[1:]:
        try:
            finished = Done.model_validate_json(line)
        except ValidationError:  # the line that a kill cut short
            continue
        entry = finished.entry
        if entry is None or (
            _has_sha256(folder / entry.file, entry.sha256)
            and _has_sha256(folder / entry.offsets, entry.offsets_sha256)
        ):
            done[finished.shard] = finished
    if record.read_bytes()[-1:] != b"\n":
        with open(record, "a") as file:
            file.write("\n")
    return done


def _has_sha256(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _write_shard(
    folder: Path,
    split: str,
    shard: int,
    numbers: NDArray[np.int64],
    part: Part,
    layout: Layout,
    skip_bad: bool,
    stop: threading.Event,
) -> Done:
    path = folder / f"{split}-{shard:06d}.tar"
    temporary = path.with_name(f".{path.name}.tmp")
    bad: list[str] = []
    pixels, sums, squares = 0, np.zeros(3, np.int64), np.zeros(3, np.int64)
    with open(temporary, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number in numbers.tolist():
                if stop.is_set():
                    raise DataError(f"{path.name}: stopped, because another shard failed")
                try:
                    suffix, raw = _member(part, number, layout)
                    image = decode(raw, STATISTICS_PX).reshape(3, -1).astype(np.int64)
                except BadSample as error:
                    name = part.images.names[number]
                    if not skip_bad:
                        raise DataError(
                            f"{name}: {error}; mend or remove it, or give --skip-bad"
                        ) from error
                    bad.append(f"{name}: {error}")
                    continue
                pixels += image.shape[1]
                sums += image.sum(axis=1)
                squares += (image**2).sum(axis=1)
                key = _key(number, part.images.names[number])
                _add(tar, f"{key}.{suffix}", raw)
                label = int(part.images.labels[number])
                if label >= 0:
                    _add(tar, f"{key}.cls", b"%d" % label)
        file.flush()
        os.fsync(file.fileno())
    moments = Moments(pixels=pixels, sums=sums.tolist(), squares=squares.tolist())
    if not pixels:
        temporary.unlink()
        return Done(shard=shard, entry=None, moments=moments, bad=bad)
    os.replace(temporary, path)
    sync(folder)
    entry = shard_file(path, offsets_of(scan_tar(path)), sha256_of(path))
    return Done(shard=shard, entry=entry, moments=moments, bad=bad)


def _member(part: Part, number: int, layout: Layout) -> tuple[str, bytes]:
    raw = part.images.read(number)
    if layout.resize_shorter_px is not None:
        raw = reduced(raw, layout.resize_shorter_px)
    if not layout.scatter:
        return to_member(raw)

    def scatter(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return place(pixels, draw_placement(pixels, layout.seed, part.origin, number))

    return to_member(raw, scatter)


def _key(number: int, name: str) -> str:
    """Unique by its number in the source; the rest helps a human to find the file. <= 60 ASCII."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.splitext(name)[0]).strip("_")
    return f"{number:08d}-{stem[-51:]}"


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)  # mtime, uid, gid 0; no user, no group
    member.mode, member.size = 0o444, len(raw)
    tar.addfile(member, io.BytesIO(raw))
