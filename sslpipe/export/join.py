"""Several backbones side by side as one, and one backbone for images of another size."""

import math
from collections.abc import Sequence
from typing import Any

from sslpipe.augment.eval_view import EvalView, JoinedView
from sslpipe.data.image_type import ImageType, hex_colour
from sslpipe.errors import UserError
from sslpipe.export.model import FrozenBackbone
from sslpipe.export.saved import PART_NOTES
from sslpipe.models.backbones import (
    JOIN,
    Backbone,
    JoinedBackbone,
    backbone_settings,
    build_backbone,
)
from sslpipe.models.limits import check_side, within_memory
from sslpipe.models.transfer import copy_weights


def join(models: Sequence[FrozenBackbone], source: str) -> FrozenBackbone:
    """Put backbones side by side: the features of each with length 1, one after the other.

    Each sees images through its own view. Weights are shared, not copied; `source` names them, A+B.

    Raises:
        UserError: One is whitened or a join; two are one network and view; or they take images of
            other channels or depths.
    """
    image_type = _image_type(models, source)
    models = [model.seeing(image_type) for model in models]
    known: list[tuple[str, dict[str, Any]]] = []
    for model in models:
        if model.whitening is not None:
            raise UserError(
                f"{source}: {model.name} has a whitening, and joins are of features as they are; "
                "name what it was made from, and `sslpipe whiten` an export of the join"
            )
        if model.config.is_join:
            raise UserError(f"{source}: {model.name} is a join already; name its parts")
        identity = model.config.weights_sha256, model.view.config()
        if identity in known:
            raise UserError(f"{source} joins {model.name} with itself; give each another size")
        known.append(identity)
    sides = [model.view.crop_px for model in models]
    backbone = JoinedBackbone([model.backbone for model in models], sides)
    parts = [
        {**model.config.backbone.model_dump(), "crop_px": model.config.crop_px} for model in models
    ]
    component = backbone_settings(JOIN, {"parts": parts})
    init = {
        "source": source,
        "format": JOIN,
        "notes": [_describe(model) for model in models],
        PART_NOTES: [model.notes for model in models],
    }
    name = " + ".join(f"{model.name} {model.view.crop_px} px" for model in models)
    view = JoinedView([model.view for model in models])
    facts = {"name": name, "init": init}
    return FrozenBackbone.of(backbone, component, view, facts, image=models[0].config.image)


def _image_type(models: Sequence[FrozenBackbone], source: str) -> ImageType:
    """Return the images that all see: of the first one's range, on the background that is known."""
    image_type = models[0].image_type
    backgrounds = {model.image_type.background for model in models}
    known = sorted(filter(None, backgrounds))
    if len(known) > 1:
        colours = " and ".join(map(hex_colour, known))
        raise UserError(
            f"{source}: parts put transparent images on {colours}, and a join sees one image; "
            "name parts of one background"
        )
    return image_type.on(known[0]) if known and image_type.is_rgb8 else image_type


def first_part(joined: FrozenBackbone) -> FrozenBackbone:
    """Return the first part of a join alone; its facts have its `part`, a sentence."""
    assert isinstance(joined.backbone, JoinedBackbone)
    assert isinstance(joined.view, JoinedView)
    settings = dict(joined.config.backbone.arguments["parts"][0])
    kind = settings.pop("kind")
    del settings["crop_px"]
    part = next(joined.backbone.network.children())
    assert isinstance(part, Backbone)
    init = joined.config.facts.get("init", {})
    facts = {"part": init.get("notes", ["the first"])[0], "notes": joined.notes_of_parts()[0]}
    view = next(joined.view.views.children())
    assert isinstance(view, EvalView)
    component = backbone_settings(kind, settings)
    return FrozenBackbone.of(part, component, view, facts, image=joined.config.image)


def _describe(model: FrozenBackbone) -> str:
    """Name a part in one sentence for reports and the model card."""
    facts = model.config.facts
    init = model.config.facts.get("init")
    source = init.get("source") if isinstance(init, dict) and "digest" not in facts else None
    return (
        f"{source or model.name}: {model.num_features} features of {model.view.crop_px} px, "
        f"weights sha256 {model.config.weights_sha256[:16]}"
    )


def at_size(model: FrozenBackbone, crop_px: int, source: str) -> FrozenBackbone:
    """Build an export's or run's backbone anew for images of `crop_px`; `source` names it.

    The view keeps its share of the image; a vision transformer's position table is resized.

    Raises:
        UserError: It is whitened, or the network cannot take images of this size.
    """
    if crop_px == model.view.crop_px:
        return model
    if model.whitening is not None or model.config.is_join:
        has = "is a join" if model.whitening is None else "has a whitening"
        raise UserError(f"{source}: it {has}, which is for its own images; leave @{crop_px} out")
    check_side(source, crop_px)
    view = model.view.config()
    # the crop keeps its share of the image
    resize_px = max(crop_px, math.floor(crop_px * view["resize_px"] / view["crop_px"]))
    sized = EvalView.from_config({**view, "crop_px": crop_px, "resize_px": resize_px})
    component = model.config.backbone
    with within_memory("backbone"):
        backbone = build_backbone(component, crop_px=crop_px)
    copy_weights(model.backbone, backbone, component.kind, source)
    facts = model.config.facts
    metadata = {key: facts[key] for key in facts if not key.startswith("evaluation")}
    return FrozenBackbone.of(backbone, component, sized, metadata, image=model.config.image)
