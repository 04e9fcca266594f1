"""A backbone to use, with everything that an export writes beside it."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.decode import (
    BadSample,
    check_size,
    decode,
    image_kind,
    read_encoded,
    reduce_to,
    rgb_pixels,
)
from sslpipe.data.image_type import ImageType
from sslpipe.data.index import Split
from sslpipe.errors import UserError, shown
from sslpipe.evaluation.embed import forward_in_parts
from sslpipe.evaluation.features import data_metadata, named_classes
from sslpipe.evaluation.whiten import Whitening, WhiteningLayer
from sslpipe.export.saved import Config, SavedBackbone
from sslpipe.models.backbones import Backbone
from sslpipe.models.state import check_finite, evaluating, weights_dtype
from sslpipe.portable import open_regular
from sslpipe.precision import torch_defaults
from sslpipe.satellites import offered
from sslpipe.sharding.members import flatten, to_member

Picture = str | Path | bytes | Image.Image | Tensor | NDArray[Any]
ENCODED_AT_ONCE = 64  # images of a list


class FrozenBackbone(SavedBackbone):
    """A backbone to use: in eval mode, without gradient, with the view that its features need.

    To train it, switch gradients on (`requires_grad_()`) and set `train()`. `train()` alone, as of
    a model around it, lets the running statistics of BatchNorm move under frozen weights; a warning
    says so once.

    Args:
        backbone: Normalised images -> features.
        view: Images of any size -> normalised images of the network's size.
        config: What an export writes beside the weights.
        whitening: Applied by `encode`; None: none.
    """

    def __init__(
        self,
        backbone: Backbone,
        view: EvalView,
        config: Config,
        whitening: Whitening | None = None,
    ) -> None:
        super().__init__(backbone, view, config)
        self.whitening = whitening
        self._has_warned = False

    def forward(self, images: Tensor) -> Tensor:
        """Compute features, not whitened: (B, 3, S, S) normalised floats -> (B, num_features).

        Raises:
            UserError: The images are not of this shape, or not floats.
        """
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            has = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else ""
            raise UserError(
                f"backbone(images) takes a tensor of normalised floats (B, C, S, S), not a "
                f"{type(images).__name__}{has and ' '}{has}; backbone.encode(images) takes files, "
                "PIL images and uint8 pixels"
            )
        if self.training and not self._has_warned and not torch.compiler.is_compiling():
            self._warn_of_moving_statistics()
        features: Tensor = self.backbone(images)  # (B, F)
        return features

    def _warn_of_moving_statistics(self) -> None:
        """Warn, once, where no weight learns but BatchNorm counts what it sees."""
        moving = (
            isinstance(part, nn.modules.batchnorm._BatchNorm)
            and part.training
            and part.track_running_stats
            for part in self.backbone.modules()
        )
        if any(moving) and not any(weight.requires_grad for weight in self.parameters()):
            self._has_warned = True
            warnings.warn(
                f"{self.name}: its weights are frozen, but train() lets the running statistics of "
                "BatchNorm move, and with them its features; call backbone.eval() after train() of "
                "the model around it, or backbone.requires_grad_() to train it",
                stacklevel=2,
            )

    @property
    def num_encoded(self) -> int:
        """The length of a row of `encode`, which a whitening may shorten."""
        if self.whitening is None:
            return self.num_features
        return self.whitening.projection.shape[1]

    @property
    def flattened(self) -> nn.Module:
        """The network, behind it its whitening: normalised images -> (B, num_encoded)."""
        if self.whitening is None:
            return self.backbone
        return _Flattened(self.backbone, WhiteningLayer(self.whitening))

    def __repr__(self) -> str:
        """Name the network, its images and its features, and what lists the layers."""
        size = f"{self.view.crop_px} px of {self.image_type}"
        flat = "" if self.whitening is None else ", flattened by encode"
        makes = f"{self.name}: images of {size} -> {self.num_features} features{flat}"
        return f"{type(self).__name__}({makes};\n  its layers: .backbone)"

    def _like(self, view: EvalView, config: Config) -> Self:
        return type(self)(self.backbone, view, config, self.whitening)

    def matched(self, *splits: Split) -> tuple["FrozenBackbone", list[Split]]:
        """Return the backbone and splits of one data set that fit each other.

        Of the images those channels are read that the network was trained on, of any range. A
        network of 8-bit RGB takes red, green and blue of any depth, within the range.

        Raises:
            UserError: The images have not these channels, or another depth.
        """
        channels = self.image_type.channels
        fitting = list(splits)
        if {*channels} <= {*splits[0].stored_type.channels}:
            for place, split in enumerate(splits):
                if split.image_type.channels != channels:
                    fitting[place] = split.with_channels(channels)
        return self.seeing(fitting[0].image_type), fitting

    @property
    def network_facts(self) -> dict[str, Any]:
        """What decides the rows of `encode`, as a features file says it of its own."""
        sha256 = self.config.whitening_sha256
        image = self.config.image
        return {
            "backbone_sha256": self.config.weights_sha256,
            "view": self.view.config(),
            "canvas_px": self.view.canvas_px,
            **({} if image is None else {"image": image.model_dump(mode="json")}),
            **({} if sha256 is None else {"whitening_sha256": sha256}),
        }

    def features_metadata(self, split: Split) -> dict[str, Any]:
        """Return all that decides the features of a split, for their file to carry."""
        facts = self.config.facts
        return {
            **self.network_facts,
            "backbone": self.config.backbone.model_dump(),
            **data_metadata(split),
            **named_classes(split),
            **({"checkpoint": facts["checkpoint"]} if "checkpoint" in facts else {}),
        }

    @torch_defaults()
    @torch.no_grad()
    def encode(
        self,
        images: Picture | Sequence[Picture],
        *,
        on_bad: Callable[[int, str], None] | None = None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Tensor:
        """Compute features of images as they are: through `view`, whitened where the export is.

        In eval mode: features of an image do not depend on the others, running statistics do not
        change, and every submodule's own mode is restored afterwards, also after an error.

        Args:
            images: The path or the bytes of a JPEG, PNG or WebP file; a PIL image; uint8 RGB or
                grey pixels, as a tensor (C, H, W) or (B, C, H, W) or as an array (H, W), (H, W, C)
                or (B, H, W, C); or a list of these, of any sizes. OpenCV's arrays are BGR: give
                `image[..., ::-1]`. Files and PIL images are turned as their EXIF says, as training
                sees them; pixels are not: of torchvision's `decode_image` give
                `apply_exif_orientation=True`. For other images than 8-bit RGB: paths of files that
                `sensors build` reads, of one image each, or tensors and arrays as above.
            on_bad: Called with the place in a list of what cannot be read or decoded, and why; it
                gets no row. None: an error.
            advance: Called with the number of entries of each part of a list that is done.

        Returns:
            (B, num_features) float32, whatever the weights' dtype; a row an image.

        Raises:
            UserError: It is something else or cannot be decoded, or features are not finite.
        """
        device = self.view.mean.device
        if isinstance(images, Tensor | np.ndarray):
            pixels = self._batch(images, "images").to(device)  # (B, C, H, W)
            sizes = torch.tensor(pixels.shape[-2:]).expand(len(pixels), 2)
            return self._features(self.view(pixels, sizes), range(len(pixels)))
        pictures = [images] if isinstance(images, str | Path | bytes | Image.Image) else images
        if not isinstance(pictures, list | tuple) or not pictures:
            raise UserError(_refusal(pictures, "images", self.image_type))
        rows = []
        reasons: list[str] = []
        for first in range(0, len(pictures), ENCODED_AT_ONCE):
            views = []
            samples = []
            for number, picture in enumerate(pictures[first : first + ENCODED_AT_ONCE], first):
                try:
                    batch = self._pixels(picture, f"images[{number}]")  # (b, C, H, W)
                except UserError as error:
                    if on_bad is None or not isinstance(error.__cause__, BadSample | OSError):
                        raise
                    on_bad(number, str(error))
                    reasons.append(str(error))
                    continue
                for pixels in batch:  # (C, H, W)
                    image = pixels[None].to(device)
                    views.append(self.view(image, torch.tensor([image.shape[-2:]])))  # (1, C, S, S)
                    samples.append(picture if isinstance(picture, str | Path) else number)
            if views:
                stacked = torch.stack(views, dim=1).flatten(0, 1)  # (B, C, S, S)
                stacked = stacked.contiguous(memory_format=torch.channels_last)
                rows.append(self._features(stacked, samples))
            advance(min(ENCODED_AT_ONCE, len(pictures) - first))
        if not rows:
            why = f"; the first: {reasons[0]}" if reasons else ""
            raise UserError(
                f"encode: images holds no image that can be decoded{why}; give at least one"
            )
        return torch.cat(rows)

    def _features(self, views: Tensor, samples: Sequence[object]) -> Tensor:
        """Compute one row a sample from its view, (B, C, S, S)."""
        with evaluating(self.backbone):
            images = views.to(weights_dtype(self.backbone))
            features = forward_in_parts(self, images).float()  # (B, F)
        if self.whitening is not None:
            features = self.whitening.apply(features)
        check_finite(features, [f"image {sample}" for sample in samples], self.name)
        return features

    def _pixels(self, picture: Picture, what: str) -> Tensor:
        """Take one entry of a list as pixels in units of views, (B, C, H, W); 8 bits stay uint8."""
        if isinstance(picture, Tensor | np.ndarray):
            return self._batch(picture, what)
        image_type = self.image_type
        taken = (str | Path | bytes | Image.Image) if image_type.is_rgb8 else (str | Path)
        if not isinstance(picture, taken):
            raise UserError(_refusal(picture, what, image_type))
        try:
            if isinstance(picture, bytes):
                pixels = decode_image(picture, image_type, self.view.canvas_px)
            elif not isinstance(picture, Image.Image):
                what = str(picture)
                pixels = read_image(Path(picture), image_type, self.view.canvas_px)
            else:
                check_size(*picture.size)
                rgb = np.ascontiguousarray(rgb_pixels(picture, image_type.background))
                pixels = reduce_to(rgb, self.view.canvas_px).transpose(2, 0, 1)
        except OSError as error:
            remedy = ""
            if isinstance(error, IsADirectoryError):
                remedy = f"; give its files, as sorted(Path({what!r}).rglob('*.jpg'))"
            raise UserError(f"cannot read {what}: {error.strerror or error}{remedy}") from error
        except ValueError as error:  # BadSample is one, and Pillow's own
            raise UserError(f"{what} cannot be encoded: {error}") from error
        return torch.from_numpy(pixels)[None]  # (1, C, h, w)

    def _batch(self, images: Tensor | NDArray[Any], what: str) -> Tensor:
        """Take pixels as a batch in units of views, (B, C, H, W). Raises: UserError."""
        image_type = self.image_type
        channels = len(self.image_type.channels)
        if isinstance(images, Tensor):
            pixels = images
        elif images.dtype.name != image_type.dtype:
            raise UserError(_refusal(images, what, image_type))
        else:
            pixels = torch.from_numpy(np.require(images, requirements=["C", "W"]))
            pixels = pixels[None] if pixels.ndim == 2 else pixels.movedim(-1, -3)  # (..., C, H, W)
        batch = pixels[None] if pixels.ndim == 3 else pixels
        counts = (1, 3) if image_type.is_rgb8 else (channels,)
        is_type = str(pixels.dtype) == f"torch.{image_type.dtype}"
        if not is_type or batch.ndim != 4 or batch.shape[1] not in counts:
            raise UserError(_refusal(images, what, image_type))
        if 0 in batch.shape[2:]:
            raise UserError(f"encode: {what} is {tuple(images.shape)}: an image has no pixels")
        if image_type.dtype == "uint8":
            return batch.expand(-1, channels, -1, -1)  # grey is repeated, as in a file
        values = batch.cpu().permute(0, 2, 3, 1).numpy()  # (B, H, W, C)
        if not np.isfinite(values).all():
            raise UserError(f"encode: {what} has values that are NaN or infinite")
        units = [
            torch.from_numpy(image_type.in_units(np.ascontiguousarray(each))) for each in values
        ]
        return torch.stack(units).permute(0, 3, 1, 2)


class _Flattened(nn.Module):
    def __init__(self, backbone: Backbone, whitening: WhiteningLayer) -> None:
        super().__init__()
        self.backbone = backbone
        self.whitening = whitening

    def forward(self, images: Tensor) -> Tensor:
        """Compute features, whitened: (B, C, S, S) normalised floats -> (B, D)."""
        rows: Tensor = self.whitening(self.backbone(images))
        return rows


def read_image(path: Path, wanted: ImageType, canvas_px: int) -> NDArray[Any]:
    """Read a file of one image of this type: (C, h, w), see `decode`. Raises: BadSample, OSError.

    Other images than 8-bit RGB are read by what a satellite brings, as the build of their data set
    read such files.
    """
    if wanted.is_rgb8:
        with open_regular(path) as file:
            return decode_image(read_encoded(file), wanted, canvas_px)
    readers = offered("image_files")
    if not readers:
        raise BadSample(
            f"this installation reads no files of {wanted}, as no folder of sslpipe brings a "
            "reader; give arrays (h, w, C), or install sslpipe as a whole"
        )
    named = [each for each in readers if path.name.lower().endswith(each.SUFFIXES)]
    pixels = (named or readers)[0].read_image(path, wanted)
    return reduce_to(np.ascontiguousarray(wanted.in_units(pixels)), canvas_px).transpose(2, 0, 1)


def decode_image(raw: bytes, wanted: ImageType, canvas_px: int) -> NDArray[Any]:
    """Decode a file's bytes to 8-bit RGB, (3, h, w), as a build stores them. Raises: BadSample."""
    if image_kind(raw) is None:  # BMP, GIF, PPM, TIFF
        flat = raw if wanted.background is None else flatten(raw, wanted.background)
        _, raw = to_member(flat)
    return decode(raw, canvas_px, image_type=wanted)


def _refusal(value: object, what: str, wanted: ImageType) -> str:
    """Return why `encode` does not take a value, and what to give instead."""
    if isinstance(value, list | tuple):
        return f"encode: {what} is an empty list; give at least one image"
    kind = type(value).__name__
    if isinstance(value, Tensor | np.ndarray):
        kind = f"{'tensor' if isinstance(value, Tensor) else 'ndarray'} of {value.dtype}"
    has = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"({shown(value)})"
    remedy = (
        "give paths, bytes of files, PIL images, uint8 tensors of 3 channels, or 1 of grey, "
        "(C, H, W) or (B, C, H, W), uint8 arrays (H, W, 3) or (B, H, W, 3), or a list of these; "
        "normalised images are for backbone(x)"
        if wanted.is_rgb8
        else f"the network takes {wanted}: give a tensor (C, H, W) or (B, C, H, W), an array "
        "(H, W, C) or (B, H, W, C), the path of such a file, or a list of these"
    )
    return f"encode: {what} is a {kind} {has}; {remedy}"
