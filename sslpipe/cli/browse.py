"""`sslpipe browse`: a map of an embedding in a local page."""

from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_features, check_file, open_data
from sslpipe.cli.options import argument, option
from sslpipe.cli.terminal import new_app, say
from sslpipe.errors import UserError

app = new_app()


@app.command(
    epilog="Examples: sslpipe browse runs/photos --data out/photos --out photos.parquet | "
    "sslpipe browse photos.parquet"
)
def main(
    features: Annotated[
        Path,
        argument(
            "A run (the test images of its suite), a file of `sslpipe embed`, one of `sslpipe "
            "index`, or what --out has written."
        ),
    ],
    data: Annotated[
        str | None, option("The data set of the features, dataset.json; an index names its own.")
    ] = None,
    clusters: Annotated[int, option("Clusters of k-means to colour by; 0: none.", min=0)] = 0,
    pca: Annotated[
        bool, option("Map by the two main axes, in seconds, instead of by UMAP.", "--pca")
    ] = False,
    flatten: Annotated[
        bool, option("Flatten the features' spectrum, as `sslpipe search` does.")
    ] = True,
    out: Annotated[
        Path | None, option("Keep the map in this file, such as map.parquet, to open it at once.")
    ] = None,
    port: Annotated[int, option("Of this machine; 0: any.", min=0, max=65535)] = 5055,
) -> None:
    """Show the images of features on a map, in a page on this machine.

    Thumbnails, nearest neighbours of a click, colours by class, column and cluster, filters, a
    selection saved as CSV. Nothing is loaded from elsewhere or sent there. Needs the extra
    `browse`.
    """
    if features.is_dir():
        run, features = features, features / "features" / "test.safetensors"
        if not features.exists():
            raise UserError(
                f"{run} has no {features.relative_to(run)}: `sslpipe evaluate suite` writes it; or "
                "name a file of `sslpipe embed`"
            )
    check_features([features])
    is_map, is_index = features.suffix == ".parquet", features.suffix == ".json"
    if (data is None) != (is_map or is_index):
        what = "names its data set itself; leave --data out" if data else "needs --data"
        raise UserError(f"{features} {what}")
    if is_map and (clusters or pca or not flatten):
        raise UserError(f"{features} is a map already: --clusters, --pca and --no-flatten make one")
    if out is not None and out.suffix != ".parquet":
        raise UserError(f"--out {out}: a map is named .parquet")
    check_file(out)

    from sslpipe.report.browse import (
        import_parts,
        load_table,
        make_table,
        open_port,
        save_table,
        serve,
    )

    import_parts("embedding_atlas", "pyarrow")
    with open_port(port) as listener:
        if is_map:
            table = load_table(features)
        else:
            from sslpipe.evaluation.search import ImageSearch
            from sslpipe.evaluation.search_index import open_index

            if is_index:
                form = None if flatten else False
                search, parts = open_index(features, flatten=form, exact=True)
                places = [part["data"] for part in parts]
            else:
                assert data is not None
                search, places = ImageSearch((features, data), flatten=flatten), [data]
            say(f"features {search.form}")
            classes = [open_data(place).manifest.classes for place in places]
            table = make_table(search, classes, clusters=clusters, pca=pca, say=say)
        if out is not None:
            save_table(table, out)
            say(f"{out}: open it again with `sslpipe browse {out}`")
        say(f"http://127.0.0.1:{listener.getsockname()[1]}  {len(table):,} images; Ctrl-C ends it")
        serve(table, listener)
