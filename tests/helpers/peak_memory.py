"""Estimated and measured memory of a training, in a process of its own: two numbers on stdout.

python -m tests.helpers.peak_memory RECIPE DATA RUN_DIR [OVERRIDE]...
"""

import json
import sys
import threading
from pathlib import Path

import torch

import sslpipe.planning.memory
from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.portable import resident_bytes
from sslpipe.recipe.reading import load_recipe


def main(recipe: str, data: str, run_dir: str, *overrides: str) -> None:
    """Train, watch the resident set from the moment the estimate is made, print both in bytes."""
    torch.set_num_threads(1)
    seen, original, over = {}, sslpipe.planning.memory.check_memory, threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen["peak"] = max(seen["peak"], resident_bytes())

    def begin(memory, *rest):
        seen["peak"] = resident_bytes()
        seen["estimate"] = memory.total
        threading.Thread(target=watch, daemon=True).start()
        return original(memory, *rest)

    sslpipe.planning.memory.check_memory = begin
    sslpipe.planning.memory.free_memory_bytes = lambda: 0  # else a start has nothing to count
    train(load_recipe(recipe, overrides), load_index(data), Path(run_dir))
    over.set()
    print(json.dumps([seen["estimate"], seen["peak"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
