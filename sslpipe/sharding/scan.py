"""Find the samples of a tar by their offsets, without extracting or unpickling anything."""

import errno
import hashlib
import io
import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import MAX_BYTES
from sslpipe.data.index import BLOCK, IMAGE_SUFFIXES, ShardFile
from sslpipe.data.storage import npy_bytes
from sslpipe.errors import DataError
from sslpipe.portable import sha256_of, write_atomically
from sslpipe.sharding.build_report import Group, Tally
from sslpipe.sharding.sources import HEIC_SUFFIXES, SUFFIXES, open_file
from sslpipe.sharding.walk import fetch_hint

# webdataset 1.0.2 splits names like this (filters.py, base_plus_ext; tariterators.py, skip_meta)
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
DOTS = "several dots in their names, at whose first a webdataset key ends; each is a sample"
SEVERAL = "several images of one key, each of which is a sample with the label and JSON of the key"
BESIDE = "members beside images"
WITHOUT_IMAGE = "members of samples without an image"
OFFSETS = "offsets"  # folder beside dataset.json, of tars that lie elsewhere
_LABEL_BYTES = 32
_LONGEST_NAME = 4096  # of a path on Linux
MOST_SAMPLE_BYTES = 2 * MAX_BYTES  # of members that are read together
MOST_HEADER_BYTES = 2**20  # of a name or of pax headers; larger ones are an attack


class Sample(NamedTuple):
    """Where one sample lies in its tar."""

    key: str  # the image's name without its last suffix; as webdataset's where that has no dot
    start: int  # its first header
    end: int  # behind its padding
    image: tuple[int, int]  # first byte and length
    label: int  # -1: none
    name: str  # of the image
    json: tuple[int, int] | None  # KEY.json
    text: tuple[int, int] | None = None  # KEY.SUFFIX, where another suffix than cls is the label's


class Member(NamedTuple):
    """A regular file of a tar, whose name is never a path on this machine."""

    name: str
    key: str  # webdataset's: to the first dot
    suffix: str  # after the key and a dot, in lower case
    start: int  # of its header
    data: int  # start of its content
    size: int

    @property
    def end(self) -> int:
        """The byte after the padding."""
        return self.data + -(-self.size // BLOCK) * BLOCK

    @property
    def stem(self) -> str:
        """The name to its last dot."""
        return self.name.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """The suffix behind the last dot, in lower case."""
        return self.suffix.rpartition(".")[2]


class Scan(NamedTuple):
    """The samples of a tar in file order, what is in no sample, and what is unusual."""

    samples: list[Sample]
    left_out: list[Group]
    unusual: list[Group]

    @property
    def folders(self) -> set[str]:
        """The folders of the images, as the tar names them: "train/cat"; "" of none."""
        return {sample.name.rpartition("/")[0] for sample in self.samples}


class HeaderFile(io.FileIO):
    """A tar of which tarfile reads the headers only; a header that claims to be huge is refused."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most MOST_HEADER_BYTES."""
        if size is None or not 0 <= size <= MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes at byte {self.tell()}")
        return super().read(size)


def scan_tar(
    path: Path, suffixes: Sequence[str] = IMAGE_SUFFIXES, *, label_suffix: str | None = None
) -> Scan:
    """List the samples of a webdataset tar, in file order.

    Members are a sample up to the FIRST dot of their names, as in webdataset. Its image is KEY.jpg
    (or another of the suffixes), else its one KEY.ANYTHING.jpg. Where names of several images
    differ behind the first dot only (v1.0.jpg, v1.1.jpg; 7.front.jpg, 7.back.jpg), and none is
    KEY.jpg, these are samples up to the LAST dot, and KEY.cls and KEY.json belong to each. A label
    is the integer text in KEY.cls. Only regular files count; what is in no sample is counted by
    kind.

    Args:
        path: The tar.
        suffixes: Of its images.
        label_suffix: Find the member KEY.SUFFIX for `Sample.text`, and take no label of KEY.cls.

    Raises: DataError where the tar is compressed or cut, members of a sample do not lie together, a
    sample has two images, or a .cls is no integer.
    """
    samples: list[Sample] = []
    unusual = Tally()
    seen: set[str] = set()
    members, left_out = list_members(path)
    several = _keys_of_several(members, suffixes)
    kinds = (label_suffix or "cls", "json")
    shared: dict[str, list[Member]] = defaultdict(list)  # by key
    for member in members:
        if member.key in several and member.suffix in kinds:
            shared[member.key].append(member)
    with open_file(path) as file:
        for key, group in groupby(members, lambda m: m.stem if m.key in several else m.key):
            unshared = [member for member in group if member not in shared.get(member.key, ())]
            if not unshared:
                continue
            if key in seen:
                raise DataError(
                    f"{path}: the members of {key!r} do not lie together (a key ends at the first "
                    "dot of a name); write them again side by side"
                )
            seen.add(key)
            if len({member.suffix for member in unshared}) < len(unshared):
                raise DataError(f"{path}: two members of {unshared[0].key!r} have the same suffix")
            image = _image_of(path, unshared, suffixes)
            if image is None:
                for member in unshared:
                    left_out.add(WITHOUT_IMAGE, member.name, f".{member.suffix}")
                continue
            if image.size > MAX_BYTES:
                what = f"images of more than {MAX_BYTES:,} bytes"
                left_out.add(what, image.name, f".{image.suffix}")
                continue

            # what belongs to it, where KEY is the image's name to its last dot, or its key
            beside = shared.get(image.key, [])
            labelled = _belonging([*beside, *unshared], image, kinds[0])
            json = _belonging([*beside, *unshared], image, "json")
            for member in unshared:
                if member not in (image, labelled, json):
                    left_out.add(BESIDE, member.name, f".{member.suffix}")

            # all members are read together, unless there are too many, or others between them
            start = unshared[0].start
            end = unshared[-1].end
            is_whole = all(before.end == after.start for before, after in pairwise(unshared))
            if not is_whole or end - start > MOST_SAMPLE_BYTES:
                start = image.start
                end = image.end
            label = -1
            if labelled and not label_suffix:
                label = _read_label(path, file.fileno(), labelled)
            sample = Sample(
                key=image.stem,
                start=start,
                end=end,
                image=(image.data, image.size),
                label=label,
                name=image.name,
                json=json and (json.data, json.size),
                text=(labelled.data, labelled.size) if label_suffix and labelled else None,
            )
            samples.append(sample)
            if beside:
                kind = sample.name.rpartition("/")[2].partition(".")[2]
                unusual.add(SEVERAL, sample.name, f".{kind}")
            elif "." in sample.key.rpartition("/")[2]:
                unusual.add(DOTS, sample.name)
    where = f" in {path.name}"
    return Scan(samples, left_out.groups(where), unusual.groups(where))


def _keys_of_several(members: Sequence[Member], suffixes: Sequence[str]) -> set[str]:
    """Return the keys, to the first dot, of several images of which none is KEY.SUFFIX."""
    images = Counter(member.key for member in members if member.kind in suffixes)
    plain = {member.key for member in members if member.suffix in suffixes}
    return {key for key, count in images.items() if count > 1} - plain


def unread(left_out: Sequence[Group], path: Path) -> list[str]:
    """Name images in formats that shards do not hold, and the command that stores them anew."""
    kinds = (*SUFFIXES, *HEIC_SUFFIXES)
    groups = [each for each in left_out if each.what == WITHOUT_IMAGE and each.kind in kinds]
    if not groups:
        return []
    listed = ", ".join(f"{each.count:,} {each.kind}" for each in groups)
    is_lacking = any(each.kind not in SUFFIXES for each in groups)
    return [
        f"images in formats that training does not read: {listed}; "
        + "pip install pillow-heif, then " * is_lacking
        + f"`sslpipe shards build OUT --source tars --root {path.parent}` stores them as PNG"
    ]


def offset_rows(samples: list[Sample]) -> NDArray[np.int64]:
    """Return what the sidecar holds: (samples, 3) int64 of start, end, label."""
    return np.array([(s.start, s.end, s.label) for s in samples], np.int64).reshape(-1, 3)


def index_tar(
    path: Path,
    suffixes: Sequence[str] = IMAGE_SUFFIXES,
    out: Path | None = None,
    numbers: NDArray[np.int64] | None = None,
) -> tuple[ShardFile, Scan]:
    """Write the sidecar of a finished tar; return its entry and the scan.

    Args:
        path: The tar.
        suffixes: Of its images.
        out: Folder of dataset.json; None: the tar's own. Elsewhere a sidecar is named by its
            content, as tars of several folders may have one name.
        numbers: The label that the sidecar holds for each label of the tar; None: the same.

    Raises: as `scan_tar`, and where it has no sample.
    """
    scan = scan_tar(path, suffixes)
    if not scan.samples:
        wanted = "KEY.jpg, KEY.png or KEY.webp; images in KEY.npy need --channels NAME,..."
        contents = "; ".join(
            f"{each.what}{' ' * bool(each.kind)}{each.kind}: {each.count:,}"
            for each in scan.left_out
        )
        raise DataError(
            f"{path} has no member {wanted if suffixes == IMAGE_SUFFIXES else 'KEY.npy'}; it has: "
            f"{contents or 'nothing'}{''.join(f'; {line}' for line in unread(scan.left_out, path))}"
        )
    rows = offset_rows(scan.samples)
    if numbers is not None:
        highest = int(rows[:, 2].max())
        if highest >= len(numbers):
            raise DataError(
                f"{path}: label {highest}, but the dataset.json beside it names {len(numbers)} "
                "classes; index that folder first with --classes FILE, or give --classes FILE of "
                "the labels of all"
            )
        labelled = rows[:, 2] >= 0
        rows[labelled, 2] = numbers[rows[labelled, 2]]
    raw = npy_bytes(rows)
    offsets_sha256 = hashlib.sha256(raw).hexdigest()
    file = path.name
    sidecar = path.with_suffix(".offsets.npy")
    if out is not None and out.resolve() != path.parent.resolve():
        is_inside = path.resolve().is_relative_to(out.resolve())
        place = path.resolve().relative_to(out.resolve()) if is_inside else path.absolute()
        file = str(place)
        sidecar = out / OFFSETS / f"{path.stem}-{offsets_sha256[:16]}.npy"
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(sidecar, raw, fsync=True)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise DataError(
            f"cannot write {sidecar}: {error.strerror}; give --out FOLDER to write the index "
            "elsewhere"
        ) from error
    entry = ShardFile(
        file=file,
        samples=len(scan.samples),
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        offsets=str(sidecar.relative_to(out or path.parent)),
        offsets_sha256=offsets_sha256,
    )
    return entry, scan


def list_members(path: Path) -> tuple[list[Member], Tally]:
    """List the regular files of a whole, plain tar, and what else it has but folders.

    Raises: DataError with the reason.
    """
    members: list[Member] = []
    left_out = Tally()
    with open_file(path) as whole, HeaderFile(whole.fileno(), closefd=False) as file:
        if packed := _COMPRESSED.get(file.read(2)):
            raise DataError(f"{path} is compressed ({packed}); offsets need a plain tar: unpack it")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                end = 0
                while (info := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # or it would keep every header
                    if info.size < 0 or tar.offset <= end:
                        raise tarfile.ReadError(f"{info.name!r} has a size of {info.size}")
                    if len(info.name) > _LONGEST_NAME:  # the pattern takes its square in time
                        raise tarfile.ReadError(f"a name of {len(info.name)} letters")
                    end = tar.offset  # where the next header would start
                    match = _NAME.match(info.name)
                    if info.isreg() and info.name.rpartition("/")[2].startswith("."):
                        # a Mac's ._1.jpg is no image, and webdataset's key of all in a/ is "a/"
                        left_out.add("hidden files", info.name)
                    elif info.isreg() and match and not _META.match(info.name):
                        if info.issparse():
                            raise tarfile.ReadError(f"{info.name!r} is a sparse file")
                        member = Member(
                            name=info.name,
                            key=match[1],
                            suffix=match[2].lower(),
                            start=info.offset,
                            data=info.offset_data,
                            size=info.size,
                        )
                        members.append(member)
                    elif not info.isdir():
                        what = "names without KEY.SUFFIX" if info.isreg() else "links and devices"
                        left_out.add(what, info.name)
                end = tar.offset
        except Exception as error:  # tarfile raises many kinds; all mean a damaged header
            what = "" if isinstance(error, tarfile.TarError) else f"{type(error).__name__}: "
            hint = fetch_hint(path)
            raise DataError(f"{path} is truncated or no tar: {what}{error}{hint}") from error
        # tarfile, like webdataset, takes a tar cut in a header or between members for a whole one
        file.seek(end)
        trailer = file.read(2**16)
    if len(trailer) < 2 * BLOCK:
        raise DataError(f"{path} is truncated: no end-of-archive mark at byte {end}")
    if trailer.strip(b"\0"):
        raise DataError(f"{path} is damaged, or several tars in one: see byte {end}")
    return members, left_out


def _image_of(path: Path, group: Sequence[Member], suffixes: Sequence[str]) -> Member | None:
    """Return the image among members that lie together; None: none is. Raises DataError for two."""
    plain = [member for member in group if member.suffix in suffixes]
    images = plain or [member for member in group if member.kind in suffixes]
    if len(images) > 1:  # such as KEY.tif beside KEY.jpg
        images = [member for member in images if member.kind in IMAGE_SUFFIXES] or images
    if len(images) > 1:
        more = "" if plain else "; a key ends at the first dot of a name: rename them"
        raise DataError(
            f"{path}: {group[0].key!r} has {len(images)} images; a sample has one{more}"
        )
    return images[0] if images else None


def _read_label(path: Path, descriptor: int, member: Member) -> int:
    """Read KEY.cls, the number of a class; -1: no label. Raises DataError for anything else."""
    raw = os.pread(descriptor, min(member.size, _LABEL_BYTES), member.data)
    if not re.fullmatch(rb"\s*(-1|\d{1,18})\s*", raw):
        raise DataError(
            f"{path}: {member.name} holds {raw!r}, not an integer >= 0 (-1: no label); of "
            "names make classes by `sslpipe shards build OUT --source tars --root "
            f"{path.parent}`"
        )
    return int(raw)


def _belonging(members: Sequence[Member], image: Member, kind: str) -> Member | None:
    """Find the member of a kind that is named as the image, else as its key.

    A kind may have dots, as in KEY.outputs.txt beside KEY.input.jpg.
    """
    by_stem = {member.stem: member for member in members if member.kind == kind}
    by_suffix = {member.suffix: member for member in members}
    return by_stem.get(image.stem, by_suffix.get(kind))
