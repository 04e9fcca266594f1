"""What a run that ended in a row of skipped steps says: what to change, and with which command."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from sslpipe.errors import UserError
from sslpipe.recipe.base import Optim
from sslpipe.recipe.reading import read_tree
from sslpipe.run.records import is_number, retry_command, trained_recipe

_RATE = "optim.peak_lr"
_NEW_RUN = "in a new run directory"


def advice(run_dir: Path, optim: Optim | None, precision: str, *, moved: bool) -> str:
    """Say what to change, of what is not set already; with an example where the rate may be it.

    Args:
        run_dir: Of the run.
        optim: The recipe's section; None: not known.
        precision: That the run computes in; "": not known.
        moved: Whether a step had changed the weights.
    """
    rounded = precision not in ("fp32", "fp64")
    if not moved:
        other = f"; or begin {_NEW_RUN} with optim.precision = 'fp32'" if rounded else ""
        return (
            "No step has changed the weights, so the rate is not the cause: look at the samples "
            "with `sslpipe preview --ids` (their ids are in bad_steps.*.jsonl) and at the weights "
            f"of --init, if any{other}"
        )
    changes = [f"a lower {_RATE}"]
    if optim is None or optim.clip_norm is None:
        changes.append("optim.clip_norm")
    if rounded:
        changes.append("optim.precision = 'fp32'")
    cause = "the rate or the precision" if rounded else "the rate"
    text = (
        f"Every step since then was skipped, so {cause} is the likely cause: begin {_NEW_RUN} "
        f"with {', or with '.join(changes)}"
    )
    return text if optim is None else f"{text}. {_lower_rate(run_dir, optim.peak_lr)}"


def _lower_rate(run_dir: Path, peak_lr: float) -> str:
    """Say which rate it was, and the command with the recipe's own where that is less, or a tenth.

    A rate that the command line made absurd is so little helped by a tenth of it.
    """
    own = _own_rate(run_dir)
    if own is not None and own < peak_lr:
        command = retry_command(run_dir, without=_RATE)
        return f"{_RATE} is {peak_lr:g}, and the recipe's own {own:g}; for example: {command}"
    lower = f"{_RATE}={peak_lr / 10:.3g}"
    command = retry_command(run_dir, lower, without=_RATE)
    return f"{_RATE} is {peak_lr:g}; " + (f"for example: {command}" if command else f"try {lower}")


def _own_rate(run_dir: Path) -> float | None:
    """Read the rate of the recipe's file, which the command line may have changed."""
    path = trained_recipe(run_dir)
    with suppress(UserError, LookupError, TypeError):
        rate: Any = None if path is None else read_tree(path)["optim"]["peak_lr"]
        return float(rate) if is_number(rate) else None
    return None
