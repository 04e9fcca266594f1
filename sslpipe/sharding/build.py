"""Images of a source -> shards of a data set."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sslpipe.arguments import Progress, silent
from sslpipe.data.columns import kind_of
from sslpipe.data.holdout import CLASS
from sslpipe.data.image_type import RGB8, hex_colour
from sslpipe.data.index import ARRAY_SUFFIXES, IMAGE_SUFFIXES, PATH_COLUMN, Manifest, ShardFile
from sslpipe.errors import DataError, did_you_mean
from sslpipe.portable import one_at_a_time, write_atomically
from sslpipe.sharding.arrays import MakeSamples, Samples
from sslpipe.sharding.build_report import (
    Report,
    check_classes,
    group_kinds,
    merge_groups,
    write_report,
)
from sslpipe.sharding.columns import (
    Columns,
    check_kinds,
    save_columns,
    with_paths,
    without_splits,
)
from sslpipe.sharding.gather import columns_of_images, columns_of_tars, describe
from sslpipe.sharding.measure import measure
from sslpipe.sharding.readers import OPTIONS, SOURCES
from sslpipe.sharding.record import (
    FOLDER,
    Done,
    Record,
    forget_split,
    merge_classes,
    open_manifest,
    recorded_digests,
    shards_in,
)
from sslpipe.sharding.sources import ColumnSpec, SourceOptions, SourceReader
from sslpipe.sharding.writer import (
    Layout,
    SplitImages,
    SplitPlan,
    cut_splits,
    mean_and_std,
    plan_split,
    write_split,
)

MISSING = "missing.txt"  # beside dataset.json: SPLIT, tab, the file as the list names it


class Built(NamedTuple):
    """The manifest in dataset.json, and what to say of the build."""

    manifest: Manifest
    skipped: list[str]  # "NAME: reason" for each image that cannot be decoded
    missing: dict[str, list[str]]  # files that a list names and that are not there, by split
    notes: tuple[str, ...]  # lines about columns, cuts and channels
    report: Report

    def __repr__(self) -> str:
        """Show the report, as the command does: what became a split, a class, was left out."""
        return "\n".join(["Built:", *self.report.lines(), *self.notes])


def write_shards(
    out: Path,
    source: str | SourceReader,
    options: SourceOptions,
    layout: Layout,
    *,
    test_fraction: float = 0.0,
    split_by: str | None = None,
    unseen_classes: Sequence[str] = (),
    skip_bad: bool = False,
    overwrite: bool = False,
    origin: str = "",
    license: str = "",
    workers: int = 2,
    progress: Progress = silent,
    value_range: tuple[float, float] | None = None,
    make_samples: MakeSamples | None = None,
) -> Built:
    """Write shards from images; after a stop, the same call resumes to the same bytes.

    Args:
        out: The data set's folder; splits that it has already stay.
        source: A key of SOURCES, or what reads images of another kind.
        options: Where the source's images are.
        layout: How they are shuffled, cut into shards and changed.
        test_fraction: Share of each class to cut from train as test, in [0, 0.9].
        split_by: Column whose groups the cut of test leaves whole, or "class".
        unseen_classes: Classes whose images go to splits of their own.
        skip_bad: Skip images that cannot be decoded, instead of raising.
        overwrite: Replace the splits that the source has.
        origin: Where the images come from, for the record.
        license: Of the images, for the record.
        workers: Threads; the files do not depend on it.
        progress: Makes the progress bar of each split.
        value_range: Low and high of all channels of images that are not 8-bit RGB; None: measured.
        make_samples: Makes samples of the source's files; None: each file is one.

    Raises:
        DataError: An unknown source, unreadable images, other classes, shards of another build.
    """
    _check_source(source, options)
    if split_by and not test_fraction:
        raise DataError(f"--split-by={split_by!r} needs --test-fraction, the share that is cut")

    # every image of the source, its label, its split
    read = SOURCES[source] if isinstance(source, str) else source
    images = read(replace(options, out=out))
    check_classes({key: value.class_names() for key, value in images.items()})
    manifest = open_manifest(out, options.name)
    # idx files without names, images in memory: a split may lack classes that another one has
    by_length = sorted((each.classes for each in images.values()), key=len, reverse=True)
    classes = tuple(dict.fromkeys(name for own in by_length for name in own))
    columns = columns_of_images(images, options)
    left_out = [each for value in images.values() for each in value.left_out]
    doubts = list(dict.fromkeys(line for value in images.values() for line in value.doubts))
    made = Samples(images=images, columns=columns, dtype=None, window=None, notes=[])
    if make_samples is not None:
        made = make_samples(images, columns, out / FOLDER, workers)
    images = made.images
    columns = made.columns
    by = split_by or made.split_by
    splits, cut = cut_splits(images, columns, classes, layout, test_fraction, by, unseen_classes)
    if not {*manifest.splits} <= {*splits}:  # labels of splits that stay are places in its list
        classes = merge_classes(manifest.classes, classes)
        splits, cut = cut_splits(
            images, columns, classes, layout, test_fraction, by, unseen_classes
        )
    notes = [*made.notes, *describe(columns), *cut]
    columns_by_split = {key: split.columns for key, split in splits.items()}
    check_kinds(without_splits(manifest, splits), columns_by_split)
    _check_type(manifest, splits, layout, made.dtype)
    plans = [plan_split(key, value, layout) for key, value in splits.items()]

    # the shards; until dataset.json names them, they are not read
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    with one_at_a_time(out / FOLDER), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # too large: a bad image
        if overwrite:
            manifest = _forget(out, manifest, [*splits])
        notes += _claim(out, plans)
        written: dict[str, list[Done]] = {}
        for plan in plans:
            total = sum(map(len, plan.shards))
            with progress(f"{out.name} {plan.split}", total) as advance:
                written[plan.split] = write_split(
                    out, plan, workers=workers, skip_bad=skip_bad, advance=advance
                )

        # dataset.json, last
        shards = _finished_shards(written)
        tars = {key: [out / entry.file for entry in own] for key, own in shards.items()}
        kind = source if isinstance(source, str) else "images in memory"
        fields: dict[str, object] = {
            "source": origin or (f"torchvision {options.name}" if kind == "torchvision" else kind),
            "license": license or manifest.license,
            "classes": classes,
            "splits": {**manifest.splits, **shards},
        }
        # mean and std are train's, or the first split's while there is no train
        if "train" in written or not manifest.splits:
            key = "train" if "train" in written else next(iter(written))
            statistics, measured = _statistics(
                tars[key], written[key], layout, value_range or made.window
            )
            fields |= statistics
            notes += measured
        missing = {key: list(value.missing) for key, value in images.items() if value.missing}
        _list_missing(out / MISSING, missing, written)
        specs = _specs(columns)
        in_shards = columns_of_tars(
            tars,
            SourceOptions(columns=specs),
            required=False,
            workers=workers,
            suffixes=IMAGE_SUFFIXES if layout.arrays is None else ARRAY_SUFFIXES,
        )
        in_shards = _with_paths(in_shards, written, specs, manifest)
        manifest = save_columns(out, manifest.model_copy(update=fields), in_shards)

        # the report
        done = [each for own in written.values() for each in own]
        skipped = [line for each in done for line in each.bad]
        bad = group_kinds(
            ("images that cannot be read or decoded", "", line.partition(": ")[0])
            for line in skipped
        )
        report = write_report(
            out,
            left_out=[*left_out, *bad],
            looked_at=sum(each.entry.samples for each in done if each.entry is not None),
            images=merge_groups(each for own in done for each in own.remarks),
            doubts=doubts,
            split_by_class=split_by == CLASS,
            digests=recorded_digests(out),
            workers=workers,
        )
        return Built(manifest, skipped, missing, tuple(notes), report)


# --- what may be written


def _check_source(source: str | SourceReader, options: SourceOptions) -> None:
    """Raise DataError for an unknown source, or an option that it would ignore."""
    if not isinstance(source, str):
        return
    if source not in SOURCES:
        known = SOURCES.names()
        raise DataError(
            f"--source={source!r} is unknown{did_you_mean(source, known)}; known: "
            f"{', '.join(known)}; tars are used as they are by `sslpipe shards index`"
        )
    for option, owners in OPTIONS.items():
        if getattr(options, option) and source not in owners:
            named = f"--{option.replace('_', '-')}"
            needed = " or ".join(owners)
            raise DataError(f"{named} is for the source {needed}; here --source is {source}")


def _check_type(
    manifest: Manifest, splits: Mapping[str, SplitImages], layout: Layout, dtype: str | None
) -> None:
    """Raise DataError where images are of another type than those of splits that stay."""
    kept = [key for key in manifest.splits if key not in splits]
    image = manifest.image or RGB8
    dtype = dtype or RGB8.dtype
    is_array = layout.arrays is not None
    channels = layout.arrays.channels if layout.arrays else RGB8.channels
    is_same = (image.channels, image.dtype, image.is_rgb8) == (channels, dtype, not is_array)
    if kept and not is_same:
        raise DataError(
            f"{', '.join(kept)} of dataset.json has {image.dtype} of {', '.join(image.channels)}, "
            f"and these images are {dtype} of {', '.join(channels)}: a data set has one type; "
            "build another one"
        )
    if kept and image.background != layout.background:
        has = "none" if image.background is None else hex_colour(image.background)
        raise DataError(
            f"--background: {', '.join(kept)} of dataset.json has {has}, and a data set has one; "
            "give the same, or build all splits anew with --overwrite"
        )


def _claim(out: Path, plans: Sequence[SplitPlan]) -> list[str]:
    """Remove what unfinished builds of other images or options have left; returns what to say.

    Raises: DataError where the folder holds shards of these splits that another build wrote.
    """
    manifest = open_manifest(out)
    begun_anew = []
    held = []
    for plan in plans:
        recorded = Record(out, plan.split).plan()
        is_finished = plan.split in manifest.splits
        if recorded is None:
            is_held = is_finished or bool(shards_in(out, plan.split))
        else:
            is_held = recorded != plan.fingerprint
        if is_held and recorded and not is_finished:
            forget_split(out, plan.split)
            begun_anew.append(plan.split)
        elif is_held:
            held.append(plan.split)
    if held:
        written = [plan.split for plan in plans]
        kept = [key for key in manifest.splits if key not in written]
        remedy = f"give --overwrite: {' and '.join(written)} are written anew"
        if kept:
            remedy += f", {' and '.join(kept)} are kept"
        raise DataError(
            f"{out} already holds {' and '.join(held)} shards of other images or options; choose "
            f"another folder, or {remedy}"
        )
    return [
        f"split {split}: an unfinished build of other images or options was there; it is begun anew"
        for split in begun_anew
    ]


def _forget(out: Path, manifest: Manifest, written: Sequence[str]) -> Manifest:
    """Remove the splits that are to be written anew; returns the manifest without them."""
    kept = {key: value for key, value in manifest.splits.items() if key not in written}
    manifest = without_splits(manifest.model_copy(update={"splits": kept}), written)
    if out.is_dir():
        save_columns(out, manifest, {})
        for key in written:
            forget_split(out, key)
    return manifest


# --- once all shards are there


def _finished_shards(written: Mapping[str, Sequence[Done]]) -> dict[str, tuple[ShardFile, ...]]:
    """Return the shards that dataset.json will name. Raises: DataError for a split without any."""
    shards = {}
    for key, own in written.items():
        shards[key] = tuple(done.entry for done in own if done.entry is not None)
        if not shards[key]:
            raise DataError(f"split {key!r} has no image that can be decoded")
    return shards


def _statistics(
    tars: Sequence[Path],
    done: list[Done],
    layout: Layout,
    value_range: tuple[float, float] | None,
) -> tuple[dict[str, object], list[str]]:
    """Return type, mean and std of a split's images as dataset.json has them, and what to say."""
    if layout.arrays is None:
        mean, std = mean_and_std(done)
        image = None if layout.background is None else RGB8.on(layout.background)
        return {"image": image, "mean": mean, "std": std}, []
    measured = measure(tars, layout.arrays.channels, value_range)
    image = measured.image.read_as(layout.arrays.reading)
    return {"image": image, "mean": measured.mean, "std": measured.std}, measured.notes


def _specs(columns: Mapping[str, Columns]) -> tuple[ColumnSpec, ...]:
    """Return what is read back from the shards: the columns of all splits, of the same kinds."""
    kinds = {
        name: kind_of(table.column(name))
        for table in columns.values()
        for name in table.column_names
    }
    return tuple(ColumnSpec(name, name, kind) for name, kind in kinds.items())


def _with_paths(
    columns: Mapping[str, Columns],
    written: Mapping[str, Sequence[Done]],
    specs: Sequence[ColumnSpec],
    manifest: Manifest,
) -> dict[str, Columns]:
    """Add the column of paths to splits of files, unless there is a column of such a name."""
    known = manifest.columns.get(PATH_COLUMN)
    own = [spec.name for spec in specs]
    alike = {name for name in (*own, *manifest.columns) if name.lower() == PATH_COLUMN}
    is_ours = PATH_COLUMN not in own and (known is None or known.kind == "text")
    added = dict(columns)
    for split, shards in written.items():
        names = [name for done in shards for name in done.names]
        if names and is_ours and alike <= {PATH_COLUMN}:
            added[split] = with_paths(columns[split], names)
    return added


def _list_missing(path: Path, missing: Mapping[str, Sequence[str]], written: Iterable[str]) -> None:
    """Write the files that are missing, in the list's order; lines of splits not written stay."""
    rewritten = {*missing, *written}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [line for line in lines if line.partition("\t")[0] not in rewritten]
    for split, names in missing.items():
        lines += [f"{split}\t{n if n.isprintable() else ascii(n)[1:-1]}" for n in names]
    if lines:
        write_atomically(path, "\n".join(lines) + "\n")
    else:
        path.unlink(missing_ok=True)
