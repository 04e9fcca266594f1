"""`sslpipe curate`: what is in a data set, before it is trained on."""

import signal
from collections import Counter
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sslpipe.cli.inputs import check_features, check_folder, open_data
from sslpipe.cli.next_step import after_a_look, say_next
from sslpipe.cli.options import NumWorkers, argument, command, option
from sslpipe.cli.terminal import new_app, progress, report_bad, say_once, show, working
from sslpipe.errors import DataError, UserError
from sslpipe.portable import replacing, write_atomically

if TYPE_CHECKING:
    from sslpipe.data.index import Split
    from sslpipe.evaluation.embed import Embeddings

app = new_app(
    no_args_is_help=True,
    help="Find duplicates, outliers, clusters and samples to label.",
    examples=[
        "sslpipe curate duplicates out/photos --out out/duplicates --split train",
        "sslpipe curate select train.safetensors --data out/photos --count 100 --out out/chosen",
    ],
)

TRIES = 4  # of k-means, for a map that is looked at

Folder = Annotated[Path, option("The folder to write into.")]


@dataclass(frozen=True)
class Embedded:
    """Features of a split, and the data set that they are of."""

    features: Annotated[Path, argument("Features of one split, from `sslpipe embed`.")]
    data: Annotated[str, option("The dataset.json that the file was embedded from.")]

    def open(self, out: Path | None = None) -> tuple["Split", "Embeddings", dict[str, Any]]:
        """Read them, their split, of whose images something is written to `out`, and their facts.

        Raises: UserError where they do not fit, or OUT.
        """
        if out is not None:
            check_folder(out)
        check_features([self.features])
        open_data(self.data)

        from sslpipe.evaluation.embed import load_embeddings
        from sslpipe.evaluation.features import split_of_file

        rows, metadata = load_embeddings(self.features)
        split = split_of_file(self.data, self.features, rows, metadata)
        if out is not None:
            split.index.check_files(split.name)
        return split, rows, metadata


@app.callback()
def _group(context: typer.Context) -> None:
    """Let SIGTERM end every subcommand as Ctrl-C does: no file is left half-written."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # the shell's status of a signal

    before = signal.signal(signal.SIGTERM, stop)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


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
    names = split or list(open_data(data).manifest.splits)
    if not names:
        raise UserError(f"{data} has no split; build one with `sslpipe shards build`")
    if len({*names}) < len(names):
        raise UserError(f"--split {' '.join(names)} names a split twice; name each once")
    index = open_data(data, names)

    from sslpipe.curate import results
    from sslpipe.curate.duplicates import find_duplicates
    from sslpipe.curate.groups import group
    from sslpipe.curate.scan import scan
    from sslpipe.portable import keep_freed_memory

    if column:
        results.check_place(index)
    # read, compare, group
    splits = [index.split(name) for name in names]
    keep_freed_memory()
    with progress("read", sum(map(len, splits))) as advance:
        samples = scan(splits, num_workers=num_workers, on_bad=report_bad, progress=advance)
    duplicates = find_duplicates(samples, progress=progress)
    sheet = results.doubt_sheet(samples, splits, duplicates.doubt)
    groups = group(duplicates.pairs, len(samples))
    # write
    count = results.write_groups(out / "groups.csv", samples, groups)
    if sheet is None:
        (out / "doubt.png").unlink(missing_ok=True)  # of other pairs
    else:
        with replacing(out / "doubt.png") as temporary:
            sheet.save(temporary, "PNG")
    if column:
        by_split = results.by_split(samples, groups)
        results.write_column(index.folder, results.COLUMN, by_split, alone=True)
        before = index.manifest.columns.get(results.COLUMN)
        if before not in (None, open_data(data).manifest.columns[results.COLUMN]):
            say_once(
                f"the column {results.COLUMN} has other values than before: runs that train by it "
                "and were started with the old ones cannot be resumed"
            )
    for text in results.shared_sentences(samples, groups):
        show(text)
    found_groups = len(groups.sizes())
    said = f"{count:,} are in {found_groups:,} group{'s' * (found_groups != 1)} of duplicates"
    show(f"{len(samples):,} samples: {f'{said}, listed in {out}' if count else 'no duplicates'}")
    after_a_look(data, *(["data.keep=duplicate_group first"] if column and count else []))


@command(
    app,
    examples=["sslpipe curate neighbours train.safetensors --data out/photos/dataset.json"],
)
def neighbours(
    embedded: Embedded,
    k: Annotated[
        int, option("Nearest neighbours that count: each must be among the other's.", min=1)
    ] = 1,
    power: Annotated[
        float,
        option("Flatten the features' spectrum by this power first; 0: as they are.", min=0, max=1),
    ] = 0.0,
) -> None:
    """Pair samples that are each other's nearest neighbours.

    Writes the column neighbour_group beside the data set: samples that share a number are mutual
    neighbours in the space of the features, which may be of any network, a join or a flattened
    export. Train with pairs.positive=neighbour_group. Shards, existing features and runs stay
    valid. Where samples have labels, they say how many pairs are right; no label makes a pair.
    """
    split, rows, _ = embedded.open()

    from sslpipe.curate.groups import estimate_precision, mutual_groups
    from sslpipe.curate.results import check_place, write_column
    from sslpipe.data.index import NEIGHBOUR_COLUMN
    from sslpipe.evaluation.whiten import FLOOR, fit_whitening

    index = split.index
    check_place(index, NEIGHBOUR_COLUMN, "")
    with working("compare"):
        groups = mutual_groups(fit_whitening(rows, FLOOR, power=power)(rows) if power else rows, k)
    paired = int((groups.group >= 0).sum())
    if not paired:
        raise DataError(
            f"{embedded.features}: no two samples are each other's {k} nearest; raise --k"
        )
    write_column(index.folder, NEIGHBOUR_COLUMN, {split.name: (rows.ids.numpy(), groups.group)})
    where = f"{NEIGHBOUR_COLUMN} of split {split.name} in {index.folder}"
    show(f"{where}: {paired:,} of {len(split):,} samples in {len(groups.sizes()):,} groups")
    precision = estimate_precision(groups.group, rows.labels.numpy())
    if precision is None:
        show("no labels to estimate its precision by: look at some groups before training")
    else:
        share, low, high = (
            100 * x for x in (precision.right / precision.pairs, *precision.interval95)
        )
        show(
            f"precision {share:.1f} % ({low:.1f} to {high:.1f}) of {precision.pairs:,} pairs whose "
            f"images are both labelled; {100 * precision.chance:.1f} % of pairs drawn by chance"
        )
    after_a_look(embedded.data, f"pairs.positive={NEIGHBOUR_COLUMN}")


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
    """List images that resemble no other, are dark, blurred, tiny.

    Writes outliers.csv, a row for each sample and reason, with the value and its limit; and
    outliers.html, the images by reason. Nothing is removed: an outlier may be your most valuable
    image.
    """
    split, rows, metadata = embedded.open(out)

    from sslpipe.curate.outliers import Outlier, bad_pictures, far_from_all
    from sslpipe.curate.pages import outlier_page
    from sslpipe.curate.tables import write_table
    from sslpipe.data.reader import keys_of

    with working("compare"):
        far = far_from_all(rows, neighbours=k, z=z)
    if tiny_px is None:
        view = metadata.get("view")
        if not isinstance(view, dict) or not isinstance(view.get("resize_px"), int):
            raise DataError(
                f"{embedded.features} does not say what its view resizes to; give --tiny-px"
            )
        tiny_px = view["resize_px"] / 2
    with progress("read", len(split)) as advance:
        bad = bad_pictures(split, tiny_px=tiny_px, num_workers=num_workers, progress=advance)
    keys = keys_of(split, [one.id for one in far])
    outliers = [*(one._replace(key=keys[one.id]) for one in far), *bad]
    table = []
    for one in outliers:  # six digits; nothing for None
        numbers = {"value": one.value, "limit": one.limit}
        short = {k: None if isnan(v) else float(f"{v:.6g}") for k, v in numbers.items()}
        table.append({"split": split.name, **one._asdict(), **short})
    write_table(out / "outliers.csv", table, ("split", *Outlier._fields))
    write_atomically(out / "outliers.html", outlier_page(split, outliers))
    counts = Counter(one.reason for one in outliers)
    said = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"
    show(f"{out}: of {len(split)} samples of {split.name}: {said}")
    words = ["--count", min(50, len(rows.ids)), "--out", out.with_name("clusters")]
    say_next(["curate", "clusters", embedded.features, "--data", embedded.data, *words])


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
    split, rows, _ = embedded.open(out)

    from sslpipe.curate.clusters import cluster
    from sslpipe.curate.pages import cluster_page
    from sslpipe.curate.tables import write_table

    with working("clusters"):
        clusters = cluster(rows, count, tries=TRIES)
    ids = rows.ids.tolist()
    distances = clusters.distances.round(6).tolist()
    table = [
        {"split": split.name, "id": i, "cluster": k, "samples": clusters.sizes[k], "distance": d}
        for i, k, d in zip(ids, clusters.of_row.tolist(), distances, strict=True)
    ]
    write_table(out / "clusters.csv", table, ("split", "id", "cluster", "samples", "distance"))
    write_atomically(out / "clusters.html", cluster_page(split, rows, clusters))
    show(
        f"{out}: {count} clusters of {len(rows.ids)} samples of {split.name}, of "
        f"{clusters.sizes[-1]} to {clusters.sizes[0]} samples"
    )
    without = int((rows.labels < 0).sum())
    few = ["--count", min(100, without or len(rows.ids)), "--out", out.with_name("chosen")]
    few += ["--images", *([] if without else ["--ignore-labels"])]
    say_next(["curate", "select", embedded.features, "--data", embedded.data, *few])


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

    from sslpipe.curate.tables import labelled_ids, read_table, write_table

    path = out / "chosen.csv"
    if path.is_file() and any(row["label"] for row in read_table(path, ("label",))):
        raise DataError(f"{path} holds labels, which would be lost; name another --out")
    split, rows, _ = embedded.open(out)

    import numpy as np
    import torch

    from sslpipe.curate.clusters import by_coverage, one_of_each
    from sslpipe.curate.pages import chosen_page
    from sslpipe.curate.results import COLUMN
    from sslpipe.curate.scan import write_images
    from sslpipe.data.reader import keys_of

    # what is labelled: by a table, else by the data set
    known = (rows.labels >= 0).numpy() & (not ignore_labels)
    if labels is not None:
        known = np.isin(rows.ids.numpy(), [*labelled_ids(labels, split.name, len(split))])
    elif known.all():
        raise DataError(
            f"all {len(known)} samples of split {split.name!r} have a label in the data set: name "
            "a table of those that count with --labels, or choose as if there were none with "
            "--ignore-labels"
        )
    if split.has_values(COLUMN):
        kept = one_of_each(split.column(COLUMN).groups.code_of(rows.ids.numpy()), known)
        if not kept.all():
            show(f"{(~kept).sum()} copies of other samples are skipped, by {COLUMN}")
        rows = rows.rows(torch.from_numpy(kept))
        known = known[kept]
    with working("select"):
        chosen = by_coverage(rows, count, labelled=known)
    by_id = {int(rows.ids[one.row]): one for one in chosen}
    written = write_images(split, [*by_id], out / "images") if images else {}
    paths = {i: path.relative_to(out).as_posix() for i, path in written.items()}
    keys = keys_of(split, [*by_id])
    table: list[dict[str, Any]] = []
    for order, (i, one) in enumerate(by_id.items()):
        row = {"order": order, "split": split.name, "id": i, "key": keys[i], "reason": one.reason}
        table.append(row | {"value": round(one.value, 6), "path": paths.get(i)})
    columns = ("order", "split", "id", "key", "reason", "value", *["path"] * images, "label")
    write_table(path, table, columns)
    captions = {i: one.reason for i, one in by_id.items()}
    write_atomically(out / "chosen.html", chosen_page(split, captions))
    show(f"{out}: {count} of {len(rows.ids)} samples of {split.name}")
    when = " when its column `label` is filled in"
    if images:
        say_next(["shards", "build", out / "shards", "--source", "csv", "--csv", path], when=when)
    else:
        of = [embedded.features, "--data", embedded.data]
        more = ["--count", count, "--labels", path, "--out", out.with_name("next")]
        say_next(["curate", "select", *of, *more], when=when)
