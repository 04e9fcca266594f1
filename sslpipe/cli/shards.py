"""Images -> webdataset shards with an index: build, index, verify, show, stats.

python -m tools.shards build out/mydata --source folder --root photos/
"""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sslpipe.cli.progress import progress
from sslpipe.data.index import Manifest, load_index
from sslpipe.errors import DataError, UserError, did_you_mean
from sslpipe.sharding import SOURCES
from sslpipe.sharding.idx import cut_idx
from sslpipe.sharding.index import find_tars, index_folder, verify_shard
from sslpipe.sharding.manifest import load_manifest, merge_classes, new_manifest, save_manifest
from sslpipe.sharding.show import sample_sheet, save_sheet, split_rows
from sslpipe.sharding.sources import SourceOptions, class_names
from sslpipe.sharding.splits import cut_classes, cut_test, relabel
from sslpipe.sharding.writer import (
    Done,
    Layout,
    SplitImages,
    forget_split,
    mean_and_std,
    write_split,
)

app = typer.Typer(
    help="Images -> webdataset shards with an index (dataset.json and member offsets).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
OutFolder = Annotated[Path, typer.Argument(help="folder of the data set", show_default=False)]
Workers = Annotated[int, typer.Option(min=1, help="threads; the files do not depend on it")]
ClassFile = Annotated[Path | None, typer.Option(help="text file, one class name a line, by label")]
_SOURCE, _SHARD = "What to read", "How to write"


@app.command()
def build(
    out: OutFolder,
    source: Annotated[
        str, typer.Option(help=" | ".join(SOURCES), rich_help_panel=_SOURCE)
    ] = "folder",
    root: Annotated[
        Path | None, typer.Option(help="folder of the images or files", rich_help_panel=_SOURCE)
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="only this split; names it where none is", rich_help_panel=_SOURCE),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="torchvision: the dataset, such as CIFAR10; else the data set's name",
            rich_help_panel=_SOURCE,
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="csv: a row an image", rich_help_panel=_SOURCE)
    ] = None,
    image_column: Annotated[
        str, typer.Option(help="csv: path from the file; parquet: image", rich_help_panel=_SOURCE)
    ] = "path",
    label_column: Annotated[
        str, typer.Option(help="csv, parquet: class", rich_help_panel=_SOURCE)
    ] = "label",
    split_column: Annotated[
        str | None, typer.Option(help="csv: name of the split", rich_help_panel=_SOURCE)
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(help="idx: class names, one a line by label", rich_help_panel=_SOURCE),
    ] = None,
    labels: Annotated[
        bool, typer.Option(help="take folder names or --label-column", rich_help_panel=_SOURCE)
    ] = True,
    download: Annotated[
        bool, typer.Option("--download", help="torchvision: fetch it", rich_help_panel=_SOURCE)
    ] = False,
    class_disjoint: Annotated[
        bool,
        typer.Option(
            "--class-disjoint/--published-split",
            help="cub, cars: train on the first half of the classes and test on the others, or "
            "split as for classification",
            rich_help_panel=_SOURCE,
        ),
    ] = True,
    test_fraction: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.9,
            help="share of each class to cut from train as test",
            rich_help_panel=_SHARD,
        ),
    ] = 0.0,
    unseen_classes: Annotated[
        str | None,
        typer.Option(
            help="names, separated by commas: their images go to splits of their own, such as "
            "test_unseen beside test",
            rich_help_panel=_SHARD,
        ),
    ] = None,
    scatter: Annotated[
        bool,
        typer.Option(
            "--scatter",
            help="place each image once at random in its frame: 55-100 % of its size, shifted, "
            "turned by up to 20 degrees, 50-100 % as bright",
            rich_help_panel=_SHARD,
        ),
    ] = False,
    resize_shorter: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="reduce images whose shorter side is longer than this many px; JPEGs are written "
            "again with quality 95, all others as PNG",
            rich_help_panel=_SHARD,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="of the shuffle, the cut and --scatter", rich_help_panel=_SHARD)
    ] = 0,
    samples_per_shard: Annotated[int, typer.Option(min=1, rich_help_panel=_SHARD)] = 1000,
    max_shard_bytes: Annotated[
        int, typer.Option(min=1, help="rough where images are converted", rich_help_panel=_SHARD)
    ] = 10**9,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="list bad images and leave them out", rich_help_panel=_SHARD
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace these splits", rich_help_panel=_SHARD)
    ] = False,
    origin: Annotated[
        str, typer.Option(help="where the images come from, for the record", rich_help_panel=_SHARD)
    ] = "",
    license: Annotated[
        str, typer.Option(help="of the images, for the record", rich_help_panel=_SHARD)
    ] = "",
    workers: Workers = 2,
) -> None:
    """Write shards from images; run again after a stop, and it goes on.

    - photos/CLASS/*.jpg:  `build out/mydata --root photos --test-fraction 0.1`
    - photos/train/CLASS/*.jpg and photos/test/...:  `build out/mydata --root photos`
    - photos/*.jpg, no labels:  `build out/mydata --root photos`
    - `build out/cifar10 --source torchvision --name CIFAR10 --root data --download`
    - `build out/birds --source csv --csv birds.csv --image-column file --label-column species`
    - `build out/fashion --source idx --root FOLDER_OF_THE_FILES`
    - `build out/cub --source cub --root CUB_200_2011`: also cars, products, omniglot, tiny-imagenet
    - `build out/beans --source parquet --root beans/data --label-column labels`
    """
    if source not in SOURCES:
        hint = did_you_mean(source, SOURCES)
        raise DataError(f"--source {source!r} is unknown{hint}; known: {', '.join(SOURCES)}")
    for option, given, owner in (
        ("--csv", csv, "csv"),
        ("--classes", classes, "idx"),
        ("--download", download, "torchvision"),
    ):
        if given and source != owner:
            raise DataError(f"{option} needs --source {owner}; here --source is {source}")
    options = SourceOptions(
        root,
        split,
        name,
        csv,
        image_column,
        label_column,
        split_column,
        classes,
        labels,
        download,
        class_disjoint,
    )
    images = SOURCES[source](options)
    manifest = load_manifest(out) or new_manifest(name or out.resolve().name)
    # idx files without names: one split may lack the last classes
    known = merge_classes(manifest.classes, max((i.classes for i in images.values()), key=len))
    parts = {
        key: SplitImages(relabel(value, known), np.arange(len(value)), key)
        for key, value in images.items()
    }
    if test_fraction:
        parts = cut_test(parts, test_fraction, seed)
    if unseen_classes is not None:
        parts = cut_classes(parts, [name.strip() for name in unseen_classes.split(",")], known)
    out.mkdir(parents=True, exist_ok=True)
    layout = Layout(seed, samples_per_shard, max_shard_bytes, scatter, resize_shorter)
    if overwrite:
        kept = {key: value for key, value in manifest.splits.items() if key not in parts}
        manifest = manifest.model_copy(update={"splits": kept})
        save_manifest(out, manifest)
        for key in parts:
            forget_split(out, key)
    written: dict[str, list[Done]] = {}
    for key, part in parts.items():
        with progress(f"{out.name} {key}", len(part.numbers)) as advance:
            written[key] = write_split(
                out, key, part, layout, workers=workers, skip_bad=skip_bad, advance=advance
            )
    text = origin or (f"torchvision {name}" if source == "torchvision" else source)
    manifest = manifest.model_copy(
        update={
            "source": text + (f", scattered with seed {seed}" if scatter else ""),
            "license": license or manifest.license,
            "classes": known,
        }
    )
    manifest = _with_splits(manifest, written)
    save_manifest(out, manifest)
    for line in (line for shards in written.values() for d in shards for line in d.bad):
        print(f"left out: {line}", file=sys.stderr)
    _print_summary(out, manifest)


@app.command()
def index(
    folder: OutFolder,
    split: Annotated[
        str | None, typer.Option(help="of all tars; else by name: train-000000.tar is in train")
    ] = None,
    classes: ClassFile = None,
    workers: Workers = 2,
) -> None:
    """Index webdataset tars made by others (img2dataset, open_clip) without rewriting them.

    A sample is KEY.jpg, KEY.png or KEY.webp with an optional integer in KEY.cls; other members
    stay and are ignored. mean and std in dataset.json are ImageNet's.
    """
    groups = find_tars(folder, split)
    names = class_names(classes) if classes else ()
    with progress(f"index {folder.name}", sum(map(len, groups.values()))) as advance:
        manifest = index_folder(folder, groups, names, workers=workers, advance=advance)
    _print_summary(folder, manifest)


@app.command()
def verify(folder: OutFolder, workers: Workers = 2) -> None:
    """Check sizes and sha256, decode every image, list what is bad; exit 1 if anything is."""
    data = load_index(folder)
    jobs = [(key, k) for key, shards in data.manifest.splits.items() for k in range(len(shards))]
    total = sum(shard.samples for shards in data.manifest.splits.values() for shard in shards)
    faults = []
    with progress(f"verify {folder.name}", total) as advance, ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda job: verify_shard(data, *job), jobs)
        for (key, shard), found in zip(jobs, results, strict=True):
            faults += found
            advance(data.manifest.splits[key][shard].samples)
    for fault in faults:
        print(f"{fault.shard}{' ' + fault.key if fault.key else ''}: {fault.reason}")
    if faults:
        print(f"{len(faults)} faults in {total} samples", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{folder}: {total} samples in {len(jobs)} shards are good")


@app.command()
def show(
    folder: OutFolder,
    split: Annotated[str, typer.Option(help="the split to look at")] = "train",
    out: Annotated[Path, typer.Option(help="the PNG to write")] = Path("samples.png"),
    count: Annotated[int, typer.Option(min=1, help="samples, chosen at random")] = 48,
    columns: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option(help="of the choice")] = 0,
) -> None:
    """A picture of samples with their classes, sizes and ids.

    - `show out/mydata --split test --out test.png`
    """
    save_sheet(
        sample_sheet(load_index(folder), split, count=count, columns=columns, seed=seed), out
    )
    print(out)


@app.command()
def stats(
    folder: OutFolder,
    looked_at: Annotated[int, typer.Option(min=1, help="samples whose size in px is read")] = 1000,
) -> None:
    """Counts, classes, bytes and image sizes of each split, without decoding anything."""
    data = load_index(folder)
    for name in data.manifest.splits:
        table = Table(title=escape(f"{data.manifest.name}, {name}"), show_header=False, box=None)
        for row in split_rows(data, name, sampled=looked_at):
            table.add_row(*map(escape, row))
        Console().print(table)


@app.command("cut-idx")
def cut_idx_command(
    root: Annotated[Path, typer.Argument(help="folder of train-*-ubyte.gz", show_default=False)],
    out: OutFolder,
    per_class: Annotated[int, typer.Option(min=1)] = 1000,
) -> None:
    """Cut the first images of each class from MNIST-style training files (never the test files)."""
    for path in cut_idx(root, out, per_class):
        print(path)


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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on stderr and exit 1."""
    torch.set_num_threads(1)  # the workers are the parallelism
    warnings.simplefilter("error", Image.DecompressionBombWarning)  # such an image is a bad one
    try:
        app(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
