"""What the commands that build a data set share: options, and what they print."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import argument, option
from sslpipe.errors import one_line

if TYPE_CHECKING:
    from sslpipe.data.index import Manifest
    from sslpipe.sharding.build import Built
    from sslpipe.sharding.report import Report

read_option = partial(option, rich_help_panel="What to read")
write_option = partial(option, rich_help_panel="How to write")

OutFolder = Annotated[Path, argument("The data set's folder.", show_default=False)]
Workers = Annotated[int, option("Threads; the files do not depend on them.", min=1)]

# what to read
Root = Annotated[Path | None, read_option("Folder of the images or files.")]
Split = Annotated[
    str | None, read_option("Read only this split; its name where the source has none.")
]
Csv = Annotated[Path | None, read_option("csv: the file, one row per image.")]
LabelColumn = Annotated[str, read_option("csv, parquet: column of the classes.")]
SplitColumn = Annotated[str | None, read_option("csv: column of the splits' names.")]
SkipMissing = Annotated[
    bool,
    read_option(
        "Skip files of a table that do not exist, and links or pointers of git-annex, DVC and "
        "git-lfs without content; list them.",
        "--skip-missing",
    ),
]
Labels = Annotated[bool, read_option("Take folder names or --label-column as classes.")]
ColumnSpecs = Annotated[
    str | None,
    read_option(
        "Columns of metadata: patient,age:integer,shot_at:time; NAME=THEIRS:KIND renames. Kinds: "
        "text, integer, float, time. Default: inferred."
    ),
]
NamePattern = Annotated[
    str | None,
    read_option("Columns from named groups of a file-name pattern, `'(?P<theme>[^/]+)/.*'`"),
]

# how to write
TestFraction = Annotated[
    float, write_option("Share of each class to move from train to test.", min=0, max=0.9)
]
UnseenClasses = Annotated[
    str | None,
    write_option(
        "Classes, separated by commas, to put in splits of their own, such as test_unseen beside "
        "test."
    ),
]
GroupBy = Annotated[
    str | None,
    write_option("Store groups of this column side by side, to read partners together."),
]
SamplesPerShard = Annotated[int, write_option("Most samples per shard.", min=1)]
SkipBad = Annotated[bool, write_option("Skip bad images, and list them.", "--skip-bad")]
Overwrite = Annotated[bool, write_option("Replace existing splits.", "--overwrite")]
OriginText = Annotated[str, write_option("Where the images come from, for the record.")]
License = Annotated[str, write_option("The images' license, for the record.")]


def print_built(out: Path, built: "Built") -> None:
    """Print what a build has skipped, and its report."""
    from sslpipe.sharding.build import MISSING

    for line in built.skipped:
        print(one_line(f"skipped: {line}"), file=sys.stderr)
    for line in built.notes:
        print(one_line(line))
    if built.missing:
        count = sum(map(len, built.missing.values()))
        print(f"skipped: {count:,} missing files, listed in {out / MISSING}", file=sys.stderr)
    if built.report is not None:
        print_report(out, built.manifest, built.report)


def print_report(folder: Path, manifest: "Manifest", report: "Report") -> None:
    """Print what became of the images, what was left out, and what looks like a slip."""
    from sslpipe.sharding.report import FILE

    for line in report.lines():
        print(line)
    classes = len(manifest.classes) or "no"
    print(f"{folder / 'dataset.json'}: {classes} classes; this report: {folder / FILE}")
    names = [*manifest.splits]
    split = [] if "train" in names else ["--split", names[0]]
    say_next("shards", "show", folder, *split, "--out", "samples.png")


def names_in(text: str | None) -> list[str]:
    """Return the names of a list that is separated by commas."""
    return [] if text is None else [name.strip() for name in text.split(",")]
