"""The checkpoints of one run: of which run they are, what they hold, and which is the best."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sslpipe.distributed import Rank
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.identity import digest, identity
from sslpipe.run.best import Best
from sslpipe.run.checkpoint import Checkpointer


class RunCheckpoints:
    """Saves and restores the parts of a run; called by all ranks.

    Attributes:
        best: Which evaluation was the best, as far as the restored checkpoint knows.

    Args:
        run_dir: The run directory.
        recipe: Resolved.
        index_sha256s: Of the data set, as `identity.index_sha256s` has them.
        order_version: Of the order's algorithm; it, recipe and data make the digest.
        process: This process.
        parts: Name -> what has a state_dict; "model" is the bare model; None is skipped.
        metadata: Plain values stored beside each checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        recipe: RunRecipe,
        index_sha256s: Sequence[str],
        order_version: int,
        process: Rank,
        parts: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> None:
        keys = [(recipe, sha256, order_version) for sha256 in index_sha256s]
        ours, *others = [{"digest": digest(*key), **identity(*key)} for key in keys]
        self._config, self._metadata = recipe.run, metadata
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._checkpointer = Checkpointer(
            run_dir,
            keep=recipe.run.keep_checkpoints,
            identity=ours,
            also=others,
            defaults=recipe.ADDED_LATER,
            process=process,
            warn=lambda text: print(f"warning: {text}", flush=True),
        )
        self.best = Best(recipe.run)

    @property
    def index_sha256(self) -> str:
        """Of the data set, as the run records it."""
        return str(self._checkpointer.identity["index_sha256"])

    def restore(self) -> int:
        """Load the newest checkpoint into the parts.

        Returns:
            The step it was written after: 0 where there is none.

        Raises:
            CheckpointError: The run was another one, or all its checkpoints are damaged.
        """
        step = self._checkpointer.restore(self._parts)
        self.best = Best(self._config, self._checkpointer.best)
        return step

    def save(self, step: int, *, needed: bool) -> None:
        """Write a checkpoint, the best one so far where `best` wants it; see `Checkpointer.save`.

        Args:
            step: Optimizer steps done.
            needed: No other save comes after this one: failing is an error.
        """
        metadata = {**self._metadata, **self.best.state()}
        self.best.saved(self._checkpointer.save(step, self._parts, metadata, needed=needed))
