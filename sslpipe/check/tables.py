"""Tables of a check for a terminal, the same for both kinds of run."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sslpipe.recipe.base import RunRecipe, Section
from sslpipe.recipe.reading import leaves
from sslpipe.run.memory import Memory, gib

Rows = list[tuple[str, str]]


def tables(
    recipe: Section,
    views: tuple[dict[str, Any], ...],
    sizes: tuple[str, Rows],
    warnings: tuple[str, ...],
) -> RenderableType:
    """Put together what every check shows: what decides first, the settings last.

    Args:
        recipe: Its settings are the last table, those at their defaults one line.
        views: The distribution of each view's parameters, presets and defaults resolved.
        sizes: A title and its rows.
        warnings: Shown after the sizes.
    """
    written = {key: _written(v) for key, v in leaves(recipe.model_dump(exclude_none=True))}
    changed = dict(leaves(recipe.model_dump(exclude_none=True, exclude_defaults=True)))
    defaults = (f"{key} {text or '(none)'}" for key, text in written.items() if key not in changed)
    return Group(
        _table(*sizes),
        *(Text(f"warning: {warning}", style="yellow") for warning in warnings),
        _table("views", _view_rows(views)),
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


def _view_rows(views: tuple[dict[str, Any], ...]) -> Rows:
    first, second = views[0], views[-1]
    return [
        (key, _written(value) + (f" | {_written(second[key])}" if second[key] != value else ""))
        for key, value in first.items()
    ]


def memory_text(memory: Memory) -> str:
    """Say what a step holds, part by part."""
    names = {"batches": "images read ahead, at most", "recorded": "recorded step"}
    held = [(key, size) for key, size in memory._asdict().items() if size or key != "recorded"]
    parts = (f"{names.get(key, key)} {gib(size)}" for key, size in held)
    return (
        f"{gib(memory.total)} on one process, workspaces not included: {', '.join(parts)}; on W "
        "processes activations, views and images are divided by W"
    )


def warmup_warning(recipe: RunRecipe) -> list[str]:
    """Say, of a warm-up that takes the whole run, that it does; nothing of others."""
    warmup, steps = recipe.optim.warmup_steps, recipe.steps
    if steps is None or warmup < steps:
        return []
    return [
        f"optim.warmup_steps = {warmup} does not end before the run's {steps} steps: the peak rate "
        "is never used"
    ]


def start_text(recipe: RunRecipe) -> str:
    """Say which weights a run starts from."""
    if not recipe.init:
        return "random weights"
    first = recipe.tune.projector_first_steps
    frozen = f"; frozen, its BatchNorms in eval mode, for the first {first} steps" if first else ""
    return f"weights {recipe.init[:16]}{frozen}"


def format_duration(seconds: float) -> str:
    """As "12 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
