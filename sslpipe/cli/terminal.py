"""What several commands print: messages and skipped samples on stderr, JSON files."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from sslpipe.data.store import Quarantined
    from sslpipe.export.load import FrozenBackbone

console = Console(stderr=True)


def say_once(text: str) -> None:
    """Print a line on stderr, of several processes by the first alone."""
    if os.environ.get("RANK", "0") == "0":
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def say_weights(model: "FrozenBackbone") -> None:
    """Say on stderr which weights of a run were chosen; nothing of its newest trained ones."""
    facts = model.config.facts
    if "checkpoint" in facts or "weights" in facts:
        kind = "averaged (optim.ema)" if facts.get("weights") == "ema" else "trained"
        name = facts.get("checkpoint", "the newest checkpoint")
        say_once(f"weights: {name} of {facts.get('name')}, {kind}")


def report_bad(sample: "Quarantined") -> None:
    """Print one line on stderr about a sample that cannot be decoded."""
    console.print(
        f"skipped: {sample.shard}, key {sample.key!r} (id {sample.id}): {sample.reason}",
        style="yellow",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def write_json(path: Path, tree: Any) -> None:
    """Write a tree of plain values as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(tree, indent=1) + "\n")
