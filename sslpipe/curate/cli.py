"""`sslpipe curate`: what is in a data set, before it is trained on."""

from collections import Counter
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sslpipe.cli.inputs import check_features, check_folder, open_data
from sslpipe.cli.next_step import after_a_look, say_next
from sslpipe.cli.options import NumWorkers, argument, command, option
from sslpipe.cli.terminal import new_app, progress, report_bad, say_once, show, working
from sslpipe.errors import DataError, UserError
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from sslpipe.curate.clusters import Chosen
    from sslpipe.evaluation.vectors import Features

app = new_app(
    no_args_is_help=True,
    help="Find duplicates, outliers, clusters and samples to label.",
    examples=[
        "sslpipe curate duplicates out/photos --out out/duplicates --split train",
        "sslpipe curate select train.safetensors --data out/photos --count 100 --out out/chosen",
    ],
)

Folder = Annotated[Path, option("The folder to write into.")]


@dataclass(frozen=True)
class Embedded:
    """Features of a split, and the data set that they are of."""

    features: Annotated[
        Path, argument("Features of one split, from `sslpipe embed`, or a file of vectors.")
    ]
    data: Annotated[
        str | None,
        option("The dataset.json that the file was embedded from. Default: tables without images."),
    ] = None

    def words(self) -> list[str | Path]:
        """Return the words that name them to another command."""
        return [self.features, *([] if self.data is None else ["--data", self.data])]

    def open(self, out: Path | None = None) -> "Features":
        """Read them, and their split, of whose images something is written to `out`.

        Raises: UserError where they do not fit, or OUT.
        """
        if out is not None:
            check_folder(out)
        check_features([self.features])
        if self.data is not None:
            open_data(self.data)

        from sslpipe.evaluation.vectors import open_features

        opened = open_features(self.features, self.data)
        if out is not None and opened.split is not None:
            opened.split.index.check_files(opened.split.name)
        return opened


@command(
    app,
    examples=["sslpipe curate duplicates out/photos/dataset.json --out out/duplicates"],
)
def duplicates(
    data: Annotated[str, argument("The data set's dataset.json or its folder.")],
    out: Folder,
    split: Annotated[
        list[str] | None,
        option("Search this split; repeatable. Default: all.", metavar="SPLIT"),
    ] = None,
    column: Annotated[bool, option("Write the column duplicate_group beside the data set.")] = True,
    num_workers: NumWorkers = 2,
) -> None:
    """Find near-duplicate images, inside a split and across splits.

    Finds copies that were saved again, resized or mirrored, and some that were cropped to 90 %.

    Writes groups.csv (one row per sample of a group), doubt.png (look at it first), and the column
    duplicate_group, by which training can keep one of each group or avoid duplicates as negatives.
    The shards do not change; existing features and runs stay valid.
    """
    check_folder(out)
    index = open_data(data, split or open_data(data).manifest.splits)

    from sslpipe.curate import duplicate_files
    from sslpipe.curate.calls import find_duplicates
    from sslpipe.curate.csv_files import write_table
    from sslpipe.sharding.show import save_sheet

    duplicates = find_duplicates(
        index,
        split,
        column=column,
        num_workers=num_workers,
        on_bad=report_bad,
        progress=progress,
    )
    table = duplicates.table()
    write_table(out / "groups.csv", table, duplicate_files.FIELDS)
    sheet = duplicates.sheet()
    if sheet is None:
        (out / "doubt.png").unlink(missing_ok=True)  # of other pairs
    else:
        save_sheet(sheet, out / "doubt.png")
    if column:
        before = index.manifest.columns.get(duplicate_files.COLUMN)
        if before not in (None, open_data(data).manifest.columns[duplicate_files.COLUMN]):
            say_once(
                f"the column {duplicate_files.COLUMN} has other values than before: runs that "
                "train by it and were started with the old ones cannot be resumed"
            )
    for text in duplicate_files.shared_sentences(duplicates.samples, duplicates.groups):
        show(text)
    show(duplicates.summary() + f", listed in {out}" * bool(table))
    after_a_look(data, *(["data.keep=duplicate_group first"] if column and table else []))


@command(
    app,
    examples=["sslpipe curate outliers train.safetensors --data out/photos --out out/outliers"],
)
def outliers(
    embedded: Embedded,
    out: Folder,
    k: Annotated[int, option("Number of nearest neighbours whose distance counts.", min=1)] = 10,
    z: Annotated[
        float, option("Robust standard deviations above the usual distance.", min=0)
    ] = 3.5,
    tiny_px: Annotated[
        float | None,
        option("Shorter side of a tiny image. Default: half of what the view resizes to.", min=0),
    ] = None,
    num_workers: NumWorkers = 2,
) -> None:
    """List images unlike the others, or constant, blurred, tiny.

    Writes outliers.csv, a row for each sample and reason, with the value and its limit; and
    outliers.html, the images by reason. Nothing is removed: an outlier may be your most valuable
    image.
    """
    opened = embedded.open(out)

    from sslpipe.curate.calls import find_outliers
    from sslpipe.curate.csv_files import write_table
    from sslpipe.curate.outliers import Outlier
    from sslpipe.curate.pages import outlier_page

    outliers = find_outliers(
        opened, k=k, z=z, tiny_px=tiny_px, num_workers=num_workers, progress=progress
    )
    split = opened.split
    table = []
    for one in outliers:  # six digits; nothing for None
        numbers = {"value": one.value, "limit": one.limit}
        short = {k: None if isnan(v) else float(f"{v:.6g}") for k, v in numbers.items()}
        table.append({"split": opened.split_name, **one._asdict(), **short})
    write_table(out / "outliers.csv", table, ("split", *Outlier._fields))
    if split is not None:
        write_atomically(out / "outliers.html", outlier_page(split, outliers))
    counts = Counter(one.reason for one in outliers)
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"
    samples = len(opened.rows.ids) if split is None else len(split)
    show(f"{out}: of {samples} samples{opened.of_split()}: {reasons}")
    words = ["--count", min(50, len(opened.rows.ids)), "--out", out.with_name("clusters")]
    say_next(["curate", "clusters", *embedded.words(), *words])


@command(
    app,
    examples=["sslpipe curate clusters train.safetensors --data out/photos --out out/clusters"],
)
def clusters(
    embedded: Embedded,
    out: Folder,
    count: Annotated[int, option("Number of clusters.", min=1)] = 50,
) -> None:
    """Cluster a split by k-means: the kinds of images that it has.

    Writes clusters.csv, each sample with its cluster (0 is the largest) and the distance to its
    centre; and clusters.html, with a map and images of each cluster.
    """
    opened = embedded.open(out)
    split = opened.split
    rows = opened.rows

    from sslpipe.curate.calls import cluster
    from sslpipe.curate.csv_files import write_table
    from sslpipe.curate.pages import cluster_page

    with working("clusters"):
        clusters = cluster(opened, count)
    ids = rows.ids.tolist()
    distances = clusters.distances.round(6).tolist()
    table = [
        {
            "split": opened.split_name,
            "id": opened.sample_name(i) if split is None else i,
            "cluster": k,
            "samples": clusters.sizes[k],
            "distance": d,
        }
        for i, k, d in zip(ids, clusters.of_row.tolist(), distances, strict=True)
    ]
    write_table(out / "clusters.csv", table, ("split", "id", "cluster", "samples", "distance"))
    if split is not None:
        write_atomically(out / "clusters.html", cluster_page(split, rows, clusters))
    show(
        f"{out}: {count} clusters of {len(rows.ids)} samples{opened.of_split()}, of "
        f"{clusters.sizes[-1]} to {clusters.sizes[0]} samples"
    )
    without = int((rows.labels < 0).sum())
    few = ["--count", min(100, without or len(rows.ids)), "--out", out.with_name("chosen")]
    few += [*([] if split is None else ["--images"]), *([] if without else ["--ignore-labels"])]
    say_next(["curate", "select", *embedded.words(), *few])


@command(
    app,
    examples=[
        "sslpipe curate select train.safetensors --data out/photos --count 100 --images --out "
        "out/chosen",
        "sslpipe curate select train.safetensors --data out/photos --count 100 --labels "
        "out/chosen/chosen.csv --out out/next",
    ],
)
def select(
    embedded: Embedded,
    out: Folder,
    count: Annotated[int, option("Number of samples to label.", min=1)],
    labels: Annotated[
        Path | None,
        option(
            "What is labelled already: a table with columns split, id and label, such as a "
            "filled-in chosen.csv. Default: the data set's own labels."
        ),
    ] = None,
    ignore_labels: Annotated[
        bool, option("Choose as if the data set had no labels.", "--ignore-labels")
    ] = False,
    images: Annotated[bool, option("Also write the chosen images.", "--images")] = False,
) -> None:
    """Choose the unlabelled samples that are most worth labelling.

    These are a typical sample of each cluster without a label, the largest cluster first. With the
    column of `sslpipe curate duplicates`, one of each group is chosen, and none of a labelled
    group.

    Writes chosen.csv, in the order to label, with an empty column `label`; chosen.html, with the
    images; and with --images, images/ and the column `path`. Fill in the
    labels, then build a data set: `sslpipe shards build --source csv --csv chosen.csv`.
    """
    if ignore_labels and labels is not None:
        raise UserError("--ignore-labels does not go with --labels")

    from sslpipe.curate.csv_files import read_table, write_table

    path = out / "chosen.csv"
    if path.is_file() and any(row["label"] for row in read_table(path, ("label",))):
        raise DataError(f"{path} holds labels, which would be lost; name another --out")
    opened = embedded.open(out)
    split = opened.split
    if images and split is None:
        raise UserError("--images are those of a data set: name it with --data, or leave them out")

    from sslpipe.curate.calls import select_to_label
    from sslpipe.curate.image_scan import write_images
    from sslpipe.curate.pages import chosen_page

    labelled = _labelled(opened, labels, ignore_labels)
    with working("select"):
        chosen = select_to_label(opened, count, labelled=labelled, say=show)
    table = _table(opened, chosen)
    columns = ["order", "split", "id", "key", "reason", "value", "label"]
    if images and split is not None:
        written = write_images(split, [row["id"] for row in table], out / "images")
        for row in table:
            row["path"] = written[row["id"]].relative_to(out).as_posix()
        columns.insert(-1, "path")
    write_table(path, table, columns)
    if split is not None:
        captions = {one.id: one.reason for one in chosen}
        write_atomically(out / "chosen.html", chosen_page(split, captions))
    show(f"{out}: {count} of {len(opened.rows.ids)} samples{opened.of_split()}")
    when = " when its column `label` is filled in"
    if images:
        say_next(["shards", "build", out / "shards", "--source", "csv", "--csv", path], when=when)
    else:
        more = ["--count", count, "--labels", path, "--out", out.with_name("next")]
        say_next(["curate", "select", *embedded.words(), *more], when=when)


def _table(opened: "Features", chosen: "list[Chosen]") -> list[dict[str, Any]]:
    """Return the rows of chosen.csv, in the order to label."""
    from sslpipe.data.reader import keys_of

    ids = [one.id for one in chosen]
    if opened.split is None:
        keys = {sample: opened.sample_name(sample) for sample in ids}
    else:
        keys = keys_of(opened.split, ids)
    return [
        {
            "order": order,
            "split": opened.split_name,
            "id": one.id,
            "key": keys[one.id],
            "reason": one.reason,
            "value": round(one.value, 6),
        }
        for order, one in enumerate(chosen)
    ]


def _labelled(opened: "Features", table: Path | None, ignored: bool) -> list[int] | None:
    """Return the ids that are labelled already, by a table; None: those of the data set are.

    Raises:
        DataError: None is left to label, or the table is of other samples.
    """
    from sslpipe.curate.csv_files import labelled_ids

    rows = opened.rows
    if table is not None:
        most = len(rows.ids) if opened.split is None else len(opened.split)
        return [*labelled_ids(table, opened.split_name or "", most)]
    if ignored:
        return []
    if bool((rows.labels >= 0).all()):
        raise DataError(
            f"all {len(rows.ids)} samples of split {opened.split_name!r} have a label: name "
            "a table of those that count with --labels, or choose as if there were none with "
            "--ignore-labels"
        )
    return None
