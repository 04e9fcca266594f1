"""BACKBONES: a kind and its settings -> a network giving one feature vector an image.

A recipe names one by `kind`: "small_resnet", "torchvision/resnet18", "timm/vit_small_patch16_224".
What stands before the slash is the table's entry, what stands after it the architecture.
Built with random weights; `sslpipe.load_backbone` fills in those that others trained.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, ValidationError, field_validator
from torch import Tensor, nn

from sslpipe.data.image_type import MOST_CHANNELS
from sslpipe.errors import RecipeError, did_you_mean, shown
from sslpipe.models.channels import set_channels
from sslpipe.models.depths import DepthEmbedding, embed_depths, features_at
from sslpipe.models.libraries import open_clip_library, open_clip_network, transformers_network
from sslpipe.models.limits import small_enough
from sslpipe.models.pooling import set_pool
from sslpipe.models.small_resnet import make_small_resnet
from sslpipe.models.stems import Stem, StemSetting, set_stem
from sslpipe.portable import memory_is_short
from sslpipe.recipe.messages import explain_errors
from sslpipe.recipe.sections import BACKBONE, Positive, Width
from sslpipe.registry import Table
from sslpipe.registry.schema import KindSettings, Settings, SparseSettings, refusals

JOIN = "join"  # the kind of several backbones side by side; see export.join
MOST_PARTS = 16  # of a join
RGB_CHANNELS = 3
LARGEST_ARGUMENT = 65_536  # of timm, which makes lists as long as `depth` before any layer


class Backbone(nn.Module):
    """A network without its classifier: (B, C, H, W) normalised floats -> (B, num_features).

    State dict keys: `network.` and the keys of the architecture's own library.

    Args:
        network: (B, C, H, W) -> pooled features.
        num_features: F, the width of the pooled features, or of the embedding where there is one.
        stem: which first layers a ResNet got ("imagenet", "small_pool", "small"); None where the
            architecture has no choice. An export needs it to build the same network again.

    Attributes:
        embedding: a last linear layer of metric learning, or None; with taps a `DepthEmbedding`.
        taps: modules of the network whose outputs are embedded beside the pooled features.
        normalize: features have length 1.
        pool: how the network pools its last map of features, a name of `pooling.POOLS`; "avg" is
            what the architecture itself does.
        channels: C of its images.
    """

    def __init__(self, network: nn.Module, num_features: int, stem: Stem | None = None) -> None:
        super().__init__()
        self.network = network
        self.num_features = num_features
        self.stem = stem
        self.embedding: nn.Linear | DepthEmbedding | None = None
        self.taps: tuple[str, ...] = ()
        self.normalize = False
        self.pool: str = "avg"
        self.channels = RGB_CHANNELS

    def forward(self, images: Tensor) -> Tensor:
        """Compute features (B, num_features)."""
        features = self.raw(images)  # (B, F)
        return F.normalize(features, dim=1) if self.normalize else features

    def raw(self, images: Tensor) -> Tensor:
        """Compute features before they are normalised: what losses and heads take."""
        if isinstance(self.embedding, DepthEmbedding):
            branches: Tensor = self.embedding(features_at(self.network, self.taps, images))
            return branches
        features: Tensor = self.network(images)
        return features if self.embedding is None else self.embedding(features)


class JoinedBackbone(Backbone):
    """Several networks side by side, the features of each with length 1.

    Args:
        networks: One a part, in the order of their features.
        sides: Of each part's square images, in px.

    Raises:
        ValueError: They are not 2 to MOST_PARTS.
    """

    def __init__(self, networks: Sequence[Backbone], sides: Sequence[int]) -> None:
        if not 2 <= len(networks) <= MOST_PARTS:
            raise ValueError(f"a join is of 2 to {MOST_PARTS} parts, not {len(networks)}")
        width = sum(network.num_features for network in networks)
        super().__init__(nn.ModuleList(networks), width)
        self.channels = networks[0].channels
        self.sides = list(sides)

    def raw(self, images: Tensor) -> Tensor:
        """Compute features (B, num_features), each part's rows of length 1.

        Shape:
            images: (B, C, 1, sum of side^2), the parts' views side by side: see `JoinedView`.
        """
        pixels = torch.split(images.flatten(2), [side**2 for side in self.sides], dim=2)
        networks: Sequence[nn.Module] = list(self.network)  # type: ignore[call-overload]
        rows = []
        for network, side, part in zip(networks, self.sides, pixels, strict=True):
            view = part.reshape(-1, self.channels, side, side)
            view = view.contiguous(memory_format=torch.channels_last)
            rows.append(F.normalize(network(view), dim=1))  # (B, F)
        return torch.cat(rows, dim=1)


class BackboneSettings(SparseSettings):
    """What every backbone takes; a subclass says `kind`, its own settings, and makes the network.

    `kind` goes on after a slash where the family has several architectures: "timm/resnet18".
    """

    channels: Annotated[int, Field(ge=1, le=MOST_CHANNELS)] = RGB_CHANNELS
    """Of the images; the data decide, and it need not be given."""
    embedding_dim: Width | None = None
    """Width of a linear layer behind the pooled features; none: without it."""
    embedding_taps: list[str] = Field([])
    """Modules of the network whose outputs have an embedding layer each, beside the pooled
    features: HDC's branches, embedding_dim wide together."""
    normalize: bool = False
    """Whether features have length 1."""
    pool: Literal["avg", "max", "gem"] = "avg"
    """Of the last map of features; gem is the generalised mean with a learned power, at first 3.
    For networks that average."""
    pool_power: float | None = None
    """Sets the power of gem, instead of learning it; 2: L2 pooling."""

    @field_validator("kind")
    @classmethod
    def _names_an_architecture(cls, kind: str) -> str:
        family, _, architecture = kind.partition("/")
        if cls.example and not architecture:
            raise ValueError(
                f"{kind!r} names no architecture; write {family}/NAME, as in {cls.example!r}"
            )
        return kind

    @property
    def architecture(self) -> str:
        """What stands after the slash of `kind`."""
        return self.kind.partition("/")[2]

    def network(self, crop_px: int) -> Backbone:
        """Make the network for images of this side, with random weights from torch's generator.

        Raises:
            ValueError: The settings do not go together; RecipeError names the key.
        """
        raise NotImplementedError

    def build(self, **known: Any) -> Backbone:
        """Make the network, and what stands behind it. Args: crop_px: as `build_backbone`."""
        crop_px: int = known["crop_px"]
        backbone = self.network(crop_px)
        set_pool(backbone.network, self.pool, self.kind, self.pool_power)
        backbone.pool = self.pool
        if self.channels != RGB_CHANNELS:
            set_channels(backbone.network, self.channels, self.kind)
            backbone.channels = self.channels
        if self.embedding_taps:
            taps = self.embedding_taps
            backbone.embedding = embed_depths(
                backbone.network,
                taps,
                self.embedding_dim,
                channels=self.channels,
                crop_px=crop_px,
            )
            backbone.taps = tuple(taps)
            assert self.embedding_dim is not None
            backbone.num_features = self.embedding_dim
        elif self.embedding_dim is not None:
            backbone.embedding = nn.Linear(backbone.num_features, self.embedding_dim)
            backbone.num_features = self.embedding_dim
        backbone.normalize = self.normalize
        return backbone


class _Holder(Settings):
    backbone: Annotated[SparseSettings, BACKBONE]


def backbone_settings(kind: str, settings: Mapping[str, Any] | None = None) -> SparseSettings:
    """Return the settings of a network: `backbone_settings("small_resnet", {"widths": [4, 8]})`.

    Raises:
        RecipeError: There is no such kind, setting or value.
    """
    tree = {"backbone": {"kind": kind, **(settings or {})}}
    try:
        return _Holder.model_validate(tree).backbone
    except ValidationError as error:
        raise RecipeError(explain_errors(error, _Holder, "", tree)) from None


def build_backbone(settings: KindSettings, *, crop_px: int) -> Backbone:
    """Build the network that settings name, with random weights from torch's generator.

    Args:
        settings: the recipe's section, or `backbone_settings`.
        crop_px: side of the square images it will see; decides the stem of a ResNet whose recipe
            does not, and the position table of a vision transformer.

    Raises:
        RecipeError: an architecture or argument that does not exist, or too large a network.
    """
    with refusals("backbone", settings.kind), small_enough("[backbone]"):
        backbone: Backbone = settings.build(crop_px=crop_px)
        return backbone


class SmallResNetSettings(BackboneSettings):
    """A ResNet for small images on a CPU: one convolution as the stem, then one stage a width."""

    kind: Literal["small_resnet"] = "small_resnet"
    widths: Annotated[list[Width], Field(min_length=1)] = Field([32, 64, 128])
    """Channels of the stages; each but the first halves the resolution. The last is the number of
    features."""
    blocks: Positive = 1
    """Basic blocks in each stage."""
    stem_stride: Literal[2, 4] = 2
    """Of the stem, whose kernel is twice as wide; with 4 a step costs a quarter as much."""

    def network(self, crop_px: int) -> Backbone:
        return small_resnet(self.widths, self.blocks, self.stem_stride)


def small_resnet(
    widths: Sequence[int] = (32, 64, 128), blocks: int = 1, stem_stride: int = 2
) -> Backbone:
    """Build the backbone of `SmallResNetSettings`."""
    return Backbone(make_small_resnet(widths, blocks, stem_stride), widths[-1])


# torchvision's classes and the attribute that holds the classifier behind the pooled features
CLASSIFIERS = {
    "ConvNeXt": "classifier.2",
    "DenseNet": "classifier",
    "EfficientNet": "classifier",
    "MobileNetV2": "classifier",
    "MobileNetV3": "classifier",
    "RegNet": "fc",
    "ResNet": "fc",
    "ShuffleNetV2": "fc",
    "SwinTransformer": "head",
    "VisionTransformer": "heads",
}
# the same as prefixes of architecture names, so that an unknown one is refused before it is built
PREFIXES = (
    "convnext_",
    "densenet",
    "efficientnet_",
    "mobilenet_",
    "regnet_",
    "resnet",
    "resnext",
    "shufflenet_",
    "swin_",
    "vit_",
    "wide_resnet",
)


class TorchvisionSettings(BackboneSettings):
    """A classifier of torchvision with its head cut off, initialised as torchvision does."""

    kind: Annotated[str, Field(pattern="^torchvision(/.*)?$")]
    stem: StemSetting = "auto"
    """auto: what fits the images; only ResNets have the choice."""

    example: ClassVar[str] = "torchvision/resnet18"

    def network(self, crop_px: int) -> Backbone:
        import torchvision  # it imports torch's compiler: 2 s that other backbones do not need

        # the architecture and its arguments, refused before anything is built
        architecture = self.architecture
        names = torchvision.models.list_models(module=torchvision.models)
        known = [name for name in names if name.startswith(PREFIXES)]
        if architecture not in known:
            raise RecipeError(
                f"backbone.kind: torchvision has no usable {architecture!r}"
                f"{did_you_mean(architecture, known)}; usable: {', '.join(known)}"
            )
        arguments: dict[str, Any] = {}
        if architecture.startswith("vit_"):
            _check_patches(architecture, int(architecture.rpartition("_")[2]), crop_px)
            arguments["image_size"] = crop_px
        network = torchvision.models.get_model(architecture, weights=None, **arguments)

        # the classifier goes, the stem fits the images
        parent_name, _, head_name = CLASSIFIERS[type(network).__name__].rpartition(".")
        parent = network.get_submodule(parent_name)
        head = parent.get_submodule(head_name)
        linear = next(module for module in head.modules() if isinstance(module, nn.Linear))
        setattr(parent, head_name, nn.Identity())
        stem_name = set_stem(network, torchvision.models.ResNet, self.stem, crop_px)
        return Backbone(network, linear.in_features, stem_name)


class TimmSettings(BackboneSettings):
    """A model of timm with num_classes=0; further keys go to timm.create_model."""

    model_config = ConfigDict(extra="allow")
    kind: Annotated[str, Field(pattern="^timm(/.*)?$")]
    stem: StemSetting = "auto"
    """auto: what fits the images; only ResNets with timm's plain 7x7 stem have the choice."""

    example: ClassVar[str] = "timm/vit_small_patch16_224"

    def network(self, crop_px: int) -> Backbone:
        import timm  # takes seconds, and most runs have no use for it

        architecture = self.architecture
        arguments = dict(self.model_extra or {})  # of timm.create_model (drop_path_rate, ...)
        for key, reason in _NOT_OF_TIMM.items():
            if key in arguments:
                raise RecipeError(f"backbone.{key} cannot be set: the backbone {reason}")
        if arguments.get("global_pool") == "":
            raise RecipeError(
                "backbone.global_pool cannot be '': a backbone gives one feature vector"
            )
        for key, value in arguments.items():
            numbers = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(each, int) and each > LARGEST_ARGUMENT for each in numbers):
                raise RecipeError(
                    f"backbone.{key} = {shown(value)}: no network of timm takes a number over "
                    f"{LARGEST_ARGUMENT:,}"
                )
        if not timm.is_model(architecture):
            hint = did_you_mean(architecture, timm.list_models())
            raise RecipeError(f"backbone.kind: timm has no {architecture!r}{hint}")
        try:
            network = timm.create_model(architecture, num_classes=0, **arguments)
            if "img_size" not in arguments and isinstance(network, timm.models.VisionTransformer):
                _check_patches(architecture, network.patch_embed.patch_size[0], crop_px)
                network.set_input_size(img_size=(crop_px, crop_px))
            elif "img_size" not in arguments and _made_for_another_size(network, crop_px):
                network.set_input_size(img_size=(crop_px, crop_px))
            stem_name = set_stem(network, timm.models.ResNet, self.stem, crop_px)
            return Backbone(network, int(network.head_hidden_size), stem_name)
        except RecipeError:
            raise
        except Exception as error:  # its hundreds of constructors refuse arguments in every way
            if memory_is_short(error):
                raise
            raise RecipeError(
                f"[backbone] kind = 'timm/{architecture}' refuses {shown(arguments)}: "
                f"{type(error).__name__}: {error}"
            ) from error


_NOT_OF_TIMM = {
    "pretrained": "starts from random weights",
    "checkpoint_path": "starts from random weights",
    "num_classes": "has no classifier",
    "features_only": "gives one feature vector an image",
    "in_chans": "sees as many channels as backbone.channels says",
    "crop_px": "is made for augment.crop_px",
    "architecture": "is named by backbone.kind",
}


def _made_for_another_size(network: Any, crop_px: int) -> bool:
    """Whether a timm network takes images of one size only, another one, and can be changed."""
    config = network.pretrained_cfg
    other = config.get("input_size", (3, crop_px, crop_px))[-1] != crop_px
    return other and config.get("fixed_input_size", False) and hasattr(network, "set_input_size")


def _check_patches(architecture: str, patch_px: int, crop_px: int) -> None:
    if crop_px % patch_px:
        raise RecipeError(
            f"backbone.kind: {architecture!r} cuts images into {patch_px} px patches and the crops "
            f"have {crop_px} px; use a crop of {crop_px // patch_px * patch_px or patch_px} px"
        )


class TransformersSettings(BackboneSettings):
    """An image model of transformers."""

    kind: Literal["transformers"] = "transformers"
    config: dict[str, Any]
    """Its config.json."""

    def network(self, crop_px: int) -> Backbone:
        network, width = transformers_network(self.config, crop_px)
        return Backbone(network, width)


class OpenClipSettings(BackboneSettings):
    """The image tower of a model of open_clip: any where embed_dim and vision are given."""

    kind: Annotated[str, Field(pattern="^open_clip(/.*)?$")]
    embed_dim: int | None = None
    """Features; none: the architecture's."""
    vision: dict[str, Any] | None = None
    """`vision_cfg` of its configuration; none: the architecture's."""
    quick_gelu: bool = False
    """OpenAI's form of GELU."""

    example: ClassVar[str] = "open_clip/ViT-B-32"

    def network(self, crop_px: int) -> Backbone:
        embed_dim = self.embed_dim
        vision = self.vision
        quick_gelu = self.quick_gelu
        if vision is None or embed_dim is None:
            library = open_clip_library()
            config = library.get_model_config(self.architecture)
            if config is None:
                names = library.list_models()
                raise RecipeError(
                    f"backbone.kind: open_clip has no {self.architecture!r}"
                    f"{did_you_mean(self.architecture, names)}"
                )
            embed_dim = config["embed_dim"]
            vision = config["vision_cfg"]
            quick_gelu = quick_gelu or bool(config.get("quick_gelu"))
        network = open_clip_network(int(embed_dim or 0), vision or {}, quick_gelu, crop_px)
        return Backbone(network, int(embed_dim or 0))


class JoinSettings(BackboneSettings):
    """Several networks side by side; see export.join."""

    kind: Literal["join"] = "join"
    parts: list[dict[str, Any]] | None = None
    """Of each its kind, crop_px and settings."""

    def network(self, crop_px: int) -> Backbone:
        """Make the networks. Raises: RecipeError where there are none: a recipe names a join."""
        parts = self.parts
        if parts is None:
            raise RecipeError(
                "backbone.kind = 'join': several networks side by side are embedded with, not "
                "trained; name one of them"
            )
        if len(parts) > MOST_PARTS:  # before any is built
            raise ValueError(f"a join is of 2 to {MOST_PARTS} parts, not {len(parts)}")
        networks = []
        sides = []
        for tree in parts:
            side = tree.get("crop_px")
            if type(side) is not int or side < 1:
                raise RecipeError(f"backbone.parts.crop_px = {shown(side)} is no number of pixels")
            kind: Any = tree.get("kind")  # a missing one is refused like a wrong one
            arguments = {key: tree[key] for key in tree if key not in ("kind", "crop_px")}
            settings = backbone_settings(kind, arguments)
            if settings.kind == JOIN:
                raise ValueError("a part of a join is a join")
            networks.append(build_backbone(settings, crop_px=side))
            sides.append(side)
        return JoinedBackbone(networks, sides)


_BUILT_IN: dict[str, type[BackboneSettings]] = {
    JOIN: JoinSettings,
    "small_resnet": SmallResNetSettings,
    "open_clip": OpenClipSettings,
    "timm": TimmSettings,
    "torchvision": TorchvisionSettings,
    "transformers": TransformersSettings,
}
BACKBONES = Table("backbone", _BUILT_IN, "sslpipe.backbones")
