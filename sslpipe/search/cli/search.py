"""`sslpipe search` and `browse`: look into what `sslpipe embed` has written."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sslpipe.cli import inputs
from sslpipe.cli.options import SOURCES, Checkpoint, Device, argument, command, option
from sslpipe.cli.terminal import encode_readable, load_model, new_app, say, show_json
from sslpipe.errors import UserError, one_line
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from sslpipe.export.load import FrozenBackbone
    from sslpipe.search.images import Hit, ImageSearch

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

    A line each: query, place, score, sample (of several data sets with its own), name, class. The
    search is exact. The features file is the index: embed new images as a data set of their own,
    and name both files. Vectors that another program made are searched by vectors, without --model
    and --data.
    """
    inputs.check_model(model)
    # a file, whose name may have a comma, or several
    names = [features] if Path(features).exists() else features.split(",")
    files = [Path(name.strip()) for name in names]
    inputs.check_features(files)
    # the data set of each; [] where none is named
    places = data or []
    if len(places) not in (0, 1, len(files)):
        raise UserError(f"--data names {len(places)} data sets for {len(files)} files of features")
    for place in places:
        inputs.open_data(place)
    if len(places) == 1:
        places = places * len(files)
    if model is None:
        _check_vectors(images, features)
    else:
        inputs.images_of(images)
    if out is not None and (model is None or not places):
        raise UserError("--out is a page of images: name images to search for, --model and --data")
    if where and not places:
        raise UserError("--where looks into the columns of a data set: name it with --data")
    inputs.check_file(out, (".html", ".htm"))

    from sslpipe.search.images import ImageSearch

    search = ImageSearch(*(zip(files, places, strict=True) if places else files), flatten=flatten)
    undo = "; --no-flatten: as they are" * (search.flattening is not None)
    say(f"features {search.form}{undo}")
    if model is None:
        queries, rows = search.queries_of(images)
    else:
        queries, rows = _embed_queries(search, images, load_model(model, checkpoint, device=device))
    answers = search.find(rows, top, where=where)
    lines = [
        _line(search, places, query, place, hit)
        for query, hits in zip(queries, answers, strict=True)
        for place, hit in enumerate(hits, 1)
    ]
    if as_json:
        show_json(lines)
    else:
        several = len({*places}) > 1
        for line in lines:
            typer.echo(_in_words(line, with_data=several))
    if out is not None:
        from sslpipe.search.pages import search_page

        write_atomically(out, search_page(search, [*map(Path, queries)], answers))
        say(f"{out}: open it in a browser")


def _check_vectors(files: list[Path], features: str) -> None:
    """Raise UserError where what is searched for without a network is no file of vectors."""
    pictures = [str(each) for each in files if each.suffix not in inputs.READ_SUFFIXES]
    if pictures:
        raise UserError(
            f"{pictures[0]} is searched for by the features of a network: name the one that "
            f"{features} was embedded with by --model; vectors are read from "
            f"{', '.join(inputs.READ_SUFFIXES)}"
        )
    inputs.check_features(files)


def _embed_queries(
    search: "ImageSearch", images: list[Path], backbone: "FrozenBackbone"
) -> "tuple[list[str], Tensor]":
    """Embed the images to search for; returns the paths of those that can be read, and rows."""
    if search.has_splits:
        backbone, _ = backbone.matched(search.splits[0])  # their range
    search.check_network(backbone.network_facts)
    paths = inputs.images_of(images, backbone.image_type)
    kept, rows = encode_readable(backbone, paths)
    return [str(paths[place]) for place in kept], rows


def _line(
    search: "ImageSearch", places: list[str], query: str, place: int, hit: "Hit"
) -> dict[str, Any]:
    """Return what is said of a hit; `places` are the data sets of the files, where known."""
    return {
        "query": query,
        "place": place,
        "score": round(hit.score, 6),
        "data": places[hit.part] if places else None,
        "split": search.split_name(hit),
        "id": hit.id,
        "name": search.key(hit),
        "class": search.class_name(hit),
    }


def _in_words(line: dict[str, Any], *, with_data: bool) -> str:
    """Return what is printed of a hit, with its data set where there are several."""
    sample = f"{line['split'] or '-'}:{line['id']}"
    cells = (
        line["query"],
        line["place"],
        f"{line['score']:.4f}",
        f"{line['data']}:{sample}" if with_data else sample,
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
