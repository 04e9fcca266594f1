"""`sslpipe search` and `browse`: look into what `sslpipe embed` has written."""

from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli import inputs
from sslpipe.cli.options import Data, Model, argument, command, option
from sslpipe.cli.terminal import encode_readable, new_app, say, show_json
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
    ],
)
def search(
    features: Annotated[str, argument("A file of `sslpipe embed`, or several joined by commas.")],
    images: Annotated[list[Path], argument("Images to search for, or folders of images.")],
    *,
    model: Model,
    data: Annotated[
        list[str],
        option("The data set of the features, of all files, or one --data a file.", metavar="DATA"),
    ],
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
    the index: embed new images as a data set of their own, and name both files.
    """
    inputs.check_model(model.model)
    whole = Path(features).exists()  # a name may have a comma
    files = [Path(each.strip()) for each in ([features] if whole else features.split(","))]
    inputs.check_features(files)
    if len(data) not in (1, len(files)):
        raise UserError(f"--data names {len(data)} data sets for {len(files)} files of features")
    for place in data:
        inputs.open_data(place)
    inputs.images_of(images)
    inputs.check_file(out)

    from sslpipe.search.images import ImageSearch

    places = data if len(data) == len(files) else data * len(files)
    search = ImageSearch(*zip(files, places, strict=True), flatten=flatten)
    undo = "; --no-flatten: as they are" * (search.flattening is not None)
    say(f"features {search.form}{undo}")
    backbone = model.load()
    backbone, _ = backbone.matched(search.splits[0])  # their range
    search.check_network(backbone.network_facts)
    queries = inputs.images_of(images, backbone.image_type)
    kept, rows = encode_readable(backbone, queries)
    queries = [queries[place] for place in kept]
    answers = search.find(rows, top, where=where)
    keys = [[search.key(hit) for hit in hits] for hits in answers]
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
        for query, hits, names in zip(queries, answers, keys, strict=True)
        for place, (hit, name) in enumerate(zip(hits, names, strict=True), 1)
    ]
    if as_json:
        show_json(lines)
    else:
        for line in lines:
            sample = f"{line['split']}:{line['id']}"
            cells = line["query"], line["place"], f"{line['score']:.4f}", sample, line["name"]
            typer.echo("\t".join(one_line(str(cell)) for cell in (*cells, line["class"] or "-")))
    if out is not None:
        from sslpipe.search.pages import search_page

        write_atomically(out, search_page(search, queries, answers, keys))
        say(f"{out}: open it in a browser")


@command(
    app,
    examples=["sslpipe browse runs/photos --data out/photos --out photos.parquet"],
)
def browse(
    features: Annotated[
        Path, argument("A run (the test images of its suite), or a file of `sslpipe embed`.")
    ],
    data: Data,
    flatten: Annotated[
        bool, option("Flatten the features' spectrum, as `sslpipe search` does.")
    ] = True,
    out: Annotated[Path, option("Write the map here.")] = Path("map.parquet"),
) -> None:
    """Show the images of features on a map, in a browser.

    Writes one parquet file with thumbnails, exact neighbours, places by UMAP and the columns of the
    data, and starts embedding-atlas on it, with the command that it prints. Needs the extra
    `browse`.
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
    inputs.open_data(data)
    if out.suffix != ".parquet":
        raise UserError(f"--out {out}: a map is named .parquet")
    inputs.check_file(out)

    from sslpipe.search.browse import show_map, write_map
    from sslpipe.search.images import ImageSearch

    search = ImageSearch((features, data), flatten=flatten)
    say(f"features {search.form}")
    count = write_map(search, out, say)
    say(f"{out}: {count:,} images")
    show_map(out, say)
