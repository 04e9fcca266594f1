"""Images of a source -> shards of a data set: what `sslpipe shards build` does."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sslpipe.data.index import Manifest
from sslpipe.errors import DataError, did_you_mean
from sslpipe.portable import write_atomically
from sslpipe.sharding import LISTS, SOURCES
from sslpipe.sharding.cells import ColumnSpec
from sslpipe.sharding.columns import check_kinds, remove_unnamed, without_splits, write_columns
from sslpipe.sharding.gather import TarColumns, columns_of_images, columns_of_tars, describe
from sslpipe.sharding.manifest import load_manifest, merge_classes, new_manifest, save_manifest
from sslpipe.sharding.members import Conversion, describe_conversion
from sslpipe.sharding.parts import PartFile, SplitRecord, save_part
from sslpipe.sharding.record import (
    Done,
    Part,
    forget_split,
    part_records,
    record_path,
    recorded_plan,
    shards_in,
)
from sslpipe.sharding.sources import Images, SourceOptions
from sslpipe.sharding.splits import cut_classes, cut_test, describe_test, relabel
from sslpipe.sharding.writer import (
    Layout,
    SplitImages,
    SplitPlan,
    mean_and_std,
    plan_split,
    shards_of,
    write_split,
)

# (title, number of samples) -> a context that is called with the number written since
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

MOST_SUFFIXES = 5  # of ignored files, that are named
MISSING = "missing.txt"  # beside dataset.json: SPLIT, tab, the file as the list names it
_SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # it begins the names of files


class Built(NamedTuple):
    """What a build made.

    Args:
        manifest: As in dataset.json; of a part: as it was before.
        skipped: "NAME: reason" for each image that cannot be decoded.
        missing: Files that a list names and that are not there, by split.
        notes: Which files were ignored, what was read into columns, how they cut the splits, and
            how many images have transparent parts; a line each.
    """

    manifest: Manifest
    skipped: list[str]
    missing: dict[str, list[str]]
    notes: tuple[str, ...] = ()


def build_dataset(
    out: Path,
    source: str,
    options: SourceOptions,
    layout: Layout,
    *,
    test_fraction: float = 0.0,
    split_by: str | None = None,
    unseen_classes: Sequence[str] = (),
    skip_bad: bool = False,
    overwrite: bool = False,
    part: Part | None = None,
    origin: str = "",
    license: str = "",
    workers: int = 2,
    progress: Progress | None = None,
) -> Built:
    """Write shards from images; after a stop, the same call resumes to the same bytes.

    Args:
        out: The data set's folder; splits that it has already stay.
        source: A key of SOURCES.
        options: Where the source's images are.
        layout: How they are shuffled, cut into shards and changed.
        test_fraction: Share of each class to cut from train as test, in [0, 0.9].
        split_by: Column whose groups the cut of test leaves whole.
        unseen_classes: Classes whose images go to splits of their own.
        skip_bad: Skip images that cannot be decoded, instead of raising.
        overwrite: Replace the splits that the source has.
        part: Write only the shards of this part, and no dataset.json; see `merge_parts`.
        origin: Where the images come from, for the record.
        license: Of the images, for the record.
        workers: Threads; the files do not depend on it.
        progress: Makes the progress bar of each split.

    Raises:
        DataError: An unknown source, unreadable images, other classes, shards of another build.
    """
    check_source(source, options)
    if split_by and not test_fraction:
        raise DataError(f"--split-by {split_by} needs --test-fraction, the share that is cut")
    if part and overwrite:
        raise DataError(
            "--overwrite with --part would remove what other parts write; use a new OUT"
        )

    # every image of the source, its label, its split
    images = SOURCES[source](options)
    manifest = load_manifest(out) or new_manifest(options.name or out.resolve().name)
    # idx files without names: one split may lack the last classes
    classes = merge_classes(manifest.classes, max((i.classes for i in images.values()), key=len))
    columns = columns_of_images(images, options)
    splits = {
        key: SplitImages(relabel(value, classes), np.arange(len(value)), key, columns.get(key, {}))
        for key, value in images.items()
    }
    if test_fraction:
        splits = cut_test(splits, test_fraction, layout.seed, split_by)
    drawn = describe_test(splits, test_fraction) if test_fraction and not split_by else []
    if unseen_classes:
        splits = cut_classes(splits, list(unseen_classes), classes)
    _check_splits(splits, without_splits(manifest, splits))
    plans = [plan_split(key, value, layout) for key, value in splits.items()]

    # the shards; until dataset.json names them, nobody reads them
    if overwrite:
        manifest = _forget(out, manifest, plans)
    check_free(out, manifest, {plan.split: plan.fingerprint for plan in plans}, part=part)
    out.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[Done]] = {}
    for plan in plans:
        total = sum(len(plan.shards[k]) for k in shards_of(plan, part))
        bar = progress(f"{out.name} {plan.split}", total) if progress else nullcontext(_ignore)
        with bar as advance:
            written[plan.split] = write_split(
                out, plan, part=part, workers=workers, skip_bad=skip_bad, advance=advance
            )

    # dataset.json, last
    text = origin or (f"torchvision {options.name}" if source == "torchvision" else source)
    facts = PartFile(
        name=options.name,
        source=text + (f", scattered with seed {layout.seed}" if layout.scatter else ""),
        license=license or manifest.license,
        classes=classes,
        splits=[SplitRecord(split=plan.split, plan=plan.fingerprint) for plan in plans],
        missing={key: list(value.missing) for key, value in images.items() if value.missing},
        part=part,
        columns={name: each.kind for own in columns.values() for name, each in own.items()},
        done=written,
    )
    notes = (*_describe_ignored(images), *describe(columns), *drawn)
    notes = (*notes, *_describe_cut(splits, split_by))
    if part is None:
        built = finish(out, manifest, facts, workers=workers)
        return built._replace(notes=(*notes, *built.notes))
    save_part(out, facts)
    notes = (*notes, *_describe_conversions(written), *_describe_transparent(written))
    return Built(manifest, _skipped(written), facts.missing, notes)


def _describe_ignored(images: Mapping[str, Images]) -> list[str]:
    """Say how many files of a folder are no images, by suffix, the most frequent first."""
    ignored = sum((Counter(value.ignored) for value in images.values()), Counter[str]())
    if not ignored:
        return []
    kinds = sorted(ignored.items(), key=lambda kind: (-kind[1], kind[0]))
    parts = [f"{suffix or 'no extension'} {count:,}" for suffix, count in kinds[:MOST_SUFFIXES]]
    rest = sum(count for _, count in kinds[MOST_SUFFIXES:])
    parts += [f"others {rest:,}"] * bool(rest)
    return [f"ignored {ignored.total():,} files: {', '.join(parts)}"]


def _describe_conversions(written: Mapping[str, list[Done]]) -> list[str]:
    """Say how images were converted that are not 8-bit grey or RGB, a line a kind."""
    shards = [done for each in written.values() for done in each]
    total = sum(done.entry.samples for done in shards if done.entry is not None)
    lines = []
    for kind in sorted({kind for done in shards for kind in done.conversions}):
        found = [done.conversions[kind] for done in shards if kind in done.conversions]
        counts, lows, highs = zip(*found, strict=True)
        conversion = Conversion(kind, min(lows), max(highs))
        lines.append(describe_conversion(conversion, sum(counts), total))
    return lines


def _describe_transparent(written: Mapping[str, list[Done]]) -> list[str]:
    """Say how many images have transparent parts, which decoders show as what lies under them."""
    shards = [done for each in written.values() for done in each]
    count = sum(done.transparent for done in shards)
    if not count:
        return []
    total = sum(done.entry.samples for done in shards if done.entry is not None)
    return [
        f"{count:,} of {total:,} images have transparent parts, which show what is stored under "
        "them, mostly black; build with --background white --overwrite to put them on white"
    ]


def _describe_cut(splits: Mapping[str, SplitImages], by: str | None) -> list[str]:
    """Say what share of samples and of groups went to test; groups are not cut, so it is rough."""
    if by is None:
        return []
    counts = {
        key: (len(split.numbers), len(np.unique(split.columns[by].groups()[split.numbers])))
        for key, split in splits.items()
    }
    total = sum(samples for samples, _ in counts.values())
    return [
        f"split {key}: {samples:,} samples ({samples / total:.1%}) of {groups:,} groups of {by}"
        for key, (samples, groups) in counts.items()
    ]


def _check_splits(splits: Mapping[str, SplitImages], manifest: Manifest) -> None:
    """Raise DataError for a name that is no split's, or a column of another kind than it has."""
    for key in splits:
        if not _SPLIT_NAME.fullmatch(key):
            raise DataError(f"split {key!r}: a name is letters, digits and . + - _, as in train")
    check_kinds(manifest, {key: split.columns for key, split in splits.items()})


def check_source(source: str, options: SourceOptions) -> None:
    """Raise DataError for an unknown source, or an option that it would ignore."""
    if source not in SOURCES:
        known = SOURCES.names()
        hint = did_you_mean(source, known)
        if source.lower() in ("tar", "tars", "wds", "webdataset"):
            hint = "; tars of webdataset are not built: sslpipe shards index, or shards repack"
        raise DataError(f"--source {source!r} is unknown{hint}; known: {', '.join(known)}")
    for option, value, owners in (
        ("--csv", options.csv, ("csv",)),
        ("--delimiter", options.delimiter, ("csv",)),
        ("--classes", options.class_file, ("idx",)),
        ("--download", options.download, ("torchvision",)),
        ("--skip-missing", options.skip_missing, LISTS),
        ("--folder-levels", options.folder_levels, ("folder",)),
    ):
        if value and source not in owners:
            raise DataError(
                f"{option} needs --source {' or '.join(owners)}; here --source is {source}"
            )


def check_free(
    out: Path, manifest: Manifest, plans: Mapping[str, str], *, part: Part | None, remedy: str = ""
) -> None:
    """Raise DataError where a folder holds shards of these splits that another build wrote.

    Args:
        out: The folder.
        manifest: Its own.
        plans: Fingerprint of each split that is to be written.
        part: Which part is to be written; None: all.
        remedy: Beside another folder; '': --overwrite, and what it does.
    """
    held = [key for key, plan in plans.items() if _is_held(out, manifest, key, plan, part)]
    if not held:
        return
    kept = [key for key in manifest.splits if key not in plans]
    remedy = remedy or (
        f"give --overwrite: {' and '.join(plans)} are written anew"
        + (f", {' and '.join(kept)} are kept" if kept else "")
    )
    raise DataError(
        f"{out} already holds {' and '.join(held)} shards of other images or options; choose "
        f"another folder, or {remedy}"
    )


def finish(out: Path, manifest: Manifest, facts: PartFile, *, workers: int = 2) -> Built:
    """Write columns, missing.txt and dataset.json, once all shards are there.

    Args:
        out: The folder of the data set.
        manifest: As it was before; splits that `facts` does not have stay.
        facts: Of the whole build.
        workers: Threads that read columns.
    """
    update = {"source": facts.source, "license": facts.license, "classes": facts.classes}
    manifest = _with_splits(manifest.model_copy(update=update), facts.done)
    specs = tuple(ColumnSpec(name, name, kind) for name, kind in facts.columns.items())
    shards = {key: [out / shard.file for shard in manifest.splits[key]] for key in facts.done}
    columns = columns_of_tars(shards, TarColumns(specs, required=False), workers=workers)
    manifest = write_columns(out, manifest, {key: columns.get(key, {}) for key in facts.done})
    _list_missing(out / MISSING, facts)
    save_manifest(out, manifest)
    remove_unnamed(out, manifest)
    notes = (*_describe_conversions(facts.done), *_describe_transparent(facts.done))
    return Built(manifest, _skipped(facts.done), facts.missing, notes)


def _forget(out: Path, manifest: Manifest, plans: Sequence[SplitPlan]) -> Manifest:
    """Remove the splits that are to be written anew; returns the manifest without them."""
    written = [plan.split for plan in plans]
    kept = {key: value for key, value in manifest.splits.items() if key not in written}
    manifest = without_splits(manifest, written).model_copy(update={"splits": kept})
    if out.is_dir():
        save_manifest(out, manifest)
        remove_unnamed(out, manifest)
        for key in written:
            forget_split(out, key)
    return manifest


def _is_held(out: Path, manifest: Manifest, split: str, plan: str, part: Part | None) -> bool:
    """Say whether a folder has shards of a split that a build of this plan did not write."""
    recorded = recorded_plan(record_path(out, split))
    if recorded is not None:
        return recorded != plan
    if split in manifest.splits:
        return True
    others = {recorded_plan(record) for record in part_records(out, split)} - {None}
    if part is not None and others:
        return others != {plan}
    return bool(others) or (out.is_dir() and bool(shards_in(out, split)))


def _with_splits(manifest: Manifest, written: Mapping[str, list[Done]]) -> Manifest:
    """Add splits; mean and std are train's, or the first split's while there is no train."""
    splits = dict(manifest.splits)
    for key, shards in written.items():
        entries = tuple(done.entry for done in shards if done.entry is not None)
        if not entries:
            raise DataError(f"split {key!r} has no image that can be decoded")
        splits[key] = entries
    update: dict[str, object] = {"splits": splits}
    if "train" in written or not manifest.splits:
        measured = written["train"] if "train" in written else next(iter(written.values()))
        update["mean"], update["std"] = mean_and_std(measured)
    return manifest.model_copy(update=update)


def _list_missing(path: Path, facts: PartFile) -> None:
    """Write the files that are missing, in the list's order; other splits' lines stay."""
    own = {*facts.missing, *(each.split for each in facts.splits)}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [line for line in lines if line.partition("\t")[0] not in own]
    for split, names in facts.missing.items():
        lines += [f"{split}\t{_on_one_line(name)}" for name in names]
    if lines:
        write_atomically(path, "\n".join(lines) + "\n")
    else:
        path.unlink(missing_ok=True)


def _on_one_line(name: str) -> str:
    return name if name.isprintable() else ascii(name)[1:-1]


def _skipped(written: Mapping[str, list[Done]]) -> list[str]:
    return [line for shards in written.values() for done in shards for line in done.bad]


def _ignore(count: int) -> None:
    """Stand in for a progress bar."""
