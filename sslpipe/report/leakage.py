"""Show how many test samples train has, too, and the numbers without them."""

from html import escape
from typing import Any

from sslpipe.evaluation.leakage import leakage_sentence


def leakage(evaluation: dict[str, Any]) -> str:
    """Tabulate each number of the table with and without leaked test samples; '' where unknown."""
    found = evaluation.get("leakage")
    if not found:
        return ""
    sentence = f"<h3>Test samples in train</h3><p>{escape(leakage_sentence(found))}</p>"
    if not found["leaked"]:
        return sentence
    rows = "".join(
        f"<tr><td>{escape(row['features'])}{', whitened' if row['whitened'] else ''}</td>"
        f"<td>{escape(row['column'])}</td><td>{100 * row['value']:.1f}</td>"
        f"<td>{_clean(row)}</td><td>{row['clean_queries']:,}</td></tr>"
        for row in found["rows"]
    )
    return (
        f"{sentence}<details><summary>Each number with and without them</summary><table><thead><tr>"
        "<th>features</th><th>number</th><th>all, %</th><th>without, %, 95 % interval</th>"
        f"<th>test images left</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def _clean(row: dict[str, Any]) -> str:
    """The number without leaked samples, in percent with its interval."""
    if row["clean_value"] is None:
        return "none is left"
    low, high = (100 * end for end in row["clean_interval95"])
    return f"{100 * row['clean_value']:.1f} ({low:.1f}\u2013{high:.1f})"
