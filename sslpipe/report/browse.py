"""A map of an embedding in a local page: thumbnails, neighbours, colours by column, a selection.

The page is embedding-atlas's (MIT, Apple), which reads one table. It is served to this machine
alone, and the browser is told to load nothing from anywhere else.
"""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.curate.clusters import cluster
from sslpipe.curate.scan import keys_of
from sslpipe.data.index import Split
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest
from sslpipe.evaluation.search import ImageSearch
from sslpipe.evaluation.whiten import principal_axes
from sslpipe.portable import open_regular, replacing
from sslpipe.report.pictures import encoded, small_images

NEIGHBOURS = 15  # of each image; UMAP's usual number
FEWEST = NEIGHBOURS + 2
OWN = ("row", "split", "id", "name", "class", "cluster", "x", "y", "image", "neighbours")
NOT_COUNTED = ("row", "id", "name", "x", "y", "image", "neighbours")
MOST_COUNTED = 1000  # different values of a column that has a chart of its own
ONLY_HERE = (  # what the page may load: all is served from this machine
    "default-src 'self'; script-src 'self' 'wasm-unsafe-eval' 'unsafe-eval' blob:; "
    "worker-src 'self' blob:; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self' data: blob:; form-action 'none'; "
    "frame-ancestors 'none'"
)


def import_parts(*names: str) -> list[Any]:
    """Import modules of the extra `browse`. Raises: UserError where one is missing."""
    from importlib import import_module

    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise UserError(f"browse needs {error.name} (pip install 'sslpipe[browse]')") from error


def make_table(
    search: ImageSearch,
    *,
    clusters: int = 0,
    pca: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """Make the table that the page shows: a row an image that can be decoded.

    Args:
        search: Opened features, as they are compared.
        clusters: k-means clusters to colour by; 0: none.
        pca: Map by the two main axes, in seconds; else by UMAP, in minutes for 100,000 images.
        say: Told what is done.

    Returns:
        A pyarrow Table of OWN and the columns of the data; no `cluster` without clusters.

    Raises:
        DataError: There are too few images.
    """
    (pa,) = import_parts("pyarrow")
    parts = [search.rows(part) for part in range(len(search.splits))]
    columns: dict[str, list[Any]] = {name: [] for name in ("split", "id", "name", "class", "image")}
    shown: list[Embeddings] = []
    more: dict[str, list[str | None]] = {}
    for split, rows in zip(search.splits, parts, strict=True):
        say(f"{split.name}: {len(rows.ids):,} thumbnails")
        names, pictures = _pictures(split, rows.ids.tolist())
        rows = rows.rows(
            torch.tensor([one in pictures for one in rows.ids.tolist()], dtype=torch.bool)
        )
        ids = rows.ids.tolist()
        columns["split"] += [split.name] * len(ids)
        columns["id"] += ids
        columns["name"] += [names[one] for one in ids]
        columns["class"] += map(split.class_name, rows.labels.tolist())
        columns["image"] += [{"bytes": pictures[one]} for one in ids]
        for name in dict.fromkeys((*split.columns, *more)):
            values = split.column(name).show(ids) if split.has_values(name) else [None] * len(ids)
            before = more.setdefault(name, [None] * (len(columns["id"]) - len(ids)))
            before += values
        shown.append(rows)
    together = Embeddings(*map(torch.cat, zip(*shown, strict=True)))
    if len(together.ids) < FEWEST:
        raise DataError(f"{len(together.ids)} images are too few for a map; give {FEWEST} or more")
    say(f"{NEIGHBOURS} neighbours of each of {len(together.ids):,} images")
    own_rows = torch.arange(len(together.ids))
    features = together.features
    near = nearest(features, features, NEIGHBOURS, units=True, hidden=(own_rows, own_rows))
    say(f"map by {'PCA' if pca else 'UMAP'}")
    places = (_by_pca if pca else _by_umap)(together, near.indices, near.similarities)
    if clusters:
        columns["cluster"] = [str(one) for one in cluster(together, clusters).of_row]
    distances = (1 - near.similarities).tolist()
    columns["neighbours"] = [
        {"ids": ids, "distances": far}
        for ids, far in zip(near.indices.tolist(), distances, strict=True)
    ]
    columns |= {"x": places[:, 0].tolist(), "y": places[:, 1].tolist()}
    taken = {name if name not in OWN else f"{name}_column": each for name, each in more.items()}
    rows_first = {"row": list(range(len(together.ids)))}
    return pa.table({**rows_first, **columns, **taken})


def _pictures(split: Split, ids: Sequence[int]) -> tuple[dict[int, str], dict[int, bytes]]:
    """Read the key and a small JPEG of each sample that can be decoded, by its id."""
    images = small_images(split, ids)
    pictures = {sample: encoded(image.convert("RGB"), "jpeg") for sample, image in images}
    return keys_of(split, list(pictures)), pictures


def _by_pca(rows: Embeddings, *_near: Any) -> NDArray[np.float32]:
    mean, _, axes = principal_axes(rows.features)
    places: NDArray[np.float32] = ((rows.features.double() - mean) @ axes[:, -2:]).float().numpy()
    return places[:, ::-1]


def _by_umap(
    rows: Embeddings, neighbours: torch.Tensor, similarities: torch.Tensor
) -> NDArray[np.float32]:
    """UMAP on exact neighbours, each row the first of its own."""
    (umap,) = import_parts("umap")
    own = torch.arange(len(rows.ids))[:, None]
    indices = torch.cat([own, neighbours[:, :-1]], dim=1).numpy()
    distances = torch.cat([torch.zeros(len(own), 1), 1 - similarities[:, :-1]], dim=1).clamp_min(0)
    knn = (indices.astype(np.int64), distances.numpy(), None)
    made = umap.UMAP(n_neighbors=NEIGHBOURS, metric="cosine", random_state=0, precomputed_knn=knn)
    places: NDArray[np.float32] = made.fit_transform(rows.features.numpy())
    return places


def save_table(table: Any, path: Path) -> None:
    """Write a table as parquet, whole or not at all."""
    (parquet,) = import_parts("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        parquet.write_table(table, temporary)


def load_table(path: Path) -> Any:
    """Read a table that `save_table` wrote. Raises: DataError where it is none."""
    (arrow, parquet) = import_parts("pyarrow", "pyarrow.parquet")
    try:
        with open_regular(path) as file:
            table = parquet.read_table(file)
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"cannot read a map from {path}: {error}; make it anew") from error
    if missing := {*OWN} - {"cluster"} - {*table.column_names}:
        raise DataError(f"{path} is no map of `sslpipe browse`: it has no {min(missing)}")
    return table


def open_port(port: int) -> socket.socket:
    """Take a port of this machine, for itself alone; 0: any. Raises: UserError where it is used."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"--port {port}: {error.strerror}; name another one") from error
    return listener


def _charts(table: Any) -> dict[str, Any]:
    """The map, coloured by class or cluster, the images, and a chart of what has few values."""
    places = {"x": "x", "y": "y", "image": "image", "neighbors": "neighbours"}
    counted = [name for name in table.column_names if name not in NOT_COUNTED]
    counted = [n for n in counted if 2 <= len(table.column(n).unique()) <= MOST_COUNTED]
    colour = {"category": counted[0]} if counted else {}
    charts: list[dict[str, Any]] = [
        {"type": "embedding", "title": "Map", "data": places | colour},
        {"type": "instances", "title": "Images"},
        *({"type": "count-plot", "title": name, "data": {"field": name}} for name in counted),
        {"type": "predicates", "title": "SQL predicates"},
    ]
    return {str(number): chart for number, chart in enumerate(charts, 1)}


def serve(table: Any, listener: socket.socket) -> None:
    """Serve the page of a table until the process is interrupted."""
    atlas, options, server, atlas_version = import_parts(
        *(f"embedding_atlas.{name}" for name in ("data_source", "options", "server", "version"))
    )
    hosts, responses, uvicorn = import_parts(
        "starlette.middleware.trustedhost", "starlette.responses", "uvicorn"
    )
    props = options.make_embedding_atlas_props(
        row_id="row",
        x="x",
        y="y",
        image="image",
        neighbors="neighbours",
        initial_state={
            "version": atlas_version.__version__,
            "charts": _charts(table),
            "columnStyles": {
                "image": {"renderer": "image", "display": "full"},
                **{name: {"display": "hidden"} for name in ("neighbours", "x", "y")},
            },
        },
    )
    source = atlas.DataSource("sslpipe", table, {"props": props})
    page = Path(server.__file__).parent / "static"
    app = server.make_server(source, static_path=str(page), duckdb_uri="server")

    async def only_here(request: Any, call_next: Any) -> Any:
        origin, host = request.headers.get("origin"), request.headers.get("host")
        site = request.headers.get("sec-fetch-site")  # which a GET has that has no origin
        foreign = request.url.path.startswith("/data/") and site == "cross-site"
        if foreign or origin not in (None, f"http://{host}"):  # the page of another site asks
            return responses.Response(status_code=403)
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = ONLY_HERE
        return response

    app.middleware("http")(only_here)
    # a page of somebody else's, whose name leads here, is not answered
    app.add_middleware(hosts.TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    config = uvicorn.Config(app, log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
