"""Write tars again so that they can be indexed: plain, members of a sample together, in shards.

Images, labels and all else that belongs to a sample keep their bytes and their order. Nothing is
extracted: names in a tar become names in a tar.
"""

import bz2
import gzip
import lzma
import re
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from sslpipe.data.index import BLOCK, IMAGE_SUFFIXES, Manifest
from sslpipe.errors import DataError
from sslpipe.portable import replacing
from sslpipe.sharding.gather import TarColumns
from sslpipe.sharding.index import any_tars, by_split, index_folder
from sslpipe.sharding.record import forget_split, load_manifest, shards_in
from sslpipe.sharding.scan import HeaderFile, Member, compression, list_members, to_sample
from sslpipe.sharding.sources import number_labels
from sslpipe.sharding.writer import Advance, add_label, add_member, cut_shards, shard_name

_OPENERS: dict[str, Callable[[Path], Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_CHUNK = 2**20


class Repacked(NamedTuple):
    """The manifest written, and members that belong to no image, "TAR: NAME"."""

    manifest: Manifest
    left_out: list[str]


class _Sample(NamedTuple):
    """One sample: the key it gets, its members in file order, and the folder of its image."""

    key: str
    members: list[Member]
    folder: str


def repack(
    source: Path,
    out: Path,
    *,
    split: str | None = None,
    samples_per_shard: int = 1000,
    max_shard_bytes: int = 10**9,
    folder_labels: bool = False,
    classes: tuple[str, ...] = (),
    columns: TarColumns = TarColumns(),  # noqa: B008  # a tuple
    overwrite: bool = False,
    workers: int = 2,
    advance: Advance = lambda count: None,
) -> Repacked:
    """Write tars again as shards with an index, `out`, which is another folder.

    A shard holds samples of one tar, in its order. A compressed tar is unpacked into `out` while it
    is read, so that memory holds its list of members and nothing else.

    Args:
        source: A tar, plain or compressed with gzip, bzip2 or xz; or a folder of them.
        out: As above.
        split: Of all tars; else by how their names begin.
        samples_per_shard: At most so many.
        max_shard_bytes: At most so many, unless one sample is larger.
        folder_labels: Whether the folder that an image is in is its class.
        classes: Class names by label; with `folder_labels` the folders' names.
        columns: What else is read of each sample.
        overwrite: Replace these splits.
        workers: Threads that index.
        advance: Called with 1 for each tar.

    Raises:
        DataError: A tar is damaged, a sample has two images or a label that is no integer, or
            `out` holds these splits.
    """
    # the tars by split, and a place for their shards
    paths = [source] if source.is_file() else any_tars(source)
    if not paths:
        raise DataError(f"{source} has no tar: *.tar, *.tar.gz, *.tgz, *.tar.bz2, *.tar.xz")
    if out.resolve() == (source.parent if source.is_file() else source).resolve():
        raise DataError(f"{out} holds the tars themselves; choose another folder for the shards")
    groups = by_split(paths, split)
    _make_room(out, list(groups), overwrite)
    # classes, where folders name them: of all tars together
    if folder_labels:
        folders = (each.folder for path in paths for each in _list(path, out))
        classes = number_labels([], folders)[1]
    # the shards, tar by tar
    left_out: list[str] = []
    written: dict[str, list[Path]] = {key: [] for key in groups}
    for key, members in groups.items():
        for path in members:
            with _plain(path, out) as plain:
                samples = _samples(plain, path.name, left_out, folder_labels)
                with HeaderFile(plain) as file, tarfile.open(fileobj=file, mode="r:") as tar:
                    for part in _cut(samples, samples_per_shard, max_shard_bytes):
                        shard = out / shard_name(key, len(written[key]))
                        _write(shard, part, file, tar, classes if folder_labels else None)
                        written[key].append(shard)
            advance(1)
    written = {key: shards for key, shards in written.items() if shards}
    if not written:
        raise DataError(f"{source} has no image: *.jpg, *.jpeg, *.png or *.webp")
    manifest = index_folder(out, written, classes, columns=columns, workers=workers)
    return Repacked(manifest, left_out)


def _make_room(out: Path, splits: Sequence[str], overwrite: bool) -> None:
    """Make the folder; remove what it has of these splits, or refuse."""
    out.mkdir(parents=True, exist_ok=True)
    manifest = load_manifest(out)
    for split in splits:
        if overwrite:
            forget_split(out, split)
        elif shards_in(out, split) or (manifest and split in manifest.splits):
            raise DataError(
                f"{out} already holds shards of {split}; choose another folder, or give "
                f"--overwrite to write {' and '.join(splits)} anew"
            )


def _list(path: Path, out: Path) -> list[_Sample]:
    with _plain(path, out) as plain:
        return _samples(plain, path.name, [], True)


@contextmanager
def _plain(path: Path, folder: Path) -> Iterator[Path]:
    """Give the tar itself, or a copy of it without its compression, which is removed after."""
    packed = compression(path)
    if packed is None:
        yield path
        return
    if packed not in _OPENERS:
        raise DataError(f"{path} is compressed with {packed}, which is not read; unpack it first")
    copy = folder / f".{path.name}.{secrets.token_hex(8)}.plain.tmp"
    try:
        with _OPENERS[packed](path) as file, open(copy, "xb") as plain:
            shutil.copyfileobj(cast(IO[bytes], file), plain, _CHUNK)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        copy.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot unpack the {packed}: {error}") from error
    try:
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _samples(plain: Path, name: str, left_out: list[str], folder_labels: bool) -> list[_Sample]:
    """Group the members of a tar by key, in the order in which the keys appear.

    A member a.b.jpg has webdataset's key a and is an image of no suffix; where such a key has no
    other image, its members are samples of their own: a_b. `left_out` gets the names that belong to
    no image; with `folder_labels` a label of its own is refused.
    """
    listing = list_members(plain)
    left_out += [f"{name}: {other}" for other in listing.others]
    whole, rest = _with_image(listing.members, lambda member: (member.key, member.suffix))
    split, rest = _with_image(rest, lambda member: _last_dot(member.name))
    left_out += [f"{name}: {member.name}" for member in rest]
    samples, used = [], set[str]()
    with open(plain, "rb") as file:
        for group in sorted([*whole, *split], key=lambda members: members[0].start):
            # one image, one member of a suffix, a label that is an integer
            sample = to_sample(Path(name), file.fileno(), group)
            assert sample is not None
            key = _unique(_clean(sample.key), used)
            folder = sample.key.rpartition("/")[0].rpartition("/")[2]
            if folder_labels and (not folder or any(m.suffix == "cls" for m in group)):
                why = "is in no folder" if not folder else "has a label of its own"
                raise DataError(f"{name}: {sample.key!r} {why}; leave out --folder-labels")
            samples.append(_Sample(key, group, folder))
    return samples


def _with_image(
    members: Iterable[Member], name: Callable[[Member], tuple[str, str]]
) -> tuple[list[list[Member]], list[Member]]:
    """Group members by the key that `name` gives; return groups with an image, and the others."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        key, suffix = name(member)
        groups.setdefault(key, []).append(member._replace(key=key, suffix=suffix))
    whole, rest = [], []
    for group in groups.values():
        if any(member.suffix in IMAGE_SUFFIXES for member in group):
            whole.append(group)
        else:
            rest += group
    return whole, rest


def _last_dot(name: str) -> tuple[str, str]:
    stem, _, suffix = name.rpartition(".")
    return stem, suffix.lower()


def _clean(key: str) -> str:
    """Make a key that leads nowhere and that every reader splits alike."""
    *folders, base = [part for part in key.split("/") if part not in ("", ".", "..")] or ["image"]
    cleaned = "/".join([*folders, base.replace(".", "_")])
    return re.sub(r"[\x00-\x1f\x7f\\\ud800-\udfff]", "_", cleaned)


def _unique(key: str, used: set[str]) -> str:
    """Return the key, or with a number where another sample of the tar has it."""
    number, free = 1, key
    while free in used:
        number += 1
        free = f"{key}_{number}"
    used.add(free)
    return free


def _cut(samples: Sequence[_Sample], count: int, size: int) -> Iterator[Sequence[_Sample]]:
    """Cut samples, in order, into shards of at most so many samples and bytes."""
    sizes = [
        sum(BLOCK - member.size // -BLOCK * BLOCK for member in each.members) for each in samples
    ]
    cuts = cut_shards([1] * len(sizes), sizes, count, size)
    for begin, end in pairwise([0, *cuts, len(samples)] if samples else ()):
        yield samples[begin:end]


def _write(
    shard: Path,
    samples: Sequence[_Sample],
    file: HeaderFile,
    tar: tarfile.TarFile,
    classes: tuple[str, ...] | None,
) -> None:
    """Write one shard, whole or not at all; with `classes`, the label of each image's folder."""
    with (
        replacing(shard, fsync=True) as temporary,
        tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as out,
    ):
        for sample in samples:
            for member in sample.members:
                content: IO[bytes] | None = cast(IO[bytes], file)
                if member.sparse is None:
                    file.seek(member.data)
                else:  # with its holes filled
                    content = tar.extractfile(member.sparse)
                assert content is not None
                add_member(out, f"{sample.key}.{member.suffix}", content, member.size)
            if classes is not None:
                add_label(out, sample.key, classes.index(sample.folder))
