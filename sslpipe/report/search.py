"""One page of what a search has found: each query beside its nearest images."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from PIL import Image

from sslpipe.data.decode import BadSample
from sslpipe.data.image_type import RGB8
from sslpipe.errors import DataError
from sslpipe.evaluation.search import Hit, ImageSearch
from sslpipe.export.model import read_image
from sslpipe.report.page import html_page, render
from sslpipe.report.pictures import THUMB_PX, shortest_uri, thumbnails

CANVAS_PX = 256  # of a query, before it is a thumbnail
FOOTER = Markup("Written by <code>sslpipe search</code>.")


def search_page(
    search: ImageSearch,
    queries: Sequence[Path],
    found: Sequence[Sequence[Hit]],
    keys: Sequence[Sequence[str]],
) -> str:
    """Show thumbnails of the queries and of what each has found.

    Args:
        search: What was searched.
        queries: Image files.
        found: The hits of each, best first.
        keys: Their names.
    """
    pictures = [
        thumbnails(split, {hit.id for hits in found for hit in hits if hit.part == part})
        for part, split in enumerate(search.splits)
    ]
    rows = []
    for query, hits, names in zip(queries, found, keys, strict=True):
        kind = search.splits[0].stored_type if search.splits else RGB8
        try:
            image = Image.fromarray(kind.picture(read_image(query, kind, CANVAS_PX)))
        except BadSample as error:
            raise DataError(f"{query} has no picture for the page: {error}") from error
        image.thumbnail((THUMB_PX, THUMB_PX))
        own = shortest_uri(image), query.name
        cells = [
            (pictures[hit.part].get(hit.id), name, hit.score)
            for hit, name in zip(hits, names, strict=True)
        ]
        rows.append((own, cells))
    head = render("search.header", count=f"{len(search):,}")
    sheet = render("search.found", rows=rows)
    return html_page("Nearest images", head, {"Found": sheet}, footer=FOOTER)
