"""Read a SOURCE of another program: the network with its weights, its view, and a report."""

from pathlib import Path
from typing import Any, NamedTuple

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import WeightsError
from sslpipe.models.backbones import Backbone, build_backbone
from sslpipe.models.limits import within_memory
from sslpipe.recipe.base import Component
from sslpipe.run.records import parse_object
from sslpipe.weights.files import read_tree
from sslpipe.weights.fit import fit_tensors
from sslpipe.weights.layouts import Encoder, find_encoder
from sslpipe.weights.source import Source
from sslpipe.weights.views import UNKNOWN, make_view, timm_view, torchvision_view


class Weights(NamedTuple):
    """What was read.

    Args:
        backbone: With its weights.
        component: What it was built from.
        view: That of the weights.
        report: `Config.facts["init"]`: source, format, sha256, loaded, missing, unexpected,
            resized, notes.
    """

    backbone: Backbone
    component: Component
    view: EvalView
    report: dict[str, Any]


def read_weights(source: Source, component: Component | None, crop_px: int | None) -> Weights:
    """Read a file or folder of another program.

    Args:
        source: Of the scheme "path".
        component: The backbone that the weights must fit; None: the source's own.
        crop_px: Side of the images; None: that of the weights.

    Raises:
        WeightsError: It cannot be read, or less than the whole backbone fits.
    """
    what = source.text
    tree, sha256 = read_tree(source.path)
    encoder = find_encoder(tree, what)
    del tree
    config = _folder_config(source.path)
    named = _named_component(source, config, encoder, component)
    view, notes = _view(what, crop_px, named, config, sha256)
    wanted = component or named
    backbone, wanted = _build(wanted, view.crop_px, encoder, fixed=component is not None)
    report = fit_tensors(backbone, wanted.kind, encoder.tensors, what)
    report["unexpected"] += encoder.dropped
    found = {"source": what, "format": _format(encoder, config), "sha256": sha256}
    return Weights(backbone, wanted, view, {**found, **report, "notes": [*encoder.notes, *notes]})


def _format(encoder: Encoder, config: dict[str, Any]) -> str:
    return "timm" if "architecture" in config else encoder.format


def _folder_config(path: Path) -> dict[str, Any]:
    """Read the config.json of a folder; {} for a file. Raises: WeightsError where it is damaged."""
    file = path / "config.json"
    if not path.is_dir() or not file.is_file():
        return {}
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} is damaged ({error}); copy the folder again") from error


def _named_component(
    source: Source, config: dict[str, Any], encoder: Encoder, wanted: Component | None
) -> Component:
    """Return the architecture that the source itself is of.

    Named by the user, by the folder, by the layout, or else by the recipe.
    """
    if source.kind is not None:
        return Component(kind=source.kind)
    if "architecture" in config:
        return Component(kind=f"timm/{config['architecture']}", **config.get("model_args", {}))
    if encoder.kinds:
        return Component(kind=encoder.kinds[0])
    if wanted is not None:
        return wanted
    raise WeightsError(
        f"{source.text} names no architecture; write it before the file, as in "
        f"timm/resnet50@{source.path}"
    )


def _view(
    what: str, crop_px: int | None, component: Component, config: dict[str, Any], sha256: str
) -> tuple[EvalView, list[str]]:
    """Make the view that the weights were trained for, or ImageNet's and say so."""
    family, _, architecture = component.kind.partition("/")
    if family == "timm":
        import timm

        if "architecture" in config:
            return timm_view(what, crop_px, config.get("pretrained_cfg", config))
        if timm.models.is_model_pretrained(architecture):
            of_release = timm.get_pretrained_cfg(architecture)
            view, notes = timm_view(what, crop_px, of_release.to_dict())
            name, _, tag = architecture.partition(".")
            said = f"the view is that of {name}.{of_release.tag}, timm's usual weights of this name"
            return view, notes if tag else [said, *notes]
    if family == "torchvision" and not config:
        import torchvision

        if architecture in torchvision.models.list_models(module=torchvision.models):
            return torchvision_view(what, crop_px, architecture, sha256)
    view, notes = make_view(what, crop_px, resize=256)
    return view, [UNKNOWN, *notes]


def _build(
    component: Component, crop_px: int, encoder: Encoder, *, fixed: bool
) -> tuple[Backbone, Component]:
    """Build the network; the weights decide a ResNet's stem, unless a recipe does."""
    kind, _, tag = component.kind.partition(".")  # timm's tag names weights, not a network
    if tag and kind.startswith("timm/"):
        component = Component(kind=kind, **component.arguments)
    with within_memory("backbone"):
        backbone = build_backbone(component, crop_px=crop_px)
    first = encoder.tensors.get("conv1.weight")
    if fixed or backbone.stem is None or first is None or first.ndim != 4:
        return backbone, component
    stem = "imagenet" if first.shape[-1] == 7 else encoder.stem
    if stem is None:
        raise WeightsError(
            "the first convolution is 3x3, and whether a max-pool follows is not in the file; "
            "name it by a recipe's backbone.stem: 'small' (no max-pool) or 'small_pool'"
        )
    if stem != backbone.stem:
        component = Component(kind=component.kind, **{**component.arguments, "stem": stem})
        backbone = build_backbone(component, crop_px=crop_px)
    return backbone, component
