"""Folders of transformers and open_clip: their own models, with their own processors' views.

The libraries are asked for what they alone know: how keys of other versions are renamed, and how a
model's images are resized and normalised. Files are read here, nothing of them is run.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.errors import RecipeError, WeightsError, listed, one_line, shown
from sslpipe.models.backbones import backbone_settings
from sslpipe.models.libraries import image_config, model_class, open_clip_library
from sslpipe.registry.schema import SparseSettings
from sslpipe.weights.source import MOST_JSON_BYTES, check_file
from sslpipe.weights.views import StatedView, unknown_view

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
OPEN_CLIP = "open_clip_config.json"
_OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
_OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

MOST = 2**20  # of any size in a config.json
MOST_OFF = 0.05  # of an image's spread: what other interpolations and rounding to bytes change


def transformers_component(config: Config, what: str) -> SparseSettings:
    """Name the backbone of a config.json of transformers. Raises: WeightsError."""
    try:
        return backbone_settings("transformers", {"config": image_config(config)})
    except RecipeError as error:
        raise WeightsError(f"{what}: {error}") from error
    except Exception as error:  # its configurations check themselves in every way
        raise WeightsError(
            f"{what}: its config.json is not one of transformers: {one_line(str(error), 200)}"
        ) from error


def transformers_tensors(
    component: SparseSettings, tensors: Tensors, what: str
) -> tuple[Tensors, list[str]]:
    """Give tensors the keys of this version's model, as transformers' own loader does.

    Returns:
        Tensors with the keys of the backbone's network; and the keys of the file that the image
        model has not: of a text tower, of a head.

    Raises:
        WeightsError: The model has tensors that the file lacks, or of other shapes.
    """
    one, settings = model_class(component.arguments["config"])
    try:
        with _quietly(), torch.random.fork_rng(devices=[]):
            model, report = one.from_pretrained(
                None,
                config=settings,
                state_dict=dict(tensors),
                ignore_mismatched_sizes=True,  # they are listed, and refused below
                output_loading_info=True,
            )
    except Exception as error:  # its hundreds of models fail in every way
        raise WeightsError(f"{what}: transformers: {one_line(str(error), 200)}") from error
    dense = hasattr(getattr(model, "pooler", None), "dense")
    missing = [*map(str, report["missing_keys"])]
    # of a pooler that is omitted, and of pretext tasks
    spare = [k for k in missing if "mask_token" in k or (dense and k.startswith("pooler."))]
    lacking = [key for key in missing if key not in spare]
    lacking += [str(key[0]) for key in report["mismatched_keys"]]
    if lacking:
        raise WeightsError(
            f"{what} does not fit {one.__name__} of transformers: {len(lacking)} tensors are "
            f"missing or of another shape, {listed([*map(repr, lacking)], 3)}"
        )
    state = model.state_dict()
    pooler = [key for key in state if dense and key.startswith("pooler.")]
    kept = {f"model.{key}": tensor for key, tensor in state.items() if key not in pooler}
    left = [key for key in pooler if key not in spare]
    return kept, [*map(str, report["unexpected_keys"]), *left]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the report that transformers logs of each loading: its own is in the result."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def folder_view(folder: Path, what: str, config: Config) -> StatedView:
    """Read the view of a folder of transformers, from its image processor if it has one.

    The view's images are compared with the processor's own: a note says where they are others,
    or where it makes none of an image alone.

    Args:
        folder: Of the model.
        what: Names it in messages.
        config: Of the model.

    Raises:
        WeightsError: transformers refuses the processor, or no view makes its images.
    """
    if (channels := config.get("num_channels", 3)) != 3:
        raise WeightsError(
            f"{what} has num_channels = {shown(channels)}, and of transformers' models those of "
            "red, green and blue alone are read; name other weights"
        )
    files = [folder / name for name in PROCESSORS if (folder / name).exists()]
    for file in files:
        check_file(file, MOST_JSON_BYTES)
    if not files:
        return transformers_view(what, config, {})
    from transformers import AutoImageProcessor

    small = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    picture = (255 * F.interpolate(small, (240, 320), mode="bilinear"))[0].byte()  # (3, H, W)
    try:
        with _quietly():
            processor = AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        settings: Config = processor.to_dict()
    except Exception as error:  # as above
        raise WeightsError(
            f"{what}: transformers refuses its {files[0].name}: {one_line(str(error), 200)}"
        ) from error
    view = transformers_view(what, config, settings)
    name = type(processor).__name__
    try:
        with _quietly():
            images = processor(picture, return_tensors="pt")["pixel_values"]
    except Exception:  # it takes something beside an image, or a library that is not installed
        note = f"images of views are not compared with those of its {name}, which makes none alone"
        return replace(view, notes=(*view.notes, note))
    ours = view.make(what, None)[0](picture[None], torch.tensor([picture.shape[1:]]))
    same = images.shape == ours.shape and (images - ours).abs().mean() <= MOST_OFF * ours.std()
    note = f"its {name} resizes and crops otherwise than views here, so that features differ"
    return view if same else replace(view, notes=(*view.notes, note))


def open_clip_component(config: Config, what: str) -> SparseSettings:
    """Name the backbone of an open_clip_config.json. Raises: WeightsError."""
    model = config.get("model_cfg")
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vision, dict):
        raise WeightsError(f"{what}: its {OPEN_CLIP} has no model_cfg with a vision_cfg")
    settings = {"embed_dim": model.get("embed_dim"), "vision": vision}
    if model.get("quick_gelu"):
        settings["quick_gelu"] = True
    return backbone_settings("open_clip/custom", settings)


def open_clip_view(component: SparseSettings, config: Config) -> StatedView:
    """Read the view of an open_clip model; `config`: its open_clip_config.json, or {}."""
    stated = config.get("preprocess_cfg") or {}
    vision = component.arguments.get("vision")
    notes: list[str] = []
    if vision is None:
        name = component.kind.partition("/")[2]
        vision = open_clip_library().get_model_config(name)["vision_cfg"]
        stated, notes = _usual_in_open_clip(name)
    mode = str(stated.get("resize_mode", "shortest"))
    if mode not in ("shortest", "squash"):
        notes.append(f"images are cropped in the centre, not by the model's {mode!r}")
    return StatedView(
        size=_whole({"image_size": 224, **vision}, "image_size"),
        mean=stated.get("mean", _OPENAI_MEAN),
        std=stated.get("std", _OPENAI_STD),
        interpolation=str(stated.get("interpolation", "bicubic")),
        squash=mode == "squash",
        notes=tuple(notes),
    )


def _usual_in_open_clip(name: str) -> tuple[Config, list[str]]:
    """Return how open_clip makes images for its weights of a model, as no file of weights says it.

    Also notes: which weights those are, and that a model of the same tensors computes otherwise.
    """
    library = open_clip_library()
    tags = library.list_pretrained_tags_by_model(name)
    keys = ("mean", "std", "interpolation", "resize_mode")
    ways: list[dict[str, Any]] = []
    for tag in tags:
        release = library.get_pretrained_cfg(name, tag)
        ways.append({key: release[key] for key in keys if key in release})
    usual = max(ways, key=ways.count, default={})
    same = [tag for tag, way in zip(tags, ways, strict=True) if way == usual]
    others = [tag for tag, way in zip(tags, ways, strict=True) if way != usual]
    notes = []
    if same:
        unlike = f", not as for {listed(others, 3)}" if others else ""
        notes.append(f"images are made as for open_clip's weights {listed(same, 3)}{unlike}")
    if f"{name}-quickgelu" in library.list_models():
        notes.append(
            "it computes with GELU, and weights of OpenAI, and those trained from them, with "
            f"QuickGELU, which no tensor shows: name those open_clip/{name}-quickgelu@FILE"
        )
    return usual, notes


def _whole(config: Config, key: str) -> int:
    """Read a positive number, or two equal ones of height and width."""
    sides = config[key] if isinstance(config[key], list) else [config[key]]
    if len({*sides}) != 1 or type(sides[0]) is not int or not 0 < sides[0] <= MOST:
        raise ValueError(
            f"{key} = {shown(config[key])} is not a number, or two equal ones, from 1 to {MOST:,}"
        )
    return int(sides[0])


def transformers_view(what: str, config: Config, stated: Config) -> StatedView:
    """Read the view of a model of transformers; `stated`: its image processor, if any."""
    if not stated:
        return unknown_view(_whole({"image_size": 224, **config}, "image_size"))
    size = _sides(stated.get("size", 224))
    crop = _sides(stated.get("crop_size", 224))
    cropped = bool(stated.get("do_center_crop", False))
    share = stated.get("crop_pct")  # of ConvNeXt: a crop below 384 px, squashed from there on
    if share is not None and size < (384,):
        cropped = True
        crop = size
        size = (int(size[0] / float(share)),)
    if str(stated.get("image_processor_type")).startswith("Levit") and len(size) == 1:
        size = (int(256 / 224 * size[0]),)
    if stated.get("do_flip_channel_order"):
        raise WeightsError(
            f"{what}: its image processor gives blue, green, red, and views here red, green, blue; "
            "name other weights"
        )
    mean, std = _mean_and_std(stated)
    return StatedView(
        size=crop[0] if cropped else size[0],
        resize=size[0],
        mean=mean,
        std=std,
        interpolation=_PIL[int(stated.get("resample", 2))],
        squash=len(size) == 2 or (share is not None and not cropped),
    )


def _mean_and_std(stated: Config) -> tuple[list[float], list[float]]:
    """Return mean and std, of pixels in [0, 1], that do what an image processor does to bytes.

    It computes (bytes * factor - offset - mean) / std; where EfficientNet has "include_top", that
    is divided by std once more.
    """
    normalised = bool(stated.get("do_normalize", True))
    mean, std = (
        [each] if isinstance(each, int | float) else list(each)
        for each in ((stated["image_mean"], stated["image_std"]) if normalised else (0.0, 1.0))
    )
    factor = float(stated.get("rescale_factor", 1 / 255)) if stated.get("do_rescale", True) else 1.0
    offset = 1.0 if stated.get("rescale_offset") else 0.0
    scale = 255 * factor
    if math.isclose(scale, 1):
        scale = 1.0
    divided = [each * each if stated.get("include_top") else each for each in std]
    return [(each + offset) / scale for each in mean], [each / scale for each in divided]


_PIL = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by PIL's numbers


def _sides(value: Any) -> tuple[int, ...]:
    """Take a size of transformers: (shorter side,), or (height, width)."""
    if not isinstance(value, Mapping):
        return (int(value), int(value))
    if "shortest_edge" in value:
        return (int(value["shortest_edge"]),)
    height = int(value["height"])
    width = int(value["width"])
    if height != width:
        raise ValueError(f"images of {height} x {width}, and only square ones are made")
    return height, width
