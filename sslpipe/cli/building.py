"""What the commands that build a data set share: options, and what they print."""

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import argument, option
from sslpipe.cli.terminal import progress
from sslpipe.errors import counted, one_line

if TYPE_CHECKING:
    from sslpipe.data.index import Manifest
    from sslpipe.sharding.build_report import Report
    from sslpipe.sharding.samples import SampleReader

OutFolder = Annotated[Path, argument("The data set's folder.")]
Workers = Annotated[int, option("Threads; the files do not depend on them.", min=1)]
ValueRange = Annotated[
    str | None,
    option(
        "The values that views show as 0 and 1. Default: measured for each channel.",
        "--range",
        metavar="LOW,HIGH",
    ),
]


@dataclass(frozen=True)
class ReadOptions:
    """Where images, labels and columns are read from."""

    root: Annotated[Path | None, option("Folder of the images or files.")] = None
    split: Annotated[
        str | None, option("Read only this split; its name where the source has none.")
    ] = None
    csv: Annotated[Path | None, option("csv: the file, one row per image.")] = None
    image_column: Annotated[
        str,
        option(
            "csv: column of the paths, relative to the file, or URLs; parquet: of the images. "
            "front,back makes a sample of each.",
        ),
    ] = "path"
    label_column: Annotated[
        str,
        option(
            "csv, parquet: column of the classes; tars: key in KEY.json, or txt for KEY.txt; "
            "folder, tars: group of --name-pattern."
        ),
    ] = "label"
    split_column: Annotated[str | None, option("csv: column of the splits' names.")] = None
    skip_missing: Annotated[
        bool,
        option(
            "Skip files of a table that do not exist, and links or pointers of git-annex, DVC and "
            "git-lfs without content; list them.",
            "--skip-missing",
        ),
    ] = False
    labels: Annotated[bool, option("Take folder names or --label-column as classes.")] = True
    columns: Annotated[
        str | None,
        option(
            "Columns of metadata: patient,age:integer,shot_at:time; NAME=THEIRS:KIND renames. "
            "Kinds: text, integer, float, time. Default: inferred."
        ),
    ] = None
    name_pattern: Annotated[
        str | None,
        option("Columns from named groups of a file-name pattern, `'(?P<theme>[^/]+)/.*'`"),
    ] = None


@dataclass(frozen=True)
class WriteOptions:
    """How the splits are cut and the shards written."""

    test_fraction: Annotated[
        float, option("Share of each class to move from train to test.", min=0, max=0.9)
    ] = 0.0
    split_by: Annotated[
        str | None,
        option(
            "Keep groups of this column, such as patient, in one split; class: test has classes of "
            "its own. Tiles and pages keep to their file by themselves."
        ),
    ] = None
    unseen_classes: Annotated[
        str | None,
        option(
            "Classes, separated by commas, to put in splits of their own, such as test_unseen "
            "beside test."
        ),
    ] = None
    group_by: Annotated[
        str | None, option("Store groups of this column side by side, to read partners together.")
    ] = None
    samples_per_shard: Annotated[int, option("Most samples per shard.", min=1)] = 1000
    skip_bad: Annotated[bool, option("Skip bad images, and list them.", "--skip-bad")] = False
    overwrite: Annotated[bool, option("Replace existing splits.", "--overwrite")] = False
    origin: Annotated[str, option("Where the images come from, for the record.")] = ""
    license: Annotated[str, option("The images' license, for the record.")] = ""
    num_workers: Workers = 2

    def unseen(self) -> list[str]:
        """Return the names of --unseen-classes."""
        text = self.unseen_classes
        return [] if text is None else [name.strip() for name in text.split(",")]


def prepare_workers() -> None:
    """Give the workers the cores, and have an image that is too large be a bad one."""
    from PIL import Image

    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the parallelism; before torch comes
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def build_shards(
    out: Path,
    source: "str | SampleReader",
    reading: ReadOptions,
    writing: WriteOptions,
    *,
    name: str | None = None,
    download: bool = False,
    resize_px: int | None = None,
    background: str | None = None,
) -> None:
    """Build a data set as the options say; print what was skipped, and the report."""
    from sslpipe.sharding.build import MISSING
    from sslpipe.sharding.dataset import build_dataset

    built = build_dataset(
        out,
        source,
        root=reading.root,
        split=reading.split,
        csv=reading.csv,
        image_column=reading.image_column,
        label_column=reading.label_column,
        split_column=reading.split_column,
        skip_missing=reading.skip_missing,
        labels=reading.labels,
        columns=reading.columns,
        name_pattern=reading.name_pattern,
        name=name,
        download=download,
        resize_px=resize_px,
        background=background,
        test_fraction=writing.test_fraction,
        split_by=writing.split_by,
        unseen_classes=writing.unseen(),
        group_by=writing.group_by,
        samples_per_shard=writing.samples_per_shard,
        skip_bad=writing.skip_bad,
        overwrite=writing.overwrite,
        origin=writing.origin,
        license=writing.license,
        num_workers=writing.num_workers,
        progress=progress,
    )
    for line in built.skipped:
        print(one_line(f"skipped: {line}"), file=sys.stderr)
    for line in built.notes:
        print(one_line(line))
    if built.missing:
        count = sum(map(len, built.missing.values()))
        print(f"skipped: missing files: {count:,}, listed in {out / MISSING}", file=sys.stderr)
    print_report(out, built.manifest, built.report)


def print_report(folder: Path, manifest: "Manifest", report: "Report") -> None:
    """Print what became of the images, what was skipped, and what looks like a slip."""
    from sslpipe.sharding.build_report import FILE

    for line in report.lines():
        print(line)
    count = len(manifest.classes)
    classes = counted(count, "class") if count else "no classes"
    if not count and any(split.classes for split in report.splits.values()):
        classes = "classes without names, which `shards index --classes FILE` gives"
    print(f"{folder / 'dataset.json'}: {classes}; this report: {folder / FILE}")
    names = [*manifest.splits]
    split = [] if "train" in names else ["--split", names[0]]
    say_next(["shards", "show", folder, *split, "--out", "samples.png"])
