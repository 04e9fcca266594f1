"""Pages: one template and one style for all; a file fetches nothing; Jinja escapes all text.

A satellite's own macros stand in its folder `templates`, and are named "PACKAGE/FILE.MACRO".

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
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from sslpipe.errors import duration
from sslpipe.evaluation.comparison import BASELINES
from sslpipe.evaluation.result import caveats
from sslpipe.evaluation.suite_file import features_name
from sslpipe.evaluation.verdict import form_names, verdict_text
from sslpipe.recipe.sections import leaves

FOOTER = Markup(
    "Written by <code>sslpipe report</code> of sslpipe. Intervals are over test images (and draws "
    "of labels), not over training seeds."
)
LIBRARY = ("vega/vega.min.js", "vega/vega-lite.min.js", "vega/vega-embed.min.js")
NAMES = {"ssl": "this run", **BASELINES}


def render(name: str, /, **values: Any) -> Markup:
    """Render a macro: of parts.html, "FILE.MACRO", or a satellite's "PACKAGE/FILE.MACRO".

    What is no Markup is escaped.
    """
    file, _, macro = name.rpartition(".")
    template = _TEMPLATES.get_template(f"{file or 'parts'}.html")
    return Markup(getattr(template.module, macro)(**values))


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


def percent(value: float, signed: bool = False) -> str:
    """Write a share in percent with one digit, "71.0"; signed: as a difference, "+1.5"."""
    return f"{100 * value:{'+' if signed else ''}.1f}"


def feature_title(row: Mapping[str, Any]) -> str:
    """Return what the features of a row of eval.json are, in words."""
    return features_name(row, NAMES.get(row["features"]))


def unbroken(text: str) -> str:
    """Keep each number and its percent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def coded(text: str) -> Markup:
    """Escape a text; what stands between backticks is code."""
    parts = text.split("`")
    return Markup().join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


def flat(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield ("data.batch_size", "256") and so on; lists as one text."""
    for key, value in leaves(tree):
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield key, "none" if value in (None, [], {}) else text


def html_page(
    title: str,
    head: Markup,
    sections: Mapping[str, str],
    *,
    footer: str = FOOTER,
    opened: Iterable[str] | None = None,
) -> str:
    """Return the whole HTML file: head, links, and sections, whose headings become anchors.

    All sections but those `opened` are folded; None: none is.
    """
    scripts: list[str] = []
    if any("class='plot'" in each for each in (head, *sections.values())):
        scripts = [packaged(name) for name in (*LIBRARY, "templates/draw.js")]
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        head=head,
        sections={heading: Markup(text) for heading, text in sections.items()},
        opened=set(sections if opened is None else opened),
        footer=Markup(footer),
        style=Markup(packaged("templates/report.css")),
        scripts=[Markup(each) for each in scripts],
        hashes=[f"'sha256-{base64.b64encode(each).decode()}'" for each in digests],
    )


def command_page(
    command: str,
    title: str,
    text: str,
    sections: Mapping[str, str],
    opened: Iterable[str] | None = None,
) -> str:
    """Return the HTML file of another command: its title, some plain sentences, its sections."""
    footer = Markup("Written by <code>sslpipe {}</code>.").format(command)
    head = render("title", title=title, text=text)
    return html_page(title, head, sections, footer=footer, opened=opened)


@functools.cache
def packaged(name: str) -> str:
    """Read a file of this package."""
    text = (resources.files("sslpipe.report") / name).read_text(encoding="utf-8")
    return text.split("\n//# sourceMappingURL")[0]


def _dumped(tree: object) -> Markup:
    """Write JSON that may stand inside <script>: no text in it ends the element."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _template(name: str) -> str:
    """Read templates/FILE of a package, "PACKAGE/FILE"; without one, of this package."""
    package, _, file = name.rpartition("/")
    folder = resources.files(package or "sslpipe.report") / "templates"
    return (folder / file).read_text(encoding="utf-8")


_TEMPLATES = Environment(
    loader=FunctionLoader(_template),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals |= {"number": number, "percent": percent}
_TEMPLATES.filters |= {
    "answer": verdict_text,
    "caveats": lambda row: caveats(row["details"]),
    "coded": coded,
    "count": "{:,}".format,
    "dumped": _dumped,
    "duration": duration,
    "feature_title": feature_title,
    "flat": flat,
    "forms": lambda row: " / ".join(dict.fromkeys(form_names(row))),
    "named": lambda features: NAMES.get(features, features),
    "number": number,
    "percent": percent,
    "unbroken": unbroken,
}
