"""Images of a source -> shards of a data set: what `sslpipe shards build` does."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from sslpipe.data.index import Manifest
from sslpipe.errors import DataError, did_you_mean
from sslpipe.sharding import SOURCES
from sslpipe.sharding.manifest import load_manifest, merge_classes, new_manifest, save_manifest
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.splits import cut_classes, cut_test, relabel
from sslpipe.sharding.writer import (
    Done,
    Layout,
    SplitImages,
    forget_split,
    mean_and_std,
    write_split,
)

# (title, number of samples) -> a context that is called with the number written since
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def build_dataset(
    out: Path,
    source: str,
    options: SourceOptions,
    layout: Layout,
    *,
    test_fraction: float = 0.0,
    unseen_classes: Sequence[str] = (),
    skip_bad: bool = False,
    overwrite: bool = False,
    origin: str = "",
    license: str = "",
    workers: int = 2,
    progress: Progress | None = None,
) -> tuple[Manifest, list[str]]:
    """Write shards from images; after a stop, the same call resumes to the same bytes.

    Args:
        out: The folder of the data set; splits that it has already stay.
        source: A key of SOURCES.
        options: Where the source's images are.
        layout: How they are shuffled, cut into shards and changed.
        test_fraction: Share of each class to cut from train as test, in [0, 0.9].
        unseen_classes: Classes whose images go to splits of their own.
        skip_bad: Skip images that cannot be decoded, instead of raising.
        overwrite: Replace the splits that the source has.
        origin: Where the images come from, for the record.
        license: Of the images, for the record.
        workers: Threads; the files do not depend on it.
        progress: Makes the progress bar of each split.

    Returns:
        The manifest, as in dataset.json, and a line for each image that was skipped.

    Raises:
        DataError: For a source that is unknown, images that cannot be read, or classes that the
            data set does not have.
    """
    check_source(source, options)

    # what there is to write: every image of the source, its label, its split
    images = SOURCES[source](options)
    manifest = load_manifest(out) or new_manifest(options.name or out.resolve().name)
    # idx files without names: one split may lack the last classes
    classes = merge_classes(manifest.classes, max((i.classes for i in images.values()), key=len))
    parts = {
        key: SplitImages(relabel(value, classes), np.arange(len(value)), key)
        for key, value in images.items()
    }
    if test_fraction:
        parts = cut_test(parts, test_fraction, layout.seed)
    if unseen_classes:
        parts = cut_classes(parts, list(unseen_classes), classes)

    # the shards; until dataset.json names them, nobody reads them
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        kept = {key: value for key, value in manifest.splits.items() if key not in parts}
        manifest = manifest.model_copy(update={"splits": kept})
        save_manifest(out, manifest)
        for key in parts:
            forget_split(out, key)
    written: dict[str, list[Done]] = {}
    for key, part in parts.items():
        bar = progress(f"{out.name} {key}", len(part.numbers)) if progress else nullcontext(_ignore)
        with bar as advance:
            written[key] = write_split(
                out, key, part, layout, workers=workers, skip_bad=skip_bad, advance=advance
            )

    # dataset.json, last
    text = origin or (f"torchvision {options.name}" if source == "torchvision" else source)
    update: dict[str, Any] = {
        "source": text + (f", scattered with seed {layout.seed}" if layout.scatter else ""),
        "license": license or manifest.license,
        "classes": classes,
    }
    manifest = _with_splits(manifest.model_copy(update=update), written)
    save_manifest(out, manifest)
    return manifest, [line for shards in written.values() for done in shards for line in done.bad]


def check_source(source: str, options: SourceOptions) -> None:
    """Raise DataError for an unknown source, or an option that it would ignore."""
    if source not in SOURCES:
        known = SOURCES.names()
        hint = did_you_mean(source, known)
        raise DataError(f"--source {source!r} is unknown{hint}; known: {', '.join(known)}")
    for option, value, owner in (
        ("--csv", options.csv, "csv"),
        ("--classes", options.class_file, "idx"),
        ("--download", options.download, "torchvision"),
    ):
        if value and source != owner:
            raise DataError(f"{option} needs --source {owner}; here --source is {source}")


def _with_splits(manifest: Manifest, written: dict[str, list[Done]]) -> Manifest:
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


def _ignore(count: int) -> None:
    """Stand in for a progress bar."""
