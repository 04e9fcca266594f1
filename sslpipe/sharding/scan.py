"""Find the samples of a tar by their offsets, without extracting or unpickling anything."""

import re
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.portable import read_at

BLOCK = 512  # bytes: a tar header, and what data are padded to
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
# webdataset 1.0.2 splits names like this (filters.py, base_plus_ext; tariterators.py, skip_meta)
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_LABEL_BYTES = 32


class Sample(NamedTuple):
    """Where one sample lies in its tar.

    Args:
        key: webdataset's.
        start: First byte in the tar, with its header.
        end: The byte after its last, with padding.
        image: First byte and length of the image itself.
        label: -1 for none.
    """

    key: str
    start: int
    end: int
    image: tuple[int, int]
    label: int


class _Member(NamedTuple):
    key: str
    suffix: str
    start: int
    data: int
    size: int

    @property
    def end(self) -> int:
        return self.data + -(-self.size // BLOCK) * BLOCK


def scan_tar(path: Path) -> list[Sample]:
    """List the samples of a webdataset tar, in file order; those without an image are skipped.

    Only regular files count; a label is the integer text in KEY.cls.

    Raises:
        DataError: The tar is compressed or cut, members of a sample do not lie together, a sample
            has two images, or a .cls is no integer.
    """
    samples: list[Sample] = []
    seen: set[str] = set()
    group: list[_Member] = []
    with open(path, "rb") as file:
        for member in [*_members(path), None]:
            if group and (member is None or member.key != group[0].key):
                sample = _sample(path, file.fileno(), group)
                if sample is not None:
                    samples.append(sample)
                group = []
            if member is not None:
                if not group and member.key in seen:
                    raise DataError(
                        f"{path}: the members of {member.key!r} do not lie together; "
                        "write the tar again, sorted by name"
                    )
                seen.add(member.key)
                group.append(member)
    return samples


def offset_rows(samples: list[Sample]) -> NDArray[np.int64]:
    """Return what the sidecar holds: (samples, 3) int64 of start, end, label."""
    return np.array([(s.start, s.end, s.label) for s in samples], np.int64).reshape(-1, 3)


def _members(path: Path) -> list[_Member]:
    """List the regular members that webdataset would see, after checking that the tar is whole."""
    with open(path, "rb") as file:
        first = file.read(2)
    if first in _COMPRESSED:
        raise DataError(f"{path} is compressed ({_COMPRESSED[first]}); offsets need a plain tar")
    members = []
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                if not info.isreg() or _META.match(info.name):
                    continue
                if info.issparse():
                    raise DataError(f"{path}: {info.name!r} is a sparse file; write the tar again")
                if match := _NAME.match(info.name):
                    key, suffix = match[1], match[2].lower()
                    members.append(_Member(key, suffix, info.offset, info.offset_data, info.size))
            end = tar.offset  # where the next header would start
    except tarfile.TarError as error:
        raise DataError(f"{path} is truncated or no tar: {error}") from error
    # tarfile, like webdataset, takes a tar cut in a header or between members for a whole one
    with open(path, "rb") as file:
        file.seek(end)
        trailer = file.read(2**16)
    if len(trailer) < 2 * BLOCK:
        raise DataError(f"{path} is truncated: no end-of-archive mark at byte {end}")
    if trailer.strip(b"\0"):
        raise DataError(f"{path} is damaged, or several tars in one: see byte {end}")
    return members


def _sample(path: Path, descriptor: int, group: list[_Member]) -> Sample | None:
    key = group[0].key
    suffixes = [member.suffix for member in group]
    if len(set(suffixes)) < len(suffixes):
        raise DataError(f"{path}: two members of {key!r} have the same suffix")
    images = [member for member in group if member.suffix in IMAGE_SUFFIXES]
    if not images:
        return None
    if len(images) > 1:
        raise DataError(f"{path}: {key!r} has {len(images)} images; a sample has one")
    label = -1
    for member in group:
        if member.suffix == "cls":
            text = read_at(descriptor, min(member.size, _LABEL_BYTES), member.data)
            label = _label(path, key, text)
    return Sample(key, group[0].start, group[-1].end, (images[0].data, images[0].size), label)


def _label(path: Path, key: str, text: bytes) -> int:
    if not re.fullmatch(rb"\s*(-1|\d{1,18})\s*", text):
        raise DataError(f"{path}: {key}.cls holds {text!r}, not an integer >= 0 (-1: no label)")
    return int(text)
