"""Data sets in one call with plain arguments: what `sslpipe shards` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sslpipe.arguments import Progress, checked, silent
from sslpipe.data.image_type import Colour
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import DataError, as_output, as_path, check_count, shown
from sslpipe.sharding.build import Built, read_samples, write_shards
from sslpipe.sharding.columns import parse_columns
from sslpipe.sharding.csv_table import Frame, frame_reader
from sslpipe.sharding.gather import parse_pattern
from sslpipe.sharding.in_memory import Rows, are_rows, reader_of
from sslpipe.sharding.readers import SOURCES
from sslpipe.sharding.samples import Cut, SampleReader
from sslpipe.sharding.sources import SourceOptions, SourceReader
from sslpipe.sharding.verify import Fault, verify_columns, verify_shard
from sslpipe.sharding.writer import Layout

if TYPE_CHECKING:
    from PIL import Image


@checked
def build_dataset(
    out: str | Path,
    source: str | Frame | Rows | Mapping[str, Rows] | SampleReader = "folder",
    *,
    root: str | Path | None = None,
    split: str | None = None,
    csv: str | Path | None = None,
    image_column: str = "path",
    label_column: str = "label",
    split_column: str | None = None,
    skip_missing: bool = False,
    labels: bool = True,
    columns: str | Sequence[str] | None = None,
    name_pattern: str | None = None,
    name: str | None = None,
    download: bool = False,
    resize_px: int | None = None,
    background: str | None = None,
    test_fraction: float = 0.0,
    split_by: str | None = None,
    unseen_classes: Sequence[str] = (),
    group_by: str | None = None,
    samples_per_shard: int = 1000,
    skip_bad: bool = False,
    overwrite: bool = False,
    origin: str = "",
    license: str = "",
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Built:
    """Write shards and dataset.json from images, as `sslpipe shards build` does.

    >>> built = sslpipe.build_dataset("out/photos", root="MY_PHOTOS", test_fraction=0.1)
    >>> print(built.report.lines(), built.skipped)

    After a stop, the same call resumes to the same bytes.

    Args:
        out: The data set's folder; splits that it has already stay.
        source: "folder", "csv", "parquet", "huggingface", "tars", "torchvision" or "idx". Or a
            DataFrame, read as a CSV file is. Or images in memory, as `embed` takes them: a list or
            an array of them, a list of (image, class), a torch Dataset without random transforms;
            by split, {"train": ..., "test": ...}. Pixels are stored as PNG: paths keep JPEG files
            as they are. Or `sslpipe.SensorFiles`: images of any channels, tiles of scenes.
        root: Folder of the images or files.
        split: Read only this split; its name where the source has none.
        csv: The file of source "csv", one row per image.
        image_column: Of a CSV file or a DataFrame: the paths, relative to `root` or else the file,
            or URLs; of parquet: the images. "front,back": each is a sample; the column "row" tells
            which belong together.
        label_column: Of a CSV or parquet file: the classes; of tars a key in KEY.json, or "txt";
            of a folder the group of `name_pattern` that is the class.
        split_column: Of a CSV file: the splits' names.
        skip_missing: Skip files of a table that do not exist; `Built.missing` lists them.
        labels: Whether folder names or `label_column` are classes.
        columns: Columns of metadata, "patient,age:integer,shot_at:time" or a list of such;
            "NAME=THEIRS:KIND" renames. None: inferred.
        name_pattern: Columns from named groups of a pattern of file names.
        name: The data set's name; for torchvision its class, such as "CIFAR10".
        download: Whether torchvision may download it.
        resize_px: Shrink images to this shorter side; None: they stay as they are.
        background: Colour under transparent parts, "white" or "#ffffff"; None: transparency is
            dropped.
        test_fraction: Share of each class to move from train to test, in [0, 0.9].
        split_by: Column whose groups, such as patients, stay in one split; "class": test has
            classes of its own.
        unseen_classes: Names of classes that go to splits of their own.
        group_by: Column whose groups are stored side by side.
        samples_per_shard: At most.
        skip_bad: Skip images that cannot be decoded, which `Built.skipped` lists.
        overwrite: Replace existing splits.
        origin: Where the images come from, for the record.
        license: Of the images, for the record.
        num_workers: Threads; the files do not depend on them.
        progress: Makes the progress bar of each split; None: there is none.

    Returns:
        The manifest in dataset.json, what was skipped, and the report of the build.

    Raises:
        DataError: An argument that does not fit, unreadable images, shards of another build.
    """
    check_count(samples_per_shard, "samples_per_shard", error=DataError)
    check_count(num_workers, "num_workers", error=DataError)
    if resize_px is not None:
        check_count(resize_px, "resize_px", error=DataError)
    folder = as_output(out, "out", DataError)
    cut = Cut(test_fraction, split_by, unseen_classes)
    reader: str | SourceReader | SampleReader
    if isinstance(source, SampleReader):
        reader = source
        _check_unused("files of sensors", {"resize_px": resize_px, "background": background})
    elif isinstance(source, Frame):
        reader = frame_reader(source)
        origin = origin or "a DataFrame"
        _check_unused("what is in memory", {"csv": csv, "download": download})
    elif are_rows(source):
        reader = reader_of(source)
        origin = origin or "images in memory"
        _check_unused(
            "what is in memory",
            {
                "root": root,
                "csv": csv,
                "split_column": split_column,
                "skip_missing": skip_missing,
                "columns": columns,
                "name_pattern": name_pattern,
                "download": download,
            },
        )
    elif isinstance(source, str) and (source in SOURCES or not Path(source).is_dir()):
        reader = source  # an unknown name is refused with the nearest one
        if source == "torchvision":
            origin = origin or f"torchvision {name}"
    else:
        remedy = "give a list, an array or a torch Dataset of images"
        if isinstance(source, str | Path):
            remedy = f"a folder of images is root={shown(source)}"
        raise DataError(
            f"source = {shown(source)} is not one of {', '.join(SOURCES.names())}; {remedy}"
        )
    options = SourceOptions(
        root=None if root is None else as_path(root, "root", DataError),
        split=split,
        name=name,
        csv=None if csv is None else as_path(csv, "csv", DataError),
        image_column=image_column,
        label_column=label_column,
        split_column=split_column,
        labels=labels,
        download=download,
        skip_missing=skip_missing,
        columns=parse_columns(columns),
        name_pattern=parse_pattern(name_pattern),
        out=folder,
    )
    if isinstance(reader, SampleReader):
        samples = reader.read_samples(options, folder, num_workers)
    else:
        samples = read_samples(reader, options)
    layout = Layout(
        samples_per_shard=samples_per_shard,
        resize_shorter_px=resize_px,
        background=None if background is None else _parse_colour(background),
        group_by=group_by,
        arrays=samples.arrays,
    )
    return write_shards(
        folder,
        samples,
        layout,
        name=name,
        cut=cut,
        skip_bad=skip_bad,
        overwrite=overwrite,
        origin=origin,
        license=license,
        workers=num_workers,
        progress=progress or silent,
    )


@checked
def verify_dataset(
    data: DatasetIndex | str | Path, *, num_workers: int = 2, progress: Progress | None = None
) -> list[Fault]:
    """Check sizes and sha256 and decode every image, as `sslpipe shards verify` does.

    Args:
        data: The data set's index, or the path or URL of its dataset.json.
        num_workers: Threads.
        progress: Makes the progress bar; None: there is none.

    Returns:
        What is wrong, (shard, key, reason) each; [] for nothing.
    """
    check_count(num_workers, "num_workers", error=DataError)
    index = load_index(data)
    splits = index.manifest.splits
    jobs = [(key, k) for key, shards in splits.items() for k in range(len(shards))]
    total = sum(splits[key][k].samples for key, k in jobs)
    faults: list[Fault] = []
    with (
        (progress or silent)(f"verify {index.manifest.name}", total) as advance,
        ThreadPoolExecutor(num_workers) as pool,
    ):
        running = [pool.submit(verify_shard, index, key, k) for key, k in jobs]
        for (key, k), each in zip(jobs, running, strict=True):
            faults += each.result()
            advance(splits[key][k].samples)
    return faults + [fault for key in splits for fault in verify_columns(index, key)]


@checked
def show_samples(
    data: DatasetIndex | str | Path,
    split: str = "train",
    *,
    ids: Sequence[int] | None = None,
    all_channels: bool = False,
) -> Image.Image:
    """Draw some samples with their classes, ids and paths, as `sslpipe shards show` does.

    >>> sslpipe.show_samples("out/photos", "test")  # a notebook shows it

    Args:
        data: The data set's index, or the path or URL of its dataset.json.
        split: Its name.
        ids: These samples; None: some at random.
        all_channels: Each sample as a strip of its channels in grey.

    Returns:
        The picture; `.save("samples.png")` writes it.
    """
    from sslpipe.sharding.show import sample_sheet

    return sample_sheet(load_index(data), split, ids=ids, all_channels=all_channels)


@checked
def describe_dataset(data: DatasetIndex | str | Path) -> dict[str, dict[str, str]]:
    """Count samples, classes, image sizes and columns, as `sslpipe shards stats` does.

    >>> pandas.DataFrame(sslpipe.describe_dataset("out/photos"))

    Args:
        data: The data set's index, or the path or URL of its dataset.json.

    Returns:
        Of each split what is counted, and its text, as the command prints it.
    """
    from sslpipe.sharding.stats import column_rows, split_rows

    index = load_index(data)
    return {
        name: dict([*split_rows(index, name), *column_rows(index, name)])
        for name in index.manifest.splits
    }


def _check_unused(images: str, arguments: Mapping[str, object]) -> None:
    """Raise DataError where an argument that has no effect on such images is given."""
    for name, value in arguments.items():
        if value:
            raise DataError(f"{name} = {shown(value)} has no effect on {images}; leave it out")


def _parse_colour(text: str) -> Colour:
    """Read a colour by its name or hexadecimal digits. Raises DataError."""
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        message = f"--background={text!r} is no colour; for example white, '#ffffff'"
        raise DataError(message) from None
    return red, green, blue
