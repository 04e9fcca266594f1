"""Show what eval.json holds: verdict, sentences, tables."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any, NamedTuple

from sslpipe.evaluation.against import KNN, RECALL
from sslpipe.evaluation.result import caveats, measured_columns
from sslpipe.evaluation.verdict import answer_text, form_names, unfinished, verdict
from sslpipe.report.charts import number
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


def verdict_sentence(run: RunFiles) -> str:
    """Say first whether the features beat random weights and raw pixels, where that is known."""
    if run.evaluation is None:
        reason = "it has no eval.json" if run.data["classes"] else "its images have no labels"
        return f"<b>Whether it is better than random weights is not known: {reason}.</b> "
    own = [row for row in run.evaluation["rows"] if row["column"] is not None]
    return f"<b>{escape(verdict({**run.evaluation, 'rows': own}))}</b> "


def evaluated_weights(run: RunFiles) -> str:
    """Say "evaluated at step 30 of 60, with averaged weights"; '' of the end's trained ones."""
    facts: Tree = run.evaluation["facts"] if run.evaluation else {}
    step: Any = facts.get("step")
    steps: Any = run.recipe.get("steps")
    said = ["with averaged weights (optim.ema)"] if facts.get("weights") == "ema" else []
    if is_number(step) and is_number(steps) and step < steps:
        said.insert(0, f"at step {step:,} of {steps:,}")
    return f"evaluated {', '.join(said)}" if said else ""


def unfinished_sentence(run: RunFiles) -> str:
    """Say before all else that the weights were not those of the end of training; else ''."""
    facts = run.evaluation["facts"] if run.evaluation else {}
    note = unfinished(facts, run.recipe.get("steps"))
    return f"<b>{escape(note)}</b> " if note else ""


def accuracy_sentence(run: RunFiles) -> str:
    """Say how good the features are by the first number, beside the baselines in the same form.

    Which is better is the verdict's to say, by paired intervals; those of the table overlap sooner.
    """
    if run.evaluation is None:
        return "It has not been evaluated yet."
    lines = [line for line in table_lines(run.evaluation) if not line.whitened]
    ours = next((line for line in lines if line.features not in BASELINES), None)
    measure = next((each for each in (KNN, RECALL) if ours and each in ours.cells), None)
    if ours is None or measure is None:
        return "Its own features have not been evaluated."
    cell = ours.cells[measure]
    beside = [
        f"{escape(line.title)}: {_percent(line.cells[measure]['value'])} %"
        for line in lines
        if line.features in BASELINES and measure in line.cells
    ]
    low, high = map(_percent, cell["interval95"])
    what = "kNN on its frozen features gets" if measure == KNN else "The nearest other image gets"
    return (
        f"{what} <b>{_percent(cell['value'])} %</b> of "
        f"{cell['queries']:,} test images right (95\u00a0% interval {low}–{high}); "
        f"{'; '.join(beside) or 'no baseline was measured'}.{_leaked(run.evaluation)}"
    )


def _leaked(evaluation: Tree) -> str:
    """Say what the plain kNN is without the test images that train has, too; '' without any."""
    found = evaluation.get("leakage")
    if not found or not found["leaked"]:
        return ""
    said = f" {found['leaked']:,} of {found['samples']:,} test images are in train, too"
    for row in found["rows"]:
        if row["features"] == "ssl" and not row["whitened"] and row["column"] in (KNN, RECALL):
            clean = row["clean_value"]
            said += "" if clean is None else f"; without them it gets {_percent(clean)} %"
    return f"{said}."


def result_table(evaluation: Tree) -> str:
    """Tabulate features by the columns of eval.json, in percent with intervals; protocols below."""
    lines, columns = table_lines(evaluation), measured_columns(evaluation)
    queries = next((row["queries"] for row in evaluation["rows"] if row["column"]), 0)
    left_out = escape("; ".join(evaluation["left_out"]))
    not_measured = f"<p class='note'>Not measured: {left_out}.</p>" if left_out else ""
    notes = "".join(f"<p class='note'>{escape(n)}</p>" for n in evaluation.get("notes", []))
    shortened = evaluation["facts"].get("shortened")
    mark = f"<p class='missing'>{escape(str(shortened).capitalize())}.</p>" if shortened else ""
    return (
        f"{mark}"
        f"<p class='note'>{_measured(evaluation)}, with 95 % intervals over {queries:,} "
        "test images (over classes where the protocol says so). <b class='best'>Marked</b> only "
        "where the whole interval is better than those of all other features; a column without a "
        "mark has no clear best.</p>"
        f"{feature_table(lines, columns)}{against_table(evaluation.get('against', []))}"
        f"{_caveats(evaluation)}{not_measured}{notes}"
        f"{_protocols(evaluation)}{_all_numbers(evaluation)}"
    )


def against_table(compared: Sequence[Tree]) -> str:
    """Tabulate the differences from other networks, with their answers; '' where there are none."""
    if not compared:
        return ""
    several = len({each["features"] for each in compared}) > 1
    rows = ""
    for each in compared:
        low, high = (f"{100 * end:+.1f}" for end in each["interval95"])
        other = str(NAMES.get(each["against"], each["against"]))
        name = f"{other} ({each['features']})" if several else other
        forms = " / ".join(dict.fromkeys(form_names(each)))
        cells = (
            _percent(each["value"]),
            _percent(each["against_value"]),
            f"{100 * each['difference']:+.1f} <small>{low} to {high}</small>",
            f"{each['count']:,} {each['unit']}",
            f"<b>{answer_text(each)}</b>" if each["primary"] else answer_text(each),
        )
        rows += (
            f"<tr><th scope='row'>{escape(name)}</th><td>{each['measure']}, {forms}</td>"
            f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    heads = "against, measure, ours in %, theirs in %, difference in points, over, answer"
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads.split(", "))
    return (
        "<h3>Against other networks</h3><p class='note'>The answer stands on one measure that was "
        "fixed before, and must be clear in both forms, as they are and whitened. "
        "It holds for all comparisons together (Holm, 5 %); each interval is a 95 % "
        "one of its own row, over test images or, where test images find each other, over "
        "classes.</p><div class='wide'><table class='numbers'><thead><tr>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _caveats(evaluation: Tree) -> str:
    """Write a line for each fit that a reader should know more of, as one at its grid's edge."""
    return "".join(
        f"<p class='note'>{escape(Line(row['features'], row['whitened'], {}).title)}, "
        f"<code>{escape(row['protocol'])}</code>: {escape(caveat)}.</p>"
        for row in evaluation["rows"]
        for caveat in caveats(row["details"])
    )


def feature_table(
    lines: list[Line],
    columns: list[str],
    titles: Mapping[str, str] | None = None,
    *,
    mark: bool = True,
) -> str:
    """Tabulate features by columns, results with intervals.

    Args:
        lines: The rows.
        columns: The keys of their cells to show.
        titles: Of columns, where not their keys.
        mark: Whether a clear best is marked.
    """
    winners = {column: clear_best(lines, column) if mark else [] for column in columns}
    head = "".join(
        f"<th scope='col'>{escape((titles or {}).get(column, column))}</th>" for column in columns
    )
    body = ""
    for line in lines:
        cells = "".join(
            _cell(line.cells.get(column), line in winners[column]) for column in columns
        )
        kind = "baseline" if line.baseline else "ours"
        body += f"<tr class='{kind}'><th scope='row'>{escape(line.title)}</th>{cells}</tr>"
    return (
        f"<div class='wide'><table class='results{' more' if titles else ''}'>"
        f"<thead><tr><th scope='col'>features</th>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _cell(row: Tree | None, is_best: bool) -> str:
    if row is None:
        return "<td>–</td>"
    text, to = (number, " to ") if row.get("unit") == "number" else (_percent, "–")
    low, high = map(text, row["interval95"])
    shown = f"<data value='{row['value']!r}'>{text(row['value'])}</data>"
    if is_best:
        shown = f"<b class='best'>{shown}</b>"
    mark = "" if row.get("details", {}).get("converged", True) else " <b>not converged</b>"
    return f"<td>{shown} <small>{low}{to}{high}{mark}</small></td>"


def _measured(evaluation: Tree) -> str:
    metrics = {row["metric"] for row in evaluation["rows"] if row["column"] is not None}
    if metrics == {"top1"}:
        return "Top-1 accuracy in %"
    small = sorted(each for each in metrics if each.startswith(SMALL_IS_GOOD))
    return "Shares in %" + (f" (small is good: {escape(', '.join(small))})" if small else "")


def _protocols(evaluation: Tree) -> str:
    """Say what each column is: protocol, and the labelled images it used."""
    items = ""
    for column in evaluation["columns"]:
        of_column = [row for row in evaluation["rows"] if row["column"] == column]
        for protocol, bank in sorted({(row["protocol"], row["bank"]) for row in of_column}):
            items += (
                f"<dt>{escape(column)}</dt><dd><code>{escape(protocol)}</code>, "
                f"{bank:,} labelled train images</dd>"
            )
    return f"<dl class='protocols'>{items}</dl>"


def _all_numbers(evaluation: Tree) -> str:
    rows = "".join(
        f"<tr><td>{escape(NAMES.get(row['features'], row['features']))}"
        f"{', whitened' if row['whitened'] else ''}</td><td><code>{escape(row['protocol'])}</code>"
        f"</td><td>{escape(row['metric'])}</td>{_cell(row, False)}<td>{row['queries']:,}</td>"
        f"<td>{row['bank']:,}</td></tr>"
        for row in evaluation["rows"]
    )
    return (
        f"<details><summary>All {len(evaluation['rows'])} numbers, with every protocol</summary>"
        "<div class='wide'><table><thead><tr><th>features</th><th>protocol</th><th>metric</th>"
        f"<th>value</th><th>queries</th><th>bank</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
