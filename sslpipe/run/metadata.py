"""What a run directory says of the run, for those who come without recipe and shards."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sslpipe.data.index import DatasetIndex
from sslpipe.recipe.base import RunRecipe
from sslpipe.registry.plugins import requested
from sslpipe.run.launch import environment
from sslpipe.run.records import write_description


def describe_run(
    run_dir: Path,
    recipe: RunRecipe,
    index: DatasetIndex,
    index_sha256: str,
    precision: str,
    world: int,
    init: Mapping[str, Any] | None = None,
) -> None:
    """Write recipe.json, data.json and run.json: what export and report need, without the shards.

    Args:
        run_dir: The run directory.
        recipe: Resolved.
        index: The data set; its splits are written as sample counts.
        index_sha256: Of it, as the checkpoints record it.
        precision: fp64, fp32, bf16 or fp16.
        world: Processes.
        init: Of the weights that the run starts from; None: random ones.

    Raises:
        UserError: A file cannot be written.
    """
    manifest = index.manifest.model_dump(mode="json", exclude={"splits"})
    manifest["samples"] = {
        name: sum(shard.samples for shard in shards)
        for name, shards in index.manifest.splits.items()
    }
    manifest["index_sha256"] = index_sha256
    run = {"precision": precision, "world": world, "environment": environment()}
    run |= {"plugins": requested()} if requested() else {}
    program = Path(sys.argv[0]).name
    if program in ("sslpipe", "__main__.py") and "train" in sys.argv:
        # recipe and overrides as they were given; of a URL, name and query may hold a secret
        run["command"] = [_without_secrets(word) for word in sys.argv[1:]]
    trees = {
        "recipe.json": recipe.model_dump(mode="json"),
        "data.json": manifest,
        "run.json": run if init is None else {**run, "init": dict(init)},
    }
    write_description(run_dir, trees)


def _without_secrets(word: str) -> str:
    """Leave out what may be secret of a URL: user and password, and the query."""
    word = re.sub(r"(://[^?]*\?).*", r"\1...", word)
    return re.sub(r"://[^/?#@]*@", "://...@", word)
