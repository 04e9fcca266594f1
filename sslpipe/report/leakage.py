"""Show how many test samples train has, too, and the numbers without them."""

import re
from collections.abc import Mapping
from html import escape

from sslpipe.evaluation.against import KNN, RECALL
from sslpipe.evaluation.leakage import leakage_sentence
from sslpipe.report.results import NAMES
from sslpipe.report.run import Tree


def leakage(evaluation: Tree) -> str:
    """Tabulate each number of the table with and without leaked test samples; '' where unknown."""
    found = evaluation.get("leakage")
    if not found:
        return ""
    text = re.sub("`([^`]*)`", r"<code>\1</code>", escape(leakage_sentence(found)))
    sentence = f"<h3>Test samples in train</h3><p>{text}</p>"
    if not found["leaked"]:
        return sentence
    rows = "".join(
        f"<tr><td>{escape(NAMES.get(row['features'], row['features']))}"
        f"{', whitened' if row['whitened'] else ''}</td>"
        f"<td>{escape(row['column'])}</td><td>{100 * row['value']:.1f}</td>"
        f"<td>{_clean(row)}</td><td>{row['clean_queries']:,}</td></tr>"
        for row in found["rows"]
    )
    return (
        f"{sentence}<details><summary>Each number with and without them</summary><table><thead><tr>"
        "<th>features</th><th>number</th><th>all, %</th><th>without, %, 95 % interval</th>"
        f"<th>test images left</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def leakage_of_runs(evaluations: Mapping[str, Tree]) -> str:
    """Tabulate the leaked test samples of several runs and their plain kNN without; '' if unknown.

    Args:
        evaluations: eval.json by the run's name.
    """
    rows = ""
    for name, evaluation in evaluations.items():
        found = evaluation.get("leakage")
        if found:
            own = [row for row in found["rows"] if row["features"] == "ssl"]
            plain = [row for row in own if row["column"] in (KNN, RECALL) and not row["whitened"]]
            shown = [(f"{100 * row['value']:.1f}", _clean(row)) for row in plain] or [("–", "–")]
            cells = (f"{found['leaked']:,} of {found['samples']:,}", found["how"], *shown[0])
            filled = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            rows += f"<tr><th scope='row'>{escape(name)}</th>{filled}</tr>"
    if not rows:
        return ""
    heads = "run; leaked test samples; found; kNN or Recall@1, all, %; without, %, 95 % interval"
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads.split("; "))
    return (
        "<h3>Test samples in train</h3><div class='wide'><table class='numbers'>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _clean(row: Tree) -> str:
    """The number without leaked samples, in percent with its interval."""
    if row["clean_value"] is None:
        return "none is left"
    low, high = (100 * end for end in row["clean_interval95"])
    return f"{100 * row['clean_value']:.1f} ({low:.1f}\u2013{high:.1f})"
