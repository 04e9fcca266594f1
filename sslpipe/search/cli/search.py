"""`sslpipe search` and `browse`: look into what `sslpipe embed` has written."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sslpipe.cli import inputs
from sslpipe.cli.options import SOURCES, Checkpoint, Device, argument, command, option
from sslpipe.cli.terminal import encode_readable, load_model, new_app, say, show_json
from sslpipe.errors import UserError, one_line
from sslpipe.portable import write_atomically

app = new_app()


@command(
    app,
    examples=[
        "sslpipe search out/all.safetensors query.jpg --model out/backbone --data "
        "out/photos/dataset.json",
        "sslpipe search shoes.safetensors,bags.safetensors QUERIES --model out/backbone --data "
        "out/shoes --data out/bags --where 'vendor = A' --out found.html",
        "sslpipe search vectors.npy queries.npy",
    ],
)
def search(
    features: Annotated[
        str,
        argument(
            "A file of `sslpipe embed`, or of vectors (.npy, .npz, .safetensors), or several "
            "joined by commas."
        ),
    ],
    images: Annotated[
        list[Path],
        argument("Images to search for, or folders of images; or, without --model, vectors."),
    ],
    *,
    model: Annotated[
        Path | None, option(f"Embeds the images: a run directory, {SOURCES}.", metavar="MODEL")
    ] = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
    data: Annotated[
        list[str] | None,
        option("The data set of the features, of all files, or one --data a file.", metavar="DATA"),
    ] = None,
    top: Annotated[int, option("Images to show for each query.", min=1)] = 10,
    where: Annotated[
        str, option('Search only among these, by their columns: "vendor = A and year >= 2024".')
    ] = "",
    flatten: Annotated[
        bool, option("Flatten the features' spectrum, as `sslpipe whiten` does.")
    ] = True,
    as_json: Annotated[bool, option("Print JSON instead of lines.", "--json")] = False,
    out: Annotated[Path | None, option("Write a page of thumbnails, such as found.html.")] = None,
) -> None:
    """Show the images of a data set that are nearest to an image.

    A line each: query, place, score, sample, name, class. The search is exact. The features file is
    the index: embed new images as a data set of their own, and name both files. Vectors that
    another program made are searched by vectors, without --model and --data.
    """
    inputs.check_model(model)
    whole = Path(features).exists()  # a name may have a comma
    files = [Path(each.strip()) for each in ([features] if whole else features.split(","))]
    inputs.check_features(files)
    places = data or []
    if len(places) not in (0, 1, len(files)):
        raise UserError(f"--data names {len(places)} data sets for {len(files)} files of features")
    for place in places:
        inputs.open_data(place)
    if model is not None:
        inputs.images_of(images)
    else:
        _check_vectors(images, features)
    if out is not None and (model is None or not places):
        raise UserError("--out is a page of images: name images to search for, --model and --data")
    if where and not places:
        raise UserError("--where looks into the columns of a data set: name it with --data")
    inputs.check_file(out, (".html", ".htm"))

    from sslpipe.search.images import ImageSearch

    whole_data = places if len(places) == len(files) else places * len(files)
    search = ImageSearch(
        *(zip(files, whole_data, strict=True) if places else files), flatten=flatten
    )
    undo = "; --no-flatten: as they are" * (search.flattening is not None)
    say(f"features {search.form}{undo}")
    if model is None:
        queries, rows = search.queries_of(images)
    else:
        backbone = load_model(model, checkpoint, device=device)
        if places:
            backbone, _ = backbone.matched(search.splits[0])  # their range
        search.check_network(backbone.network_facts)
        paths = inputs.images_of(images, backbone.image_type)
        kept, rows = encode_readable(backbone, paths)
        queries = [str(paths[place]) for place in kept]
    answers = search.find(rows, top, where=where)
    keys = [[search.key(hit) for hit in hits] for hits in answers]
    lines = []
    for query, hits, names in zip(queries, answers, keys, strict=True):
        for rank, (hit, name) in enumerate(zip(hits, names, strict=True), 1):
            line = {
                "query": query,
                "place": rank,
                "score": round(hit.score, 6),
                "data": whole_data[hit.part] if places else None,
                "split": search.split_name(hit),
                "id": hit.id,
                "name": name,
                "class": search.class_name(hit),
            }
            lines.append(line)
    if as_json:
        show_json(lines)
    else:
        for line in lines:
            typer.echo(_in_words(line))
    if out is not None:
        from sslpipe.search.pages import search_page

        write_atomically(out, search_page(search, [*map(Path, queries)], answers, keys))
        say(f"{out}: open it in a browser")


def _check_vectors(files: list[Path], features: str) -> None:
    """Raise UserError where what is searched for without a network is no file of vectors."""
    pictures = [str(each) for each in files if each.suffix not in inputs.READ_SUFFIXES]
    if pictures:
        raise UserError(
            f"{pictures[0]} is searched for by the features of a network: name the one that "
            f"{features} was embedded with by --model"
        )
    inputs.check_features(files)


def _in_words(line: dict[str, Any]) -> str:
    """Return what is printed of a hit."""
    cells = (
        line["query"],
        line["place"],
        f"{line['score']:.4f}",
        f"{line['split'] or '-'}:{line['id']}",
        line["name"],
        line["class"] or "-",
    )
    return "\t".join(one_line(str(cell)) for cell in cells)


@command(
    app,
    examples=["sslpipe browse runs/photos --data out/photos --out photos.parquet"],
)
def browse(
    features: Annotated[
        Path,
        argument("A run (the test images of its suite), or a file of `sslpipe embed` or vectors."),
    ],
    data: Annotated[
        str | None, option("The data set's dataset.json: a path or a URL; for its images.")
    ] = None,
    flatten: Annotated[
        bool, option("Flatten the features' spectrum, as `sslpipe search` does.")
    ] = True,
    out: Annotated[Path, option("Write the map here.")] = Path("map.parquet"),
) -> None:
    """Show the images of features on a map, in a browser.

    Writes one parquet file with thumbnails, exact neighbours, places by UMAP and the columns of the
    data, and starts embedding-atlas on it, with the command that it prints. Needs the extra
    `browse`. Vectors without --data are a map of dots.
    """
    if features.is_dir():
        run = features
        features = features / "features" / "test.safetensors"
        if not features.exists():
            raise UserError(
                f"{run} has no {features.relative_to(run)}: `sslpipe evaluate suite` writes it; or "
                "name a file of `sslpipe embed`"
            )
    inputs.check_features([features])
    if data is not None:
        inputs.open_data(data)
    inputs.check_file(out, (".parquet",))

    from sslpipe.search.browse import browse as show

    show(features, data, out=out, flatten=flatten, say=say)
