"""A map of features as one parquet file, which embedding-atlas (MIT, Apple) shows in a page."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet

from sslpipe.arguments import checked
from sslpipe.data.index import DatasetIndex
from sslpipe.data.reader import keys_of
from sslpipe.errors import DataError, UserError, as_output, counted, install
from sslpipe.evaluation.neighbours import nearest
from sslpipe.evaluation.vectors import Vectors, open_features
from sslpipe.portable import replacing
from sslpipe.report.pictures import encoded, small_images
from sslpipe.search.images import Hit, ImageSearch

NEIGHBOURS = 15  # of each image; UMAP's usual number
FEWEST = NEIGHBOURS + 2
OWN = ("id", "name", "class", "image", "neighbours", "x", "y")
SHOWN_BY = ("--x", "x", "--y", "y", "--neighbors", "neighbours")
SHOWN_WITH = ("--image", "image")


@checked
def browse(
    features: Vectors,
    data: DatasetIndex | str | Path | None = None,
    *,
    out: str | Path = "map.parquet",
    flatten: bool = True,
    show: bool = True,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Show features on a map, in a browser, as `sslpipe browse` does.

    >>> sslpipe.browse("out/test.safetensors", "out/photos", show=False)

    Args:
        features: A file of `sslpipe embed` or of vectors, (N, F) floats, or a result of `embed`.
        data: The data set that a file was embedded from, for images and columns; None: dots.
        out: The parquet file to write.
        flatten: Flatten the features' spectrum, as in `ImageSearch`.
        show: Start embedding-atlas on the file, until it ends.
        say: Called with what is done; None: nobody is.

    Returns:
        The file.

    Raises:
        DataError: There are too few rows, or they are of another data set.
        UserError: The extra `browse` is not installed.
    """
    say = say or (lambda text: None)
    path = as_output(out, "out")
    if path.suffix != ".parquet":
        raise UserError(f"out = {str(path)!r}: a map is named .parquet")
    for name in ("umap", "embedding_atlas") if show else ("umap",):
        _import(name)  # before minutes of work
    search = ImageSearch(open_features(features, data), flatten=flatten)
    say(f"features {search.form}")
    count = write_map(search, path, say)
    say(f"{path}: {counted(count, 'image')}")
    if show:
        show_map(path, say, images=data is not None)
    return path


def write_map(
    search: ImageSearch, path: Path, say: Callable[[str], None] = lambda text: None
) -> int:
    """Write a row an image that can be decoded: OWN, and the columns of the data, as text.

    Args:
        search: One opened features file, as its rows are compared. Vectors alone have no images.
        path: Of the parquet file, which is written whole or not at all.
        say: Called with what is done.

    Returns:
        How many images.

    Raises:
        DataError: There are too few images.
        UserError: UMAP is not installed.
    """
    split = search.splits[0] if search.has_splits else None
    rows = search.rows(0)
    pictures: dict[int, bytes] = {}
    if split is not None:
        say(f"{len(rows.ids):,} thumbnails")
        for sample, image in small_images(split, rows.ids.tolist()):
            pictures[sample] = encoded(image.convert("RGB"), "jpeg")
        readable = [sample in pictures for sample in rows.ids.tolist()]
        rows = rows.rows(torch.tensor(readable, dtype=torch.bool))
    ids = rows.ids.tolist()
    if len(ids) < FEWEST:
        raise DataError(f"{len(ids)} images are too few for a map; give {FEWEST} or more")
    say(f"map of {len(ids):,} images by UMAP")
    features = rows.features
    near = nearest(features, features, NEIGHBOURS, units=True, hidden=(rows.ids, rows.ids))
    distances = (1 - near.similarities).clamp_min(0)
    places = _umap(features, near.indices, distances)
    hits = [
        Hit(score=0.0, part=0, id=sample, label=label)
        for sample, label in zip(ids, rows.labels.tolist(), strict=True)
    ]
    names = {hit.id: search.key(hit) for hit in hits} if split is None else keys_of(split, ids)
    columns: dict[str, list[Any]] = {
        "id": ids,
        "name": [names[sample] for sample in ids],
        "class": [search.class_name(hit) for hit in hits],
        "neighbours": [
            {"ids": ids, "distances": far}
            for ids, far in zip(near.indices.tolist(), distances.tolist(), strict=True)
        ],
        "x": places[:, 0].tolist(),
        "y": places[:, 1].tolist(),
    }
    if split is not None:
        columns["image"] = [{"bytes": pictures[sample]} for sample in ids]
        for name in filter(split.has_values, split.columns):
            shown_as = name
            while shown_as in {*OWN, *columns}:
                shown_as += "_column"
            columns[shown_as] = split.column(name).show(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        parquet.write_table(pa.table(columns), temporary)
    return len(ids)


def show_map(
    path: Path, say: Callable[[str], None] = lambda text: None, *, images: bool = True
) -> None:
    """Start embedding-atlas on a map, until it ends. Raises: UserError where it is missing."""
    _import("embedding_atlas")
    options = [*SHOWN_BY, *(SHOWN_WITH if images else ())]
    say(f"embedding-atlas {shlex.quote(str(path))} {' '.join(options)}")
    words = ["-m", "embedding_atlas.cli", str(path), *options, "--host", "127.0.0.1"]
    with _sigterm_raises():  # then `run` kills what it started, which else outlives this process
        subprocess.run([sys.executable, *words], check=False)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let a SIGTERM to this process raise SystemExit with the shell's status for it, inside."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # where Python has no handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _umap(features: torch.Tensor, near: torch.Tensor, distances: torch.Tensor) -> NDArray[Any]:
    """Place rows (N, F) on a map by their exact neighbours, each row the first of its own."""
    umap = _import("umap")
    itself = torch.arange(len(features))[:, None]
    indices = torch.cat([itself, near[:, :-1]], 1).numpy().astype(np.int64)
    far = torch.cat([torch.zeros(len(features), 1), distances[:, :-1]], 1).numpy()
    knn = (indices, far, None)
    made = umap.UMAP(
        n_neighbors=NEIGHBOURS,
        metric="cosine",
        random_state=0,
        n_jobs=1,  # of a seed umap allows no more, and warns of its own default
        precomputed_knn=knn,
    )
    with warnings.catch_warnings():  # that no other rows can be put on the map later
        warnings.filterwarnings("ignore", ".*NNDescent", UserWarning)
        places: NDArray[Any] = made.fit_transform(features.numpy())
    return places


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"browse needs {error.name}: {install('browse')}") from error
