"""Estimated and measured memory of a training, in a process of its own: two numbers on stdout.

python -m tests.helpers.peak_memory RECIPE DATA RUN_DIR [OVERRIDE]...
"""

import json
import sys
import threading
from pathlib import Path

import torch

import sslpipe.run.memory
from sslpipe.data.index import load_index
from sslpipe.metric_learning.finetune import finetune
from sslpipe.portable import resident_bytes
from sslpipe.pretrain import pretrain
from sslpipe.recipe import is_finetune, load_recipe
from sslpipe.recipe.reading import read_tree


def main(recipe: str, data: str, run_dir: str, *overrides: str) -> None:
    """Train, watch the resident set from the moment the estimate is made, print both in bytes."""
    torch.set_num_threads(1)
    seen, original, over = {}, sslpipe.run.memory.check_memory, threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen["peak"] = max(seen["peak"], resident_bytes())

    def begin(memory, *rest):
        seen["peak"] = resident_bytes()
        seen["estimate"] = memory.total
        threading.Thread(target=watch, daemon=True).start()
        return original(memory, *rest)

    sslpipe.run.memory.check_memory = begin
    kind = finetune if is_finetune(read_tree(recipe, overrides)) else pretrain
    kind(load_recipe(recipe, overrides), load_index(data), Path(run_dir))
    over.set()
    print(json.dumps([seen["estimate"], seen["peak"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
