"""Whole fine-tunings on the tiny data set, in 1 to 4 real gloo processes."""

from pathlib import Path

import sslpipe.finetune
from sslpipe.data.index import load_index
from sslpipe.distributed import Shard
from sslpipe.finetune_recipe import load_finetune_recipe
from sslpipe.frozen import load_backbone
from tests.processes import run_processes

RECIPE = """
name = "tiny-metric"
steps = 8
[data]
canvas_px = 16
validation_classes = 2
[sampler]
classes_per_batch = 4
images_per_class = 3
buffer = 48
num_streams = 2
shuffle_window = 6
[augment]
kind = "fused"
preset = "simclr_small"
crop_px = 16
[backbone]
kind = "small_resnet"
widths = [8, 16]
[embedding]
dim = 8
[loss]
kind = "arcface"
scale = 8.0
[optim]
kind = "adamw"
peak_lr = 0.01
[run]
log_steps = 1
save_steps = 3
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def finetune_in_rank(
    shard: Shard, recipe: str, data: str, run_dir: str, backbone: str | None, *overrides: str
):
    """What each process runs; records the ids and the drawn numbers of every step."""
    seen = []
    original = sslpipe.finetune.draws

    def recording(seed, epoch, ids, sizes, specs):
        drawn = original(seed, epoch, ids, sizes, specs)
        seen.append((ids.clone(), drawn.boxes.clone()))
        return drawn

    sslpipe.finetune.draws = recording
    try:
        given = None if backbone is None else load_backbone(backbone)
        loaded = load_finetune_recipe(recipe, overrides)
        done = sslpipe.finetune.finetune(loaded, load_index(data), Path(run_dir), given)
    finally:
        sslpipe.finetune.draws = original
    return done, seen


def finetune_over(
    world: int, recipe: Path, data: Path, run_dir: Path, *overrides: str, backbone=None
):
    arguments = (str(recipe), str(data), str(run_dir), backbone and str(backbone), *overrides)
    return run_processes(finetune_in_rank, world, *arguments)


def several_in_rank(shard: Shard, jobs):
    """Several fine-tunings one after another in one process group: fewer processes to start."""
    return [finetune_in_rank(shard, *job) for job in jobs]
