"""What `sslpipe evaluate suite` prints, and how it is stopped."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from sslpipe.cli.terminal import percent_interval, print_table, say, show, text_table
from sslpipe.evaluation.advice import advise
from sslpipe.evaluation.comparison import RECALL
from sslpipe.evaluation.result import measured_columns, query_counts
from sslpipe.evaluation.suite_file import features_name, own_name, with_own_name
from sslpipe.evaluation.verdict import form_names, leakage_sentence, unfinished, verdict_text
from sslpipe.run.console import SafeConsole

AGAIN_S = 1.0  # a Ctrl-C so much later than the first signal ends what is being written


def print_report(report: dict[str, Any], out: Path) -> None:
    """Print the answer, the tables, and what is missing; end where sets are."""
    if note := unfinished(report["facts"]):
        SafeConsole().print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for sentence in advise(report):
        show(sentence)
    print_suite(report)
    show(report["verdict"])
    if "leakage" in report:
        show(leakage_sentence(report["leakage"]))
    for sentence in report["left_out"]:
        show(f"not measured: {sentence}")
    show(f"{len(report['rows'])} numbers in {out}")
    if missing := report.get("incomplete", {}):
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        say(f"error: not in {out}: {reasons}; run the same command again", "red")
        raise typer.Exit(130 if "interrupted" in missing.values() else 2)


def print_suite(report: dict[str, Any]) -> None:
    """Print the suite's tables, and which fit did not converge."""
    name = own_name(report["facts"], [row["features"] for row in report["rows"]])
    tables = {"rows", "against"} & report.keys()
    report = {**report, **{table: with_own_name(report[table], name) for table in tables}}
    print_table(suite_table(report))
    for row in report["rows"]:
        if row["column"] is not None and not row["details"].get("converged", True):
            show(f"* {row['features']}, {row['column']}: the fit did not converge")
    if report.get("against"):
        print_table(against_table(report["against"]))


def suite_table(report: dict[str, Any]) -> Table:
    """Rows: features, plain and flattened. Columns: those of the report; percent and interval."""
    columns = measured_columns(report)
    what = "Shares" if RECALL in columns else "Top-1 accuracy"
    title = f"{what} in %, 95 % interval; {query_counts(report, 'test samples')}"
    cells: dict[str, dict[str, str]] = {}
    for row in report["rows"]:
        line = cells.setdefault(features_name(row), {})
        if row["column"] is not None:
            mark = "" if row["details"].get("converged", True) else " *"
            line[row["column"]] = percent_interval(row["value"], row["interval95"]) + mark
    rows = [[name, *(line.get(each, "–") for each in columns)] for name, line in cells.items()]
    return text_table(["features", *columns], rows, title=title)


def against_table(compared: Sequence[dict[str, Any]]) -> Table:
    """Rows: a measure of a network each, first the one that decides and has the answer."""
    several = len({each["features"] for each in compared}) > 1
    table = Table(title="Against other networks: shares in %, differences in points, 95 % interval")
    table.add_column("against", overflow="fold")
    table.add_column("measure", overflow="fold")
    for heading in ("ours", "theirs", "difference", "over"):
        table.add_column(heading, justify="right", overflow="fold")  # wraps, and is never cut
    table.add_column("answer", overflow="fold")
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
            verdict_text(each),
        )
    return table


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C raise KeyboardInterrupt, and a later Ctrl-C again.

    Schedulers and `timeout` often send SIGTERM twice: the second one must not cost what is written
    after the first.
    """
    last = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        again = last > 0
        last = last or time.monotonic()
        if not again or (number == signal.SIGINT and time.monotonic() - last > AGAIN_S):
            raise KeyboardInterrupt

    both = (signal.SIGTERM, signal.SIGINT)
    kinds = [kind for kind in both if signal.getsignal(kind) is not signal.SIG_IGN]
    before = [signal.signal(kind, stop) for kind in kinds]
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {out} is not written")
        raise typer.Exit(130) from None
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
