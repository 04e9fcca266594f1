"""A backbone with its view and its config: what an export holds, and what a run starts from."""

from typing import Annotated, Any, Literal, Self

import numpy as np
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.image_type import RGB8, Colour, ImageType
from sslpipe.errors import UserError, one_line
from sslpipe.files import Stored
from sslpipe.models.backbones import JOIN, Backbone, backbone_settings
from sslpipe.models.state import module_sha256
from sslpipe.recipe.sections import BACKBONE, Pixels, Positive
from sslpipe.registry.schema import Kinds, Settings, SparseSettings

PART_NOTES = "part_notes"  # key of a join's facts["init"]: the notes of each part


class Config(Settings):
    """The keys of config.json; unknown ones are an error, as a newer format has a higher version.

    A sha256 of weights is `module_sha256`'s.
    """

    format_version: Literal[1] = 1
    # builds the same network, with the stem of the training
    backbone: Annotated[SparseSettings, Kinds(*BACKBONE.names_of_tables, recorded=True)]
    crop_px: Pixels  # side of the images that the network was built for
    num_features: Positive
    view: dict[str, Any]  # arguments of EvalView, through which the network saw images
    weights_sha256: str
    facts: dict[str, Any]  # for people: run, recipe, digest, data, classes seen, evaluation
    whitening_sha256: str | None = None  # of the file that `sslpipe whiten` adds
    # what images the network was trained on; None: 8-bit RGB, alpha dropped
    image: ImageType | None = None

    @property
    def is_join(self) -> bool:
        """Whether it is several networks side by side; see `sslpipe.export.join`."""
        return self.backbone.kind == JOIN


class HubConfig(Stored):
    """A config.json of the timm and hf formats, in part."""

    sslpipe: Config


class SavedBackbone(nn.Module):
    """A backbone with what an export writes beside it; in eval mode, without gradient.

    Args:
        backbone: Normalised images -> features.
        view: Images of any size -> normalised images of the network's size.
        config: What an export writes beside the weights.
    """

    def __init__(self, backbone: Backbone, view: EvalView, config: Config) -> None:
        super().__init__()
        self.backbone = backbone
        self.view = view
        self.config = config
        self.num_features = backbone.num_features
        self.eval().requires_grad_(False)

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        component: SparseSettings,
        view: EvalView,
        facts: dict[str, Any],
        image: ImageType | None = None,
    ) -> Self:
        """Wrap a network, and say in the config what it is.

        Args:
            backbone: The network with its weights.
            component: What it was built from.
            view: The view that its features need.
            facts: `Config.facts`.
            image: What images the network was trained on; None: 8-bit RGB.
        """
        # resolved, so that a later rule for "auto" changes nothing
        stem = {} if backbone.stem is None else {"stem": backbone.stem}
        config = Config(
            image=unusual(image),
            backbone=backbone_settings(component.kind, {**component.arguments, **stem}),
            crop_px=view.crop_px,
            num_features=backbone.num_features,
            view=view.config(),
            weights_sha256=module_sha256(backbone),
            facts=facts,
        )
        return cls(backbone, view, config)

    def update_config(self, **changes: Any) -> None:
        """Replace keys of `config`, which may be shared with other backbones."""
        self.config = self.config.model_copy(update=changes)

    @property
    def name(self) -> str:
        """For messages: the run's name, or the architecture."""
        return str(self.config.facts.get("name", self.config.backbone.kind))

    @property
    def notes(self) -> list[str]:
        """What was decided, or is not known, of weights that another program wrote; [] of ours.

        Of a join those of its parts, each once.
        """
        if self.config.is_join:
            parts = self.notes_of_parts()
            return [*dict.fromkeys(note for notes in parts for note in notes)]
        init = self.config.facts.get("init")
        if not isinstance(init, dict) or "digest" in self.config.facts:
            return []
        notes = init.get("notes")
        if not isinstance(notes, list) or init.get("format") == "sslpipe":
            return []
        return [f"{self.name}: {one_line(str(note))}" for note in notes]

    def notes_of_parts(self) -> list[list[str]]:
        """Return the `notes` of each part of a join, in their order."""
        parts = self.config.backbone.arguments["parts"]
        init = self.config.facts.get("init")
        noted = init.get(PART_NOTES) if isinstance(init, dict) else None
        if not isinstance(noted, list) or len(noted) != len(parts):  # trained further, say
            return [[] for _ in parts]
        return [
            [one_line(str(note)) for note in notes] if isinstance(notes, list) else []
            for notes in noted
        ]

    @property
    def image_type(self) -> ImageType:
        """What images it takes. Raises: UserError for weights of others with other channels."""
        if self.config.image is None and self.backbone.channels != len(RGB8.channels):
            raise UserError(
                f"{self.name} sees {self.backbone.channels} channels, and nothing says which; "
                "start a training on data of as many from it (`sslpipe train --init`)"
            )
        return self.config.image or RGB8

    def seeing(self, image_type: ImageType) -> Self:
        """Return the backbone with a view that allows for another range. Raises: UserError."""
        own_type = self.image_type
        if own_type.is_rgb8 and image_type.is_rgb:  # of any depth, and on their background
            background = image_type.background if image_type.is_rgb8 else own_type.background
            return self if background == own_type.background else self.on(background)
        if own_type == image_type:
            return self
        if (own_type.channels, own_type.dtype) != (image_type.channels, image_type.dtype):
            raise UserError(
                f"{self.name} takes images of {own_type}, and these are of {image_type}; "
                "train a network on them (`sslpipe train --init` makes its first layer fit), or "
                "give images of its kind"
            )
        # its units are a * theirs + b, and so are its mean and std
        low, theirs_low, high, theirs_high = (
            np.array(ends)
            for ends in (own_type.low, image_type.low, own_type.high, image_type.high)
        )  # (C,) each
        a = (theirs_high - theirs_low) / (high - low)
        b = (theirs_low - low) / (high - low)

        def moved(view: dict[str, Any]) -> dict[str, Any]:
            mean, std = (np.array(view[key]) for key in ("mean", "std"))
            return {**view, "mean": ((mean - b) / a).tolist(), "std": (std / a).tolist()}

        config = self.view.config()
        if "views" in config:  # of a join
            config["views"] = [moved(each) for each in config["views"]]
        try:
            view = EvalView.from_config(moved(config))
        except ValueError as error:
            raise UserError(
                f"the range of these images is too far from that of {self.name}: {error}; build "
                "them with its --range"
            ) from error
        seen = self.config.model_copy(update={"image": unusual(image_type)})
        return self._like(view, seen).to(self.view.mean.device)

    def _like(self, view: EvalView, config: Config) -> Self:
        """Return the same network with another view and config."""
        return type(self)(self.backbone, view, config)

    def on(self, background: Colour | None) -> Self:
        """Return the backbone that puts transparent parts of images on another background."""
        image = self.image_type.on(background)
        config = self.config.model_copy(update={"image": unusual(image)})
        return self._like(self.view, config)


def unusual(image: ImageType | None) -> ImageType | None:
    """Return what a Config says of the images that a network takes: None for 8-bit RGB."""
    return None if image == RGB8 else image
