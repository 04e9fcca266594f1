"""Put the HTML file around the sections of a report: title, links, style; nothing is fetched."""

from collections.abc import Mapping
from html import escape
from importlib import resources

FOOTER = (
    "Written by <code>sslpipe report</code> of sslpipe. Intervals are over test images (and draws "
    "of labels), not over training seeds."
)


def html_page(title: str, head: str, sections: Mapping[str, str], *, footer: str = FOOTER) -> str:
    """Return the whole HTML file.

    Args:
        title: Plain text, escaped here.
        head: HTML above the links.
        sections: Heading -> HTML; each heading becomes an anchor.
        footer: HTML.
    """
    anchors = {heading: heading.lower().replace(" ", "-") for heading in sections}
    links = "".join(f"<a href='#{anchor}'>{heading}</a>" for heading, anchor in anchors.items())
    body = "".join(
        f"<section id='{anchors[heading]}'><h2>{heading}</h2>{html}</section>"
        for heading, html in sections.items()
    )
    style = (resources.files("sslpipe.report") / "report.css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}: sslpipe report</title><style>{style}</style>"
        f"</head><body>{head}<nav aria-label='Sections'>{links}</nav><main>{body}</main>"
        f"<footer>{footer}</footer></body></html>\n"
    )
