"""The tables of numbers that `sslpipe evaluate` and `report` print."""

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from sslpipe.cli.terminal import show, text_table
from sslpipe.evaluation.groups import worst_sentence
from sslpipe.evaluation.result import Result, caveats, measured_columns
from sslpipe.evaluation.suite_file import features_name, own_name, with_own_name
from sslpipe.evaluation.verdict import RECALL, answer_text, form_names

SHOWN_VALUES = 10  # the worst of a column


def percent(value: float, interval: tuple[float, float]) -> str:
    """Write a share and its interval in percent."""
    return f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def print_results(title: str, results: Sequence[Result], prefix: str = "") -> None:
    """Print a table of results, and what weakens them."""
    rows = []
    for one in results:
        low, high = one.interval95
        value = f"{one.value:.4g} [{low:.4g}, {high:.4g}]"
        if one.unit == "share":
            value = f"{percent(one.value, one.interval95)} %"
        rows.append([prefix + one.protocol, one.metric, value, str(one.queries), str(one.bank)])
    heads = ("protocol", "metric", "value", "queries", "bank")
    # what all rows share is said once, above them
    shared = [
        place for place in (0, 3, 4) if len(rows) > 1 and len({row[place] for row in rows}) == 1
    ]
    said_once = [f"{heads[place]}: {rows[0][place]}" for place in shared if rows[0][place] != "0"]
    kept = [place for place in range(len(heads)) if place not in shared]
    table = text_table(
        [heads[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        left=1 if 0 in shared else 2,
    )
    Console().print(Group(Text("; ".join([title, *said_once])), table))
    for one in results:
        for said in caveats(one.details):
            show(f"{one.protocol}: {said}")


def print_values(results: Sequence[Result]) -> None:
    """Print the worst values of a column, for each result of `groups.worst_value`."""
    for result in results:
        values = result.details.get("values")
        if "worst" not in result.details or not isinstance(values, dict):
            continue
        metric = result.metric.split(" of the worst")[0]
        column = result.protocol.rpartition(" by=")[2]
        rows = [
            [value, percent(own["value"], own["interval95"]), str(own["queries"])]
            for value, own in list(values.items())[:SHOWN_VALUES]
        ]
        heads = (column, f"{metric} in %, 95 % interval", "queries")
        Console().print(text_table(heads, rows, title=result.protocol))
        show(worst_sentence(result))


def renamed(text: str, own: str) -> str:
    """Put the model's own name into a line of the suite."""
    return re.sub(r"(?<![\w.-])ssl(?![\w.-])", lambda found: own, text)


def print_suite(report: dict[str, Any]) -> None:
    """Print the suite's tables; a log file gets lines wide enough for an interval in a cell."""
    own = own_name(report["facts"], [row["features"] for row in report["rows"]])
    tables = {"rows", "against", "nuisance"} & report.keys()
    report = {**report, **{table: with_own_name(report[table], own) for table in tables}}
    printer = Console()
    if not printer.is_terminal:
        printer = Console(width=110)
    printer.print(suite_table(report))
    for row in report["rows"]:
        if row["column"] is not None and not row["details"].get("converged", True):
            show(f"* {row['features']}, {row['column']}: the fit did not converge")
    if report.get("against"):
        printer.print(against_table(report["against"]))
    if report.get("nuisance"):
        printer.print(nuisance_table(report["nuisance"]))


def suite_table(report: dict[str, Any]) -> Table:
    """Rows: features, plain and flattened. Columns: those of the report; percent and interval."""
    columns = measured_columns(report)
    queries = next((row["queries"] for row in report["rows"] if row["column"] is not None), 0)
    what = "Shares" if RECALL in columns else "Top-1 accuracy"
    title = f"{what} in %, 95 % interval; {queries} test samples"
    note = report["facts"].get("shortened")
    cells: dict[str, dict[str, str]] = {}
    for row in report["rows"]:
        line = cells.setdefault(features_name(row), {})
        if row["column"] is not None:
            mark = "" if row["details"].get("converged", True) else " *"
            line[row["column"]] = percent(row["value"], row["interval95"]) + mark
    return _by_features(columns, cells, f"{title}; {note}" if note else title, "–")


def nuisance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows: chance, and each kind of features. Columns: those of the data set that were probed."""
    cells: dict[str, dict[str, str]] = {"chance": {}}
    for row in rows:
        cells["chance"][row["column"]] = f"{100 * row['details']['chance']:.1f}"
        shown = percent(row["value"], row["interval95"])
        cells.setdefault(row["features"], {})[row["column"]] = shown
    title = "What else the features know: a linear probe's % right, 95 % interval"
    return _by_features([*cells["chance"]], cells, title, "-")


def _by_features(
    columns: Sequence[str], cells: dict[str, dict[str, str]], title: str, absent: str
) -> Table:
    rows = [[name, *(line.get(each, absent) for each in columns)] for name, line in cells.items()]
    return text_table(["features", *columns], rows, title=title)


def against_table(compared: Sequence[dict[str, Any]]) -> Table:
    """Rows: a measure of a network each, first the one that decides and has the answer."""
    several = len({each["features"] for each in compared}) > 1
    table = Table(title="Against other networks: shares in %, differences in points with 95 %")
    table.add_column("against", overflow="fold")
    table.add_column("measure")
    for heading in ("ours", "theirs", "difference", "over"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer")
    for each in compared:
        if each["primary"]:
            table.add_section()
        name = each["against"] + (f" ({each['features']})" if several else "")
        low, high = (100 * end for end in each["interval95"])
        table.add_row(
            Text(name if each["primary"] else ""),
            f"{each['measure']}, {' / '.join(dict.fromkeys(form_names(each)))}",
            f"{100 * each['value']:.1f}",
            f"{100 * each['against_value']:.1f}",
            f"{100 * each['difference']:+.1f} ({low:+.1f}, {high:+.1f})",
            f"{each['count']:,} {each['unit']}",
            answer_text(each),
        )
    return table
