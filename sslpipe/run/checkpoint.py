"""Checkpoints that are either whole or not there.

    RUN/checkpoints/step-00001234/
        model.safetensors   weights and buffers of the bare model
        parts.pt            state_dicts of the other parts (optimizer, loss, scaler); weights_only
        state.json          step, digest, resolved recipe, processes, versions
        MANIFEST.json       bytes and sha256 of the files above; written last
    RUN/checkpoints/latest  the newest name: a hint for people, never read here
    RUN/checkpoints/best    the name that the newest state.json calls the best: another such hint
    RUN/checkpoints/bad-*   damaged ones that a resume has set aside

The best checkpoint (run.keep) is what the newest state.json says: one rename makes both. It stays
while any checkpoint that stays names it, so that a resume from an older one finds its best, too.

A folder is written under a temporary name, flushed, and renamed by rank 0 alone; it is renamed
again before it is removed. What a kill leaves of either goes at the next start or save.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_map

from sslpipe.distributed import Rank, broadcast_object
from sslpipe.errors import CheckpointError, UserError
from sslpipe.faults import fault
from sslpipe.portable import sha256_of, sync, write_atomically
from sslpipe.recipe.base import Weights
from sslpipe.recipe.identity import differences, same_run
from sslpipe.run.fsdp import load_whole_state, whole_state
from sslpipe.run.records import read_object

FILES = {"model.safetensors", "parts.pt", "state.json"}  # of a checkpoint, beside its manifest
MAX_FAILED_SAVES = 3  # in a row; then the run stops
_TEMPORARY = ".tmp-"  # how folders begin that are not whole yet, or no more


class Checkpointer:
    """Saves and restores a run's parts; called by all ranks, written by rank 0.

    Args:
        run_dir: Of the run.
        keep: How many checkpoints stay, beside those that they name as the best; older ones are
            deleted.
        identity: What must agree for a resume: {"digest": ..., "recipe": {...}, "index_sha256":
            ...}.
        process: This process.
        warn: Shows a message to the user.
        defaults: `ADDED_LATER` of the recipe: what a stored identity may say or not.
        also: Other identities that the run may have been recorded with.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        identity: dict[str, Any],
        process: Rank,
        warn: Callable[[str], None],
        defaults: Mapping[str, Any] = MappingProxyType({}),
        also: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self.defaults, self.also = defaults, also
        self.keep, self.identity, self.process, self.warn = keep, identity, process, warn
        self.best: dict[str, Any] = {}  # what the restored state.json says of the best one
        self._failed_saves = 0

    def save(
        self, step: int, parts: dict[str, Any], metadata: dict[str, Any], *, needed: bool = False
    ) -> bool:
        """Write a checkpoint; a failed save (a full disk, say) is reported and tried again later.

        Args:
            step: Optimizer steps done.
            parts: Name -> what has a state_dict; "model" is the bare model.
            metadata: More entries of state.json.
            needed: No other save comes after this one: failing is an error.

        Returns:
            Whether it worked, on all ranks.

        Raises:
            CheckpointError: MAX_FAILED_SAVES failures in a row, or one that was `needed`.
        """
        problem: str | None = None
        states = {name: whole_state(part) for name, part in parts.items()}  # all ranks
        if self.process.rank == 0:
            try:
                self._write(step, states, metadata)
            except (OSError, RuntimeError, SafetensorError) as error:  # each says "full" its way
                cause = _of_the_disk(error)
                problem = f"{type(cause).__name__}: {cause}"
        problem = broadcast_object(problem)
        if problem is None:
            self._failed_saves = 0
            return True
        self._failed_saves += 1
        message = f"the checkpoint of step {step} was not written ({problem})"
        if needed:
            raise CheckpointError(f"{message}; free some space, then resume with the same command")
        if self._failed_saves == MAX_FAILED_SAVES:
            raise CheckpointError(f"{message}, {MAX_FAILED_SAVES} times in a row; free some space")
        self.warn(f"{message}; the older ones stand, the next save tries again")
        return False

    def restore(self, parts: dict[str, Any]) -> int:
        """Load the newest whole checkpoint into the parts.

        A damaged one is renamed bad-..., and the next older one is taken.

        Args:
            parts: As in `save`.

        Returns:
            The step it was written after; 0 where there is none.

        Raises:
            CheckpointError: All are damaged, they cannot be read, or the run was another one.
        """
        choice: tuple[str | None, str | None] = (None, None)
        if self.process.rank == 0:
            try:
                _remove_leftovers(self.folder)
                choice = (self._choose(), None)
            except (CheckpointError, OSError) as error:
                choice = (None, str(error))
        name, problem = broadcast_object(choice)
        if problem:
            raise CheckpointError(problem)
        if name is None:
            return 0
        best = read_state(self.folder / name).get("best") or {}
        if "name" not in best or (self.folder / best["name"]).is_dir():
            self.best = best
        elif self.process.rank == 0:
            self.warn(f"{best['name']}, the best checkpoint so far, is gone; the next becomes it")
        return load_parts(self.folder / name, parts)

    def _choose(self) -> str | None:
        names = checkpoint_names(self.folder)
        for name in reversed(names):
            damage = damage_of(self.folder / name)
            if damage is None:
                self._same_run(name)
                return name
            self.warn(f"checkpoint {name} is damaged ({damage}); renamed bad-{name}")
            os.replace(self.folder / name, self.folder / f"bad-{name}-{uuid.uuid4().hex[:6]}")
        if names:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged (now bad-...); start in a new run "
                "directory, or restore an undamaged copy"
            )
        return None

    def _same_run(self, name: str) -> None:
        stored = read_state(self.folder / name)["identity"]
        if any(same_run(stored, each, self.defaults) for each in (self.identity, *self.also)):
            self.identity = stored  # a run keeps the digest that it began with
        else:
            ours, theirs = ({k: i[k] for k in i if k != "digest"} for i in (self.identity, stored))
            differ = differences(theirs, ours)
            raise CheckpointError(f"{self.folder.parent} holds a run with other settings: {differ}")

    def _write(self, step: int, states: dict[str, Any], metadata: dict[str, Any]) -> None:
        # a temporary folder: what a kill leaves is never taken for a checkpoint
        name = f"step-{step:08d}"
        self.folder.mkdir(exist_ok=True)  # not its parent: a run that vanished is an error
        _remove_leftovers(self.folder)
        temporary = self.folder / f"{_TEMPORARY}{name}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir()
        try:
            model = {k: v.detach().contiguous() for k, v in states.pop("model").items()}
            save_file(model, temporary / "model.safetensors")
            fault("checkpoint.model")
            with open(temporary / "parts.pt", "wb") as file:  # whose errors name what is wrong
                torch.save(tree_map(_alone, states), file)
            state = {"step": step, "identity": self.identity, **metadata}
            (temporary / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
            manifest = {p.name: [p.stat().st_size, sha256_of(p)] for p in temporary.iterdir()}
            fault("checkpoint.before_manifest")
            (temporary / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
            for path in [*temporary.iterdir(), temporary]:
                sync(path)

            # whole and on disk: it becomes visible at once
            fault("checkpoint.before_rename")
            if (self.folder / name).exists():  # written before a restart from an older one
                _remove(self.folder / name)
            os.replace(temporary, self.folder / name)
            sync(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fault("checkpoint.before_prune")
        with suppress(OSError):  # a hint, and the checkpoint is there
            write_atomically(self.folder / "latest", name)
            if "best" in metadata:
                write_atomically(self.folder / "best", str(metadata["best"].get("name", "")))
        names = checkpoint_names(self.folder)
        bests = [best_of(self.folder / each) for each in names[-self.keep :]]
        kept = {best.name for best in bests if best is not None}
        for old in names[: -self.keep]:
            if old not in kept:
                _remove(self.folder / old)


def _alone(value: Any) -> Any:
    """Copy a tensor that is a part of a larger memory: all of that would be saved with it."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def checkpoint_names(folder: Path) -> list[str]:
    """List the names of the checkpoints in RUN/checkpoints, oldest first.

    Raises:
        CheckpointError: It is no folder.
    """
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file where a folder should be; move it away")
    names = [p.name for p in folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(names, key=_step_of)


def describe_newest(run_dir: Path) -> str:
    """Say, in a message about a run that ended, which checkpoint it left."""
    names = checkpoint_names(run_dir / "checkpoints")
    return f"the last checkpoint is {names[-1]}" if names else "no checkpoint was written yet"


class BestOf(NamedTuple):
    """The best checkpoint of a run, and which of its weights were."""

    name: str
    weights: Weights


def best_of(checkpoint: Path) -> BestOf | None:
    """Read which checkpoint was the best when this one was written; None: none was kept."""
    with suppress(CheckpointError):
        best = read_state(checkpoint).get("best")
        if isinstance(best, dict) and isinstance(best.get("name"), str):
            return BestOf(best["name"], best.get("weights", "trained"))
    return None


def latest(run_dir: Path) -> Path:
    """Find a run's newest checkpoint, whole.

    Raises:
        CheckpointError: There is none, or the newest is damaged, or was and the run has not come
            as far again: older weights are never taken for the run's last.
    """
    folder = run_dir / "checkpoints"
    names = checkpoint_names(folder)
    aside = [p.name for p in folder.glob("bad-step-*")] if names else []
    lost = [name for name in aside if _step_of(name) > _step_of(names[-1])]
    if not names:
        raise CheckpointError(f"{run_dir} holds no checkpoint; has it saved one yet?")
    damage = damage_of(folder / names[-1])
    if damage is None and not lost:
        return folder / names[-1]
    found = (
        f"newest checkpoint, {names[-1]}, is damaged ({damage})"
        if damage
        else f"last checkpoint was damaged ({max(lost, key=_step_of)}), and it has not come as far "
        "again"
    )
    older = [name for name in reversed(names) if damage_of(folder / name) is None]
    other = f", or take an older one by --checkpoint {older[0]}" if older else ""
    raise CheckpointError(
        f"{folder}: the {found}; resume the run with its own `sslpipe train` command, restore a "
        f"copy{other}"
    )


def named(run_dir: Path, name: str) -> Path:
    """Find one checkpoint of a run, whole.

    Args:
        run_dir: The run directory.
        name: As the folder is called, "step-00000012"; fewer zeros, or the number alone, will do.

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
    damage = damage_of(folder / full)
    if damage is not None:
        others = [each for each in names if damage_of(folder / each) is None]
        raise CheckpointError(
            f"{folder / full} is damaged ({damage}); whole ones: {', '.join(others) or 'none'}"
        )
    return folder / full


def damage_of(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint's files, by size and sha256; None: they are whole."""
    try:
        manifest = read_object(checkpoint / "MANIFEST.json")
    except UserError:
        return "no readable MANIFEST.json"
    if set(manifest) != FILES:
        return "MANIFEST.json does not list its files"
    for name, entry in manifest.items():
        path = checkpoint / name
        size, sha256 = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or has another size than in MANIFEST.json"
        if sha256_of(path) != sha256:
            return f"{name} has another sha256 than in MANIFEST.json"
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint whose files are whole.

    Raises:
        CheckpointError: It was not written by this program.
    """
    path = checkpoint / "state.json"
    try:
        state = read_object(path)
    except UserError as error:
        raise CheckpointError(str(error)) from error
    identity = state.get("identity")
    if not isinstance(identity, dict) or not {"digest", "recipe", "index_sha256"} <= set(identity):
        raise CheckpointError(f"{path} says nothing of its run; was it written by this program?")
    return state


def load_parts(checkpoint: Path, parts: dict[str, Any]) -> int:
    """Load a checkpoint's files into the parts. Returns the step it was written after."""
    states = torch.load(checkpoint / "parts.pt", map_location="cpu", weights_only=True)
    states["model"] = load_file(checkpoint / "model.safetensors")
    for name, part in parts.items():
        load_whole_state(part, states[name])
    return int(read_state(checkpoint)["step"])


def _step_of(name: str) -> int:
    match = re.search(r"step-(\d+)", name)
    return int(match[1]) if match else -1


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a kill in between leaves none that looks whole."""
    doomed = checkpoint.with_name(f"{_TEMPORARY}{checkpoint.name}-{uuid.uuid4().hex[:8]}")
    os.replace(checkpoint, doomed)
    _delete(doomed)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a kill left of checkpoints that were being written, or removed."""
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        _delete(leftover)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _of_the_disk(error: BaseException) -> BaseException:
    """Return the OSError behind an error: torch's own says only that a file came out too short."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error
