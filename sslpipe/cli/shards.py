"""`sslpipe shards`: images -> webdataset shards with an index, and a look at them."""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sslpipe.cli.inputs import MOST_SEED, check_picture
from sslpipe.cli.next_step import after_a_look, after_shards, say_next
from sslpipe.cli.progress import progress
from sslpipe.cli.recipes import Ids, parse_ids
from sslpipe.cli.shard_options import (
    BACKGROUND,
    CLASS_DISJOINT,
    COLUMNS,
    GROUP_BY,
    LEVELS,
    PATTERN,
    RESIZE,
    SCATTER,
    SPLIT_BY,
    UNSEEN,
    ClassFile,
    DataSet,
    JsonFields,
    NamePattern,
    OutFolder,
    Workers,
    parse_colour,
    parse_levels,
    parse_names,
    tar_columns,
)
from sslpipe.cli.shard_options import read_option as _read
from sslpipe.cli.shard_options import write_option as _write
from sslpipe.data.index import Manifest, load_index
from sslpipe.errors import DataError
from sslpipe.sharding import SOURCES
from sslpipe.sharding.build import MISSING, Built, build_dataset
from sslpipe.sharding.cells import parse_columns
from sslpipe.sharding.gather import parse_pattern
from sslpipe.sharding.idx import cut_idx
from sslpipe.sharding.index import (
    any_tars,
    check_columns,
    find_tars,
    index_folder,
    verify_columns,
    verify_shard,
)
from sslpipe.sharding.merge import merge_parts, shards_to_merge
from sslpipe.sharding.record import Part
from sslpipe.sharding.repack import repack as repack_tars
from sslpipe.sharding.sources import SourceOptions, class_names
from sslpipe.sharding.writer import Layout

app = typer.Typer(
    help="Images -> webdataset shards with an index (dataset.json and offsets).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Example: sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1",
)


@app.callback()
def _settings() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the parallelism; before torch comes
    warnings.simplefilter("error", Image.DecompressionBombWarning)  # such an image is a bad one


@app.command()
def build(
    out: OutFolder,
    source: Annotated[str, _read(" | ".join(SOURCES.names()))] = "folder",
    root: Annotated[Path | None, _read("Folder of the images or files.")] = None,
    split: Annotated[str | None, _read("Only this split; names it where none is.")] = None,
    name: Annotated[
        str | None,
        _read("torchvision: the dataset, such as CIFAR10; else the data set's name."),
    ] = None,
    csv: Annotated[Path | None, _read("csv: the file, one row an image.")] = None,
    delimiter: Annotated[
        str | None, _read("csv: ';' or tab; else a comma, of a .tsv file a tab.")
    ] = None,
    image_column: Annotated[
        str, _read("Column: csv, of the paths from the file; parquet, of the images.")
    ] = "path",
    label_column: Annotated[str, _read("csv, parquet: column of the classes.")] = "label",
    split_column: Annotated[str | None, _read("csv: column of the splits' names.")] = None,
    skip_missing: Annotated[
        bool,
        _read("csv, parquet: list files that are not there and skip them.", "--skip-missing"),
    ] = False,
    classes: Annotated[Path | None, _read("idx: class names, one a line, by label.")] = None,
    labels: Annotated[bool, _read("Take folder names or --label-column as classes.")] = True,
    columns: Annotated[str | None, _read(COLUMNS)] = None,
    folder_levels: Annotated[str | None, _read(LEVELS)] = None,
    name_pattern: Annotated[str | None, _read(PATTERN)] = None,
    download: Annotated[bool, _read("torchvision: fetch it.", "--download")] = False,
    class_disjoint: Annotated[
        bool, _read(CLASS_DISJOINT, "--class-disjoint/--published-split")
    ] = True,
    test_fraction: Annotated[
        float, _write("Share of each class to cut from train as test.", min=0, max=0.9)
    ] = 0.0,
    split_by: Annotated[str | None, _write(SPLIT_BY)] = None,
    unseen_classes: Annotated[str | None, _write(UNSEEN)] = None,
    group_by: Annotated[str | None, _write(GROUP_BY)] = None,
    scatter: Annotated[bool, _write(SCATTER, "--scatter")] = False,
    resize_shorter: Annotated[int | None, _write(RESIZE, min=1)] = None,
    background: Annotated[str | None, _write(BACKGROUND)] = None,
    seed: Annotated[int, _write("Of the shuffle, the cut and --scatter.")] = 0,
    samples_per_shard: Annotated[int, _write("Samples, at most.", min=1)] = 1000,
    max_shard_bytes: Annotated[
        int, _write("Bytes, at most; roughly where images are converted.", min=1)
    ] = 10**9,
    skip_bad: Annotated[bool, _write("List bad images and skip them.", "--skip-bad")] = False,
    overwrite: Annotated[bool, _write("Replace these splits.", "--overwrite")] = False,
    origin: Annotated[str, _write("Where the images come from, for the record.")] = "",
    license: Annotated[str, _write("Of the images, for the record.")] = "",
    part: Annotated[
        str | None, _write("I/N: a part of the shards, for one of N machines; see merge.")
    ] = None,
    workers: Workers = 2,
) -> None:
    """Write shards from images; run again after a stop, and it resumes.

    - photos/CLASS/*.jpg:  `sslpipe shards build out/mydata --root photos --test-fraction 0.1`
    - photos/train/CLASS/*.jpg and photos/test/...:  `sslpipe shards build out/mydata --root photos`
    - photos/*.jpg, no labels:  `sslpipe shards build out/mydata --root photos`
    - `... build out/cifar10 --source torchvision --name CIFAR10 --root data --download`
    - `... build out/birds --source csv --csv birds.csv --image-column file --label-column species`
    - `... build out/fashion --source idx --root FOLDER_OF_THE_FILES`
    - `... build out/cub --source cub --root CUB_200_2011`: also cars, products, omniglot, market,
      inshop, tiny-imagenet
    - `... build out/beans --source parquet --root beans/data --label-column labels`
    - photos/VENDOR/THING.png:  `... build out/icons --root photos --name-pattern
      '(?P<vendor>[^/]+)/(?P<thing>.+)[.]png' --group-by thing --split-by thing --test-fraction 0.1`
    - on machine 3 of 16: `... build out/big --root photos --part 3/16`, then `... merge out/big`
    """
    chosen = None if part is None else Part.parse(part)
    built = build_dataset(
        out,
        source,
        SourceOptions(
            root, split, name, csv, image_column, label_column,
            split_column, classes, labels, download, class_disjoint, delimiter, skip_missing,
            parse_columns(columns, "--columns") if columns is not None else (),
            parse_levels(folder_levels),
            None if name_pattern is None else parse_pattern(name_pattern),
        ),
        Layout(
            seed, samples_per_shard, max_shard_bytes, scatter, resize_shorter,
            parse_colour(background), group_by,
        ),
        test_fraction=test_fraction,
        split_by=split_by,
        unseen_classes=[] if unseen_classes is None else parse_names(unseen_classes),
        skip_bad=skip_bad,
        overwrite=overwrite,
        part=chosen,
        origin=origin,
        license=license,
        workers=workers,
        progress=progress,
    )  # fmt: skip
    _print_built(out, built, chosen)


@app.command()
def merge(
    out: OutFolder,
    parts: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of the parts, in any order; else OUT.", show_default=False),
    ] = None,
    workers: Workers = 2,
) -> None:
    """Make one data set of all parts of `build --part`: the files that one machine would write.

    - all parts in one folder:  `sslpipe shards merge out/big`
    - each in its own:  `sslpipe shards merge out/big part1 part2 part3`
    """
    with progress(f"merge {out.name}", shards_to_merge(out, parts or [])) as advance:
        built = merge_parts(out, parts or [], workers=workers, advance=advance)
    _print_built(out, built)


@app.command()
def repack(
    source: Annotated[Path, typer.Argument(help="A tar, or a folder of tars.", show_default=False)],
    out: OutFolder,
    split: Annotated[
        str | None, typer.Option(help="Of all tars; else by name: train-000000.tar is in train.")
    ] = None,
    samples_per_shard: Annotated[int, typer.Option(min=1, help="Samples, at most.")] = 1000,
    max_shard_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes, at most, unless one sample is larger.")
    ] = 10**9,
    folder_labels: Annotated[
        bool, typer.Option("--folder-labels", help="An image's folder in the tar is its class.")
    ] = False,
    classes: ClassFile = None,
    json_fields: JsonFields = None,
    name_pattern: NamePattern = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace these splits.")] = False,
    workers: Workers = 2,
) -> None:
    """Write tars again where `index` refuses them, and index them.

    For tars that are compressed (gzip, bzip2, xz), whose samples' members lie apart, with sparse
    files, with dots in file names, or with class folders and no labels. Images, labels and all else
    of a sample keep their bytes and their order; links and what belongs to no image are left out.

    - `sslpipe shards repack photos.tar.gz out/photos --split train --folder-labels`
    """
    if folder_labels and classes is not None:
        raise DataError("--classes with --folder-labels: the folders' names are the classes")
    names = class_names(classes) if classes else ()
    total = 1 if source.is_file() else len(any_tars(source))
    with progress(f"repack {source.name}", total) as advance:
        result = repack_tars(
            source,
            out,
            split=split,
            samples_per_shard=samples_per_shard,
            max_shard_bytes=max_shard_bytes,
            folder_labels=folder_labels,
            classes=names,
            columns=tar_columns(json_fields, name_pattern),
            overwrite=overwrite,
            workers=workers,
            advance=advance,
        )
    if result.left_out:
        count, first = len(result.left_out), result.left_out[0]
        print(f"left out: {count:,} members of no image, such as {first!r}", file=sys.stderr)
    _print_summary(out, result.manifest)


@app.command()
def index(
    folder: OutFolder,
    split: Annotated[
        str | None, typer.Option(help="Of all tars; else by name: train-000000.tar is in train.")
    ] = None,
    classes: ClassFile = None,
    json_fields: JsonFields = None,
    name_pattern: NamePattern = None,
    no_columns: Annotated[
        bool, typer.Option("--no-columns", help="Drop the columns that dataset.json has.")
    ] = False,
    workers: Workers = 2,
) -> None:
    """Index webdataset tars made by others (img2dataset, open_clip) without rewriting them.

    A sample is KEY.jpg, KEY.png or KEY.webp with an optional integer in KEY.cls and columns in
    KEY.json; other members stay and are ignored. mean and std in dataset.json are ImageNet's.

    - `sslpipe shards index laion --json-fields url,width:integer`
    """
    groups = find_tars(folder, split)
    columns = tar_columns(json_fields, name_pattern)
    if not no_columns:
        check_columns(folder, groups, columns)
    names = class_names(classes) if classes else ()
    with progress(f"index {folder.name}", sum(map(len, groups.values()))) as advance:
        manifest = index_folder(
            folder, groups, names, columns=columns, workers=workers, advance=advance
        )
    _print_summary(folder, manifest)


@app.command()
def verify(folder: DataSet, workers: Workers = 2) -> None:
    """Check sizes and sha256, decode every image, list what is bad; exit 1 if anything is."""
    data = load_index(folder)
    jobs = [(key, k) for key, shards in data.manifest.splits.items() for k in range(len(shards))]
    total = sum(shard.samples for shards in data.manifest.splits.values() for shard in shards)
    faults, name = [], Path(folder).name
    with progress(f"verify {name}", total) as advance, ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda job: verify_shard(data, *job), jobs)
        for (key, shard), found in zip(jobs, results, strict=True):
            faults += found
            advance(data.manifest.splits[key][shard].samples)
    faults += [fault for key in data.manifest.splits for fault in verify_columns(data, key)]
    for fault in faults:
        print(f"{fault.shard}{' ' + fault.key if fault.key else ''}: {fault.reason}")
    if faults:
        print(f"{len(faults)} faults in {total} samples", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{folder}: {total} samples in {len(jobs)} shards are good")
    after_a_look(folder)


@app.command()
def show(
    folder: DataSet,
    split: Annotated[str, typer.Option(help="The split to look at.")] = "train",
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("samples.png"),
    count: Annotated[int, typer.Option(min=1, help="Samples, chosen at random.")] = 48,
    ids: Ids = None,
    columns: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of the choice.")] = 0,
) -> None:
    """A picture of samples with their classes, sizes, ids and keys; of --ids they are printed, too.

    - `sslpipe shards show out/mydata --split test --out test.png`
    - `sslpipe shards show out/mydata --ids 469,523`
    """
    wanted = parse_ids(ids)
    data = load_index(folder)
    check_picture(out)

    from sslpipe.sharding.show import sample_lines, sample_sheet, save_sheet

    sheet = sample_sheet(data, split, count=count, columns=columns, seed=seed, ids=wanted)
    save_sheet(sheet, out)
    for line in sample_lines(data, split, sorted({*wanted}) if wanted else []):
        print(line)
    print(out)
    if not wanted:  # else who asks for some samples is in the middle of something else
        after_a_look(folder)


@app.command()
def stats(
    folder: DataSet,
    looked_at: Annotated[int, typer.Option(min=1, help="Samples whose size in px is read.")] = 1000,
) -> None:
    """Counts, classes, bytes, image sizes and columns of each split; nothing is decoded."""
    data = load_index(folder)

    from sslpipe.sharding.show import column_rows, split_rows

    for name in data.manifest.splits:
        table = Table(title=escape(f"{data.manifest.name}, {name}"), show_header=False, box=None)
        for row in [*split_rows(data, name, sampled=looked_at), *column_rows(data, name)]:
            table.add_row(*map(escape, row))
        Console().print(table)
    after_a_look(folder)


@app.command("cut-idx")
def cut_idx_command(
    root: Annotated[Path, typer.Argument(help="Folder of train-*-ubyte.gz.", show_default=False)],
    out: OutFolder,
    per_class: Annotated[int, typer.Option(min=1)] = 1000,
) -> None:
    """Cut the first images of each class from MNIST-style training files (never the test files)."""
    for path in cut_idx(root, out, per_class):
        print(path)
    say_next("shards", "build", out / "shards", "--source", "idx", "--root", out)


def _print_built(out: Path, built: Built, part: Part | None = None) -> None:
    for line in built.skipped:
        print(f"skipped: {line}", file=sys.stderr)
    for line in built.notes:
        print(line)
    if part is not None:
        print(f"{out}: part {part} is done; when all are: sslpipe shards merge {out}")
        return
    if built.missing:
        count = sum(map(len, built.missing.values()))
        print(f"skipped: {count:,} missing files, listed in {out / MISSING}", file=sys.stderr)
    _print_summary(out, built.manifest)


def _print_summary(folder: Path, manifest: Manifest) -> None:
    table = Table()
    for heading in ("split", "samples", "shards", "MB"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for key, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards) / 1e6
        samples = sum(shard.samples for shard in shards)
        table.add_row(escape(key), str(samples), str(len(shards)), f"{size:.1f}")
    Console().print(table)
    print(f"{folder / 'dataset.json'}: {len(manifest.classes) or 'no'} classes")
    after_shards(folder, [*manifest.splits])
