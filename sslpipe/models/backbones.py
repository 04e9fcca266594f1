"""BACKBONES: a kind and its settings -> a network giving one feature vector an image.

A recipe names one by `kind`: "small_resnet", "torchvision/resnet18", "timm/vit_small_patch16_224".
What stands before the slash is the table's entry, what stands after it the architecture.
Built with random weights; `sslpipe.load_backbone` fills in those that others trained.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, ValidationError, field_validator
from torch import Tensor, nn

from sslpipe.data.image_type import MOST_CHANNELS
from sslpipe.errors import RecipeError, did_you_mean, shown
from sslpipe.models.channels import set_channels
from sslpipe.models.libraries import open_clip_library, open_clip_network, transformers_network
from sslpipe.models.pooling import set_pool
from sslpipe.portable import memory_is_short
from sslpipe.recipe.base import BACKBONE, Positive
from sslpipe.recipe.messages import explain_errors
from sslpipe.registry import Table
from sslpipe.registry.schema import KindSettings, Settings, SparseSettings, refusals

JOIN = "join"  # the kind of several backbones side by side; see export.join
MOST_PARTS = 16  # of a join
RGB_CHANNELS = 3
Stem = Literal["imagenet", "small_pool", "small"]
STEMS: dict[str, str] = {
    "imagenet": "7x7 stride-2 convolution and max-pool: 1/4 of the resolution",
    "small_pool": "3x3 stride-1 convolution and max-pool: 1/2 of the resolution",
    "small": "3x3 stride-1 convolution, no max-pool: full resolution",
}


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


class DepthEmbedding(nn.Module):
    """Embed what a network gives at several depths, a linear layer each, side by side.

    These are the branches of a hard-aware deeply cascaded embedding; `HDCLoss` trains them.

    Args:
        widths: Features at each depth.
        dim: Of all layers together; each has its share.

    Shape:
        (B, width) of each depth -> (B, dim).

    Source:
        Yuan et al. 2017, arXiv:1611.05720, section 3.
    """

    def __init__(self, widths: Sequence[int], dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, dim // len(widths)) for width in widths)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Concatenate the branches."""
        each = [layer(x) for layer, x in zip(self.layers, features, strict=True)]
        return torch.cat(each, dim=1)


def features_at(network: nn.Module, taps: Sequence[str], images: Tensor) -> list[Tensor]:
    """Compute the outputs of some modules of a network, averaged over positions, then its own.

    Args:
        network: (B, C, H, W) -> (B, F).
        taps: Names of its modules that give a map (B, F, H, W), tokens (B, N, F) or features.
        images: (B, C, H, W).

    Returns:
        (B, F) of each tap, in the order of their names, and of the network.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found[name] = output

        return hook

    # hooks of this call alone: a copy of the network has none that belong to another
    hooks = [network.get_submodule(name).register_forward_hook(keep(name)) for name in taps]
    try:
        last: Tensor = network(images)
    finally:
        for handle in hooks:
            handle.remove()
    pooled = {name: x.flatten(2).mean(2) if x.dim() == 4 else x for name, x in found.items()}
    pooled = {name: x.mean(1) if x.dim() == 3 else x for name, x in pooled.items()}
    return [*(pooled[name] for name in taps), last]


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
    embedding_dim: Positive | None = None
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

    example: ClassVar[str] = ""
    """A whole `kind`, of a family with several architectures."""

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
            backbone.embedding = embed_depths(backbone, taps, self.embedding_dim, crop_px)
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


def backbone_settings(kind: str, **settings: Any) -> SparseSettings:
    """Return the settings of a network: `backbone_settings("small_resnet", widths=[4, 8])`.

    Raises:
        RecipeError: There is no such kind, setting or value.
    """
    tree = {"backbone": {"kind": kind, **settings}}
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
        RecipeError: an architecture or an argument that does not exist.
    """
    with refusals("backbone", settings.kind):
        backbone: Backbone = settings.build(crop_px=crop_px)
        return backbone


def embed_depths(
    backbone: Backbone, taps: Sequence[str], dim: int | None, crop_px: int
) -> DepthEmbedding:
    """Make the embedding layers of a network's taps and of its features; images tell the widths.

    Raises:
        RecipeError: No such module, one that gives no features, or a width that does not part.
    """
    branches = len(taps) + 1
    if dim is None or dim % branches:
        raise RecipeError(
            f"embedding.dim = {dim} does not part into the {branches} branches of embedding.taps "
            f"equally; use {(dim or 128) // branches * branches or branches}"
        )
    modules = {name for name, _ in backbone.network.named_modules() if name}
    for name in taps:
        if name not in modules:
            near = did_you_mean(name, modules)
            outer = sorted(each for each in modules if "." not in each)
            raise RecipeError(
                f"embedding.taps names {name!r}, which is no module of the network{near}; its "
                f"outermost are: {', '.join(outer)}"
            )
    if len({*taps}) < len(taps):
        raise RecipeError(f"embedding.taps = {list(taps)} names a module twice; name each once")
    training = backbone.network.training
    images = torch.zeros(1, backbone.channels, crop_px, crop_px)
    try:
        with torch.no_grad():
            features = features_at(backbone.network.eval(), taps, images)
    except (KeyError, AttributeError, RuntimeError) as error:
        raise RecipeError(
            f"embedding.taps = {list(taps)}: one of them gives no features of an image; name "
            "stages of the network"
        ) from error
    finally:
        backbone.network.train(training)
    return DepthEmbedding([x.shape[1] for x in features], dim)


def fitting_stem(crop_px: int) -> Stem:
    """Choose the stem for square images of this size.

    32 px: every reference recipe drops both strides; 64 px: W-MSE (Ermolov et al. 2021, their
    code) keeps the max-pool; from 65 px on the ImageNet stem.
    """
    return "small" if crop_px <= 40 else "small_pool" if crop_px <= 64 else "imagenet"


def stem_warning(settings: KindSettings, crop_px: int) -> str | None:
    """Warn of a requested stem that does not fit the image size; None where it does."""
    requested = getattr(settings, "stem", "auto")
    fitting = fitting_stem(crop_px)
    if not isinstance(requested, str) or requested not in STEMS or requested == fitting:
        return None
    return (
        f"backbone.stem = {requested!r} ({STEMS[requested]}) does not fit {crop_px} px crops; "
        f"{fitting!r} ({STEMS[fitting]}) does: leave the key out, or set it to 'auto'"
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Args:
        in_width: channels in.
        width: channels out.
        stride: of the first convolution.

    Source:
        He et al. 2015, arXiv:1512.03385, fig. 2.
    """

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != width:
            projection = nn.Conv2d(in_width, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute (B, width, H / stride, W / stride) from x (B, in_width, H, W)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


class SmallResNetSettings(BackboneSettings):
    """A ResNet for small images on a CPU: a 4x4 stride-2 stem, one stage a width."""

    kind: Literal["small_resnet"] = "small_resnet"
    widths: Annotated[list[Positive], Field(min_length=1)] = Field([32, 64, 128])
    """Channels of the stages; each but the first halves the resolution. The last is the number of
    features."""
    blocks: Positive = 1
    """Basic blocks in each stage."""

    def network(self, crop_px: int) -> Backbone:
        """Make the network."""
        return small_resnet(self.widths, self.blocks)


def small_resnet(widths: Sequence[int] = (32, 64, 128), blocks: int = 1) -> Backbone:
    """Build the network of `SmallResNetSettings`."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 4, 2, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(inplace=True),
    ]
    in_width = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(in_width, width, stride))
            in_width = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # torchvision's rule for ResNets
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return Backbone(network, widths[-1])


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


StemSetting = Literal["auto", "imagenet", "small_pool", "small"]


class TorchvisionSettings(BackboneSettings):
    """A classifier of torchvision with its head cut off, initialised as torchvision does."""

    kind: Annotated[str, Field(pattern="^torchvision(/.*)?$")]
    stem: StemSetting = "auto"
    """auto: what fits the images; only ResNets have the choice."""
    zero_init_residual: bool = False
    """ResNets only; the last BatchNorm scale of each block starts at 0."""

    example: ClassVar[str] = "torchvision/resnet18"

    def network(self, crop_px: int) -> Backbone:
        """Make the network."""
        return torchvision_backbone(
            self.architecture,
            crop_px=crop_px,
            stem=self.stem,
            zero_init_residual=self.zero_init_residual,
        )


def torchvision_backbone(
    architecture: str, *, crop_px: int, stem: StemSetting, zero_init_residual: bool
) -> Backbone:
    """Build the network of `TorchvisionSettings`."""
    # the architecture and its arguments, refused before anything is built
    import torchvision  # here, as it imports torch's compiler: 2 s that other backbones do not need

    names = torchvision.models.list_models(module=torchvision.models)
    known = [name for name in names if name.startswith(PREFIXES)]
    if architecture not in known:
        raise RecipeError(
            f"backbone.kind: torchvision has no usable {architecture!r}"
            f"{did_you_mean(architecture, known)}; usable: {', '.join(known)}"
        )
    arguments: dict[str, Any] = {}
    if architecture.startswith(("resnet", "resnext", "wide_resnet")):
        arguments["zero_init_residual"] = zero_init_residual
    elif zero_init_residual:
        raise RecipeError(f"backbone.zero_init_residual: {architecture!r} is not a ResNet")
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
    stem_name = _set_stem(network, torchvision.models.ResNet, stem, crop_px)
    return Backbone(network, linear.in_features, stem_name)


class TimmSettings(BackboneSettings):
    """A model of timm with num_classes=0; further keys go to timm.create_model."""

    model_config = ConfigDict(extra="allow")
    kind: Annotated[str, Field(pattern="^timm(/.*)?$")]
    stem: StemSetting = "auto"
    """auto: what fits the images; only ResNets with timm's plain 7x7 stem have the choice."""

    example: ClassVar[str] = "timm/vit_small_patch16_224"

    def network(self, crop_px: int) -> Backbone:
        """Make the network."""
        further = dict(self.model_extra or {})
        return timm_backbone(self.architecture, crop_px=crop_px, stem=self.stem, **further)


def timm_backbone(
    architecture: str, *, crop_px: int, stem: StemSetting = "auto", **arguments: Any
) -> Backbone:
    """Build the network of `TimmSettings`.

    Args:
        architecture: its name in timm.
        crop_px: side of the images.
        stem: see there.
        arguments: of timm.create_model (drop_path_rate, ...).
    """
    import timm  # takes seconds, and most runs have no use for it

    for key, reason in _NOT_OF_TIMM.items():
        if key in arguments:
            raise RecipeError(f"backbone.{key} cannot be set: the backbone {reason}")
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
        stem_name = _set_stem(network, timm.models.ResNet, stem, crop_px)
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


def _set_stem(
    network: nn.Module, resnet: type[nn.Module], stem: StemSetting, crop_px: int
) -> Stem | None:
    """Give a ResNet the requested stem, in place; return what it now has, None without a choice."""
    conv = network.conv1 if isinstance(network, resnet) else None
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size != (7, 7):
        if stem != "auto":
            raise RecipeError(
                f"backbone.stem = {stem!r}: this architecture has no ResNet stem to replace; "
                "leave the key out"
            )
        return None
    chosen: Stem = fitting_stem(crop_px) if stem == "auto" else stem
    if chosen != "imagenet":
        network.conv1 = nn.Conv2d(3, conv.out_channels, 3, 1, 1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    if chosen == "small":
        network.maxpool = nn.Identity()
    return chosen


class TransformersSettings(BackboneSettings):
    """An image model of transformers."""

    kind: Literal["transformers"] = "transformers"
    config: dict[str, Any]
    """Its config.json."""

    def network(self, crop_px: int) -> Backbone:
        """Make the network."""
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
        """Make the network."""
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
        """Make the networks."""
        return joined_backbone(self.parts)


def joined_backbone(parts: list[dict[str, Any]] | None = None) -> Backbone:
    """Build the networks of a join.

    Args:
        parts: Of each its kind, crop_px and arguments.

    Raises:
        RecipeError: There are none: a recipe names a join.
    """
    if parts is None:
        raise RecipeError(
            "backbone.kind = 'join': several networks side by side are embedded with, not trained; "
            "name one of them"
        )
    if len(parts) > MOST_PARTS:  # before any is built
        raise ValueError(f"a join is of 2 to {MOST_PARTS} parts, not {len(parts)}")
    networks = []
    sides = []
    for tree in parts:
        side = tree.get("crop_px")
        if type(side) is not int or side < 1:
            raise RecipeError(f"backbone.parts.crop_px = {shown(side)} is no number of pixels")
        settings = backbone_settings(**{k: v for k, v in tree.items() if k != "crop_px"})
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
