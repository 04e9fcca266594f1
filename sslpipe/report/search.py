"""One page of what a search has found: each query beside its nearest images."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sslpipe.data.decode import BadSample
from sslpipe.data.image_type import RGB8
from sslpipe.errors import DataError
from sslpipe.evaluation.search import Hit, ImageSearch
from sslpipe.export.model import read_image
from sslpipe.report.page import command_page, render
from sslpipe.report.pictures import THUMB_PX, shortest_uri, thumbnails

CANVAS_PX = 256  # of a query, before it is a thumbnail


def search_page(
    search: ImageSearch,
    queries: Sequence[Path],
    found: Sequence[Sequence[Hit]],
    keys: Sequence[Sequence[str]],
) -> str:
    """Show thumbnails of the queries (image files) and of the hits of each, best first.

    `keys` are the names of the hits.
    """
    kind = search.splits[0].stored_type if search.splits else RGB8
    pictures = [
        thumbnails(split, {hit.id for hits in found for hit in hits if hit.part == part})
        for part, split in enumerate(search.splits)
    ]
    rows = []
    for query, hits, names in zip(queries, found, keys, strict=True):
        try:
            image = Image.fromarray(kind.picture(read_image(query, kind, CANVAS_PX)))
        except BadSample as error:
            raise DataError(f"{query} has no picture for the page: {error}") from error
        image.thumbnail((THUMB_PX, THUMB_PX))
        cells = [
            (pictures[hit.part].get(hit.id), name, hit.score)
            for hit, name in zip(hits, names, strict=True)
        ]
        rows.append(((shortest_uri(image), query.name), cells))
    text = f"Of {len(search):,}; the number is the cosine."
    return command_page(
        "search", "Nearest images", text, {"Found": render("search.found", rows=rows)}
    )
