"""Write the two files beside an export that are for people: README.md and SHA256SUMS."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.metadata import version
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

import sslpipe
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.image_type import RGB8, ImageType, hex_colour
from sslpipe.evaluation.suite_file import own_name, with_own_name
from sslpipe.models.backbones import JOIN

# format -> lines of Python that load it, for the model card
USAGE = tomllib.loads((resources.files(__package__) / "templates/usage.toml").read_text("utf-8"))
# first word of a format, or of a backbone's kind -> the packages that read it
PACKAGES = {
    "torchvision": ("torchvision",),
    "timm": ("timm",),
    "transformers": ("transformers",),
    "open_clip": ("open_clip_torch",),
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxruntime"),
}
TASK = "image-feature-extraction"
TAGS: tuple[str, ...] = ("self-supervised-learning", "contrastive-learning")
TAGS_OF_CLASSES = ("metric-learning", "image-retrieval")


def model_card(
    config: Mapping[str, Any], usage: Mapping[str, str], num_encoded: int | None = None
) -> str:
    """Write the model card in Markdown, from templates/model_card.md.

    Args:
        config: A `Config` as plain values.
        usage: Lines of Python that load each format.
        num_encoded: The length of a row of `encode`, where it is flattened.
    """
    facts = config["facts"]
    backbone = config["backbone"]
    rows = facts.get("evaluation", [])
    kind = backbone["kind"]
    if kind == "transformers":
        kind += f"/{backbone['config'].get('model_type')}"
    architecture = kind.rpartition("/")[2]
    length = "of length 1" if backbone.get("normalize") else "not normalised"
    image = RGB8 if config.get("image") is None else ImageType.model_validate(config["image"])
    channels = backbone.get("channels", len(image.channels))
    words: dict[str, str] = {}
    if backbone.get("normalize"):  # of libraries whose networks do not
        yours = "; torch.nn.functional.normalize is yours"
        words |= {text: text + yours for text in ("# images -> features", "normalised -> (B, F)")}
    words |= {
        "ARCHITECTURE": architecture,
        "not normalised": length,
        "uint8 RGB": "uint8 RGB" if image.is_rgb8 else f"{image.dtype} of its channels",
        "(B, 3,": f"(B, {channels},",
    }
    if backbone["kind"] != JOIN:  # whose images are those of several networks, side by side
        side = config["crop_px"]
        words |= {"S, S)": f"{side}, {side})", "(B, F)": f"(B, {config['num_features']})"}
    if num_encoded is not None:
        words |= {"(B, F)": f"(B, {num_encoded})", "not normalised": "flattened"}
    usage = dict(usage)
    for name in usage:
        for word, meant in words.items():
            usage[name] = usage[name].replace(word, meant)
        usage[name] = usage[name].rstrip()
    known_as = own_name(facts, [row["features"] for row in rows])
    return _TEMPLATES.get_template("model_card.md").render(
        **{**config, "image": image},
        usage=usage,
        num_encoded=num_encoded,
        flattening=[name for name in usage if name != "safetensors"],
        kind=kind,
        heads=[name for name in ("timm", "transformers", "hf") if name in usage],
        length=length,
        canvas_px=EvalView.from_config(config["view"]).canvas_px,
        background=None if image.background is None else hex_colour(image.background),
        elsewhere=_trained_elsewhere(facts),
        recipe=facts.get("recipe", {}),
        data=facts.get("data", {}),
        init=facts.get("init"),
        seen=facts.get("classes_seen", []),
        versions=_versions(backbone, usage),
        known_as=known_as,
        rows=with_own_name(rows, known_as),
    )


def with_flattening(card: str, num_features: int, num_encoded: int) -> str:
    """Return the card of an export whose rows of `encode` are flattened from now on.

    Args:
        card: A model card.
        num_features: Of the network.
        num_encoded: The length of a row of `encode`.
    """
    section = _TEMPLATES.get_template("flattening.md").render(
        num_features=num_features, num_encoded=num_encoded, flattening=()
    )
    before, measured, rest = card.partition("## Measured\n")
    return f"{before.partition('## Flattening')[0]}{section}\n{measured}{rest}"


def hub_card(config: Mapping[str, Any], text: str, *, library: str) -> str:
    """Put the metadata of the Hugging Face Hub before a model card, for "timm" or "sslpipe".

    No licence is stated for the weights: that is for those to say who upload them.
    """
    facts = config["facts"]
    tags = TAGS_OF_CLASSES if facts.get("learns_classes") else TAGS
    metadata = {
        "library_name": library,
        "pipeline_tag": TASK,
        "tags": [*(() if _trained_elsewhere(facts) else tags), "sslpipe"],
    }
    lines = (f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())  # as YAML has it
    return f"---\n{''.join(lines)}---\n\n{text}"


def _versions(backbone: Mapping[str, Any], formats: Iterable[str]) -> str:
    """Return "sslpipe 1.0, torch 2.11.0, timm 1.0.20": of what wrote the formats and read them."""
    kinds = [part["kind"] for part in backbone.get("parts", [backbone])]
    packages = [
        package
        for name in (*kinds, *formats)
        for package in PACKAGES.get(re.split("[/-]", name)[0], ())
    ]
    if "hf" in formats and "transformers" not in kinds:
        packages.append("timm")  # which reads it, too
    versions = {"sslpipe": sslpipe.__version__, "torch": torch.__version__}
    versions |= {package: version(package) for package in packages}
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _trained_elsewhere(facts: Mapping[str, Any]) -> bool:
    return "init" in facts and "digest" not in facts


def _plain(text: object) -> str:
    """Return a name from a file as plain text: it ends no table cell, heading, link or tag."""
    return re.sub(r"([\\`*_|<>\[\]#&])", r"\\\1", " ".join(str(text).split()))


def _settings(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in arguments.items() if key != "kind")


_TEMPLATES = Environment(
    loader=PackageLoader("sslpipe.export"),
    autoescape=False,  # Markdown: `plain` escapes
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters.update(
    plain=_plain,
    repr=repr,
    settings=_settings,
    numbers=lambda values: ", ".join(f"{value:.6g}" for value in values),
)
