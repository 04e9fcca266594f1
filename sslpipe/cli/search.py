"""`sslpipe search`: the images nearest to an image, in what `sslpipe embed` has written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli.inputs import check_features, check_file, check_model, images_of, open_data
from sslpipe.cli.options import SOURCES, Checkpoint, Device, Weights, argument, option
from sslpipe.cli.terminal import new_app, say, say_weights
from sslpipe.errors import UserError, one_line
from sslpipe.portable import write_atomically

app = new_app()


@app.command(
    epilog="Examples: sslpipe search out/all.safetensors query.jpg --model out/backbone --data "
    "out/photos/dataset.json | sslpipe search shoes.safetensors,bags.safetensors QUERIES --model "
    'out/backbone --data out/shoes --data out/bags --where "vendor = A" --out found.html'
)
def main(
    features: Annotated[
        str,
        argument("A file of `sslpipe embed`; several joined by commas; or one of `sslpipe index`."),
    ],
    images: Annotated[list[Path], argument("Images to search for, or folders of images.")],
    model: Annotated[Path, option(f"What made the features: a run, {SOURCES}, or model.onnx.")],
    data: Annotated[
        list[str] | None,
        option(
            "The data set of the features, dataset.json: of all files, or one --data a file. Not "
            "with an index, which names its own."
        ),
    ] = None,
    top: Annotated[int, option("Images to show for each query.", min=1)] = 10,
    where: Annotated[
        str, option('Search only among these, by their columns: "vendor = A and year >= 2024".')
    ] = "",
    expand: Annotated[
        int, option("Search again for the query and this many first neighbours.", min=0)
    ] = 0,
    flatten: Annotated[
        bool | None,
        option(
            "Flatten the features' spectrum, as `sslpipe whiten` does. Default: as `index build` "
            "did, else do.",
            "--flatten/--no-flatten",
            show_default=False,
        ),
    ] = None,
    exact: Annotated[
        bool, option("Compare all images where the index is approximate.", "--exact")
    ] = False,
    rerank: Annotated[
        int,
        option(
            "Order this many of the nearest by the neighbours that they share with the query "
            "(k-reciprocal re-ranking), such as 100.",
            min=0,
            max=1000,
        ),
    ] = 0,
    augment: Annotated[
        int,
        option("Mix each image of the index with this many of its nearest ones first.", min=0),
    ] = 0,
    as_json: Annotated[bool, option("Print JSON instead of lines.", "--json")] = False,
    out: Annotated[Path | None, option("Write a page of thumbnails, such as found.html.")] = None,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    device: Device = "auto",
) -> None:
    """Show the images nearest to an image, in what `embed` has written.

    A line each: query, place, score, sample, name, class. The search is exact, unless the index was
    built with --approximate. The features file is the index: embed new images as a data set of
    their own, and name both files.
    """
    check_model(model)
    whole = Path(features).exists()  # a name may have a comma
    files = [Path(each.strip()) for each in ([features] if whole else features.split(","))]
    check_features(files)
    is_index = len(files) == 1 and files[0].suffix == ".json"
    if is_index and data:
        raise UserError(f"{files[0]} names its data sets itself; leave --data out")
    if not is_index and len(data or ()) not in (1, len(files)):
        number = len(data or ())
        raise UserError(f"--data names {number} data sets for {len(files)} files of features")
    if exact and not is_index:
        raise UserError("--exact is for an index built with --approximate; leave it out")
    if is_index:
        from sslpipe.evaluation.search_index import read_index

        places = [part["data"] for part in read_index(files[0])]
    else:
        assert data is not None
        places = data if len(data) == len(files) else data * len(files)
    indexes = [open_data(place) for place in places]
    images_of(images)
    if out is not None:
        check_file(out)

    from sslpipe.distributed import pick_device
    from sslpipe.evaluation.search import ImageSearch
    from sslpipe.export.load import load_backbone

    if is_index:
        from sslpipe.evaluation.search_index import open_index

        search, _ = open_index(files[0], augment, flatten=flatten, exact=exact)
    else:
        parts = zip(files, places, strict=True)
        search = ImageSearch(*parts, flatten=flatten is not False, augment=augment)
    undo = "; --no-flatten: as they are" * (search.flattening is not None)
    say(f"features {search.form}{undo}")
    backbone = load_backbone(model, checkpoint=checkpoint, weights=weights)
    say_weights(backbone)
    backbone, _ = backbone.matched(search.splits[0])  # of the same range as its images
    search.check_network(backbone.network_facts)
    queries = images_of(images, backbone.image_type)
    rows = backbone.to(pick_device(device, f"--device {device}")).encode(queries)
    found = search.find(rows, top, where=where, expand=expand, rerank=rerank)
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
            "class": _class(indexes[hit.part].manifest.classes, hit.label),
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
        from sslpipe.report.search import search_page

        write_atomically(out, search_page(search, queries, found, keys))
        say(f"{out}: open it in a browser")


def _class(names: Sequence[str], label: int) -> str | None:
    return None if label < 0 else names[label] if label < len(names) else str(label)
