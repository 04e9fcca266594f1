"""Images of a split -> shards: planned ahead, written in parallel, resumed.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.arguments import Advance
from sslpipe.data.columns import kind_of
from sslpipe.data.decode import BadSample, decode, image_kind
from sslpipe.data.image_type import Reading
from sslpipe.data.index import ARRAY_SUFFIXES, BLOCK, IMAGE_SUFFIXES, ShardFile, Triple
from sslpipe.errors import DataError, listed
from sslpipe.portable import replacing
from sslpipe.random import permutation
from sslpipe.sharding.arrays import Arrays, without_nan
from sslpipe.sharding.build_report import Group, Tally
from sslpipe.sharding.columns import Columns, find_groups
from sslpipe.sharding.copies import digest_of
from sslpipe.sharding.members import (
    downscale,
    flatten,
    remarks_on,
    to_member,
)
from sslpipe.sharding.record import Done, Moments, Record
from sslpipe.sharding.samples import SEED, SplitImages
from sslpipe.sharding.scan import index_tar

WRITER_VERSION = 1  # raised when the same plan gives other bytes
MOST_TOGETHER = 32  # samples of one group side by side
NAMED_BAD = 5  # images that cannot be decoded; the others are counted
LARGE_PNG = 8_000_000  # bytes, which are worth a remark
STATISTICS_PX = 256  # mean and std are taken of images reduced to fit this


class Layout(NamedTuple):
    """What, besides the source, decides the bytes of the shards."""

    samples_per_shard: int = 1000  # at most
    max_shard_bytes: int = 10**9  # at most; rough where images are converted
    resize_shorter_px: int | None = None  # longer images are downscaled to this shorter side
    background: tuple[int, int, int] | None = None  # RGB, 0 to 255; None: alpha is dropped
    group_by: str | None = None  # column whose groups are written side by side; see `_order`
    arrays: Arrays | None = None  # images that are not 8-bit RGB; None: 8-bit RGB


class SplitPlan(NamedTuple):
    """Which images of a split lie in which shard; the fingerprint is of all that decides bytes."""

    split: str
    source: SplitImages
    layout: Layout
    shards: list[NDArray[np.int64]]
    fingerprint: str


class WrittenSplit(NamedTuple):
    """A split whose shards are on disk: what was planned, and each shard, in order."""

    plan: SplitPlan
    done: list[Done]

    @property
    def shards(self) -> tuple[ShardFile, ...]:
        """Those that have a sample, as dataset.json names them."""
        return tuple(each.entry for each in self.done if each.entry is not None)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Which of the source's images the samples are, in their order; (n,)."""
        order = np.concatenate(self.plan.shards)
        bad = [number for each in self.done for number in each.bad]
        return order[~np.isin(order, bad)]

    def skipped(self) -> list[str]:
        """Return "NAME: reason" of each image that cannot be decoded."""
        return [reason for each in self.done for reason in each.bad.values()]

    def remarks(self) -> list[Group]:
        """Return what is unusual of the images, by shard."""
        return [group for each in self.done for group in each.remarks]

    def columns(self) -> Columns:
        """Return the samples' columns."""
        return self.plan.source.columns.take(self.numbers).combine_chunks()

    def names(self) -> list[str]:
        """Return where the samples lie below the source's root; [] where they are no files."""
        images = self.plan.source.images
        return [images.names[n] for n in self.numbers.tolist()] if images.are_places else []


def plan_split(split: str, source: SplitImages, layout: Layout) -> SplitPlan:
    """Shuffle a split's images and cut them into shards."""
    return SplitPlan(
        split=split,
        source=source,
        layout=layout,
        shards=_cut(split, source, layout),
        fingerprint=_fingerprint(split, source, layout),
    )


def write_split(
    folder: Path,
    plan: SplitPlan,
    *,
    workers: int,
    skip_bad: bool,
    advance: Advance,
) -> WrittenSplit:
    """Write what is missing of a split's shards and return all of them.

    Files do not depend on `workers`, which are threads. With `skip_bad` an image
    that cannot be decoded is listed in `Done.bad`. `advance` takes numbers of
    images. Raises: DataError for a bad image, which it names, and where all are bad.
    """
    # what an earlier call has finished
    record = Record(folder, plan.split)
    if record.plan() is None:
        record.write(plan.fingerprint)
    done = record.finished()
    numbers = range(len(plan.shards))
    advance(sum(len(plan.shards[k]) for k in numbers if k in done))
    lock = threading.Lock()
    stop = threading.Event()

    def write(shard: int) -> None:
        finished = _write_shard(folder=folder, shard=shard, plan=plan, skip_bad=skip_bad, stop=stop)
        with lock:  # a shard is finished once its line is on disk
            done[shard] = finished
            record.append(finished)
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
    written = WrittenSplit(plan, [done[shard] for shard in numbers])
    if not written.shards:
        raise DataError(
            f"split {plan.split!r} has no image that can be decoded; the first is "
            f"{written.skipped()[0]}"
        )
    return written


def mean_and_std(shards: list[Done]) -> tuple[Triple, Triple]:
    """Compute mean and standard deviation over all pixels, RGB in [0, 1], rounded to 6 digits."""
    pixels = sum(d.moments.pixels for d in shards)
    mean = []
    std = []
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
    numbers = source.numbers
    name = zlib.crc32(split.encode())
    order = numbers[permutation(len(numbers), (SEED, name))]
    if layout.group_by is None:
        return order, np.arange(len(order))
    codes = find_groups(source.columns, layout.group_by, "--group-by")[order]
    by_group = np.argsort(codes, kind="stable")
    order = order[by_group]
    codes = codes[by_group]
    # place within the group, and the number of the piece
    first = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    sizes = np.diff(first, append=len(codes))
    within = np.arange(len(codes)) - np.repeat(first, sizes)
    begins = within % min(MOST_TOGETHER, layout.samples_per_shard) == 0
    piece = np.cumsum(begins) - 1
    # the pieces, shuffled
    rank = np.empty(begins.sum(), np.int64)
    rank[permutation(len(rank), (SEED, name, 1))] = np.arange(len(rank))
    shuffled = np.argsort(rank[piece], kind="stable")
    return order[shuffled], np.flatnonzero(begins[shuffled])


def _cut(split: str, source: SplitImages, layout: Layout) -> list[NDArray[np.int64]]:
    """Return the numbers of each shard's images: shuffled, then cut by count and by bytes."""
    images = source.images
    order, starts = _order(split, source, layout)
    blocks = -(-images.sizes // BLOCK) + 1
    sizes = BLOCK * (blocks + np.where(images.labels >= 0, 2, 0))  # in the tar
    described = np.array([len(tree) for tree in source.described], np.int64)
    sizes += np.where(described, BLOCK * (1 + -(-described // BLOCK)), 0)
    ends = [0, *np.cumsum(sizes[order]).tolist()]
    # at which of them another shard begins: pieces lie together, unless larger than a shard
    cuts = list[int]()
    begin = 0
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
    decides = json.dumps([WRITER_VERSION, split, SEED, *options], default=Reading.model_dump)
    digest = hashlib.sha256(decides.encode() + images.contents.encode())
    for number in source.numbers.tolist():
        row = [number, images.names[number], int(images.labels[number]), int(images.sizes[number])]
        digest.update(json.dumps(row).encode())
    for name in source.columns.column_names:
        digest.update(json.dumps([name, kind_of(source.columns.column(name))]).encode())
    for number in source.numbers.tolist():
        digest.update(source.described[number] or b"{}")
    return digest.hexdigest()


def _unreadable(bad: Sequence[str]) -> str:
    """Name some images that cannot be decoded, and count the others."""
    if len(bad) == 1:
        return f"{bad[0]}; mend or remove it, or give --skip-bad"
    return (
        f"{len(bad):,} images cannot be read so far: {listed(bad, NAMED_BAD, '; ')}; mend or "
        "remove them, or give --skip-bad"
    )


def _write_shard(
    folder: Path, shard: int, plan: SplitPlan, skip_bad: bool, stop: threading.Event
) -> Done:
    """Write one tar and its sidecar, each atomically; no tar where every image is bad."""
    images = plan.source.images
    path = folder / f"{plan.split}-{shard:06d}.tar"
    bad = dict[int, str]()
    remarks = Tally()
    digests = list[str]()
    # of pixels
    count = 0
    sums = np.zeros(3, np.int64)
    squares = np.zeros(3, np.int64)
    with (
        replacing(path, fsync=True) as temporary,
        tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number in plan.shards[shard].tolist():
            if stop.is_set():
                raise DataError(f"{path.name}: stopped, because another shard failed")
            name = images.names[number]
            label = int(images.labels[number])
            try:
                suffix, raw, pixels, of_image = _encode(plan, number)
            except BadSample as error:
                bad[number] = f"{name}: {error}"
                continue
            for what in of_image:
                remarks.add(what, name)
            digests.append(digest_of(raw).hex())
            count += pixels.shape[1]
            sums += pixels.sum(axis=1)
            squares += (pixels**2).sum(axis=1)
            for kind, content in (
                (suffix, raw),
                ("cls", b"%d" % label if label >= 0 else b""),
                ("json", plan.source.described[number]),
            ):
                if content:
                    member = tarfile.TarInfo(f"{_key(number, name)}.{kind}")
                    # no time, no owner
                    member.mode = 0o444
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        if bad and not skip_bad:  # all of this shard, so that they are mended at once
            raise DataError(_unreadable([*bad.values()]))
    if not count:
        path.unlink()
    suffixes = ARRAY_SUFFIXES if plan.layout.arrays else IMAGE_SUFFIXES
    return Done(
        shard=shard,
        entry=index_tar(path, suffixes)[0] if count else None,  # now that it is whole and on disk
        moments=Moments(pixels=count, sums=sums.tolist(), squares=squares.tolist()),
        bad=bad,
        digests="".join(digests),
        remarks=remarks.groups(),
    )


def _encode(plan: SplitPlan, number: int) -> tuple[str, bytes, NDArray[np.int64], list[str]]:
    """Return an image's suffix and bytes in the shard, its (3, n) pixels, and remarks."""
    source = plan.source
    layout = plan.layout
    original = raw = source.images.read(number)
    if layout.arrays is not None:
        raw, has_nan = without_nan(raw, layout.arrays.reading.nan)
        remarks = ["NaN or infinite values, replaced"] * has_nan
        return "npy", raw, np.zeros((3, 1), np.int64), remarks  # measured once all is written
    if layout.background is not None:
        raw = flatten(raw, layout.background)
    if layout.resize_shorter_px is not None:
        raw = downscale(raw, layout.resize_shorter_px)
    suffix, raw = to_member(raw)
    pixels = decode(raw, STATISTICS_PX).reshape(3, -1).astype(np.int64)
    remarks = remarks_on(original, on_background=layout.background is not None)
    if image_kind(original) is None and len(raw) > LARGE_PNG:
        remarks.append(
            f"stored as PNG of more than {LARGE_PNG / 1e6:g} MB (build with --resize-px 512 and "
            "--overwrite to store and read less)"
        )
    return suffix, raw, pixels, remarks


def _key(number: int, name: str) -> str:
    """Return a unique key of 60 ASCII characters at most; its end helps to find the file."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.splitext(name)[0]).strip("_")
    return f"{number:08d}-{stem[-51:]}"
