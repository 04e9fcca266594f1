"""Images of a source -> shards of a data set."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sslpipe.arguments import Progress, silent
from sslpipe.data.decode import pillow_remarks
from sslpipe.data.holdout import CLASS
from sslpipe.data.image_type import RGB8, hex_colour
from sslpipe.data.index import Manifest
from sslpipe.errors import DataError, for_caller
from sslpipe.portable import one_at_a_time, write_atomically
from sslpipe.sharding.build_report import (
    Group,
    Report,
    check_classes,
    merge_groups,
    write_report,
)
from sslpipe.sharding.columns import (
    check_kinds,
    save_columns,
    with_paths,
    without_splits,
)
from sslpipe.sharding.gather import columns_of_images, describe
from sslpipe.sharding.measure import measure
from sslpipe.sharding.readers import find_reader
from sslpipe.sharding.record import (
    Record,
    forget_split,
    merge_classes,
    open_manifest,
    recorded_digests,
    shards_in,
)
from sslpipe.sharding.samples import Cut, Samples, SplitImages, cut_splits, series_doubts
from sslpipe.sharding.sources import SourceOptions, SourceReader
from sslpipe.sharding.writer import (
    Layout,
    SplitPlan,
    WrittenSplit,
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


def read_samples(source: str | SourceReader, options: SourceOptions) -> Samples:
    """Read where all images of a source are, with labels and columns; each file is a sample.

    Raises:
        DataError: An unknown source, or what is wrong with its tables, folders and names.
    """
    read = find_reader(source, options) if isinstance(source, str) else source
    images = read(options)
    check_classes({key: split.class_names() for key, split in images.items()})
    return Samples(
        images=images,
        columns=columns_of_images(images, options),
        label_column=options.label_column,
        origin=source if isinstance(source, str) else "",
    )


def write_shards(
    out: Path,
    samples: Samples,
    layout: Layout,
    *,
    name: str | None = None,
    cut: Cut = Cut(),  # noqa: B008  # immutable
    skip_bad: bool = False,
    overwrite: bool = False,
    origin: str = "",
    license: str = "",
    workers: int = 2,
    progress: Progress = silent,
) -> Built:
    """Write shards of samples; after a stop, the same call resumes to the same bytes.

    Args:
        out: The data set's folder; splits that it has already stay.
        samples: As `read_samples` finds them.
        layout: How they are shuffled, cut into shards and changed.
        name: Of a new data set; None: the folder's.
        cut: What is cut from the samples' splits.
        skip_bad: Skip images that cannot be decoded, instead of raising.
        overwrite: Replace the splits that are there.
        origin: Where the images come from, for the record; "": the name of the source.
        license: Of the images, for the record.
        workers: Threads; the files do not depend on it.
        progress: Makes the progress bar of each split.

    Raises:
        DataError: Unreadable images, other classes, shards of another build.
    """
    # which of them lies where
    if cut.test_fraction and not cut.split_by:
        cut = replace(cut, split_by=samples.split_by)
    manifest = open_manifest(out, name)
    classes = _classes(samples, manifest, cut)
    splits, of_cut = cut_splits(samples, classes, cut)
    plans = [plan_split(key, value, layout) for key, value in splits.items()]
    notes = [*samples.notes, *describe(samples.columns), *of_cut]

    # the shards; until dataset.json names them, they are not read
    with one_at_a_time(out), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # too large: a bad image
        manifest = open_manifest(out, name)  # of a build that this one waited for
        if _classes(samples, manifest, cut) != classes:
            raise DataError(f"{out}: another build has named its classes; build again")
        _check_fits(manifest, splits, layout, samples.dtype)
        if overwrite:
            kept = {key: shards for key, shards in manifest.splits.items() if key not in splits}
            manifest = without_splits(manifest.model_copy(update={"splits": kept}), splits)
            save_columns(out, manifest, {})
            for key in splits:
                forget_split(out, key)
        notes += _claim(out, manifest, plans)
        written: dict[str, WrittenSplit] = {}
        for plan in plans:
            with progress(f"{out.name} {plan.split}", len(plan.source.numbers)) as advance:
                written[plan.split] = write_split(
                    out, plan, workers=workers, skip_bad=skip_bad, advance=advance
                )

        # dataset.json and the report
        fields = {
            "source": origin or samples.origin,
            "license": license or manifest.license,
            "classes": classes,
        }
        manifest, measured = _write_index(
            out, manifest.model_copy(update=fields), written, samples.window
        )
        missing = {key: [*split.missing] for key, split in samples.images.items() if split.missing}
        _list_missing(out / MISSING, missing, written)
        skipped = [line for split in written.values() for line in split.skipped()]
        left_out = [group for split in samples.images.values() for group in split.left_out]
        if skipped:
            what = "images that cannot be read or decoded"
            example = skipped[0].partition(": ")[0]
            left_out.append(Group(what=what, count=len(skipped), example=example))
        doubts = [doubt for split in samples.images.values() for doubt in split.doubts]
        if cut.test_fraction and not cut.split_by:
            doubts += series_doubts(samples.images["train"])
        report = write_report(
            out,
            left_out=left_out,
            looked_at=sum(shard.samples for split in written.values() for shard in split.shards),
            images=merge_groups(group for split in written.values() for group in split.remarks()),
            doubts=[*dict.fromkeys(doubts), *pillow_remarks()],
            split_by_class=cut.split_by in (CLASS, samples.label_column),
            digests=recorded_digests(out),
            workers=workers,
        )
        return Built(manifest, skipped, missing, (*notes, *measured), report)


# --- what may be written


def _classes(samples: Samples, manifest: Manifest, cut: Cut) -> tuple[str, ...]:
    """Return the names of classes by label: those of the splits that stay, else the source's."""
    # idx files without names, images in memory: a split may lack classes that another one has
    by_length = sorted((each.classes for each in samples.images.values()), key=len, reverse=True)
    classes = tuple(dict.fromkeys(name for names in by_length for name in names))
    if {*manifest.splits} <= {*cut.splits(samples.images)}:
        return classes
    return merge_classes(manifest.classes, classes)


def _check_fits(
    manifest: Manifest, splits: Mapping[str, SplitImages], layout: Layout, dtype: str | None
) -> None:
    """Raise DataError where columns or images are of another type than in splits that stay."""
    columns = {key: split.columns for key, split in splits.items()}
    check_kinds(without_splits(manifest, splits), columns)
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


def _claim(out: Path, manifest: Manifest, plans: Sequence[SplitPlan]) -> list[str]:
    """Remove what unfinished builds of other images or options have left; returns what to say.

    Raises: DataError where the folder holds shards of these splits that another build wrote.
    """
    notes = []
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
            notes.append(
                f"split {plan.split}: an unfinished build of other images or options was there; it "
                "is begun anew"
            )
        elif is_held:
            held.append(plan.split)
        elif is_finished:
            again = f"split {plan.split} was built already of files of these names and sizes"
            notes.append(for_caller(f"{again}; --overwrite reads them again"))
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
    return notes


# --- once all shards are there


def _write_index(
    out: Path,
    manifest: Manifest,
    written: Mapping[str, WrittenSplit],
    window: tuple[float, float] | None,
) -> tuple[Manifest, list[str]]:
    """Write dataset.json and the columns; returns what it has now, and what to say of channels."""
    shards = {key: split.shards for key, split in written.items()}
    fields: dict[str, object] = {"splits": {**manifest.splits, **shards}}
    notes = list[str]()
    # type, mean and std are train's, or the first split's while there is no train
    if "train" in written or not manifest.splits:
        of_split = written.get("train", next(iter(written.values())))
        layout = of_split.plan.layout
        if layout.arrays is None:
            mean, std = mean_and_std(of_split.done)
            image = None if layout.background is None else RGB8.on(layout.background)
            fields |= {"image": image, "mean": mean, "std": std}
        else:
            tars = [out / shard.file for shard in of_split.shards]
            measured = measure(tars, layout.arrays.channels, window)
            image = measured.image.read_as(layout.arrays.reading)
            fields |= {"image": image, "mean": measured.mean, "std": measured.std}
            notes = measured.notes
    columns = with_paths(
        {key: split.columns() for key, split in written.items()},
        {key: split.names() for key, split in written.items()},
        manifest,
    )
    return save_columns(out, manifest.model_copy(update=fields), columns), notes


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
