"""Image models of transformers and open_clip as backbones, built by these libraries themselves.

A configuration makes a network with random weights; `weights.huggingface` reads the files. No code
of a hub is run: of a configuration only the library's own classes are built.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import RecipeError, did_you_mean, install, one_line, shown
from sslpipe.models.state import evaluating

# keys of a configuration that name code, kernels or quantised weights, or that images do not need
_SKIPPED = (
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation",
    "id2label", "label2id", "torch_dtype",
)  # fmt: skip
# quantised weights, and parts that a model's constructor would download
_REFUSED = ("quantization_config", "use_pretrained_backbone", "use_timm_backbone")
_CLASS_TOKENS = ("cls_token", "class_embedding")
# a masked autoencoder hides three quarters of an image; its encoder is a ViT, with a ViT's names
_ENCODERS = {"vit_mae": "vit"}


class TransformersTower(nn.Module):
    """A model of transformers: normalised images -> its pooled features.

    What the model itself pools counts (its class token, its mean); a pooler that is a dense layer
    behind the class token, as BERT has it, is omitted. A model that pools nothing gives its class
    token, else the mean of its last hidden state.

    Args:
        model: Of `transformers.AutoModel`, of images.
        crop_px: Side of the images.
    """

    def __init__(self, model: nn.Module, crop_px: int) -> None:
        super().__init__()
        self.omits_pooler = hasattr(getattr(model, "pooler", None), "dense")
        if self.omits_pooler:
            model.pooler = None  # type: ignore[assignment]
        self.model = model
        named = [name.rpartition(".")[2] for name, _ in model.named_parameters()]
        self.has_class_token = any(name in _CLASS_TOKENS for name in named)
        built_px = getattr(model.config, "image_size", None)
        known = inspect.signature(model.forward).parameters
        # position tables of another size are resized by the model itself
        self.resizes = built_px not in (None, crop_px) and "interpolate_pos_encoding" in known

    def checkpoint_activations(self, enabled: bool) -> bool:
        """Switch the model's own activation checkpointing; return whether it has any."""
        model: Any = self.model
        if not model.supports_gradient_checkpointing:
            return False
        # newer versions of transformers say activation, older ones gradient
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        if not enabled:
            getattr(model, f"{word}_checkpointing_disable")()
            return True
        try:
            getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
        except ValueError:  # no layer of the model has it
            return False
        return True

    def forward(self, images: Tensor) -> Tensor:
        """Compute features (B, F) of images (B, C, S, S)."""
        output = self._output(images)
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        hidden: Tensor = output.last_hidden_state
        if hidden.ndim == 4:
            return hidden.mean(dim=(2, 3))  # (B, F, h, w) -> (B, F)
        return hidden[:, 0] if self.has_class_token else hidden.mean(dim=1)  # (B, N, F) -> (B, F)

    def _output(self, images: Tensor) -> Any:
        if self.resizes:
            return self.model(pixel_values=images, interpolate_pos_encoding=True)
        return self.model(pixel_values=images)

    @torch.no_grad()
    def features_of_output(self, image_shape: Sequence[int]) -> str:
        """Write what `forward` takes of the model's output, as Python: "last_hidden_state[:, 0]".

        Args:
            image_shape: (C, S, S).
        """
        output = self._output(torch.zeros((1, *image_shape)))
        if getattr(output, "pooler_output", None) is not None:
            return "pooler_output.flatten(1)"
        if output.last_hidden_state.ndim == 4:
            return "last_hidden_state.mean(dim=(2, 3))"
        return f"last_hidden_state{'[:, 0]' if self.has_class_token else '.mean(dim=1)'}"


def image_config(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a config.json of transformers makes its image model.

    Of a model of images and text that is `vision_config`.

    Raises:
        RecipeError: transformers is not installed, or has no such model; or it is quantised.
    """
    mapping = _transformers().CONFIG_MAPPING
    model_type = str(tree.get("model_type"))
    if model_type not in mapping:
        raise RecipeError(
            f"transformers has no model_type {shown(model_type)}"
            f"{did_you_mean(model_type, list(mapping))}; code of a hub is not run"
        )
    for key in _REFUSED:
        if tree.get(key):
            raise RecipeError(
                f"its configuration has {key} = {shown(tree[key])}; give a model of one network, "
                "with weights in float32, float16 or bfloat16"
            )
    config = mapping[model_type].from_dict(_plain(tree))
    vision = getattr(config, "vision_config", None)
    known = {**tree, "model_type": _ENCODERS.get(model_type, model_type)}
    return _plain(known if vision is None else vision.to_dict())


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what names code, of its parts too."""
    kept = {k: v for k, v in tree.items() if k not in _SKIPPED and not k.startswith("_")}
    return {k: _plain(v) if isinstance(v, Mapping) else v for k, v in kept.items()}


def model_class(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a model's class in transformers, and its configuration. Raises: RecipeError."""
    library = _transformers()
    settings = library.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    try:
        models = library.MODEL_MAPPING[type(settings)]
    except KeyError:
        raise RecipeError(f"transformers has no image model {config['model_type']!r}") from None
    one = models[0] if isinstance(models, tuple) else models
    if "pixel_values" not in inspect.signature(one.forward).parameters:
        raise RecipeError(f"{one.__name__} of transformers takes no images")
    return one, settings


def transformers_network(config: Mapping[str, Any], crop_px: int) -> tuple[nn.Module, int]:
    """Build a model of transformers with random weights: the network, and its features' width.

    Raises:
        RecipeError: transformers is not installed, or refuses the configuration.
    """
    one, settings = model_class(image_config(config))
    try:
        tower = TransformersTower(one(settings), crop_px)
        return tower, _width(tower, int(getattr(settings, "num_channels", 3)), crop_px)
    except RecipeError:
        raise
    except Exception as error:  # its hundreds of models refuse configurations in every way
        raise RecipeError(f"{one.__name__} of transformers: {one_line(str(error), 200)}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise RecipeError(f"it needs transformers: {install('hf')}") from error
    return transformers


def open_clip_network(
    embed_dim: int, vision: Mapping[str, Any], quick_gelu: bool, crop_px: int
) -> nn.Module:
    """Build the image tower of open_clip with random weights.

    Args:
        embed_dim: Features, those that images and texts share.
        vision: `vision_cfg` of open_clip's configuration.
        quick_gelu: OpenAI's form of GELU.
        crop_px: Side of the images.

    Raises:
        RecipeError: open_clip is not installed, or refuses the configuration.
    """
    open_clip_library()  # or it is not installed
    from open_clip.model import _build_vision_tower

    name = vision.get("timm_model_name")
    if name is not None and ":" in str(name):
        raise RecipeError(f"vision.timm_model_name = {shown(name)} is not one of timm's own models")
    settings = {**vision, "image_size": crop_px, "output_tokens": False}
    if name is not None:
        settings["timm_model_pretrained"] = False  # nothing is downloaded
    try:
        tower: nn.Module = _build_vision_tower(embed_dim, settings, quick_gelu)
        return tower
    except Exception as error:  # as above
        raise RecipeError(f"open_clip's image tower: {one_line(str(error), 200)}") from error


def open_clip_library() -> Any:
    """Return open_clip. Raises: RecipeError where it is not installed."""
    try:
        import open_clip
    except ImportError as error:
        raise RecipeError(f"it needs open_clip: {install('open_clip')}") from error
    return open_clip


@torch.no_grad()
def _width(network: nn.Module, channels: int, crop_px: int) -> int:
    """Return how many features a network gives, by a black image."""
    with evaluating(network):
        features: Tensor = network(torch.zeros(1, channels, crop_px, crop_px))
    if features.ndim != 2:
        raise RecipeError(f"it gives {tuple(features.shape)}, not one row of features an image")
    return features.shape[1]
