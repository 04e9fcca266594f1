"""The parts that train to an end: accuracy, beside peers of the same steps and beside the start."""

import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.gpu.common import Bench, Figures, SkippedError
from benchmarks.gpu.runs import RECIPES, TINY, bare_encoder, free_accelerator, read_recipe
from benchmarks.graded.data import TUNING
from benchmarks.graded.jobs import (
    FORMS,
    IMAGENET,
    LABELLED,
    RECIPE_STEPS,
    WEIGHTS_FILE,
    Job,
    Place,
    outcomes,
)
from benchmarks.graded.table import METRICS, SETS
from sslpipe.api import train
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import load_recipe
from sslpipe.report.suite import suite
from sslpipe.run.log import read_metrics
from sslpipe.sharding.build import read_samples, write_shards
from sslpipe.sharding.samples import Cut
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import Layout
from tools.datasets import scattered_idx

EPOCHS, IMAGES, BATCH, HELD_OUT = 40, 60_000, 512, 500
DEMO_IMAGES = Path(__file__).parents[2] / "assets" / "fashion-mnist-10k"
NT_XENT, DIET, SUPERVISED = "NT-Xent", "DIET", "supervised"
DIET_SETTINGS = (  # of recipes/my_images_diet.toml
    *("loss={kind='diet'}", "projector.num_layers=1", "projector.batchnorm=false"),
    "projector.out_dim=0",
    "optim={kind='adamw', peak_lr=2e-3, weight_decay=0.05, precision='bf16'}",
)
# one view an image, so twice the images: as many passes of the network a step
SUPERVISED_SETTINGS = (
    *("loss={kind='softmax'}", "embedding={normalize=false}", "tune.loss_lr=1.0"),
    "optim={kind='adamw', peak_lr=2e-3, weight_decay=0.05, precision='bf16'}",
)
CLASSES = 10
MEASURES = ("kNN", "linear")
SEEDS, WORKERS = (0, 1, 2), 12


def speedrun(bench: Bench) -> Figures:
    """ResNet-18, 40 epochs of scattered Fashion-MNIST: kNN and linear probe of the test file."""
    index = scattered(bench)
    steps = bench.size(EPOCHS * (IMAGES - HELD_OUT) // BATCH, 4)
    bench.keep({"steps": steps})
    for name, recipe in networks(bench, steps).items():
        found = run(bench, recipe, index)
        bench.keep({f"{name}: {what}": value for what, value in found.items()})
    nt_xent = networks(bench, steps)[NT_XENT]
    assert isinstance(nt_xent, Recipe)
    alone = bare_encoder(bench, nt_xent, nt_xent.optim.precision)["images/s"]
    speed = bench.kept[f"{NT_XENT}: images/s"]
    assert isinstance(alone, float)
    assert isinstance(speed, float)
    return bench.kept | {"of the bare encoder's speed %": 100 * speed / alone}


def networks(bench: Bench, steps: int) -> dict[str, Recipe | FinetuneRecipe]:
    """NT-Xent, DIET and a supervised network: equal steps and passes, views, network, precision."""
    epoch_steps = max(1, steps // EPOCHS)
    shared = [f"steps={steps}", f"run.device={bench.device.type}", "run.save_steps=1000000"]
    shared += [f"optim.warmup_steps={steps // 10}", f"run.log_steps={epoch_steps}"]
    own = [*shared, *bench.size(("data.num_streams=64",), TINY)]
    own += [f"run.monitor_steps={epoch_steps}", f"data.holdout={bench.size(HELD_OUT, 20)}"]
    labelled = [*shared, "run.monitor_steps=0"]
    if bench.tiny:
        labelled += [f"sampler.classes_per_batch={CLASSES}", "sampler.images_per_class=2"]
        precision = "optim.precision='fp32'"
    else:
        big = ["backbone={kind='torchvision/resnet18'}", "run.cache='device'"]
        big += [f"run.num_workers={os.cpu_count()}"]
        own += [*big, f"data.batch_size={BATCH}"]
        labelled += [*big, f"sampler.images_per_class={2 * BATCH // CLASSES}"]
        labelled += [f"sampler.classes_per_batch={CLASSES}", "sampler.buffer=16384"]
        precision = "optim.precision='bf16'"
    metric = RECIPES / "metric" / "fashion_mnist_unseen.toml"
    supervised = load_recipe(metric, [*SUPERVISED_SETTINGS, *labelled, precision])
    assert isinstance(supervised, FinetuneRecipe)
    return {
        NT_XENT: read_recipe("fashion_mnist", [*own, precision]),
        DIET: read_recipe("fashion_mnist", [*DIET_SETTINGS, *own, precision]),
        SUPERVISED: supervised,
    }


def run(bench: Bench, recipe: Recipe | FinetuneRecipe, index: DatasetIndex) -> Figures:
    """Train and measure: seconds, speed, the held-out kNN over seconds, the test file's scores."""
    bench.forget_memory()
    with TemporaryDirectory() as folder:
        begin_s = time.perf_counter()
        try:
            train(recipe, index, folder)
        finally:
            free_accelerator()
        figures: Figures = {"seconds": time.perf_counter() - begin_s}
        lines = read_metrics(Path(folder))
        speeds = [line["images_per_s"] for line in lines if "images_per_s" in line]
        figures["images/s"] = statistics.median(speeds)
        watched = read_metrics(Path(folder), "eval")
        if curve := {
            line["step"]: line["holdout_knn"] for line in watched if "holdout_knn" in line
        }:
            figures["kNN of the held out, by seconds"] = ", ".join(
                f"{figures['seconds'] * step / recipe.steps:.0f} s {100 * value:.1f}"
                for step, value in curve.items()
            )
        report = suite(
            folder, index, baselines=False, leakage=False, against=(), device=bench.device.type
        )
    for row in report["rows"]:
        if row["features"] == "ssl" and not row["whitened"] and row["column"] in MEASURES:
            low, high = (f"{100 * end:.1f}" for end in row["interval95"])
            figures[f"{row['column']} %"] = f"{100 * row['value']:.1f} [{low}, {high}]"
    return figures | bench.peak_gib()


def scattered(bench: Bench) -> DatasetIndex:
    """The scattered images in shards, made once; small: 20 of each class of the demo's."""
    out = bench.folder / bench.size("fashion-mnist", "fashion-mnist-tiny")
    if not (out / "dataset.json").exists():
        images = bench.folder / "scattered"
        if bench.tiny:
            images = bench.folder / "scattered-tiny"
            scattered_idx.main([str(DEMO_IMAGES), str(images), "--per-class", "20"])
        if not images.exists():
            made = f"python -m tools.datasets.scattered_idx IDX_FOLDER {images}"
            raise SkippedError(f"{images} is not there: {made}")
        options = SourceOptions(root=images)
        layout = Layout(samples_per_shard=1024, max_shard_bytes=2**30)
        write_shards(
            out,
            read_samples("idx", options),
            layout,
            cut=Cut(test_fraction=bench.size(0.0, 0.5)),  # the demo's files are of one split
            workers=os.cpu_count() or 1,
        )
    return load_index(out / "dataset.json")


def labels(bench: Bench) -> Figures:
    """Recall@1 and MAP@R of new classes after the labelled recipe, three seeds, on ten sets."""
    graded = bench.folder / "graded"
    if not (graded / WEIGHTS_FILE).exists():
        made = f"python -m benchmarks.graded.data debian {graded} --jpeg-px 112"
        raise SkippedError(f"no {graded / WEIGHTS_FILE}: {made}, and Lite0's weights as this file")
    names = bench.size(SETS, TUNING[1:])
    place = Place(graded, bench.device.type, bench.size((), ("steps=2", "augment.crop_px=32")))
    jobs = [Job(IMAGENET, name, 0, 0) for name in names]
    jobs += [Job(LABELLED, name, seed, RECIPE_STEPS) for name in names for seed in SEEDS]
    scores: dict[str, list[float]] = {}
    for job, outcome in outcomes(place, jobs, bench.size(WORKERS, 2)):
        if "error" in outcome:
            raise RuntimeError(f"{job.name}, seed {job.seed}: {outcome['error']}")
        found = outcome["scores"][FORMS[0]].values
        for metric in METRICS:
            key = f"{job.name}: {metric} %, {job.method}"
            scores.setdefault(key, []).append(100 * float(np.mean(found[metric])))
    return {key: statistics.mean(values) for key, values in sorted(scores.items())}
