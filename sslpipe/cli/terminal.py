"""How every command prints: results on stdout, messages and progress on stderr."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from sslpipe.errors import UserError, printable
from sslpipe.run.console import SafeConsole

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table
    from torch import Tensor

    from sslpipe.data.reader import Quarantined
    from sslpipe.export.load import FrozenBackbone

_LOG_COLUMNS = 240  # of a line that no terminal shows, at most
console = SafeConsole(stderr=True)
PLAIN_EVERY_S = 10.0
_ANY_COLUMNS = 10**6  # more than any table has
MOST_SKIPPED = 10  # images that cannot be read and are named; the others are counted
HELP_WIDTH = 80  # columns of a help


def list_examples(examples: Sequence[str]) -> str:
    """Return what a help ends with: command lines that can be copied, at most 80 columns wide."""
    heading = "Examples:" if len(examples) > 1 else "Example:"
    return "\n  ".join([f"\b\n{heading}", *map(_example, examples)])


def _example(example: str) -> str:
    """Break a long command line; a comment that does not fit behind it stands above."""
    command, mark, comment = example.partition("  # ")
    broken = break_command(command, indent=2)
    if not mark:
        return broken
    fits = len(broken.splitlines()[-1]) + len(mark) + len(comment) <= HELP_WIDTH - 4
    return f"{broken}{mark}{comment}" if fits else f"# {comment}\n  {broken}"


def break_command(command: str, indent: int) -> str:
    r"""Break a command line with `\`, not between an option and its value, where it is too long.

    Args:
        command: As it is typed.
        indent: Columns before it; click's help has two more.
    """
    lines = [""]
    word = r"(?:'[^']*'|\S)+"
    for part in re.findall(rf"--?\S+(?: (?!-){word})?|{word}", command):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > HELP_WIDTH - 2 - indent:
            lines[-1] += " \\"
            lines.append(f"{' ' * (indent + 4)}{part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def new_app(examples: Sequence[str] = (), **settings: Any) -> typer.Typer:
    """Make the app of a command, or of a group of commands, whose help ends with examples."""
    if examples:
        settings["epilog"] = list_examples(examples)
    usual: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
    # plain help: at 80 columns the texts get the width, and a line of an example is not broken
    return typer.Typer(**usual | {"rich_markup_mode": None} | settings)


class LazyGroup(TyperGroup):
    """A group that lists commands from a table, and imports the one that is called."""

    SUMMARIES: ClassVar[dict[str, str]] = {}  # name -> first line of the help

    def __init__(self, *, commands: Any = None, **attrs: Any) -> None:
        rows = {name: TyperCommand(name=name, help=text) for name, text in self.SUMMARIES.items()}
        super().__init__(commands={**(commands or {}), **rows}, **attrs)

    def load(self, name: str) -> Any:
        """Import a command."""
        raise NotImplementedError

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.load(name), rest


def text_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int = 1
) -> "Table":
    """Make a table of texts as they are; columns after the first `left` end at the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None if title is None else Text(title))
    for number, head in enumerate(heads):
        justify: JustifyMethod = "left" if number < left else "right"
        table.add_column(Text(head), justify=justify, overflow="fold")  # a long name is not cut
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # here, for their widths
    return table


def print_table(table: "Table") -> None:
    """Print a table on stdout; a file or a pipe gets lines as long as the table is wide.

    On a terminal that is narrower, cells have several lines, and rules part the rows.
    """
    printer = _table_printer()
    table.show_lines = _width(printer, table) > printer.width
    printer.print(table)


def _width(printer: SafeConsole, table: "Table") -> int:
    """Return how many columns a table takes where none of its cells is broken."""
    from rich.measure import Measurement

    unlimited = printer.options.update_width(_ANY_COLUMNS)
    return Measurement.get(printer, unlimited, table).maximum


def _table_printer() -> SafeConsole:
    printer = SafeConsole()
    return printer if printer.is_terminal else SafeConsole(width=_LOG_COLUMNS)


def print_named(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print rows that begin with a name to copy, such as a path, which no line break divides.

    Where a table is too wide, each name is a line of its own above what is known of it; "-" there
    is left out.

    Args:
        heads: Of the columns.
        rows: The texts of each.
        left: The first columns, which end at the left.
    """
    table = text_table(heads, rows, left=left)
    printer = _table_printer()
    if _width(printer, table) <= printer.width:
        printer.print(table)
        return
    for name, *cells in rows:
        known = zip(heads[1:], cells, strict=True)
        show(name)
        show("  " + ", ".join(f"{head} {cell}" for head, cell in known if cell != "-"))


def percent_interval(value: float, interval: tuple[float, float]) -> str:
    """Write a share and its interval in percent."""
    return f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def show(text: object) -> None:
    """Print a line of the result on stdout, as it is."""
    SafeConsole().print(text, highlight=False, markup=False, soft_wrap=True)


def show_json(tree: Any) -> None:
    """Print JSON on stdout: names in their own script, but nothing that a terminal obeys."""
    text = json.dumps(tree, indent=1, ensure_ascii=False)
    typer.echo(re.sub(r"[^\n]", lambda match: _json_escape(match[0]), text))


def _json_escape(character: str) -> str:
    return character if printable(character) == character else f"\\u{ord(character):04x}"


def say(text: str, style: str = "") -> None:
    """Print a message on stderr, as it is."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def encode_readable(model: "FrozenBackbone", paths: Sequence[Path]) -> "tuple[list[int], Tensor]":
    """Encode what can be read, and name the rest on stderr: places in `paths`, and their rows.

    Raises:
        UserError: None can be read.
    """
    bad: dict[int, str] = {}
    with progress("embed", len(paths)) as advance:
        try:
            rows = model.encode(list(paths), on_bad=bad.__setitem__, advance=advance).float().cpu()
        except UserError as error:
            if len(bad) < len(paths) or not bad:
                raise
            raise UserError(bad[0]) from error
    for reason in list(bad.values())[:MOST_SKIPPED]:
        say(f"skipped: {reason}", "yellow")
    if len(bad) > 1:
        say(f"{len(bad):,} of {len(paths):,} images were skipped", "yellow")
    return [place for place in range(len(paths)) if place not in bad], rows


def first_process() -> bool:
    """Whether this process is the first, or the only one, that the launcher started."""
    return os.environ.get("RANK", "0") == "0"


def say_once(text: str) -> None:
    """Print a message on stderr, of several processes by the first alone."""
    if first_process():
        say(text)


def load_model(
    source: str | Path, checkpoint: str | None, *, device: str = "cpu"
) -> "FrozenBackbone":
    """Load a backbone; say which weights of a run were chosen, unless its newest ones.

    Of weights of another program say what was decided or is not known, such as their view. `device`
    is that of --device.
    """
    from sslpipe.distributed import pick_device
    from sslpipe.export.load import load_backbone, weights_text

    target = pick_device(device, f"--device {device}")
    model = load_backbone(source, checkpoint=checkpoint)
    if text := weights_text(model):
        say_once(text)
    for note in model.notes:
        say_once(note)
    return model.to(target)


def report_bad(sample: "Quarantined") -> None:
    """Name a sample that cannot be decoded."""
    where = f"{sample.shard}, key {sample.key!r} (id {sample.id})"
    say(f"skipped: {where}: {sample.reason}", "yellow")


@contextmanager
def progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, elsewhere a line every ten seconds.

    Yields:
        A function that advances it by a number; any thread may call it.
    """
    if not console.is_terminal:
        yield _plain(task, total)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}")
    left = TimeRemainingColumn(elapsed_when_finished=True)
    with Progress(text, BarColumn(), MofNCompleteColumn(), left, console=console) as bar:
        number = bar.add_task(task, total=total)
        yield lambda count: bar.advance(number, count)


def _plain(task: str, total: int) -> Callable[[int], None]:
    """Print a line every ten seconds, and a last one where there was one before."""
    from sslpipe.run.log import clock

    lock = threading.Lock()
    done = 0
    started = time.monotonic()
    last = started
    has_printed = False

    def advance(count: int) -> None:
        nonlocal done, last, has_printed
        with lock:
            done += count
            if (has_printed and done == total) or time.monotonic() - last > PLAIN_EVERY_S:
                last = time.monotonic()
                has_printed = True
                left = (last - started) * (total - done) / max(1, done)
                to_go = f", {clock(left)} left" if done < total else ""
                say(f"{task}: {done}/{total}{to_go}")

    return advance


@contextmanager
def working(task: str) -> Iterator[Callable[[str], None]]:
    """Show how long a task has taken, on a terminal, until it ends; yields what names its stage."""
    if not console.is_terminal or not first_process():
        yield lambda text: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        number = bar.add_task(task, total=None)
        yield lambda text: bar.update(number, description=f"{task}: {text}")
