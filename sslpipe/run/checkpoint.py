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

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_map

from sslpipe.distributed import Rank, broadcast_object
from sslpipe.errors import CheckpointError
from sslpipe.faults import fault
from sslpipe.files import json_text
from sslpipe.portable import explain_file_error, file_error, sha256_of, sync, write_atomically
from sslpipe.recipe.identity import differences
from sslpipe.registry.plugins import describe_error
from sslpipe.run.checkpoint_files import (
    BestEntry,
    best_of,
    checkpoint_names,
    damage_of,
    read_state,
)

MAX_FAILED_SAVES = 3  # in a row; then the run stops
_TEMPORARY = ".tmp-"  # how folders begin that are not whole yet, or no more


@dataclass(eq=False)
class Checkpointer:
    """Saves and restores a run's parts; called by all ranks, written by rank 0."""

    run_dir: Path
    keep: int  # how many checkpoints stay, beside those that they name as the best
    identity: dict[str, Any]  # what must agree for a resume, as `run_identity` returns it
    process: Rank
    warn: Callable[[str], None]  # shows a message to the user
    best: BestEntry | None = field(
        init=False, default=None
    )  # what the restored state.json says of the best checkpoint

    def __post_init__(self) -> None:
        self.folder = self.run_dir / "checkpoints"
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
        if self.process.rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            try:
                self._write(step, states, metadata)
            except (OSError, RuntimeError, SafetensorError) as error:  # each says "full" its way
                failed = file_error(error)  # which torch's own words hide
                problem = describe_error(error)
                if failed is not None:
                    problem = explain_file_error(failed, self.folder)  # the disk to look at
            if not self.run_dir.is_dir():  # no later save can work
                problem = f"{self.run_dir} is gone: it was removed, or moved away"
                needed = True
        problem, needed = broadcast_object((problem, needed))
        if problem is None:
            self._failed_saves = 0
            return True
        self._failed_saves += 1
        message = f"the checkpoint of step {step} was not written ({problem})"
        if needed:
            raise CheckpointError(f"{message}; then resume with the same command")
        if self._failed_saves == MAX_FAILED_SAVES:
            raise CheckpointError(f"{message}, {MAX_FAILED_SAVES} times in a row")
        self.warn(f"{message}; the older ones stand, the next save tries again")
        return False

    def restore(self, parts: dict[str, Any]) -> int:
        """Load the newest whole checkpoint into the parts; damaged ones are set aside.

        Returns:
            The step it was written after; 0 where there is none.

        Raises:
            CheckpointError: All are damaged, they cannot be read, or the run was another one.
        """
        name = None
        problem = None
        if self.process.rank == 0:
            try:
                _remove_leftovers(self.folder)
                name = self._choose()
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = explain_file_error(error)
        name, problem = broadcast_object((name, problem))
        if problem:
            raise CheckpointError(problem)
        if name is None:
            return 0
        best = read_state(self.folder / name).best
        if best is None or best.name is None or (self.folder / best.name).is_dir():
            self.best = best
        elif self.process.rank == 0:
            self.warn(f"{best.name}, the best checkpoint so far, is gone; the next becomes it")
        return load_parts(self.folder / name, parts)

    def _choose(self) -> str | None:
        names = checkpoint_names(self.folder)
        for name in reversed(names):
            damage = damage_of(self.folder / name)
            if damage is None:
                stored = read_state(self.folder / name).identity
                if stored.digest == self.identity["digest"]:
                    return name
                differ = differences(stored.model_dump(), self.identity)
                raise CheckpointError(f"{self.run_dir} holds a run with other settings: {differ}")
            self.warn(f"checkpoint {name} is damaged ({damage}); renamed bad-{name}")
            os.replace(self.folder / name, self.folder / f"bad-{name}-{uuid.uuid4().hex[:6]}")
        if names:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged (now bad-...); start in a new run "
                "directory, or restore an undamaged copy"
            )
        return None

    def _write(self, step: int, states: dict[str, Any], metadata: dict[str, Any]) -> None:
        # a temporary folder: what a kill leaves is never taken for a checkpoint
        name = f"step-{step:08d}"
        if not self.run_dir.is_dir():  # a run that vanished is an error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.run_dir)
        self.folder.mkdir(exist_ok=True)
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
            (temporary / "state.json").write_text(json_text(state), encoding="utf-8")
            manifest = {p.name: [p.stat().st_size, sha256_of(p)] for p in temporary.iterdir()}
            fault("checkpoint.before_manifest")
            (temporary / "MANIFEST.json").write_text(json_text(manifest), encoding="utf-8")
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


def load_parts(checkpoint: Path, parts: dict[str, Any]) -> int:
    """Load a checkpoint's files into the parts. Returns the step it was written after."""
    states = torch.load(checkpoint / "parts.pt", map_location="cpu", weights_only=True)
    states["model"] = load_file(checkpoint / "model.safetensors")
    if states.keys() != parts.keys():
        raise CheckpointError(
            f"{checkpoint} holds the states of {', '.join(sorted(states))}, and this run has "
            f"{', '.join(sorted(parts))}: another version of sslpipe wrote it; resume with that "
            "one, or begin in another --run-dir"
        )
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return read_state(checkpoint).step


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
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
