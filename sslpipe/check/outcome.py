"""What a check has found, of any kind of run, and its tables for a terminal."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sslpipe.data.index import PATH_COLUMN, DatasetIndex
from sslpipe.errors import for_caller, listed
from sslpipe.planning.memory import Memory
from sslpipe.portable import gib
from sslpipe.recipe.sections import RunRecipe, leaves

MOST_NAMED = 6  # columns of a warning
Rows = list[tuple[str, str]]


class Check(NamedTuple):
    """A run that can be trained: its recipe, filled in, and what is known of it."""

    recipe: Any  # of any kind
    views: tuple[dict[str, Any], ...]  # each view's distribution, presets and defaults resolved
    rows: Rows  # what people come for: time, memory, sizes, as they are shown
    details: Rows  # what they look at when something is odd
    warnings: tuple[str, ...]
    memory: Memory  # bytes, of one process with the whole batch, or micro-batch
    digest: str
    step_flops: float = 0.0  # of a pretraining
    step_seconds: float = 0.0

    def __repr__(self) -> str:
        """Show what people come for; `rich.print(check.render())` shows all."""
        lines = [f"{name}: {text}" for name, text in self.rows]
        return "\n".join(["Check:", *lines, *(f"warning: {each}" for each in self.warnings)])

    def render(self) -> RenderableType:
        """Make tables: what it takes and what to watch first, details last."""
        return Group(
            _table("this can be trained", self.rows),
            *(Text(f"warning: {warning}", style="yellow") for warning in self.warnings),
            settings_table(self.recipe),
            _views_table(self.views),
            _table("details", self.details),
        )


def settings_table(recipe: RunRecipe) -> RenderableType:
    """Make the table of a recipe's settings; those at their defaults are one line below it."""
    tree = recipe.model_dump(exclude_none=True)
    not_default = recipe.model_dump(exclude_none=True, exclude_defaults=True)
    changed = {key for key, _ in leaves(not_default)}
    written = {key: _written(value) for key, value in leaves(tree)}
    defaults = (f"{k} {text or '(none)'}" for k, text in written.items() if k not in changed)
    return Group(
        _table("settings", [row for row in written.items() if row[0] in changed]),
        Text(f"\nat their defaults: {', '.join(defaults)}"),
    )


def _table(title: str, rows: Rows) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a digest is never cut
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))  # Text: brackets are no markup here
    return table


def _written(value: Any) -> str:
    """As in a recipe."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(_written(item) for item in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _views_table(views: tuple[dict[str, Any], ...]) -> RenderableType:
    """Make the table of what the views do; what they do not is one line below it."""
    first = views[0]
    second = views[-1]
    rows = [
        (key, _written(value) + (f" | {_written(second[key])}" if second[key] != value else ""))
        for key, value in first.items()
    ]
    unused = [name for name, text in rows if text == "0"]
    used = _table("views", [row for row in rows if row[0] not in unused])
    return Group(used, Text(f"\nat 0: {', '.join(unused)}")) if unused else used


def memory_text(memory: Memory) -> str:
    """Return what a step holds in all."""
    of = "one process" if memory.process else "a CUDA device, an estimate from counts on the CPU"
    return f"{gib(memory.total)} of {of}"


def memory_parts(memory: Memory) -> str:
    """Return what a step holds, part by part."""
    names = {"batches": "images read ahead, at most", "process": "the process itself"}
    sizes = {key: size for key, size in memory._asdict().items() if size or key == "activations"}
    parts = (f"{names.get(key, key)} {gib(size)}" for key, size in sizes.items())
    return f"{', '.join(parts)}; on W processes activations, views and images are divided by W"


def straddle_warning(
    index: DatasetIndex, split_name: str, in_several: Sequence[str] = ()
) -> str | None:
    """Return which columns have values both in a split and in others of its data set.

    Only texts and integers are looked at, as times and floats name nothing, and none of the columns
    that are meant to be `in_several`.
    """
    rows = []
    for name, entry in index.manifest.columns.items():
        if entry.kind not in ("text", "integer") or split_name not in entry.splits:
            continue
        if name in in_several:
            continue
        if name == PATH_COLUMN:  # folders of two builds may have files of the same names
            continue
        groups = index.split(split_name).column(name).groups
        for other in sorted(set(entry.splits) - {split_name}):
            other_groups = index.split(other).column(name).groups
            shared = int(other_groups.shared_with(groups).sum())
            if shared:
                rows.append(f"{shared:,} of {len(other_groups):,} values of {name} in {other}")
    if not rows:
        return None
    return for_caller(
        f"groups straddle splits: {listed(rows, MOST_NAMED)} are in {split_name}, too; "
        "where a column names what must not be shared, such as a patient, build with --split-by"
    )
