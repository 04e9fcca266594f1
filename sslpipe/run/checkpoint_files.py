"""The checkpoints that a run directory holds: which, whether they are whole, what they say.

`checkpoint.py` writes them, and tells what the files are.
"""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field

from sslpipe.data.index import DatasetIndex
from sslpipe.errors import CheckpointError, UserError
from sslpipe.files import Finite, Int64, Stored, read_json
from sslpipe.portable import sha256_of
from sslpipe.recipe.identity import OTHER_RUN, other_data

FILES = {"model.safetensors", "parts.pt", "state.json"}  # of a checkpoint, beside its manifest


def checkpoint_names(folder: Path) -> list[str]:
    """List the names of the checkpoints in RUN/checkpoints, oldest first."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file where a folder should be; move it away")
    names = [p.name for p in folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(names, key=_step_of)


def newest(run_dir: Path) -> Path | None:
    """Find a run's newest checkpoint, whole or not; None: there is none."""
    names = checkpoint_names(run_dir / "checkpoints")
    return run_dir / "checkpoints" / names[-1] if names else None


def describe_newest(run_dir: Path) -> str:
    """Return which checkpoint a run that ended has left, for a message."""
    last = newest(run_dir)
    return f"the last checkpoint is {last.name}" if last else "no checkpoint was written yet"


class BestEntry(Stored):
    """The best evaluation so far, as a run follows it and state.json has it."""

    name: str | None = None  # of its checkpoint, where the run keeps it
    step: Int64 | None = None  # steps done there; none before the first one
    value: Finite = -math.inf  # their score, larger is better
    since: Int64 = 0  # evaluations after it that count, none of which was better
    measure: str = ""  # what is compared, as the first evaluation decided
    # of the weights that the run started from, where they are a candidate: their score; where that
    # is MAP@R, their Recall@1, below which an evaluation is not the best, and the MAP@R of each
    # sample, by its id, which the best is clearly above
    start: Finite | None = None
    floor: Finite | None = None
    start_by_sample: dict[int, Finite] | None = None

    @property
    def reason(self) -> str:
        """Why the checkpoint is the best; "" without a start: then commands take the newest."""
        if self.start is None:
            return ""
        if self.step == 0:
            better = "better" if self.start_by_sample is None else "clearly better"
            return f"the start: no evaluation was {better} ({self.measure} {self.start:.4g})"
        return f"the best by {self.measure}: {self.value:.4g}, the start {self.start:.4g}"


class Identity(Stored):
    """What decides the trained weights, as `recipe.identity` returns it."""

    model_config = ConfigDict(extra="allow")
    digest: str
    recipe: dict[str, Any]
    index_sha256: str


class State(Stored):
    """state.json; also what is not read again: precision, processes, versions."""

    step: Annotated[int, Field(ge=0, le=2**53)]
    identity: Identity
    best: BestEntry | None = None
    view: dict[str, Any] | None = None  # of a run from weights: see `EvalView.config`
    init: dict[str, Any] | None = None  # the weights that the run started from
    classes: list[Int64] | None = None  # labels that a fine-tuning has seen


def best_of(checkpoint: Path) -> BestEntry | None:
    """Read which checkpoint was the best when this one was written; None: none was kept."""
    with suppress(CheckpointError):
        best = read_state(checkpoint).best
        if best is not None and best.name is not None:
            return best
    return None


def latest(run_dir: Path) -> Path:
    """Find a run's newest checkpoint, whole.

    Raises:
        CheckpointError: There is none, or the newest is damaged, or was and the run has not come
            as far again: older weights are never taken for the run's last.
    """
    folder = run_dir / "checkpoints"
    names = checkpoint_names(folder)
    if not names:
        raise CheckpointError(f"{run_dir} holds no checkpoint; has it saved one yet?")
    last = max((p.name for p in folder.glob("bad-step-*")), key=_step_of, default="")
    if damage := damage_of(folder / names[-1]):
        reason = f"newest checkpoint, {names[-1]}, is damaged ({damage})"
    elif _step_of(last) > _step_of(names[-1]):
        reason = f"last checkpoint was damaged ({last}), and it has not come as far again"
    else:
        return folder / names[-1]
    older = _whole(folder, names)
    other = f", or take an older one by --checkpoint={older[-1]}" if older else ""
    raise CheckpointError(
        f"{folder}: the {reason}; resume the run with its own `sslpipe train` command, restore a "
        f"copy{other}"
    )


def named(run_dir: Path, name: str) -> Path:
    """Find one checkpoint of a run, whole, by "step-00000012", fewer zeros, or the number alone.

    Raises:
        CheckpointError: It is not there, or damaged.
    """
    folder = run_dir / "checkpoints"
    names = checkpoint_names(folder)
    match = re.fullmatch(r"(?:step-)?(\d{1,18})", name)
    full = f"step-{int(match[1]):08d}" if match else name
    if full not in names:
        raise CheckpointError(
            f"{folder} has no checkpoint {name!r}; there are: {', '.join(names) or 'none'}"
        )
    if damage := damage_of(folder / full):
        others = ", ".join(_whole(folder, names)) or "none"
        raise CheckpointError(f"{folder / full} is damaged ({damage}); whole ones: {others}")
    return folder / full


class Choice(NamedTuple):
    """A checkpoint of a run that a command takes."""

    folder: Path
    is_named: bool = False  # somebody asked for it, or it is not the newest
    reason: str = ""  # of a run from weights whose best one is taken


def choose_checkpoint(run_dir: Path, name: str | None) -> Choice:
    """Find the checkpoint that a command means by --checkpoint.

    Args:
        run_dir: The run directory.
        name: One for `named`; "last": the newest; "best": what the newest one says is the best so
            far; None: the best where the weights that the run started from were a candidate
            (run.keep = "best"), else the newest.

    Raises:
        CheckpointError: It is not there, or damaged; or the run keeps no best one.
    """
    if name not in (None, "best", "last"):
        return Choice(named(run_dir, name), is_named=True)
    last = latest(run_dir)
    best = None if name == "last" else best_of(last)
    if name != "best" and (best is None or not best.reason):
        return Choice(last)
    if best is None or best.name is None:
        raise CheckpointError(
            f"{run_dir} keeps no best checkpoint: run.keep = 'last', or no evaluation had a number "
            f"yet; there are: {', '.join(checkpoint_names(run_dir / 'checkpoints'))}"
        )
    return Choice(
        named(run_dir, best.name),
        is_named=name == "best" or best.name != last.name,
        reason=best.reason,
    )


def check_same_data(run_dir: Path, index: DatasetIndex) -> None:
    """Raise CheckpointError where a run's newest checkpoint is of another data set."""
    last = newest(run_dir)
    if last is None or damage_of(last) is not None:
        return
    began = read_state(last).identity.index_sha256
    if not index.has_sha256(began):
        raise CheckpointError(
            f"{run_dir} holds another run: {other_data(began, index.sha256)}; {OTHER_RUN}"
        )


def _whole(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if damage_of(folder / name) is None]


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, by size and sha256; None: they are whole."""
    try:
        manifest = read_json(checkpoint / "MANIFEST.json", dict[str, tuple[int, str]])
    except UserError:
        return "no readable MANIFEST.json"
    if set(manifest) != FILES:
        return "MANIFEST.json does not list its files"
    for name, (size, sha256) in manifest.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or has another size than in MANIFEST.json"
        if sha256_of(path) != sha256:
            return f"{name} has another sha256 than in MANIFEST.json"
    return None


def read_state(checkpoint: Path) -> State:
    """Read a checkpoint's state.json. Raises: CheckpointError where it is another file."""
    return read_json(checkpoint / "state.json", State, error=CheckpointError)


def _step_of(name: str) -> int:
    match = re.search(r"step-(\d+)", name)
    return int(match[1]) if match else -1
