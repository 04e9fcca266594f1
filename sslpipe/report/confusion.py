"""Show what a linear probe confuses: a matrix, or lists where classes are many."""

from typing import Any

import numpy as np
from markupsafe import Markup

from sslpipe.evaluation.against import LINEAR
from sslpipe.report.page import html, joined, missing, number, render
from sslpipe.report.results import table_lines
from sslpipe.report.run import Tree

MOST_CLASSES = 20  # of a confusion matrix that is shown whole


def confusion(evaluation: Tree, classes: list[str]) -> Markup:
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
        return missing("No linear probe in eval.json, so no confusion matrix.")
    counts = np.array(cell["details"]["confusion"], dtype=np.int64)  # (C, C) [true][predicted]
    names = [*classes, *(f"class {label}" for label in range(len(classes), len(counts)))]
    note = html(
        "<p>Linear probe <code>{}</code>, C = {}{}, chosen on a held-out part of train.</p>",
        cell["protocol"],
        number(cell["details"]["C"]),
        " (at the edge of its grid)" if cell["details"]["C_at_edge"] else "",
    )
    if len(counts) <= MOST_CLASSES:
        shown = [_matrix(counts, names), _confusions(counts, names, 8)]
    else:
        note += html("<p>A matrix of {} classes is not drawn.</p>", len(counts))
        shown = [_worst(counts, names), _confusions(counts, names, 20)]
    return html("{}<div class='side'>{}</div>", note, joined(shown))


def _matrix(counts: Any, names: list[str]) -> Markup:
    rows = []
    for label, row in enumerate(counts.tolist()):
        total = max(1, sum(row))
        cells = [(label == other, f"{n / total:.3f}", n) for other, n in enumerate(row)]
        recall = f"{100 * row[label] / total:.0f} %" if sum(row) else "–"
        rows.append((names[label], cells, recall))
    return render("matrix", names=names[: len(counts)], rows=rows)


def _confusions(counts: Any, names: list[str], most: int) -> Markup:
    off = counts.copy()
    np.fill_diagonal(off, 0)
    order = np.argsort(off, axis=None, kind="stable")[::-1][:most]
    pairs = [divmod(int(place), len(off)) for place in order]
    items = [
        f"{names[true]} predicted as {names[other]}: {off[true, other]}"
        for true, other in pairs
        if off[true, other]
    ]
    if not items:
        return Markup("<p>No image was confused.</p>")
    return render("ranking", title="Most frequent confusions", items=items)


def _worst(counts: Any, names: list[str]) -> Markup:
    totals = counts.sum(axis=1)
    shares = np.where(totals > 0, counts.diagonal() / np.maximum(totals, 1), np.inf)
    rows = [int(label) for label in np.argsort(shares, kind="stable")[:10] if totals[label]]
    items = [f"{names[row]}: recall {100 * shares[row]:.0f} %" for row in rows]
    return render("ranking", title="Lowest recall", items=items)
