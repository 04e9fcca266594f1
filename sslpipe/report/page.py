"""Templates of the report: one HTML file that fetches nothing; all text is escaped by Jinja.

Charts are Vega-Lite specifications. Of the libraries that draw in one file without a network,
Plotly is 1 MB in its smallest build and has no pictures on hover, Bokeh 1 MB without intervals on
a log axis, matplotlib's SVG neither hovers nor zooms and brings 40 MB; Vega with Vega-Lite is
0.8 MB, takes the page's CSS colours (so light and dark), and an interval is one more mark. It runs
without `eval`, so that the page's Content-Security-Policy allows these scripts and nothing else.
"""

import base64
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

FOOTER = Markup(
    "Written by <code>sslpipe report</code> of sslpipe. Intervals are over test images (and draws "
    "of labels), not over training seeds."
)
LIBRARY = ("vega/vega.min.js", "vega/vega-lite.min.js", "vega/vega-embed.min.js")

_TEMPLATES = Environment(
    loader=PackageLoader("sslpipe.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(part: str, /, **values: Any) -> Markup:
    """Render a macro of parts.html; every value that is no Markup is escaped."""
    macro = getattr(_TEMPLATES.get_template("parts.html").module, part)
    return Markup(macro(**values))


def html(text: str, *values: object) -> Markup:
    """Fill values into HTML of our own; each value that is no Markup is escaped."""
    return Markup(text).format(*values)


def joined(parts: Iterable[Markup], between: str = "") -> Markup:
    """Join HTML."""
    return Markup(between).join(parts)


def table(
    heads: Iterable[object],
    rows: Iterable[Sequence[object]],
    kind: str = "numbers",
    row_kinds: Sequence[str] = (),
) -> Markup:
    """Tabulate rows, whose first cells are their headings.

    Args:
        heads: Of the columns.
        rows: Cells: text, or Markup.
        kind: CSS class of the table.
        row_kinds: CSS class of each row.
    """
    return render("table", heads=list(heads), rows=list(rows), kind=kind, row_kinds=row_kinds)


def missing(text: str, command: str = "") -> Markup:
    """Say what is missing, and the command that makes it."""
    return render("missing", text=text, command=command)


def number(value: float | None) -> str:
    """Write a number with four digits at most: 12k, 0.05, 1e-05, 3.142; None as a dash."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}".replace("-", "−")


def html_page(
    title: str,
    head: Markup,
    sections: Mapping[str, str],
    *,
    footer: str = FOOTER,
    opened: Iterable[str] | None = None,
    shared: Mapping[str, Any] | None = None,
) -> str:
    """Return the whole HTML file.

    Args:
        title: Plain text.
        head: HTML above the links.
        sections: Heading -> HTML; each heading becomes an anchor.
        footer: HTML.
        opened: Headings of the sections that are not folded; None: all.
        shared: Data sets that several charts draw, by name.
    """
    anchors = {heading: heading.lower().replace(" ", "-") for heading in sections}
    scripts: list[str] = []
    if any("class='plot'" in each for each in (head, *sections.values())):
        scripts = [_file(name) for name in LIBRARY] + [_file("templates/draw.js")]
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        head=head,
        sections=[(name, anchors[name], Markup(text)) for name, text in sections.items()],
        opened=set(sections if opened is None else opened),
        footer=Markup(footer),
        style=Markup(_file("templates/report.css")),
        shared=dict(shared or {}),
        scripts=[Markup(each) for each in scripts],
        hashes=[_csp_hash(each) for each in scripts],
    )


def dumped(tree: object) -> Markup:
    """Write JSON that may stand inside <script>: no text in it ends the element."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


@functools.cache
def _file(name: str) -> str:
    text = (resources.files("sslpipe.report") / name).read_text(encoding="utf-8")
    return text.split("\n//# sourceMappingURL")[0]


def _csp_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


_TEMPLATES.filters["dumped"] = dumped
