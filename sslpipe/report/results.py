"""Show what eval.json holds: verdict, sentences, tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from markupsafe import Markup

from sslpipe.evaluation.against import KNN, RECALL
from sslpipe.evaluation.result import caveats, measured_columns
from sslpipe.evaluation.verdict import answer_text, comparisons, form_names, unfinished, verdict
from sslpipe.report.page import html, joined, number, render, table
from sslpipe.report.run import RunFiles, Tree
from sslpipe.run.records import is_number

NAMES = {"ssl": "this run", "random": "random weights", "pixels": "raw pixels"}
BASELINES = ("pixels", "random")
COLOURS = {"ssl": "var(--series-1)", "pixels": "var(--series-2)", "random": "var(--series-3)"}
OTHER_COLOURS = tuple(f"var(--series-{number})" for number in (4, 5, 6))
SMALL_IS_GOOD = ("fpr@", "alignment", "uniformity")  # how such metrics begin; others: large is


class Line(NamedTuple):
    """A row of the table.

    Args:
        features: "ssl" for the run's own, "pixels", "random", or another name.
        whitened: Whether they are.
        cells: Results by column.
        baseline: Whether they are a baseline.
    """

    features: str
    whitened: bool
    cells: dict[str, Tree]
    baseline: bool = False

    @property
    def title(self) -> str:
        """Say what the features are, in words."""
        return NAMES.get(self.features, self.features) + (", whitened" if self.whitened else "")


def table_lines(evaluation: Tree) -> list[Line]:
    """Return the run's own rows first, then whatever else was measured, then the baselines."""
    lines: dict[tuple[str, bool], Line] = {}
    for row in evaluation["rows"]:
        key = (row["features"], row["whitened"])
        baseline = row.get("baseline", row["features"] in BASELINES)
        line = lines.setdefault(key, Line(*key, {}, baseline))
        if row["column"] is not None:
            line.cells[row["column"]] = row
    return sorted(
        lines.values(),
        key=lambda line: (
            line.baseline,
            line.features != "ssl",
            BASELINES.index(line.features) if line.features in BASELINES else len(BASELINES),
        ),
    )


def feature_colours(rows: Iterable[Tree]) -> dict[str, str]:
    """Return the colour of each kind of features: the usual ones, and some for all others."""
    others = dict.fromkeys(row["features"] for row in rows if row["features"] not in COLOURS)
    return COLOURS | dict(zip(others, cycle(OTHER_COLOURS)))


def clear_best(lines: list[Line], column: str) -> list[Line]:
    """Return the lines whose whole interval is better than those of all other features.

    Plain and whitened features of one backbone do not compete.
    """
    there = [line for line in lines if column in line.cells]
    clear = []
    for line in there:
        others = [other.cells[column] for other in there if other.features != line.features]
        if others and all(_is_better(line.cells[column], other) for other in others):
            clear.append(line)
    return clear


def _is_better(ours: Tree, theirs: Tree) -> bool:
    """Say whether our interval lies wholly on the better side of theirs."""
    (low, high), (their_low, their_high) = ours["interval95"], theirs["interval95"]
    if ours["metric"].startswith(SMALL_IS_GOOD):
        return bool(high < their_low)
    return bool(low > their_high)


def headline(run: RunFiles) -> str:
    """Say in one sentence whether to use the features: against other networks, else baselines."""
    if run.evaluation is None:
        if not run.data["classes"]:
            return "No labels, so no accuracy: look at the nearest neighbours."
        return "Not evaluated yet: how good the features are is not known."
    names = {"better": "better than", "worse": "worse than", "": "not clearly different from"}
    said: dict[str, list[str]] = {}
    for each in run.evaluation.get("against", ()):
        if each["primary"]:
            answer = each["answer"] if each["answer"] in names else ""
            said.setdefault(answer, []).append(NAMES.get(each["against"], each["against"]))
    if not said:
        rows = [row for row in run.evaluation["rows"] if row["column"] is not None]
        others = [other["name"] for other in run.evaluation["facts"].get("against", ())]
        compared = run.evaluation.get("comparisons") or comparisons(rows, without=others)
        for name in ("random", "pixels"):
            ends = [each["interval95"] for each in compared if each["baseline"] == name]
            if ends:
                better, worse = all(low > 0 for low, _ in ends), all(high < 0 for _, high in ends)
                said.setdefault("better" * better or "worse" * worse, []).append(NAMES[name])
    clauses = [f"{names[a]} {' and '.join(dict.fromkeys(said[a]))}" for a in names if a in said]
    if not clauses:
        return "No other network was measured: whether the features are better is not known."
    text = f"The features are {', but '.join(clauses) if len(clauses) == 2 else ', '.join(clauses)}"
    return f"{text}{': use the model you have' if 'worse' in said else ''}."


def first_number(run: RunFiles) -> tuple[Line, str, list[Line]] | None:
    """Find the number that the page begins with, of plain features.

    Returns:
        The run's own line, the column, and the lines of the baselines that have it; None: nothing
        was measured.
    """
    lines = [line for line in table_lines(run.evaluation or {"rows": []}) if not line.whitened]
    ours = next((line for line in lines if line.features not in BASELINES), None)
    measure = next((each for each in (KNN, RECALL) if ours and each in ours.cells), None)
    if ours is None or measure is None:
        return None
    return ours, measure, [e for e in lines if e.features in BASELINES and measure in e.cells]


def score(run: RunFiles) -> Markup:
    """Show the first number with its interval, and the baselines on the same scale."""
    found = first_number(run)
    if found is None:
        return Markup()
    ours, measure, beside = found
    cell = ours.cells[measure]
    low, high = map(_percent, cell["interval95"])
    how = "by a vote of their nearest training images" if measure == KNN else "by the nearest other"
    marks = [
        {
            "at": _percent(line.cells[measure]["value"]),
            "text": _percent(line.cells[measure]["value"]),
            "name": line.title,
            "colour": COLOURS[line.features],
        }
        for line in beside
    ]
    what = f"of {cell['queries']:,} test images get the right class {how} ({measure})"
    value = _percent(cell["value"])
    return render("score", value=value, low=low, high=high, what=what, marks=marks)


def verdict_sentence(run: RunFiles) -> Markup:
    """Say first whether the features beat random weights and raw pixels, where that is known."""
    if run.evaluation is None:
        reason = "it has no eval.json" if run.data["classes"] else "its images have no labels"
        said = f"Whether it is better than random weights is not known: {reason}."
    else:
        own = [row for row in run.evaluation["rows"] if row["column"] is not None]
        said = verdict({**run.evaluation, "rows": own})
    return html("<b>{}</b> ", said)


def evaluated_weights(run: RunFiles) -> str:
    """Say "evaluated at step 30 of 60, with averaged weights"; '' of the end's trained ones."""
    facts: Tree = run.evaluation["facts"] if run.evaluation else {}
    step: Any = facts.get("step")
    steps: Any = run.recipe.get("steps")
    said = ["with averaged weights (optim.ema)"] if facts.get("weights") == "ema" else []
    if is_number(step) and is_number(steps) and step < steps:
        said.insert(0, f"at step {step:,} of {steps:,}")
    return f"evaluated {', '.join(said)}" if said else ""


def unfinished_sentence(run: RunFiles) -> Markup:
    """Say before all else that the weights were not those of the end of training; else ''."""
    facts = run.evaluation["facts"] if run.evaluation else {}
    note = unfinished(facts, run.recipe.get("steps"))
    return html("<b>{}</b> ", note) if note else Markup()


def accuracy_sentence(run: RunFiles) -> Markup:
    """Say how good the features are by the first number, beside the baselines in the same form.

    Which is better is the verdict's to say, by paired intervals; those of the table overlap sooner.
    """
    if run.evaluation is None:
        return Markup("It has not been evaluated yet.")
    found = first_number(run)
    if found is None:
        return Markup("Its own features have not been evaluated.")
    ours, measure, beside = found
    cell = ours.cells[measure]
    others = [f"{line.title}: {_percent(line.cells[measure]['value'])} %" for line in beside]
    return html(
        "{} <b>{} %</b> of {:,} test images right (95\u00a0% interval {}–{}); {}.{}",
        "kNN on its frozen features gets" if measure == KNN else "The nearest other image gets",
        _percent(cell["value"]),
        cell["queries"],
        *map(_percent, cell["interval95"]),
        "; ".join(others) or "no baseline was measured",
        _leaked(run.evaluation),
    )


def _leaked(evaluation: Tree) -> str:
    """Say what the first number is without the test images that train has, too; '' without any."""
    found = evaluation.get("leakage")
    if not found or not found["leaked"]:
        return ""
    said = f" {found['leaked']:,} of {found['samples']:,} test images are in train, too"
    for row in found["rows"]:
        if row["features"] == "ssl" and not row["whitened"] and row["column"] in (KNN, RECALL):
            clean = row["clean_value"]
            said += "" if clean is None else f"; without them it gets {_percent(clean)} %"
    return f"{said}."


def result_table(evaluation: Tree) -> Markup:
    """Tabulate features by the columns of eval.json, in percent with intervals; protocols below."""
    queries = next((row["queries"] for row in evaluation["rows"] if row["column"]), 0)
    # what a reader should know more of, as a fit at its grid's edge
    below = [
        html(
            "<p class='note'>{}, <code>{}</code>: {}.</p>",
            Line(row["features"], row["whitened"], {}).title,
            row["protocol"],
            text,
        )
        for row in evaluation["rows"]
        for text in caveats(row["details"])
    ]
    if evaluation["left_out"]:
        left_out = "; ".join(evaluation["left_out"])
        below.append(html("<p class='note'>Not measured: {}.</p>", left_out))
    below += [html("<p class='note'>{}</p>", note) for note in evaluation.get("notes", [])]
    return joined(
        [
            feature_table(table_lines(evaluation), measured_columns(evaluation)),
            html(
                "<p class='note'>{}, with 95 % intervals over {:,} test images (over classes where "
                "the protocol says so). <b class='best'>Marked</b> only where the whole interval "
                "is better than those of all other features; a column without a mark has no clear "
                "best.</p>",
                _measured(evaluation),
                queries,
            ),
            against_table(evaluation.get("against", [])),
            *below,
            render("folded", title="How each column was measured", text=_protocols(evaluation)),
            _all_numbers(evaluation),
        ]
    )


def against_table(compared: Sequence[Tree]) -> Markup:
    """Tabulate the differences from other networks, with their answers; '' where there are none."""
    if not compared:
        return Markup()
    several = len({each["features"] for each in compared}) > 1
    rows = []
    for each in compared:
        low, high = (f"{100 * end:+.1f}" for end in each["interval95"])
        other = str(NAMES.get(each["against"], each["against"]))
        rows.append(
            (
                f"{other} ({each['features']})" if several else other,
                f"{each['measure']}, {' / '.join(dict.fromkeys(form_names(each)))}",
                _percent(each["value"]),
                _percent(each["against_value"]),
                html("{:+.1f} <small>{} to {}</small>", 100 * each["difference"], low, high),
                f"{each['count']:,} {each['unit']}",
                html("<b>{}</b>" if each["primary"] else "{}", answer_text(each)),
            )
        )
    heads = "against, measure, ours in %, theirs in %, difference in points, over, answer"
    return html(
        "<h3>Against other networks</h3><p class='note'>The answer stands on one measure that was "
        "fixed before, and must be clear in both forms, as they are and whitened. It holds for all "
        "comparisons together (Holm, 5 %); each interval is a 95 % one of its own row, over test "
        "images or, where test images find each other, over classes.</p>{}",
        table(heads.split(", "), rows),
    )


def feature_table(
    lines: list[Line],
    columns: list[str],
    titles: Mapping[str, str] | None = None,
    *,
    mark: bool = True,
) -> Markup:
    """Tabulate features by columns, results with intervals.

    Args:
        lines: The rows.
        columns: The keys of their cells to show.
        titles: Of columns, where not their keys.
        mark: Whether a clear best is marked.
    """
    winners = {column: clear_best(lines, column) if mark else [] for column in columns}
    return table(
        ["features", *((titles or {}).get(column, column) for column in columns)],
        [
            [line.title, *(_cell(line.cells.get(c), line in winners[c]) for c in columns)]
            for line in lines
        ],
        "results more" if titles else "results",
        ["baseline" if line.baseline else "ours" for line in lines],
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _cell(row: Tree | None, is_best: bool) -> Markup:
    if row is None:
        return Markup("–")
    text, to = (number, " to ") if row.get("unit") == "number" else (_percent, "–")
    low, high = map(text, row["interval95"])
    shown = html("<data value='{!r}'>{}</data>", row["value"], text(row["value"]))
    if is_best:
        shown = html("<b class='best'>{}</b>", shown)
    converged = row.get("details", {}).get("converged", True)
    mark = Markup("" if converged else " <b>not converged</b>")
    return html("{} <small>{}{}{}{}</small>", shown, low, to, high, mark)


def _measured(evaluation: Tree) -> str:
    metrics = {row["metric"] for row in evaluation["rows"] if row["column"] is not None}
    if metrics == {"top1"}:
        return "Top-1 accuracy in %"
    small = sorted(each for each in metrics if each.startswith(SMALL_IS_GOOD))
    return "Shares in %" + (f" (small is good: {', '.join(small)})" if small else "")


def _protocols(evaluation: Tree) -> Markup:
    """Say what each column is: protocol, and the labelled images it used."""
    items = [
        html(
            "<dt>{}</dt><dd><code>{}</code>, {:,} labelled train images</dd>",
            column,
            protocol,
            bank,
        )
        for column in evaluation["columns"]
        for protocol, bank in sorted(
            {
                (row["protocol"], row["bank"])
                for row in evaluation["rows"]
                if row["column"] == column
            }
        )
    ]
    return html("<dl class='protocols'>{}</dl>", joined(items))


def _all_numbers(evaluation: Tree) -> Markup:
    rows = [
        (
            Line(row["features"], row["whitened"], {}).title,
            html("<code>{}</code>", row["protocol"]),
            row["metric"],
            _cell(row, False),
            f"{row['queries']:,}",
            f"{row['bank']:,}",
        )
        for row in evaluation["rows"]
    ]
    heads = ("features", "protocol", "metric", "value", "queries", "bank")
    title = f"All {len(rows)} numbers, with every protocol"
    return render("folded", title=title, text=table(heads, rows, "all"))
