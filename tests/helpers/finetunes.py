"""Whole fine-tunings on the tiny data set, in 1 to 4 real gloo processes."""

from pathlib import Path

import sslpipe.api
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.export.load import load_backbone
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.run import Run
from tests.helpers import runs
from tests.helpers.runs import at_each_step, feed_equal_views, train_over

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
precision = "fp32"
[run]
keep = "last"
log_steps = 1
save_steps = 3
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    return runs.write_recipe(folder, text)


def finetune_in_rank(
    process: Rank, recipe: str, data: str, run_dir: str, backbone: str | None, *overrides: str
):
    """What each process runs; records the ids and the drawn numbers of every step.

    In float64 the views are made image by image, as `feed_equal_views` says.
    """
    seen, forward = [], FusedViews.forward
    if "optim.precision=fp64" in overrides:
        feed_equal_views()
    original = at_each_step(
        lambda step, batch: seen.append((batch.ids.clone(), batch.plan.draws.boxes.clone()))
    )
    try:
        given = None if backbone is None else load_backbone(backbone)
        loaded, index = load_recipe(recipe, overrides), load_index(data)
        done = sslpipe.api.train(loaded, index, run_dir, init=given)
    finally:
        FusedViews.forward, Run.steps = forward, original
    return done, seen


def finetune_over(
    world: int, recipe: Path, data: Path, run_dir: Path, *overrides: str, backbone=None
):
    given = backbone and str(backbone)
    return train_over(world, recipe, data, run_dir, given, *overrides, by=finetune_in_rank)


def several_in_rank(process: Rank, jobs):
    """Several fine-tunings one after another in one process group: fewer processes to start."""
    return [finetune_in_rank(process, *job) for job in jobs]
