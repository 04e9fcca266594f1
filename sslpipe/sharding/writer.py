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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import ARRAY_SUFFIXES, BLOCK, IMAGE_SUFFIXES, Triple
from sslpipe.errors import DataError
from sslpipe.portable import replacing
from sslpipe.random import permutation
from sslpipe.sharding.columns import Columns, find_groups
from sslpipe.sharding.gather import to_json
from sslpipe.sharding.members import downscale, flatten, lost_in, to_member
from sslpipe.sharding.record import (
    Done,
    Moments,
    Part,
    append,
    read_finished,
    record_path,
    recorded_plan,
    write_record,
)
from sslpipe.sharding.scan import index_tar
from sslpipe.sharding.scatter import draw_placement, place
from sslpipe.sharding.scenes import Sensors, without_nan
from sslpipe.sharding.sources import Images

WRITER_VERSION = 1  # raised when the same plan gives other bytes
MOST_TOGETHER = 32  # samples of one group side by side
STATISTICS_PX = 256  # mean and std are taken of images reduced to fit this

Advance = Callable[[int], None]


class Layout(NamedTuple):
    """What, besides the source, decides the bytes of the shards."""

    seed: int  # of the shuffle and of scattering
    samples_per_shard: int  # at most
    max_shard_bytes: int  # at most; rough where images are converted
    scatter: bool  # each image is placed at random in its frame; see `scatter.place`
    resize_shorter_px: int | None = None  # longer images are downscaled to this shorter side
    background: tuple[int, int, int] | None = None  # RGB, 0 to 255; None: alpha is dropped
    group_by: str | None = None  # column whose groups are written side by side; see `_order`
    sensors: Sensors | None = None  # scenes, and other images than 8-bit RGB; None: 8-bit RGB

    @property
    def is_array(self) -> bool:
        """Whether the shards hold arrays, not 8-bit RGB."""
        return self.sensors is not None and self.sensors.channels is not None

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the members that hold images."""
        return ARRAY_SUFFIXES if self.is_array else IMAGE_SUFFIXES


class SplitImages(NamedTuple):
    """A split to write: which of a source's images, (n,) int64, and columns of all of `images`.

    `origin` is the source's name of its split, by which scattering is seeded.
    """

    images: Images
    numbers: NDArray[np.int64]
    origin: str
    columns: Columns = MappingProxyType({})


class SplitPlan(NamedTuple):
    """Which image lies in which shard: a pure function of the source and the layout.

    `shards` are the numbers of the images of each, `fingerprint` is of all that decides the bytes.
    """

    split: str
    source: SplitImages
    layout: Layout
    shards: list[NDArray[np.int64]]
    fingerprint: str


def plan_split(split: str, source: SplitImages, layout: Layout) -> SplitPlan:
    """Shuffle a split's images and cut them into shards."""
    shards = _cut(split, source, layout)
    return SplitPlan(split, source, layout, shards, _fingerprint(split, source, layout))


def shards_of(plan: SplitPlan, part: Part | None) -> range:
    """Return the numbers of the shards that a part writes; None: all of them."""
    return range(part.number - 1 if part else 0, len(plan.shards), part.total if part else 1)


def write_split(
    folder: Path,
    plan: SplitPlan,
    *,
    part: Part | None = None,
    workers: int,
    skip_bad: bool,
    advance: Advance,
) -> list[Done]:
    """Write what is missing of a split's shards and return all of them, in shard order.

    Files are the same for any number of workers, which are threads, and of parts (None: all
    shards). With `skip_bad` an image that cannot be decoded is listed in `Done.bad`. `advance` is
    called with the number of images that each finished shard has.

    Raises: DataError for a bad image, which it names, or the record of another plan.
    """
    # what an earlier call has finished
    record = record_path(folder, plan.split, part)
    if recorded_plan(record) is None:
        write_record(record, plan.fingerprint)
    done: dict[int, Done] = {}
    for path in {record, record_path(folder, plan.split)}:  # parts may have been merged since
        if recorded_plan(path) not in (None, plan.fingerprint):
            raise DataError(f"{path} is the record of another build; remove it and its shards")
        done |= read_finished(folder, path)
    numbers = shards_of(plan, part)
    advance(sum(len(plan.shards[k]) for k in numbers if k in done))
    lock, stop = threading.Lock(), threading.Event()

    def write(shard: int) -> None:
        finished = _write_shard(folder, shard, plan, skip_bad, stop)
        with lock:  # a shard is finished once its line is on disk
            done[shard] = finished
            append(record, finished)
        advance(len(plan.shards[shard]))

    # the rest, in any order
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(write, shard) for shard in numbers if shard not in done]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # Ctrl-C, too, must not wait for the shards still queued
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[shard] for shard in numbers]


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


def _order(
    split: str, source: SplitImages, layout: Layout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shuffle a split's images: their numbers (n,), and where the pieces begin that lie together.

    With `layout.group_by` a piece is a group, or MOST_TOGETHER of a larger one: its samples have
    partners beside them all the same, and no shard is of one group only.
    """
    numbers, seed = source.numbers, (layout.seed, zlib.crc32(split.encode()))
    order = numbers[permutation(len(numbers), *seed)]
    if layout.group_by is None:
        return order, np.arange(len(order))
    codes = find_groups(source.columns, layout.group_by, "--group-by")[order]
    by_group = np.argsort(codes, kind="stable")
    order, codes = order[by_group], codes[by_group]
    # place within the group, and the number of the piece
    first = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    sizes = np.diff(first, append=len(codes))
    within = np.arange(len(codes)) - np.repeat(first, sizes)
    begins = within % min(MOST_TOGETHER, layout.samples_per_shard) == 0
    piece = np.cumsum(begins) - 1
    # the pieces, shuffled
    rank = np.empty(begins.sum(), np.int64)
    rank[permutation(len(rank), *seed, 1)] = np.arange(len(rank))
    shuffled = np.argsort(rank[piece], kind="stable")
    return order[shuffled], np.flatnonzero(begins[shuffled])


def _cut(split: str, source: SplitImages, layout: Layout) -> list[NDArray[np.int64]]:
    """Return the numbers of each shard's images: shuffled, then cut by count and by bytes."""
    images = source.images
    order, starts = _order(split, source, layout)
    blocks = -(-images.sizes // BLOCK) + 1
    sizes = BLOCK * (blocks + np.where(images.labels >= 0, 2, 0))  # in the tar
    if source.columns:
        described = [len(to_json(source.columns, number)) for number in range(len(images))]
        sizes += [BLOCK * (1 + -(-size // BLOCK)) if size else 0 for size in described]
    ends = [0, *np.cumsum(sizes[order]).tolist()]
    # at which of them another shard begins: pieces lie together, unless larger than a shard
    cuts, begin = list[int](), 0
    for start, stop in pairwise([*starts.tolist(), len(order)]):
        is_whole = ends[stop] - ends[start] <= layout.max_shard_bytes
        for first, last in [(start, stop)] if is_whole else pairwise(range(start, stop + 1)):
            too_many = last - begin > layout.samples_per_shard
            if first > begin and (too_many or ends[last] - ends[begin] > layout.max_shard_bytes):
                cuts.append(first)
                begin = first
    return list(np.split(order, cuts))


def _fingerprint(split: str, source: SplitImages, layout: Layout) -> str:
    """Hash what decides the bytes of a split's shards."""
    images = source.images
    options = [value for value in layout if value is not None]
    digest = hashlib.sha256(json.dumps([WRITER_VERSION, split, source.origin, *options]).encode())
    for number in source.numbers.tolist():
        row = [number, images.names[number], int(images.labels[number]), int(images.sizes[number])]
        digest.update(json.dumps(row).encode())
    for name, column in source.columns.items():
        digest.update(json.dumps([name, column.kind]).encode())
    if source.columns:
        for number in source.numbers.tolist():
            digest.update(to_json(source.columns, number) or b"{}")
    return digest.hexdigest()


def _write_shard(
    folder: Path, shard: int, plan: SplitPlan, skip_bad: bool, stop: threading.Event
) -> Done:
    """Write one tar and its sidecar, each atomically; no tar where every image is bad."""
    source, layout = plan.source, plan.layout
    path = folder / f"{plan.split}-{shard:06d}.tar"
    # the images, with the sums that mean and std are computed of
    bad: list[str] = []
    pixels, lost = 0, Counter[str]()
    sums, squares = np.zeros(3, np.int64), np.zeros(3, np.int64)
    with (
        replacing(path, fsync=True) as temporary,
        tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number in plan.shards[shard].tolist():
            if stop.is_set():
                raise DataError(f"{path.name}: stopped, because another shard failed")
            try:
                original = source.images.read(number)
                if layout.is_array:
                    raw, replaced = without_nan(original, layout.sensors and layout.sensors.nan)
                    suffix, image = "npy", np.zeros((3, 1), np.int64)  # measured once written
                    lost.update(["have NaN or infinite values, replaced"] * replaced)
                else:
                    suffix, raw = _member(original, source, number, layout)
                    image = decode(raw, STATISTICS_PX).reshape(3, -1).astype(np.int64)
            except BadSample as error:
                name = source.images.names[number]
                if not skip_bad:
                    raise DataError(
                        f"{name}: {error}; mend or remove it, or give --skip-bad"
                    ) from error
                bad.append(f"{name}: {error}")
                continue
            if not layout.is_array:
                lost.update(lost_in(original, on_background=layout.background is not None))
            pixels += image.shape[1]
            sums += image.sum(axis=1)
            squares += (image**2).sum(axis=1)
            label = int(source.images.labels[number])
            members = {
                suffix: raw,
                "cls": b"%d" % label if label >= 0 else b"",
                "json": to_json(source.columns, number),
            }
            for kind, content in members.items():
                if content:
                    member = tarfile.TarInfo(f"{_key(number, source.images.names[number])}.{kind}")
                    member.mode, member.size = 0o444, len(content)  # no time, no owner
                    tar.addfile(member, io.BytesIO(content))
    if not pixels:
        path.unlink()
    return Done(
        shard=shard,
        # now that it is whole and on disk
        entry=index_tar(path, layout.suffixes) if pixels else None,
        moments=Moments(pixels=pixels, sums=sums.tolist(), squares=squares.tolist()),
        bad=bad,
        lost=dict(lost),
    )


def _member(raw: bytes, source: SplitImages, number: int, layout: Layout) -> tuple[str, bytes]:
    """Return suffix and bytes of an image as the shard holds it."""
    if layout.background is not None:
        raw = flatten(raw, layout.background)
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
