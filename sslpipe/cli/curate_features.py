"""The subcommands of `sslpipe curate` that read a file of features."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from sslpipe.cli.inputs import check_features, check_folder
from sslpipe.cli.next_step import say_next, say_next_program
from sslpipe.cli.progress import progress, working
from sslpipe.cli.terminal import console
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.errors import DataError, UserError
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sslpipe.curate.tables import Kinds
    from sslpipe.evaluation.embed import Embeddings

HOW = ("coverage", "balanced", "hard")
TOOLS = ("fiftyone", "lightly")
TRIES = 4  # of k-means, for a map that is looked at

_FIFTYONE = (
    "import fiftyone as fo; "
    "fo.launch_app(fo.Dataset.from_dir({!r}, fo.types.FiftyOneDataset)).wait()"
)

Features = Annotated[
    Path, typer.Argument(help="Embeddings of one split, from `sslpipe embed`.", show_default=False)
]
Data = Annotated[str, typer.Option(help="The dataset.json that the file was embedded from.")]
Folder = Annotated[Path, typer.Option("--out", help="The folder to write into.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all that is random.")]


class _Opened(NamedTuple):
    """A features file and the split that it is of."""

    data: DatasetIndex
    split: Split
    rows: "Embeddings"
    facts: dict[str, Any]


def outliers(
    features: Features,
    data: Data,
    out: Folder,
    neighbours: Annotated[int, typer.Option(min=1, help="Whose distance counts.")] = 10,
    z: Annotated[
        float, typer.Option(min=0, help="Robust standard deviations above the usual distance.")
    ] = 3.5,
    tiny_px: Annotated[
        float | None,
        typer.Option(min=0, help="Shorter side; else half of what the features' view resizes to."),
    ] = None,
    num_workers: Annotated[int, typer.Option(min=0, help="Threads that decode.")] = 2,
) -> None:
    """List samples that resemble no other, and pictures that are dark, blurred, tiny and so on.

    Writes outliers.csv and, where pyarrow is installed, outliers.parquet: a row for each sample and
    reason, with the value and the limit that it is beyond; and outliers.html, the pictures under
    their reasons. Nothing is removed: an outlier may be the best picture of all.
    """
    opened = _open(features, data, out)

    from sslpipe.curate.outliers import bad_pictures, far_from_all
    from sslpipe.report.curated import outlier_page

    split = opened.split
    with working("compare"):
        far = far_from_all(opened.rows, neighbours=neighbours, z=z)
    tiny = _tiny_px(features, opened.facts) if tiny_px is None else tiny_px
    with progress("read", len(split)) as advance:
        bad = bad_pictures(split, tiny_px=tiny, num_workers=num_workers, progress=advance)
    keys = _keys(split, [one.id for one in far])
    found = [*(one._replace(key=keys[one.id]) for one in far), *bad]
    rows = [
        {
            "split": split.name,
            **one._asdict(),
            "value": _number(one.value),
            "limit": _number(one.limit),
        }
        for one in found
    ]
    kinds = {"split": str, "id": int, "key": str, "reason": str}
    write_results(out / "outliers", rows, {**kinds, "value": float, "limit": float, "detail": str})
    write_atomically(out / "outliers.html", outlier_page(split, found))
    counts: dict[str, int] = {}
    for one in found:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    said = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"
    _say(f"{out}: of {len(split)} samples of {split.name}: {said}")
    kinds_of = ["--count", min(50, len(opened.rows.ids)), "--out", out.with_name("clusters")]
    say_next("curate", "clusters", features, "--data", data, *kinds_of)


def clusters(
    features: Features,
    data: Data,
    out: Folder,
    count: Annotated[int, typer.Option(min=1, help="How many clusters.")] = 50,
    seed: Seed = 0,
) -> None:
    """Cluster a split by k-means: the kinds of pictures there are, and how many of each.

    Writes clusters.csv (and .parquet), a row for each sample with its cluster and the distance to
    the cluster's centre, 0 the largest; and clusters.html, a map and the pictures of each.
    """
    opened = _open(features, data, out)

    from sslpipe.curate.clusters import cluster
    from sslpipe.report.curated import cluster_page

    split, rows = opened.split, opened.rows
    with working("clusters"):
        found = cluster(rows, count, seed=seed, tries=TRIES)
    table = [
        {
            "split": split.name,
            "id": sample_id,
            "cluster": int(number),
            "samples": int(found.sizes[number]),
            "distance": round(float(distance), 6),
        }
        for sample_id, number, distance in zip(
            rows.ids.tolist(), found.of_row, found.distances, strict=True
        )
    ]
    kinds = {"split": str, "id": int, "cluster": int, "samples": int, "distance": float}
    write_results(out / "clusters", table, kinds)
    names = opened.data.manifest.classes
    page = cluster_page(split, rows, found, names, seed)
    write_atomically(out / "clusters.html", page)
    _say(
        f"{out}: {count} clusters of {len(rows.ids)} samples of {split.name}, of "
        f"{found.sizes[-1]} to {found.sizes[0]} samples"
    )
    without = int((rows.labels < 0).sum())
    few = ["--count", min(100, without or len(rows.ids)), "--out", out.with_name("chosen")]
    few += ["--images", *([] if without else ["--ignore-labels"])]
    say_next("curate", "select", features, "--data", data, *few)


def select(
    features: Features,
    data: Data,
    out: Folder,
    count: Annotated[int, typer.Option(min=1, help="How many samples to label.")],
    how: Annotated[str, typer.Option(help="coverage, balanced or hard.")] = "coverage",
    labels: Annotated[
        Path | None,
        typer.Option(
            help="A table with the columns split, id and label: what is labelled already, as in a "
            "chosen.csv that was filled in; else the data set's own labels."
        ),
    ] = None,
    ignore_labels: Annotated[
        bool, typer.Option("--ignore-labels", help="Choose as if the data set had no labels.")
    ] = False,
    clusters: Annotated[int, typer.Option(min=1, help="Of --how balanced.")] = 50,
    images: Annotated[bool, typer.Option(help="Write the chosen pictures, too.")] = False,
    seed: Seed = 0,
) -> None:
    """Choose the samples that are worth a label first; those with a label are not chosen.

    coverage: a typical sample of each cluster, for the first labels; balanced: as many of each
    cluster; hard: those that a probe on the labels so far is least sure of. Where `sslpipe curate
    duplicates` has written its column, of copies one is chosen, and none of what has a label.

    Writes chosen.csv (and .parquet), in the order in which to label, with an empty column `label`;
    chosen.html, their pictures; with --images, images/ and the column `path`: fill in the labels
    and `sslpipe shards build --source csv --csv chosen.csv` makes a data set of them.
    """
    if how not in HOW:
        raise UserError(f"--how {how} is unknown; known: {', '.join(HOW)}")
    if ignore_labels and (how == "hard" or labels is not None):
        raise UserError("--ignore-labels does not go with --labels or --how hard, which need them")
    _check_unlabelled(out / "chosen.csv")
    opened = _open(features, data, out)

    import torch

    from sslpipe.curate.labelling import balanced, by_coverage, hard, one_of_each
    from sslpipe.curate.results import COLUMN
    from sslpipe.report.curated import chosen_page

    split, rows = opened.split, opened.rows
    known = _known_labels(opened, labels)
    if ignore_labels:
        known = known * 0 - 1
    elif labels is None and (known >= 0).all():
        raise DataError(
            f"all {len(known)} samples of split {split.name!r} have a label in the data set: name "
            "a table of those that count with --labels, or choose as if there were none with "
            "--ignore-labels"
        )
    if split.has_values(COLUMN):
        kept = one_of_each(split.column(COLUMN).groups.code_of(rows.ids.numpy()), known >= 0)
        if not kept.all():
            _say(f"{(~kept).sum()} copies of other samples are left out, by {COLUMN}")
        rows, known = rows.rows(torch.from_numpy(kept)), known[kept]
    with working(f"select by {how}"):
        if how == "coverage":
            chosen = by_coverage(rows, count, labelled=known >= 0, seed=seed)
        elif how == "balanced":
            chosen = balanced(rows, count, clusters=clusters, labelled=known >= 0, seed=seed)
        else:
            chosen = hard(rows, count, labels=known)
    ids = [int(rows.ids[one.row]) for one in chosen]
    paths: dict[int, str] = {}
    if images:
        from sslpipe.curate.images import write_images

        written = write_images(split, ids, out / "images")
        paths = {one.id: one.path.relative_to(out).as_posix() for one in written}
    keys = _keys(split, ids)
    table = [
        {
            "order": order,
            "split": split.name,
            "id": sample_id,
            "key": keys[sample_id],
            "reason": one.reason,
            "value": round(one.value, 6),
            "path": paths.get(sample_id),
            "label": None,
        }
        for order, (sample_id, one) in enumerate(zip(ids, chosen, strict=True))
    ]
    kinds: Kinds = {"order": int, "split": str, "id": int, "key": str, "reason": str}
    kinds = {**kinds, "value": float, **({"path": str} if images else {}), "label": str}
    write_results(out / "chosen", [{k: row[k] for k in kinds} for row in table], kinds)
    captions = {i: one.reason for i, one in zip(ids, chosen, strict=True)}
    write_atomically(out / "chosen.html", chosen_page(split, captions, how))
    _say(f"{out}: {count} of {len(rows.ids)} samples of {split.name} by {how}")
    when, csv = " when its column `label` is filled in", out / "chosen.csv"
    if images:
        words = ["--source", "csv", "--csv", csv]
        say_next("shards", "build", out / "shards", *words, when=when)
    else:
        words = ["--count", count, "--how", "hard", "--labels", csv, "--out", out.with_name("next")]
        say_next("curate", "select", features, "--data", data, *words, when=when)


def export(
    features: Features,
    data: Data,
    out: Folder,
    to: Annotated[str, typer.Option(help="fiftyone or lightly.")],
    table: Annotated[
        list[Path] | None,
        typer.Option(help="A CSV or parquet of `sslpipe curate` to show; repeatable."),
    ] = None,
    listed: Annotated[bool, typer.Option(help="Only samples that a table lists.")] = False,
    image_px: Annotated[
        int, typer.Option(min=0, help="Longer side of JPEGs; 0: the shards' own files.")
    ] = 0,
) -> None:
    """Write pictures, features and tables as FiftyOne or LightlyStudio show them.

    FiftyOne: fiftyone.Dataset.from_dir(OUT, fiftyone.types.FiftyOneDataset). LightlyStudio:
    python OUT/open_lightly_studio.py.
    """
    if to not in TOOLS:
        raise UserError(f"--to {to} is unknown; known: {', '.join(TOOLS)}")
    if listed and not table:
        raise UserError("--listed takes the samples of tables; name one with --table")
    opened = _open(features, data, out)

    from sslpipe.curate.exports import export as write

    made_by = str(opened.facts.get("backbone_sha256", opened.data.sha256))[:12]
    total = write(
        out,
        to,
        opened.data,
        opened.split,
        opened.rows,
        space=f"sslpipe/features@{made_by}",
        tables=table or [],
        listed=listed,
        most_px=image_px,
    )
    _say(f"{out}: {total} samples of {opened.split.name} for {to}")
    if to == "lightly":
        say_next_program("python", out / "open_lightly_studio.py")
    else:
        say_next_program("python", "-c", _FIFTYONE.format(str(out)))


def _open(features: Path, data: str, out: Path) -> _Opened:
    """Read the features and find their split. Raises: UserError where they do not fit, or OUT."""
    check_folder(out)
    check_features([features])
    index = load_index(data)

    from sslpipe.evaluation.embed import load_embeddings
    from sslpipe.evaluation.features import split_of_file

    rows, facts = load_embeddings(features)
    split = split_of_file(data, features, rows, facts)
    index.check_files(split.name)
    return _Opened(index, split, rows, facts)


def _check_unlabelled(path: Path) -> None:
    """Raise DataError where somebody has filled in labels that would be lost."""
    from sslpipe.curate.tables import read_table

    if path.is_file() and any(row["label"] for row in read_table(path, ("label",))):
        raise DataError(f"{path} holds labels, which would be lost; name another --out")


def _tiny_px(path: Path, facts: dict[str, Any]) -> float:
    """Half the side to which the features' view brings the shorter side of an image."""
    view = facts.get("view")
    if not isinstance(view, dict) or not isinstance(view.get("resize_px"), int):
        raise DataError(f"{path} does not say what size its view resizes to; give --tiny-px")
    return float(view["resize_px"] / 2)


def _keys(split: Split, ids: list[int]) -> dict[int, str]:
    """Look up the shards' keys of some samples."""
    from sslpipe.curate.images import raw_samples

    return {sample_id: raw.key for sample_id, raw in raw_samples(split, ids)}


def _known_labels(opened: _Opened, table: Path | None) -> "NDArray[np.int64]":
    """The labels so far, (N,), -1 for none: of a table, else the data set's own."""
    import numpy as np

    from sslpipe.curate.tables import read_labels

    if table is None:
        own: NDArray[np.int64] = opened.rows.labels.numpy()
        return own
    by_id = read_labels(table, opened.split.name, len(opened.split))
    return np.array([by_id.get(i, -1) for i in opened.rows.ids.tolist()], np.int64)


def write_results(stem: Path, rows: list[dict[str, Any]], kinds: "Kinds") -> None:
    """Write STEM.csv, and STEM.parquet where pyarrow is installed; else say so."""
    from sslpipe.curate.tables import write_tables

    if not write_tables(stem, rows, kinds):
        console.print(
            f"{stem.name}.parquet needs pyarrow and is not written: pip install 'sslpipe[parquet]'",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _number(value: float) -> float | None:
    """A value with six digits; None for one that is none."""
    return None if value != value else float(f"{value:.6g}")


def _say(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
