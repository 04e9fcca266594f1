"""The published views by name, and how a recipe's own values change them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sslpipe.augment.ops import current_spec, register_installed
from sslpipe.augment.spec import ViewSpec, is_interval
from sslpipe.data.image_type import RGB8
from sslpipe.errors import RecipeError, did_you_mean, shown
from sslpipe.registry.plugins import plugin_hint

_JITTER_STRENGTH = (
    "SimCLR's s: brightness, contrast and saturation become 0.8 s, hue 0.2 s; what the preset "
    "switches off stays off, and a field that is set by its own name wins"
)
_MOCO_JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
_BYOL = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
_NO_COLOURS = {"saturation": 0.0, "hue": 0.0, "grayscale_prob": 0.0}
_UPRIGHT = {**_NO_COLOURS, "flip_prob": 0.0, "blur_prob": 0.0}
_NO_UP = {"vertical_flip_prob": 0.5, "quarter_turn_prob": 0.75}  # the square's eight symmetries
_LIGHT = {"brightness": 0.4, "contrast": 0.4}
_FROM_ABOVE: dict[str, Any] = {**_NO_COLOURS, **_NO_UP, **_LIGHT, "crop_area": (0.2, 1.0)}
# What each preset changes of ViewSpec's defaults, first and second view.
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Chen et al. 2020, arXiv:2002.05709, appendix A, strength 1.0
    "simclr": ({}, {}),
    # the same paper, appendix B.9 (CIFAR-10, 32 px): strength 0.5, no blur
    "simclr_small": ({**_MOCO_JITTER, "blur_prob": 0.0},) * 2,
    # Chen et al. 2020, arXiv:2003.04297 and its code
    "mocov2": ({**_MOCO_JITTER, "crop_area": (0.2, 1.0)},) * 2,
    # Grill et al. 2020, arXiv:2006.07733, table 6
    "byol": ({**_BYOL, "blur_prob": 1.0}, {**_BYOL, "blur_prob": 0.1, "solarize_prob": 0.2}),
    # gray images with an upright object: nothing that only moves colour, nothing mirrored
    "grayscale": (
        {
            **_UPRIGHT,
            "brightness": 0.6,
            "contrast": 0.6,
            "crop_area": (0.3, 1.0),
            "rotation_deg": 20.0,
        },
    )
    * 2,
    # fields of cells: no up; focus and the lamp's and dyes' strength say nothing about the sample
    "microscopy": ({**_FROM_ABOVE, "channel_gain": 0.2, "noise_std": 0.03},) * 2,
    # after Wang et al. 2022, arXiv:2211.07044 (SSL4EO-S12), for bands seen from above: no hue; each
    # band's gain and offset are the sensor's and the air's, and one may be missing
    "satellite": (
        {**_FROM_ABOVE, "channel_gain": 0.1, "channel_shift": 0.05, "channel_drop_prob": 0.2},
    )
    * 2,
    # one channel with an up, as thermal cameras': mocov2 without its colours, and the curve from
    # signal to value, which differs between cameras
    "grey": ({**_MOCO_JITTER, **_NO_COLOURS, "crop_area": (0.2, 1.0), "gamma": 0.5},) * 2,
    # after Sowrirajan et al. 2021, arXiv:2010.05352 (MoCo-CXR): small rotations, no blur and no
    # small crops, which hide lesions; not mirrored, as the heart is on the left
    "xray": (
        {
            **_UPRIGHT,
            "crop_area": (0.5, 1.0),
            "rotation_deg": 10.0,
            "gamma": 0.3,
            "brightness": 0.3,
            "contrast": 0.3,
        },
    )
    * 2,
}


def view_specs(
    preset: str,
    crop_px: int,
    overrides: Mapping[str, Any] | None = None,
    channels: Sequence[str] = RGB8.channels,
    beside: Iterable[str] = (),
) -> tuple[ViewSpec, ViewSpec]:
    """Return the settings of a preset's two views, with the recipe's own values put in.

    Args:
        preset: a name of PRESETS.
        crop_px: side of the square views.
        overrides: fields of ViewSpec, settings of registered ops, or `jitter_strength` (see
            `setting_docs`). One value serves both views; a list of two gives each view its own
            (blur_prob = [1.0, 0.1]; crop_area = [[0.3, 1], [0.1, 0.3]]).
        channels: of the images. What makes no sense for them is 0, whatever the preset says.
        beside: names of further settings of the views, for the message about an unknown one.

    Raises:
        RecipeError: an unknown preset or field, or one that makes no sense for these channels.
        ValueError: naming field and value.
    """
    overrides = dict(overrides or {})
    if preset not in PRESETS:
        raise RecipeError(
            f"augment.preset = {preset!r} is unknown{did_you_mean(str(preset), PRESETS)}; "
            f"known: {', '.join(PRESETS)}"
        )
    register_installed(overrides)
    spec = current_spec(rgb=tuple(channels) == RGB8.channels)
    fields = {field.name: field for field in dataclasses.fields(spec) if field.name != "crop_px"}
    known = [*beside, *fields, "jitter_strength"]
    for key in overrides:
        if key not in known:
            raise RecipeError(
                f"augment.{key} is not a setting of the views{did_you_mean(key, known)}"
                f"{plugin_hint()}; known: {', '.join(known)}"
            )
    strength = overrides.pop("jitter_strength", None)
    off = _senseless(spec, channels, overrides)
    first, second = (
        spec(
            **{"crop_px": crop_px, **changed, **_jitter_fields(strength, changed), **off}
            | {key: _value_of_view(fields[key], each, view) for key, each in overrides.items()}
        )
        for view, changed in enumerate(PRESETS[preset])
    )
    return first, second


def _senseless(
    spec: type[ViewSpec], channels: Sequence[str], overrides: Mapping[str, Any]
) -> dict[str, float]:
    """Return the settings that are 0 for these channels; raises where `overrides` has another."""
    off = {} if spec.rgb else dict.fromkeys(_NO_COLOURS, "the channels are not red, green, blue")
    if len(channels) == 1:
        off["channel_drop_prob"] = "there is one channel only"
    for key, reason in off.items():
        value = overrides.get(key, 0)
        if any(value) if isinstance(value, list | tuple) else value:
            raise RecipeError(
                f"augment.{key} = {shown(value)} makes no sense: {reason} ({', '.join(channels)}); "
                "leave it out"
            )
    return dict.fromkeys(off, 0.0)


def setting_docs() -> dict[str, str]:
    """Return what each key of the views' settings means, those of registered ops among them."""
    docs = {
        field.name: f"{field.metadata['doc']} (default {field.default})"
        for field in dataclasses.fields(current_spec())
    }
    return {**docs, "jitter_strength": _JITTER_STRENGTH}


def _jitter_fields(strength: object, preset: Mapping[str, Any]) -> dict[str, float]:
    if strength is None:
        return {}
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not strength >= 0:
        raise ValueError(f"jitter_strength = {strength!r} is not a number >= 0")
    simclr = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
    return {key: base * strength for key, base in simclr.items() if preset.get(key, base) > 0}


def _value_of_view(field: "dataclasses.Field[Any]", value: Any, view: int) -> Any:
    if not isinstance(value, list | tuple):
        return value
    nested = any(isinstance(item, list | tuple) for item in value)
    if is_interval(field) and not nested:
        return value
    if len(value) != 2:
        raise ValueError(f"{field.name} = {value!r}: give one value, or two, one a view")
    return value[view]
