"""Index tars made by others as they are."""

from __future__ import annotations

import re
import tarfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from os.path import isfile
from pathlib import Path
from typing import NamedTuple

from sslpipe.arguments import Progress, checked, silent
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import (
    ARRAY_SUFFIXES,
    IMAGE_SUFFIXES,
    PATH_COLUMN,
    Manifest,
    ShardFile,
    check_split_name,
)
from sslpipe.data.storage import join
from sslpipe.errors import DataError, as_output, check_count, listed, shown
from sslpipe.portable import one_at_a_time
from sslpipe.sharding.arrays import parse_channels, parse_range
from sslpipe.sharding.build_report import (
    Group,
    Report,
    merge_groups,
    was_split_by_class,
    write_report,
)
from sslpipe.sharding.columns import parse_columns, save_columns, with_paths, without_splits
from sslpipe.sharding.gather import TarCells, cells_of_tar, columns_of_tars, parse_pattern
from sslpipe.sharding.join_tars import Joined, built_paths, join_folders
from sslpipe.sharding.measure import measure
from sslpipe.sharding.record import merge_classes, open_manifest
from sslpipe.sharding.scan import BESIDE, index_tar, unread
from sslpipe.sharding.sources import SourceOptions, distinct_names, read_class_names, read_file
from sslpipe.sharding.split_names import (
    missing_shards,
    split_of,
    without_number,
)
from sslpipe.sharding.tar_doubts import classes_in_names

_TAR_SUFFIX = re.compile(r"\.(tar|tgz|tbz2|txz|tar\.[a-z0-9]+)$", re.IGNORECASE)


class Indexed(NamedTuple):
    """The manifest in dataset.json, and what to say of it."""

    manifest: Manifest
    report: Report

    def __repr__(self) -> str:
        """Show the report, as the command does."""
        return "\n".join(["Indexed:", *self.report.lines()])


def find_tars(folder: Path, split: str | None) -> dict[str, list[Path]]:
    """Group a folder's tars by split: `split`, else how their names begin. Raises: DataError."""
    if not folder.is_dir():
        is_inside = folder.is_file() or re.search(r"[{*]", folder.name)  # {0000..0099}.tar
        where = f": give {folder.parent}, which holds it" if is_inside else ""
        raise DataError(f"{folder} is not a folder{where}")
    groups: dict[str, list[Path]] = {}
    names: dict[str, set[str]] = defaultdict(set)  # by split, how the names of its tars begin
    for path in sorted(folder.glob("[!.]*")):
        if not _TAR_SUFFIX.search(path.name):
            continue
        if path.suffix != ".tar":
            raise DataError(f"{path} is compressed; offsets need plain tars: unpack it first")
        begin = without_number(path.stem)
        name = split or split_of(begin) or begin or split_of(path.absolute().parent.name) or "train"
        try:
            check_split_name(name).encode()
            str(path.absolute()).encode()
        except UnicodeEncodeError:
            raise DataError(f"{path}: its name is not UTF-8; rename it") from None
        except ValueError as error:
            raise DataError(f"{path}: split {name!r}: {error}, or give --split NAME") from None
        groups.setdefault(name, []).append(path)
        names[name].add(re.sub(r"^[\W\d_]+", "", begin))  # 00000-train, 00001-train
    if not groups:
        inside = sorted({path.parent.name for path in folder.glob("*/*.tar")})
        more = f"; its folders have: {listed(inside, 5)}; name these, and --out FOLDER"
        raise DataError(f"{folder} has no .tar files{more * bool(inside)}")
    for name, begins in names.items():
        if len(begins) > 1 and not split:
            both = " and ".join(map(shown, sorted(begins)))
            raise DataError(
                f"{folder}: tars that begin with {both} mean one split, {name}; rename some, or "
                f"give --split={name!r} for all"
            )
    return groups


@checked
def index_tars(
    folders: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    split: str | None = None,
    classes: str | Path | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    name_pattern: str | None = None,
    channels: str | Sequence[str] | None = None,
    range: Sequence[float] | None = None,
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Indexed:
    """Use webdataset tars that others made as they are, as `sslpipe shards index` does.

    >>> sslpipe.index_tars("laion", columns=["url", "width:integer"])

    Other splits of the data set stay as they are; columns that are not read again are forgotten.

    Args:
        folders: The folder of the tars, or several to join.
        out: Folder for dataset.json and the offsets; None: the tars' own. Several folders need it.
        split: The split of all tars; None: by name, as in train-000000.tar.
        classes: The names of the classes by label, or a text file of a name per line.
        columns: Columns from keys of KEY.json, "sku,shot_at:time" or a list of such;
            "sku=product:text" renames. None: those that dataset.json has; "": no column.
        name_pattern: Columns from named groups of a pattern of the images' names.
        channels: Names of the channels of images in KEY.npy, (h, w, C); their type is measured.
        range: The low and the high value that views show as 0 and 1; None: measured.
        num_workers: Threads.
        progress: Makes the progress bar; None: there is none.

    Returns:
        The manifest in dataset.json, and the report.

    Raises:
        DataError: A tar is compressed, damaged, not laid out for webdataset, or in two splits.
    """
    check_count(num_workers, "num_workers", error=DataError)
    paths = [Path(each) for each in ([folders] if isinstance(folders, str | Path) else folders)]
    if not paths:
        raise DataError("folders = [] names none; give the folder of the tars, or several")
    target = paths[0] if out is None else as_output(out, "out", DataError)

    # the tars by split, without those that have no member
    tars: dict[str, list[Path]] = defaultdict(list)
    for folder in paths:
        for name, files in find_tars(folder, split).items():
            tars[name] += files
    groups = {
        name: [path for path in files if _has_member(path)] or files for name, files in tars.items()
    }
    if out is None and len(paths) > 1:
        raise DataError("several folders become one data set in a folder that --out names")

    # what is known of them; of the target's own tars dataset.json says more
    names = distinct_names(classes) if isinstance(classes, list | tuple) else ()
    if isinstance(classes, str | Path):
        names = read_class_names(Path(classes))
    joined = Joined(classes=names)
    if [folder.resolve() for folder in paths] != [target.resolve()]:
        joined = join_folders(paths, names, with_columns=columns is None)
    options = SourceOptions(
        columns=parse_columns(columns) if columns else joined.columns,
        name_pattern=parse_pattern(name_pattern),
    )
    named_channels = parse_channels(channels)
    value_range = parse_range(range)
    if value_range and not named_channels:
        raise DataError("--range is of images that --channels names; give both, or neither")

    with (
        one_at_a_time(target),
        (progress or silent)(f"index {target.name}", sum(map(len, tars.values()))) as advance,
    ):
        manifest = open_manifest(target)
        if columns is None or columns:
            _check_columns(target, manifest, groups, options)
        suffixes = _suffixes(target, manifest, groups, joined, named_channels)
        _check_once(target, groups, manifest)

        # the sidecars
        def index(path: Path) -> _IndexedTar:
            entry, scan = index_tar(path, suffixes, target, joined.numbers.get(path.parent))
            advance(1)
            return _IndexedTar(
                path=path,
                entry=entry,
                left_out=scan.left_out,
                unusual=scan.unusual,
                highest_label=max(sample.label for sample in scan.samples),
                has_json=any(sample.json for sample in scan.samples),
                folders=scan.folders,
                cells=cells_of_tar(path, scan.samples, options),
            )

        with ThreadPoolExecutor(num_workers) as pool:
            indexed = {name: list(pool.map(index, files)) for name, files in groups.items()}
        every = list(chain(*indexed.values()))
        highest = max(every, key=lambda tar: tar.highest_label)
        count = len(joined.classes)
        if count and not joined.numbers and highest.highest_label >= count:  # they begin at 1
            raise DataError(
                f"{highest.path}: label {highest.highest_label}, but names are given for the "
                f"labels 0 to {count - 1}; the first name is that of label 0: name every label"
            )

        # dataset.json
        splits = {name: tuple(tar.entry for tar in of_split) for name, of_split in indexed.items()}
        kept = [name for name in manifest.splits if name not in splits]
        fields: dict[str, object] = {
            "classes": joined.classes or manifest.classes,
            "splits": {**manifest.splits, **splits},
        }
        if kept:
            fields["classes"] = merge_classes(manifest.classes, joined.classes)
        if not kept or "train" in splits:
            fields |= joined.fields
        if named_channels:
            fields |= _measured_fields(groups, named_channels, value_range)
        cells = {name: [tar.cells for tar in of_split] for name, of_split in indexed.items()}
        values = with_paths(
            columns_of_tars(cells, options),
            {name: built_paths(groups[name], splits[name]) for name in groups},
            without_splits(manifest, groups),
        )
        manifest = save_columns(target, manifest.model_copy(update=fields), values)

        # the report
        empty = sorted({*chain(*tars.values())} - {*chain(*groups.values())})
        return Indexed(manifest, _report(target, empty, every, num_workers))


def _suffixes(
    out: Path,
    manifest: Manifest,
    groups: Collection[str],
    joined: Joined,
    channels: tuple[str, ...] | None,
) -> tuple[str, ...]:
    """Return how the images end: RGB, or arrays where channels are named or stored.

    Raises: DataError where splits that are kept are of another type.
    """
    kept = [name for name in manifest.splits if name not in groups]
    stored = manifest.image or RGB8
    if channels:
        if kept and stored.is_rgb8:
            raise DataError(f"{out / 'dataset.json'} has splits of 8-bit RGB: index all at once")
        return ARRAY_SUFFIXES
    image = manifest.model_copy(update=joined.fields).image or RGB8
    if kept and image != stored:
        raise DataError(f"{', '.join(kept)} of {out / 'dataset.json'} has images of another type")
    return IMAGE_SUFFIXES if image.is_rgb8 else ARRAY_SUFFIXES


class _IndexedTar(NamedTuple):
    """A tar whose sidecar is written: its entry, and what the report needs of its scan."""

    path: Path
    entry: ShardFile
    left_out: list[Group]
    unusual: list[Group]
    highest_label: int  # -1: none has one
    has_json: bool
    folders: set[str]  # of the images
    cells: TarCells


def _measured_fields(
    groups: Mapping[str, Sequence[Path]],
    channels: tuple[str, ...],
    value_range: tuple[float, float] | None,
) -> dict[str, object]:
    """Return what dataset.json says of arrays: measured on train, else on the first split."""
    first = "train" if "train" in groups else next(iter(groups))
    measured = measure(groups[first], channels, value_range)
    if measured.image.is_rgb8:
        raise DataError("these are 8-bit RGB: store them as PNG or JPEG, or name channels else")
    for name, paths in groups.items():
        other = measured if name == first else measure(paths, channels, value_range)
        if (dtype := other.image.dtype) != measured.image.dtype:
            raise DataError(f"split {name!r} is of {dtype}, and others {measured.image.dtype}")
    return {"image": measured.image, "mean": measured.mean, "std": measured.std}


def _report(
    out: Path, empty: Sequence[Path], indexed: Sequence[_IndexedTar], workers: int
) -> Report:
    """Return what became of the members of tars, once dataset.json is there."""
    left_out = [Group(what="tars without a member", count=1, example=path.name) for path in empty]
    left_out += [group for tar in indexed for group in tar.left_out]
    skipped = merge_groups(left_out)
    unusual = merge_groups(group for tar in indexed for group in tar.unusual)
    paths = [*empty, *(tar.path for tar in indexed)]
    doubts = [*missing_shards(paths), *unread(skipped, indexed[0].path)]
    has_texts = any(each.what == BESIDE and each.kind == ".txt" for each in skipped)
    has_json = any(tar.has_json for tar in indexed)
    has_labels = any(tar.highest_label >= 0 for tar in indexed)
    if not has_labels and (has_texts or has_json):
        member = "KEY.txt" if has_texts else "KEY.json"
        named = "txt" if has_texts else "NAME_IN_JSON"
        doubts.append(
            f"no image has a label, which is KEY.cls; if {member} says the class: `sslpipe shards "
            f"build OUT --source tars --root {indexed[0].path.parent} --label-column {named}`"
        )
    elif not has_labels:
        folders = {folder for tar in indexed for folder in tar.folders}
        images = sum(tar.entry.samples for tar in indexed)
        doubts += classes_in_names([tar.path for tar in indexed], folders, images)
    return write_report(
        out,
        left_out=skipped,
        images=unusual,
        doubts=doubts,
        split_by_class=was_split_by_class(out),
        workers=workers,
    )


def _has_member(path: Path) -> bool:
    """Return whether there is more than the end mark, as in tars whose downloads failed."""
    if not isfile(path):  # which reading it says
        return True
    return not 0 < path.stat().st_size <= tarfile.RECORDSIZE or any(read_file(path))


def _check_once(out: Path, groups: Mapping[str, Sequence[Path]], manifest: Manifest) -> None:
    """Raise DataError where a tar would be in two splits, or twice in one."""
    owner: dict[Path, str] = {}
    for split, shards in manifest.splits.items():
        if split not in groups:
            for shard in shards:
                owner[Path(join(str(out), shard.file)).resolve()] = split
    for split, paths in groups.items():
        for path in paths:
            other = owner.setdefault(path.resolve(), split)
            if other != split:
                raise DataError(
                    f"{path} is in the split {other!r} of {out / 'dataset.json'}, and would be in "
                    f"{split!r}, too; remove dataset.json to name the splits anew, or give --split "
                    f"{other}"
                )
        if len({path.resolve() for path in paths}) < len(paths):
            raise DataError(f"split {split!r} has a tar twice; name each folder once")


def _check_columns(
    folder: Path, manifest: Manifest, splits: Iterable[str], columns: SourceOptions
) -> None:
    """Raise DataError where splits are to be indexed again without the columns that they have."""
    fields = [
        f"{name}:{entry.kind}"
        for name, entry in manifest.columns.items()
        if name != PATH_COLUMN  # only a build knows it
        and set(splits) & set(entry.splits)
    ]
    if fields and not (columns.columns or columns.name_pattern):
        raise DataError(
            f"{folder / 'dataset.json'} has columns of these splits: give "
            f'--columns={",".join(fields)!r} to read them again, or --columns="" to drop them'
        )
