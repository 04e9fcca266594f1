"""Write the shards of one split: planned ahead, written in parallel, resumed after a kill.

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
from sslpipe.sharding.members import downscale, to_member
from sslpipe.sharding.scan import BLOCK, offset_rows, scan_tar
from sslpipe.sharding.scatter import draw_placement, place
from sslpipe.sharding.sources import Images

WRITER_VERSION = 1  # raised when the same plan gives other bytes
STATISTICS_PX = 256  # mean and std are taken of images reduced to fit this

Advance = Callable[[int], None]


class Layout(NamedTuple):
    """What, besides the source, decides the bytes of the shards.

    Args:
        seed: Of the shuffle and of scattering.
        samples_per_shard: At most so many.
        max_shard_bytes: At most so many; rough where images are converted.
        scatter: Whether each image is placed at random in its frame; see `scatter.place`.
        resize_shorter_px: Downscale longer images to this shorter side; None: as they are.
    """

    seed: int
    samples_per_shard: int
    max_shard_bytes: int
    scatter: bool
    resize_shorter_px: int | None = None


class SplitImages(NamedTuple):
    """A split to write.

    Args:
        images: A split of the source.
        numbers: (n,) int64, which of `images` are written.
        origin: The source's name of its split, by which scattering is seeded.
    """

    images: Images
    numbers: NDArray[np.int64]
    origin: str


class Moments(BaseModel):
    """Exact sums over pixels of RGB values 0 to 255, so that no order of adding matters.

    Args:
        pixels: How many.
        sums: Of the values, by channel.
        squares: Of the squared values, by channel.
    """

    pixels: int
    sums: list[int]
    squares: list[int]


class Done(BaseModel):
    """One finished shard, a line of the build record.

    Args:
        shard: Its number.
        entry: Its line in dataset.json; None where every image was bad.
        moments: Of its pixels.
        bad: "NAME: reason" for each image that was skipped.
    """

    shard: int
    entry: ShardFile | None
    moments: Moments
    bad: list[str]


def write_split(
    folder: Path,
    split: str,
    source: SplitImages,
    layout: Layout,
    *,
    workers: int,
    skip_bad: bool,
    advance: Advance,
) -> list[Done]:
    """Write what is missing of a split's shards and return all of them, in shard order.

    Files are the same for any number of workers.

    Args:
        folder: Of the data set.
        split: Name of the split.
        source: Its images.
        layout: What decides the bytes.
        workers: Threads.
        skip_bad: Skip an image that cannot be decoded, and list it in `Done.bad`.
        advance: Called with the number of images that each finished shard has.

    Raises:
        DataError: An image cannot be decoded (it is named), or the folder holds shards of another
            plan.
    """
    # the plan, and what of it an earlier call has finished
    plan = _plan(split, source, layout)
    record = folder / ".build" / f"{split}.jsonl"
    done = _read_record(folder, record, _fingerprint(split, source, layout))
    advance(sum(len(plan[k]) for k in done))
    lock, stop = threading.Lock(), threading.Event()

    def write(shard: int) -> None:
        finished = _write_shard(folder, split, shard, plan[shard], source, layout, skip_bad, stop)
        with lock:  # a shard is finished once its line is on disk
            done[shard] = finished
            with open(record, "a") as file:
                file.write(finished.model_dump_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        advance(len(plan[shard]))

    # the rest, in any order
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
    """Compute mean and standard deviation over all pixels, RGB in [0, 1], rounded to 6 digits."""
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


def _plan(split: str, source: SplitImages, layout: Layout) -> list[NDArray[np.int64]]:
    """Return the numbers of each shard's images: shuffled, then cut by count and by bytes."""
    numbers, images = source.numbers, source.images
    order = numbers[permutation(len(numbers), layout.seed, zlib.crc32(split.encode()))]
    blocks = -(-images.sizes // BLOCK) + 1
    sizes = BLOCK * (blocks + np.where(images.labels >= 0, 2, 0))  # in the tar
    cuts, count, filled = [], 0, 0
    for at, number in enumerate(order):
        if count == layout.samples_per_shard or (
            count and filled + sizes[number] > layout.max_shard_bytes
        ):
            cuts.append(at)
            count = filled = 0
        count, filled = count + 1, filled + int(sizes[number])
    return list(np.split(order, cuts))


def _fingerprint(split: str, source: SplitImages, layout: Layout) -> str:
    """Hash what decides the bytes of a split's shards."""
    images = source.images
    options = [value for value in layout if value is not None]
    digest = hashlib.sha256(json.dumps([WRITER_VERSION, split, source.origin, *options]).encode())
    for number in source.numbers.tolist():
        row = [number, images.names[number], int(images.labels[number]), int(images.sizes[number])]
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _read_record(folder: Path, record: Path, fingerprint: str) -> dict[int, Done]:
    """Return the shards that are finished and unharmed; start the record where there is none."""
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
    source: SplitImages,
    layout: Layout,
    skip_bad: bool,
    stop: threading.Event,
) -> Done:
    """Write one tar and its sidecar, each atomically; no tar where every image is bad."""
    path = folder / f"{split}-{shard:06d}.tar"
    temporary = path.with_name(f".{path.name}.tmp")
    # the images, with the sums that mean and std are computed of
    bad: list[str] = []
    pixels, sums, squares = 0, np.zeros(3, np.int64), np.zeros(3, np.int64)
    with open(temporary, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number in numbers.tolist():
                if stop.is_set():
                    raise DataError(f"{path.name}: stopped, because another shard failed")
                try:
                    suffix, raw = _member(source, number, layout)
                    image = decode(raw, STATISTICS_PX).reshape(3, -1).astype(np.int64)
                except BadSample as error:
                    name = source.images.names[number]
                    if not skip_bad:
                        raise DataError(
                            f"{name}: {error}; mend or remove it, or give --skip-bad"
                        ) from error
                    bad.append(f"{name}: {error}")
                    continue
                pixels += image.shape[1]
                sums += image.sum(axis=1)
                squares += (image**2).sum(axis=1)
                key = _key(number, source.images.names[number])
                _add(tar, f"{key}.{suffix}", raw)
                label = int(source.images.labels[number])
                if label >= 0:
                    _add(tar, f"{key}.cls", b"%d" % label)
        file.flush()
        os.fsync(file.fileno())
    # the file gets its name when it is whole and on disk, then its sidecar is written
    moments = Moments(pixels=pixels, sums=sums.tolist(), squares=squares.tolist())
    if not pixels:
        temporary.unlink()
        return Done(shard=shard, entry=None, moments=moments, bad=bad)
    os.replace(temporary, path)
    sync(folder)
    entry = shard_file(path, offset_rows(scan_tar(path)), sha256_of(path))
    return Done(shard=shard, entry=entry, moments=moments, bad=bad)


def _member(source: SplitImages, number: int, layout: Layout) -> tuple[str, bytes]:
    """Return suffix and bytes of an image as the shard holds it."""
    raw = source.images.read(number)
    if layout.resize_shorter_px is not None:
        raw = downscale(raw, layout.resize_shorter_px)
    if not layout.scatter:
        return to_member(raw)

    def scatter(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return place(pixels, draw_placement(pixels, layout.seed, source.origin, number))

    return to_member(raw, scatter)


def _key(number: int, name: str) -> str:
    """Return a unique key of 60 ASCII characters at most; its end helps to find the file."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.splitext(name)[0]).strip("_")
    return f"{number:08d}-{stem[-51:]}"


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)  # mtime, uid, gid 0; no user, no group
    member.mode, member.size = 0o444, len(raw)
    tar.addfile(member, io.BytesIO(raw))
