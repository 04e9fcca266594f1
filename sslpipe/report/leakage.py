"""Show how many test samples train has, too, and the numbers without them."""

import re
from collections.abc import Mapping

from markupsafe import Markup, escape

from sslpipe.evaluation.against import KNN, RECALL
from sslpipe.evaluation.leakage import leakage_sentence
from sslpipe.report.page import html, render, table
from sslpipe.report.results import Line
from sslpipe.report.run import Tree

HEADING = Markup("<h3>Test samples in train</h3>")


def leakage(evaluation: Tree) -> Markup:
    """Tabulate each number of the table with and without leaked test samples; '' where unknown."""
    found = evaluation.get("leakage")
    if not found:
        return Markup()
    text = Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(leakage_sentence(found)))))
    sentence = html("{}<p>{}</p>", HEADING, text)
    if not found["leaked"]:
        return sentence
    rows = [
        (
            Line(row["features"], row["whitened"], {}).title,
            row["column"],
            f"{100 * row['value']:.1f}",
            _clean(row),
            f"{row['clean_queries']:,}",
        )
        for row in found["rows"]
    ]
    heads = "features; number; all, %; without, %, 95 % interval; test images left"
    numbers = table(heads.split("; "), rows)
    return sentence + render("folded", title="Each number with and without them", text=numbers)


def leakage_of_runs(evaluations: Mapping[str, Tree]) -> Markup:
    """Tabulate the leaked test samples of several runs and their first number without.

    Args:
        evaluations: eval.json by the run's name.

    Returns:
        '' where it is unknown of all.
    """
    rows = []
    for name, evaluation in evaluations.items():
        found = evaluation.get("leakage")
        if found:
            own = [row for row in found["rows"] if row["features"] == "ssl" and not row["whitened"]]
            plain = [row for row in own if row["column"] in (KNN, RECALL)]
            shown = [(f"{100 * row['value']:.1f}", _clean(row)) for row in plain] or [("–", "–")]
            counted = f"{found['leaked']:,} of {found['samples']:,}"
            rows.append((name, counted, found["how"], *shown[0]))
    heads = "run; leaked test samples; found; kNN or Recall@1, all, %; without, %, 95 % interval"
    return HEADING + table(heads.split("; "), rows) if rows else Markup()


def _clean(row: Tree) -> str:
    """The number without leaked samples, in percent with its interval."""
    if row["clean_value"] is None:
        return "none is left"
    low, high = (100 * end for end in row["clean_interval95"])
    return f"{100 * row['clean_value']:.1f} ({low:.1f}\u2013{high:.1f})"
