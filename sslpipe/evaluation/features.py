"""Features of whole splits by a backbone and by what it has to beat, ready for the suite."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, embed
from sslpipe.evaluation.feature_files import CLASSES, load_embeddings
from sslpipe.files import json_text, parse_object
from sslpipe.models.backbones import Backbone, build_backbone
from sslpipe.registry.schema import SparseSettings

PIXELS_PX = 32  # larger images are reduced: 3 x 224 x 224 numbers a sample are no baseline
# numbers of a split's pixels, above which sides are halved: searching them, and their principal
# axes, must not take longer than the networks; but not below LEAST_PX
MOST_PIXELS = 2**26
LEAST_PX = 8


def pixel_features(
    splits: Sequence[Split],
    view: EvalView,
    options: EmbedOptions = EmbedOptions(),  # noqa: B008 (immutable)
    *,
    left_out: list[str] | None = None,
) -> list[Embeddings]:
    """Flatten each split's pixels, in [0, 1] at the view's size: (N, C S S) features.

    Views larger than PIXELS_PX are made again at that size, and sides halved while a split has more
    than MOST_PIXELS numbers, which `left_out` gets a sentence on. Where red, green and blue are
    equal in every image of all splits, one channel is kept: cosines do not change. The rest
    is as in `embed`.
    """
    count = len(splits[0].image_type.channels)
    scale = min(1.0, PIXELS_PX / view.crop_px)
    raw = EvalView(
        crop_px=round(view.crop_px * scale),
        resize_px=round(view.resize_px * scale),
        mean=(0.0,) * count,
        std=(1.0,) * count,
    )
    options = replace(options, canvas_px=options.canvas_px or view.canvas_px)
    splits_rows = [embed(nn.Flatten(), raw, split, options) for split in splits]
    side = raw.crop_px
    pictures = [rows.features.view(len(rows.ids), count, side, side) for rows in splits_rows]
    if count == 3 and all(bool((each == each[:, :1]).all()) for each in pictures):
        pictures = [each[:, :1] for each in pictures]
    most = max(pictures, key=torch.Tensor.numel)
    while side // 2 >= LEAST_PX and most.numel() * side**2 > MOST_PIXELS * raw.crop_px**2:
        side //= 2
    if side < raw.crop_px:
        pictures = [adaptive_avg_pool2d(each, side) for each in pictures]
        if left_out is not None:
            left_out.append(
                f"pixels at {raw.crop_px} px: of {len(most):,} images they are more than "
                f"{MOST_PIXELS:,} numbers; measured at {side} px"
            )
    return [
        rows._replace(features=each.flatten(1).contiguous())
        for rows, each in zip(splits_rows, pictures, strict=True)
    ]


def random_backbone(component: SparseSettings, crop_px: int, seed: int = 0) -> Backbone:
    """Build the recipe's network with weights drawn from `seed`; torch's generator stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(component, crop_px=crop_px)


def saved_embeddings(
    file: Path, identity: Mapping[str, Any], split: Split, *, whole: bool = True
) -> Embeddings | None:
    """Read what `embed_to_file` wrote earlier, where it is just what would be computed now.

    `identity` is all that decides the features, as the file carries it. None without a file, or
    where it differs in anything; with `whole`, also where samples could not be decoded.
    """
    if not file.is_file():
        return None
    rows, metadata = load_embeddings(file)
    left_out = metadata.pop("left_out", None)
    if metadata != parse_object(json_text(identity)):
        return None
    if whole and (
        left_out != []
        or not torch.equal(rows.ids, torch.arange(len(split)))
        or not torch.equal(rows.labels, torch.from_numpy(split.labels))
    ):
        return None
    return rows


def data_metadata(split: Split) -> dict[str, Any]:
    """Return what a features file or eval.json says of the data set and the split."""
    index = split.index
    return {"data": index.manifest.name, "data_sha256": index.sha256, "split": split.name}


def named_classes(split: Split) -> dict[str, Any]:
    """Return the names of a split's labels, by which features of two data sets are compared.

    Empty where a label has no name, or two have the same, as ImageNet's two of "crane".
    """
    names = split.index.manifest.classes
    tells = len({*names}) == len(names) > int(split.labels.max(initial=0))
    return {CLASSES: list(names)} if tells else {}
