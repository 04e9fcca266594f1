"""16-bit images of five channels, a run on them, and small recipes for others."""

import copy
import io
from pathlib import Path

import numpy as np

from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.knn import knn_results
from sslpipe.recipe.reading import parse_recipe
from tests.helpers.runs import command_line
from tests.helpers.shards import write_tar

RECIPE = {
    "name": "channels",
    "seed": 0,
    "steps": 30,
    "data": {"batch_size": 32, "num_streams": 8, "canvas_px": 32, "shuffle_window": 8},
    "augment": {"kind": "fused", "preset": "microscopy", "crop_px": 24, "noise_std": 0.0},
    "backbone": {"kind": "small_resnet", "widths": [16, 32]},
    "projector": {"hidden_dim": 32, "out_dim": 16},
    "loss": {"kind": "nt_xent", "temperature": 0.2},
    "optim": {"kind": "adamw", "peak_lr": 3e-3, "warmup_steps": 3, "precision": "fp32"},
    "run": {"save_steps": 15},
}
FIVE = ("--channels", "a,b,c,d,e")


def recipe(**changes):
    return parse_recipe(copy.deepcopy(RECIPE) | changes, "a test")


def sslpipe_run(*words: object) -> str:
    """What a command prints on stdout; raises where it fails."""
    return command_line(*map(str, words), status=0).stdout


def spots(kind: int, seed: int) -> np.ndarray:
    """(28, 28) in 0..1: few large or many small spots."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:28, :28]
    count, radius = ((3, 5.0), (20, 1.2))[kind]
    places = rng.uniform(2, 26, (count, 2))
    near = (np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * radius**2)) for a, b in places)
    return sum(near).clip(0, 1)


def accuracy(model, data: Path) -> float:
    """kNN of the test split by the train split."""
    index = load_index(data)
    matched, splits = model.matched(index.split("train"), index.split("test"))
    bank, queries = (embed(matched.backbone, matched.view, split) for split in splits)
    (result,) = knn_results(bank, queries, k=(5,))
    return result.value


def run_on_five(folder: Path) -> Path:
    """A run on images of five channels, whose classes differ in channels b and e.

    Writes img/class0/0.npy ..., the data sets data and, of another range, wide, and run.
    """
    rng = np.random.default_rng(0)
    members = {"train": [], "test": []}
    for number in range(96):
        kind = number % 2
        path = folder / "img" / f"class{kind}" / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = rng.normal(3000, 100, (28, 28, 5))
        image[..., [1, 4]] += 2000 * spots(kind, number)[..., None]
        file = io.BytesIO()
        np.save(file, image.astype(np.uint16))
        path.write_bytes(file.getvalue())
        own = members["test" if number >= 72 else "train"]
        own += [(f"{number:04}.npy", file.getvalue()), (f"{number:04}.cls", b"%d" % kind)]
    for split, each in members.items():
        write_tar(folder / "tars" / f"{split}-000000.tar", *each)
    sslpipe_run("shards", "index", folder / "tars", "--out", folder / "data", *FIVE)
    wide = (*FIVE, "--range", "0,9000")
    sslpipe_run("shards", "index", folder / "tars", "--out", folder / "wide", *wide)
    train(recipe(), folder / "data", folder / "run")
    return folder
