"""Show what a linear probe confuses: a matrix, or lists where classes are many."""

from html import escape
from typing import Any

import numpy as np

from sslpipe.evaluation.against import LINEAR
from sslpipe.report.charts import number
from sslpipe.report.results import table_lines
from sslpipe.report.run import Tree

MOST_CLASSES = 20  # of a confusion matrix that is shown whole


def confusion(evaluation: Tree, classes: list[str]) -> str:
    """Return the linear probe's matrix, or the most frequent confusions where classes are many.

    Args:
        evaluation: eval.json.
        classes: Names by label.
    """
    cell = next(
        (
            line.cells[LINEAR]
            for line in table_lines(evaluation)
            if LINEAR in line.cells and line.cells[LINEAR]["details"].get("confusion")
        ),
        None,
    )
    if cell is None:
        return "<p class='missing'>No linear probe in eval.json, so no confusion matrix.</p>"
    counts = np.array(cell["details"]["confusion"], dtype=np.int64)  # (C, C) [true][predicted]
    names = [*classes, *(f"class {label}" for label in range(len(classes), len(counts)))]
    note = (
        f"<p>Linear probe <code>{escape(cell['protocol'])}</code>, C = "
        f"{number(cell['details']['C'])}"
        + (" (at the edge of its grid)" if cell["details"]["C_at_edge"] else "")
        + ", chosen on a held-out part of train.</p>"
    )
    if len(counts) <= MOST_CLASSES:
        tables = _matrix(counts, names) + _confusions(counts, names, 8)
        return f"{note}<div class='side'>{tables}</div>"
    return (
        f"{note}<p>A matrix of {len(counts)} classes is not drawn.</p><div class='side'>"
        f"{_worst(counts, names)}{_confusions(counts, names, 20)}</div>"
    )


def _matrix(counts: Any, names: list[str]) -> str:
    head = "".join(f"<th scope='col'><span>{escape(name)}</span></th>" for name in names)
    body = ""
    for label, row in enumerate(counts):
        total = max(1, int(row.sum()))
        cells = "".join(
            f"<td class='{'hit' if label == column else 'miss'}' style='--s:{count / total:.3f}'>"
            f"{count or ''}</td>"
            for column, count in enumerate(row.tolist())
        )
        share = f"{100 * row[label] / total:.0f} %" if row.sum() else "–"
        body += f"<tr><th scope='row'>{escape(names[label])}</th>{cells}<td>{share}</td></tr>"
    return (
        "<div><p class='note'>Rows: the true class; columns: the predicted one; last: the recall."
        "</p><div class='wide'><table class='matrix'>"
        f"<thead><tr><td></td>{head}<th scope='col'><span>recall</span></th></tr></thead>"
        f"<tbody>{body}</tbody></table></div></div>"
    )


def _confusions(counts: Any, names: list[str], most: int) -> str:
    off = counts.copy()
    np.fill_diagonal(off, 0)
    order = np.argsort(off, axis=None, kind="stable")[::-1][:most]
    pairs = [divmod(int(place), len(off)) for place in order]
    items = "".join(
        f"<li>{escape(names[true])} predicted as {escape(names[other])}: {off[true, other]}</li>"
        for true, other in pairs
        if off[true, other]
    )
    if not items:
        return "<p>No image was confused.</p>"
    return f"<div><h3>Most frequent confusions</h3><ol class='confusions'>{items}</ol></div>"


def _worst(counts: Any, names: list[str]) -> str:
    totals = counts.sum(axis=1)
    shares = np.where(totals > 0, counts.diagonal() / np.maximum(totals, 1), np.inf)
    rows = [int(label) for label in np.argsort(shares, kind="stable")[:10] if totals[label]]
    items = "".join(
        f"<li>{escape(names[row])}: recall {100 * shares[row]:.0f} %</li>" for row in rows
    )
    return f"<div><h3>Lowest recall</h3><ol class='confusions'>{items}</ol></div>"
