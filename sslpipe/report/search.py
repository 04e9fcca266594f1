"""One page of what a search has found: each query beside its nearest images."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sslpipe.evaluation.search import Hit, ImageSearch
from sslpipe.report.page import html, html_page, render
from sslpipe.report.pictures import THUMB_PX, data_uri, thumbnails


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
        cells = [
            {
                "uri": pictures[hit.part].get(hit.id),
                "alt": f"sample {hit.id}",
                "name": name,
                "word": "",
                "sign": "",
                "cosine": f"{hit.score:.3f}",
            }
            for hit, name in zip(hits, names, strict=True)
        ]
        with Image.open(query) as image:
            image.thumbnail((THUMB_PX, THUMB_PX))
            head = {"uri": data_uri(image), "alt": query.name, "name": query.name}
        rows.append((head, cells))
    most = max(map(len, found))
    sheet = render("neighbours", rows=rows, heads=[f"{n}." for n in range(1, most + 1)])
    heading = html(
        "<h1>{}</h1><p>{}</p>", "Nearest images", f"Of {len(search):,}; the number is the cosine."
    )
    footer = html("Written by <code>{}</code>.", "sslpipe search")
    return html_page("Nearest images", heading, {"Found": sheet}, footer=footer)
