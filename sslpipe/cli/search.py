"""`sslpipe search`, `browse` and `index`: look into what `sslpipe embed` has written."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sslpipe.cli import inputs
from sslpipe.cli import options as opt
from sslpipe.cli.next_step import say_next
from sslpipe.cli.terminal import load_model, new_app, say
from sslpipe.errors import UserError, one_line
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from sslpipe.evaluation.search import ImageSearch

app = new_app()
index_app = new_app(
    help="Grow an index for `search`: add features files, remove images; build it for speed.",
    no_args_is_help=True,
    epilog="Example: sslpipe index add photos.json out/photos.safetensors --data out/photos",
)
app.add_typer(index_app, name="index")

Index = Annotated[Path, opt.argument("The index, a small file such as photos.json.")]
Features = Annotated[Path, opt.argument("A file of `sslpipe embed`; it stays where and as it is.")]


@opt.documented(
    app,
    epilog="Examples: sslpipe search out/all.safetensors query.jpg --model out/backbone --data "
    "out/photos/dataset.json | sslpipe search shoes.safetensors,bags.safetensors QUERIES --model "
    'out/backbone --data out/shoes --data out/bags --where "vendor = A" --out found.html',
)
def search(
    features: str,
    images: list[Path],
    model: Annotated[
        Path, opt.option(f"What made the features: a run, {opt.SOURCES}, or model.onnx.")
    ],
    data: list[str] | None = None,
    top: Annotated[int, opt.option(min=1)] = 10,
    where: str = "",
    expand: Annotated[int, opt.option(min=0)] = 0,
    flatten: opt.Flatten = None,
    exact: Annotated[bool, opt.option("", "--exact")] = False,
    rerank: Annotated[int, opt.option(min=0, max=1000)] = 0,
    augment: Annotated[int, opt.option(min=0)] = 0,
    as_json: Annotated[bool, opt.option("Print JSON instead of lines.", "--json")] = False,
    out: Path | None = None,
    checkpoint: opt.Checkpoint = None,
    weights: opt.Weights = None,
    device: opt.Device = "auto",
) -> None:
    """Show the images nearest to an image, in what `embed` has written.

    A line each: query, place, score, sample, name, class. The search is exact, unless the index was
    built with --approximate. The features file is the index: embed new images as a data set of
    their own, and name both files.

    Args:
        features: A file of `sslpipe embed`; several joined by commas; or one of `sslpipe index`.
        images: Images to search for, or folders of images.
        data: The data set of the features, dataset.json: of all files, or one --data a file. Not
            with an index, which names its own.
        top: Images to show for each query.
        where: Search only among these, by their columns: "vendor = A and year >= 2024".
        expand: Search again for the query and this many first neighbours.
        flatten: Flatten the features' spectrum, as `sslpipe whiten` does. Default: as `index
            build` did, else do.
        exact: Compare all images where the index is approximate.
        rerank: Order this many of the nearest by the neighbours that they share with the query
            (k-reciprocal re-ranking), such as 100.
        augment: Mix each image of the index with this many of its nearest ones first.
        out: Write a page of thumbnails, such as found.html.
    """
    inputs.check_model(model)
    whole = Path(features).exists()  # a name may have a comma
    files = [Path(each.strip()) for each in ([features] if whole else features.split(","))]
    inputs.check_features(files)
    is_index = len(files) == 1 and files[0].suffix == ".json"
    if is_index and data:
        raise UserError(f"{files[0]} names its data sets itself; leave --data out")
    if not is_index and len(data or ()) not in (1, len(files)):
        number = len(data or ())
        raise UserError(f"--data names {number} data sets for {len(files)} files of features")
    if exact and not is_index:
        raise UserError("--exact is for an index built with --approximate; leave it out")
    for place in data or ():
        inputs.open_data(place)
    inputs.images_of(images)
    inputs.check_file(out)

    search, places = _open(files, data, augment, flatten=flatten, exact=exact)
    undo = "; --no-flatten: as they are" * (search.flattening is not None)
    say(f"features {search.form}{undo}")
    backbone = load_model(model, checkpoint, weights, device)
    backbone, _ = backbone.matched(search.splits[0])  # their range
    search.check_network(backbone.network_facts)
    queries = inputs.images_of(images, backbone.image_type)
    found = search.find(backbone.encode(queries), top, where=where, expand=expand, rerank=rerank)
    keys = [[search.key(hit) for hit in hits] for hits in found]
    lines = [
        {
            "query": str(query),
            "place": place,
            "score": round(hit.score, 6),
            "data": places[hit.part],
            "split": search.splits[hit.part].name,
            "id": hit.id,
            "name": name,
            "class": search.splits[hit.part].class_name(hit.label),
        }
        for query, hits, names in zip(queries, found, keys, strict=True)
        for place, (hit, name) in enumerate(zip(hits, names, strict=True), 1)
    ]
    if as_json:
        typer.echo(json.dumps(lines, indent=1))
    else:
        for line in lines:
            sample = f"{line['split']}:{line['id']}"
            cells = line["query"], line["place"], f"{line['score']:.4f}", sample, line["name"]
            typer.echo("\t".join(one_line(str(cell)) for cell in (*cells, line["class"] or "-")))
    if out is not None:
        from sslpipe.report.commands import search_page

        write_atomically(out, search_page(search, queries, found, keys))
        say(f"{out}: open it in a browser")


def _open(
    files: list[Path],
    data: list[str] | None,
    augment: int = 0,
    *,
    flatten: bool | None,
    exact: bool,
) -> tuple["ImageSearch", list[str]]:
    """Open features files with their data sets, or an index, without; returns each one's, too."""
    from sslpipe.evaluation.search import ImageSearch
    from sslpipe.evaluation.search_index import open_index

    if not data:
        search, parts = open_index(files[0], augment, flatten=flatten, exact=exact)
        return search, [part["data"] for part in parts]
    places = data if len(data) == len(files) else data * len(files)
    both = zip(files, places, strict=True)
    return ImageSearch(*both, flatten=flatten is not False, augment=augment), places


@opt.documented(
    app,
    epilog="Examples: sslpipe browse runs/photos --data out/photos --out photos.parquet | "
    "sslpipe browse photos.parquet",
)
def browse(
    features: Path,
    data: str | None = None,
    clusters: Annotated[int, opt.option(min=0)] = 0,
    pca: Annotated[bool, opt.option("", "--pca")] = False,
    flatten: bool = True,
    out: Path | None = None,
    port: Annotated[int, opt.option(min=0, max=65535)] = 5055,
) -> None:
    """Show the images of features on a map, in a page on this machine.

    Thumbnails, nearest neighbours of a click, colours by class, column and cluster, filters, a
    selection saved as CSV. Nothing is loaded from elsewhere or sent there. Needs the extra
    `browse`.

    Args:
        features: A run (the test images of its suite), a file of `sslpipe embed`, one of `sslpipe
            index`, or what --out has written.
        data: The data set of the features, dataset.json; an index names its own.
        clusters: Clusters of k-means to colour by; 0: none.
        pca: Map by the two main axes, in seconds, instead of by UMAP.
        flatten: Flatten the features' spectrum, as `sslpipe search` does.
        out: Keep the map in this file, such as map.parquet, to open it at once.
        port: Of this machine; 0: any.
    """
    if features.is_dir():
        run, features = features, features / "features" / "test.safetensors"
        if not features.exists():
            raise UserError(
                f"{run} has no {features.relative_to(run)}: `sslpipe evaluate suite` writes it; or "
                "name a file of `sslpipe embed`"
            )
    inputs.check_features([features])
    is_map = features.suffix == ".parquet"
    if (data is None) != (features.suffix in (".parquet", ".json")):
        what = "names its data set itself; leave --data out" if data else "needs --data"
        raise UserError(f"{features} {what}")
    if is_map and (clusters or pca or not flatten):
        raise UserError(f"{features} is a map already: --clusters, --pca and --no-flatten make one")
    if out is not None and out.suffix != ".parquet":
        raise UserError(f"--out {out}: a map is named .parquet")
    inputs.check_file(out)

    from sslpipe.report import browse as page

    page.import_parts("embedding_atlas", "pyarrow")
    with page.open_port(port) as listener:
        if is_map:
            table = page.load_table(features)
        else:
            form = None if flatten else False
            search, _ = _open(
                [features], None if data is None else [data], flatten=form, exact=True
            )
            say(f"features {search.form}")
            table = page.make_table(search, clusters=clusters, pca=pca, say=say)
        if out is not None:
            page.save_table(table, out)
            say(f"{out}: open it again with `sslpipe browse {out}`")
        say(f"http://127.0.0.1:{listener.getsockname()[1]}  {len(table):,} images; Ctrl-C ends it")
        page.serve(table, listener)


@index_app.command(
    epilog="Example: sslpipe index add photos.json out/photos.safetensors --data out/photos"
)
def add(index: Index, features: Features, data: opt.Data) -> None:
    """Add the images of a features file to an index, or begin one with them."""
    inputs.check_features([features])
    inputs.check_file(index, "INDEX")
    inputs.open_data(data)

    from sslpipe.evaluation.search_index import add_to_index

    say(f"{index}: {add_to_index(index, features, data, say):,} images")
    say_next("search", index, "QUERY.jpg", "--model", "MODEL")


@index_app.command(
    epilog="Example: sslpipe index remove photos.json out/photos.safetensors --ids 469,523"
)
def remove(index: Index, features: Features, ids: opt.Ids = None) -> None:
    """Remove images of a features file from an index; their ids are those that search prints."""
    inputs.check_features([features])
    chosen = inputs.parse_ids(ids)
    if chosen is None:
        raise UserError("name the images to remove, as in --ids 469,523")

    from sslpipe.evaluation.search_index import remove_from_index

    say(f"{index}: {remove_from_index(index, features, chosen, say):,} images")


@opt.documented(index_app, epilog="Example: sslpipe index build photos.json")
def build(index: Index, flatten: bool = True, approximate: bool = False) -> None:
    """Write ready-to-search rows beside an index, so that a search starts at once.

    They take as much disk as the features. Files that are added later are written too.

    Args:
        flatten: Flatten the features' spectrum, as `sslpipe whiten` does.
        approximate: Search features files of 100,000 images or more approximately (faiss); the
            recall against exact search is measured and shown.
    """
    _check_index(index)

    from sslpipe.evaluation.search_index import build_index

    search = build_index(index, flatten=flatten, approximate=approximate, say=say)
    say(f"{index}: {len(search):,} images, features {search.form}")
    say_next("search", index, "QUERY.jpg", "--model", "MODEL")


@index_app.command(epilog="Example: sslpipe index verify photos.json")
def verify(index: Index) -> None:
    """Read all that an index names, and compare it with its sha256; a search reads only a part."""
    _check_index(index)

    from sslpipe.evaluation.search_index import check_index

    say(f"{index}: {check_index(index):,} images, undamaged")


def _check_index(index: Path) -> None:
    if not index.is_file():
        why = f"{index} is no regular file" if index.exists() else f"there is no index {index}"
        raise UserError(f"{why}; begin one with `sslpipe index add`")
