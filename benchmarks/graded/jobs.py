"""The trainings of the study: a job each, in processes that run one after another."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from benchmarks.graded.table import FLATTENED
from benchmarks.trainings import QUIET, RECIPES, search, side_by_side
from sslpipe.api import train
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.holdout import as_overrides, untrained_ids
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.subsets import FEW_HELD_OUT, suggest_holdout
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, embed
from sslpipe.evaluation.feature_files import save_embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import FrozenBackbone, load_run
from sslpipe.export.named import open_init
from sslpipe.export.start import Start
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.parts import build_model
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics

RANDOM, IMAGENET = "random weights", "ImageNet weights"  # what the others start from
JOIN, JOIN_PX = "ImageNet weights, two sizes", (96, 160)
TAUGHT = "taught by two sizes"
LABELLED = "labels of the train classes"
MY_IMAGES_DIET = "my_images_diet"
QUEUE = ("loss.kind=moco", "loss.queue_rows=2048", "momentum.start=0.97")
DIET = (  # with its paper's decay
    *("loss={kind='diet'}", "optim.weight_decay=0.05"),
    *("projector.num_layers=1", "projector.batchnorm=false", "projector.out_dim=IMAGES"),
)
TEACHER = (  # docs/objectives.md
    *("loss={kind='distill'}", "teacher.features=TEACHER"),
    *("projector.num_layers=0", "projector.out_dim=1280", "tune.projector_first_steps=0"),
)
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> its start, settings of the recipe
    "NT-Xent": (RANDOM, ()),
    "DCL": (RANDOM, ("loss.kind=dcl",)),
    "queue (MoCo)": (RANDOM, QUEUE),
    "DIET": (RANDOM, DIET),
    MY_IMAGES_DIET: (RANDOM, ()),  # the recipe of that name
    "continued": (IMAGENET, ()),
    TAUGHT: (IMAGENET, TEACHER),
    LABELLED: (IMAGENET, ()),  # of LABELLED_RECIPE
}
FORMS = ("as it is", "flattened")
RECIPE = {RANDOM: "my_images_small", IMAGENET: "adapt_mobile", MY_IMAGES_DIET: MY_IMAGES_DIET}
RECIPE_STEPS = 400  # the latter's
LABELLED_RECIPE = "metric/my_images_mobile"
CANVAS_PX, WEIGHTS_FILE = 256, "lite0.pth"
TIMED = {"cuda": 20, "cpu": 3}  # steps of a log line; the third one is the time


class Job(NamedTuple):
    """A training and its scores, or those of a start: steps = 0; timed: the seconds of a step."""

    method: str
    name: str
    seed: int
    steps: int
    seconds: float = 0.0
    setting: str = ""
    timed: bool = False

    @property
    def row(self) -> str:
        return f"{self.method}, {self.seconds:g} s" if self.seconds else self.method


class Place(NamedTuple):
    """Where jobs run."""

    folder: Path
    device: str
    settings: tuple[str, ...]


# --- processes


def workers(count: int, device: str) -> ProcessPoolExecutor:
    context, threads = get_context("spawn"), 2 if device == "cuda" else 1
    return ProcessPoolExecutor(count, mp_context=context, initializer=begin, initargs=(threads,))


def begin(threads: int) -> None:
    """Prepare a process that trains one run after another; what they print goes nowhere."""
    torch.set_num_threads(threads)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def outcomes(place: Place, jobs: list[Job], count: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs side by side, and yield each as it ends; a process that dies ends all of them."""
    with workers(count, place.device) as pool:
        futures = {pool.submit(attempt, place, job): job for job in jobs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], {"error": "a process died"}


def attempt(place: Place, job: Job) -> dict[str, Any]:
    """Run a job; whatever it raises is its outcome, and the others go on."""
    try:
        return run(place, job)
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        return {"error": f"{type(error).__name__}: {text[:300]}"}
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        if place.device == "cuda":
            torch.cuda.empty_cache()


def run(place: Place, job: Job) -> dict[str, Any]:
    """Train and score: {"step_s"} of a timed job, else seconds, what was kept, and "scores"."""
    begin_s = time.perf_counter()
    index = index_of(place, job.name)
    recipe = read_recipe(place, job, index)
    init = weights(place.folder) if start_of(job.method) == IMAGENET else None
    batch = (recipe.data if isinstance(recipe, Recipe) else recipe.sampler).batch_size
    outcome: dict[str, Any] = {"batch": batch}
    if job.timed:
        return outcome | {"step_s": step_seconds(recipe, index, batch)}
    if job.method == RANDOM:
        assert isinstance(recipe, Recipe)
        crop_px = int(recipe.augment.arguments["crop_px"])
        backbone = build_model(recipe, crop_px).backbone  # the one that `train` makes of the seed
        view = Start("random", None).view(recipe, index, crop_px).config()
    elif job.method in (IMAGENET, JOIN):
        assert init is not None
        backbone, view = init.backbone, init.view.config()
    else:
        with TemporaryDirectory() as folder:
            train(recipe, index, Path(folder), init=init)
            model = load_run(Path(folder))
        backbone, view = model.backbone, model.view.config()
        outcome["kept_step"] = model.config.facts["step"]
    trained_s = time.perf_counter()
    sides = JOIN_PX if job.method == JOIN else (view["crop_px"],)
    seen, tested = (
        embedded(place, job.name, part, backbone, view, sides) for part in ("train", "test")
    )
    flattened = fit_whitening(seen, power=FLATTENED)(tested)
    outcome["scores"] = dict(zip(FORMS, map(search, (tested, flattened)), strict=True))
    scored_s = time.perf_counter()
    times = {"train_s": trained_s - begin_s, "score_s": scored_s - trained_s}
    return outcome | {name: round(seconds, 2) for name, seconds in times.items()}


def step_seconds(recipe: Recipe | FinetuneRecipe, index: DatasetIndex, batch: int) -> float:
    """Time a step by the third log line; of a run whose views grow, the mean over its steps."""
    share: float = recipe.augment.arguments.get("half_size_share", 0.0)
    if share:  # the second line is of halved views then, the third of whole ones
        augment = recipe.augment.model_copy(update={"half_size_share": 2 / 3})
        recipe = recipe.model_copy(update={"augment": augment})
    with TemporaryDirectory() as folder:
        train(recipe, index, Path(folder))
        seconds = [batch / line["images_per_s"] for line in read_metrics(Path(folder))]
    return share * seconds[1] + (1 - share) * seconds[2]


# --- what runs and starts are made of


def start_of(method: str) -> str:
    return METHODS[method][0] if method in METHODS else RANDOM if method == RANDOM else IMAGENET


def read_recipe(place: Place, job: Job, index: DatasetIndex) -> Recipe | FinetuneRecipe:
    """Read the recipe of a job, its batch no larger than the images that it trains on."""
    start, split = start_of(job.method), index.split("train")
    own = [f"seed={job.seed}", f"run.device={place.device}", "run.num_workers=2"]
    own += ["run.save_steps=1000000", f"run.log_steps={max(1, job.steps // 3)}"]
    if job.method == LABELLED:
        own += [f"sampler.classes_per_batch={min(16, len(np.unique(split.labels)))}"]
        own += ["augment.crop_px=64"]  # evaluated at 96 px, as the other rows
        own += [*filter(None, [job.setting]), *place.settings]
        labelled = load_recipe(RECIPES / f"{LABELLED_RECIPE}.toml", own)
        assert isinstance(labelled, FinetuneRecipe)
        return labelled
    own += [f"steps={job.steps or 1}", "run.cache=device"]
    if place.device == "cuda":
        own += ["optim.precision=bf16"]
    if start == RANDOM:
        own += [*QUIET[:-1], f"optim.warmup_steps={job.steps // 10}"]  # a tenth, as the recipe's
    else:
        own += as_overrides(suggest_holdout(split.labels, FEW_HELD_OUT)[0]).split()
        own += [f"run.monitor_steps={min(50, max(1, job.steps // 4))}"]
    facts = {"IMAGES": str(len(split)), "TEACHER": f"'{teacher_file(place, job.name)}'"}
    for text in METHODS.get(job.method, ("", ()))[1]:
        key, _, value = text.partition("=")
        own.append(f"{key}={facts.get(value, value)}")
    own += [*filter(None, [job.setting]), *place.settings]
    path = RECIPES / f"{RECIPE.get(job.method, RECIPE[start])}.toml"
    recipe = load_recipe(path, own)
    assert isinstance(recipe, Recipe)
    images = len(split) - len(untrained_ids(recipe, split))
    if images < recipe.data.batch_size:
        batch = 2 ** (images.bit_length() - 1)
        own += [f"data.batch_size={batch}", f"data.num_streams={min(batch, 16)}"]
        recipe = load_recipe(path, own)
        assert isinstance(recipe, Recipe)
    return recipe


@cache
def weights(folder: Path) -> FrozenBackbone:
    """Load the ImageNet weights, for images of the side at which the recipe evaluates."""
    recipe = load_recipe(RECIPES / f"{RECIPE[IMAGENET]}.toml", [])
    assert isinstance(recipe, Recipe)
    model = open_init(recipe, f"timm/tf_efficientnet_lite0@{folder / WEIGHTS_FILE}")
    assert model is not None
    return model


def index_of(place: Place, name: str) -> DatasetIndex:
    return load_index(place.folder / name / "dataset.json")


def embedded(
    place: Place,
    name: str,
    split: str,
    backbone: nn.Module,
    view: dict[str, Any],
    sides: Sequence[int],
) -> Embeddings:
    """Embed the whole shorter side of a split's images; of several sides unit rows side by side."""
    rows = index_of(place, name).split(split)
    backbone = backbone.to(place.device).to(memory_format=torch.channels_last)
    views = [EvalView(side, side, view["mean"], view["std"]) for side in sides]
    options = EmbedOptions(canvas_px=CANVAS_PX, device=place.device)
    return side_by_side([embed(backbone, each, rows, options) for each in views])


def teacher_file(place: Place, name: str) -> Path:
    return (place.folder / "teacher" / f"{name}.safetensors").resolve()


def teach(place: Place, name: str) -> None:
    """Write the features of JOIN's train images, unless they are there."""
    path = teacher_file(place, name)
    if not path.exists():
        start = weights(place.folder)
        rows = embedded(place, name, "train", start.backbone, start.view.config(), JOIN_PX)
        sha256 = index_of(place, name).sha256
        save_embeddings(path, rows, {"data_sha256": sha256, "split": "train", "source": JOIN})
