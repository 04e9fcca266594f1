"""Print what was measured, beside what the docs show: a ratio that does not repeat, shows."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parents[1] / "docs" / "measured"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows of texts as a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def compare(name: str, now: Any, ratios: Callable[[Any], dict[str, float]]) -> None:
    """Print each ratio measured now, the one in the docs, and their quotient.

    Args:
        name: Of the file in docs/measured.
        now: What would be written there.
        ratios: Takes the ratios out of the content of such a file.
    """
    documented = json.loads((MEASURED / name).read_text())
    then, machine = ratios(documented), documented["machine"]
    rows = [(key, ratio, then[key]) for key, ratio in ratios(now).items() if key in then]
    if rows:
        print(f"\nfaster than the peer: now, in the docs ({machine.get('cpu')}), quotient")
    for key, ratio, before in rows:
        print(f"{key:<60} {ratio:7.2f} {before:7.2f} {ratio / before:6.2f}")
