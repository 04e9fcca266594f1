"""Read a SOURCE of another program: the network with its weights, its view, and a report."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import UserError, WeightsError, did_you_mean, one_line, shown
from sslpipe.models.backbones import RGB_CHANNELS, Backbone, build_backbone
from sslpipe.models.channels import first_convolution
from sslpipe.models.limits import TooLarge, within_memory
from sslpipe.recipe.base import Component
from sslpipe.run.records import read_object
from sslpipe.weights.files import read_tree
from sslpipe.weights.fit import Report, candidates, check_tensors, fit_tensors
from sslpipe.weights.huggingface import MOST, transformers_encoder, transformers_view
from sslpipe.weights.layouts import Encoder, find_encoder
from sslpipe.weights.source import Source
from sslpipe.weights.views import timm_view, torchvision_view, unknown_view

MOST_CANDIDATES = 12  # networks that are built to tell which one a file is of
# layouts of weights that were trained as the architecture's own library trains them
_OF_ITS_LIBRARY = ("EfficientNet-PyTorch", "sslpipe", "state dict", "timm")
# arguments in timm's config.json that a backbone has not, or whose place the view takes
_NOT_BUILT = ("img_size", "in_chans", "num_classes")
# arguments that change what the same tensors compute
_NOT_IN_TENSORS = ("act_layer", "global_pool", "head_norm_eps", "norm_eps", "norm_layer")
MOST_ASKED = 2  # numbers that a network may have for each of the file; tables are resized
_SAME = 1e-5  # features of two networks differ by less, relative to the largest: they are one


def read_weights(
    source: Source, component: Component | None, crop_px: int | None
) -> tuple[Backbone, Component, EvalView, Report]:
    """Read a file or folder of another program, of the scheme "path".

    Args:
        source: It.
        component: The backbone that the weights must fit; None: the source's own.
        crop_px: Side of the images; None: that of the weights.

    Returns:
        The network with its weights; what it was built from; the view of the weights; and for
        `Config.facts["init"]` what was loaded: source, format, sha256, loaded (a number of
        tensors), missing, unexpected, resized (keys), and notes.

    Raises:
        WeightsError: It cannot be read, or less than the whole backbone fits.
    """
    what = source.text
    # the tensors of one encoder, and its architecture
    tree, sha256 = read_tree(source.path)
    config = _read_object(source.path, "config.json")
    encoder = find_encoder(tree, what)
    check_tensors(encoder.tensors, what)
    del tree
    if "model_type" in config:
        encoder = transformers_encoder(config, encoder.tensors, what)
    own = _stated(source, config) or encoder.component
    by_keys = source.kind is None and own is None  # nobody named it
    kind, tag = source.kind, ""  # as the user named it, with the tag of timm's weights
    if kind is not None and kind.startswith("timm/"):
        kind, _, tag = kind.partition(".")
        if tag:
            _check_tag(source, kind.removeprefix("timm/"), tag, config)
    if kind is not None:
        theirs = Component(kind=kind)
    else:
        theirs = own or component or Component(kind=_identified(source, encoder))
    # images as it knows them
    usual = encoder.format in _OF_ITS_LIBRARY and not by_keys
    view, notes = _view(source, crop_px, theirs.kind, tag, usual, config, encoder.format, sha256)
    # the network, with its weights
    layout = "timm" if "architecture" in config else encoder.format
    try:
        wanted = _computing_as(component or theirs, own)
        backbone, wanted = _build(wanted, view.crop_px, encoder, fixed=component is not None)
    except UserError as error:
        if component is not None:  # the recipe's own
            raise
        raise WeightsError(f"{what}: {error}") from error
    report = fit_tensors(backbone, wanted.kind, encoder.tensors, f"{what} (format: {layout})")
    report["unexpected"] += encoder.dropped
    notes = [*encoder.notes, *notes]
    if by_keys and component is None:
        notes.insert(0, f"keys and shapes are those of {theirs.kind}; nobody named it")
    found = {"source": what, "format": layout, "sha256": sha256}
    return backbone, wanted, view, {**found, **report, "notes": notes}


def _read_object(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a folder; {} where there is none. Raises: UserError for damage."""
    if not (path / name).is_file():
        return {}
    return read_object(path / name, "copy the folder again")


def _stated(source: Source, config: dict[str, Any]) -> Component | None:
    """Take the network from a config.json of timm; None where it is none. Raises: WeightsError."""
    if "architecture" not in config:
        return None
    name, stated = config["architecture"], config.get("model_args") or {}
    if not isinstance(name, str):
        raise WeightsError(
            f"{source.path}/config.json: architecture = {shown(name)} is no name of a network of "
            "timm"
        )
    try:
        if not isinstance(stated, dict):
            raise TypeError(f"{shown(stated)} is no table of arguments")
        for key, value in stated.items():  # some are counted to before anything is built
            if any(isinstance(each, int) and abs(each) > MOST for each in tree_leaves(value)):
                raise ValueError(f"{key} = {shown(value)} is more than {MOST:,}")
        tree = {key: value for key, value in stated.items() if key not in _NOT_BUILT}
        return Component.model_validate({**tree, "kind": f"timm/{name}"})
    except (TypeError, ValueError) as error:  # pydantic's are of the latter
        text = one_line(str(error))
        raise WeightsError(f"{source.path}/config.json: model_args: {text}") from error


def _check_tag(source: Source, architecture: str, tag: str, config: dict[str, Any]) -> None:
    """Raise WeightsError where timm has no such weights, or a folder of timm says it has others."""
    import timm

    tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{architecture}.*")]
    stated = config.get("pretrained_cfg", config)
    theirs = stated.get("tag") if "architecture" in config and isinstance(stated, dict) else None
    if theirs and theirs != tag and source.text.startswith(f"{source.kind}@"):
        raise WeightsError(
            f"{source.text}: {source.path}/config.json says that its weights are {theirs!r}, not "
            f"{tag!r}; leave the tag out"
        )
    if tag not in tags and tag != theirs and timm.is_model(architecture):
        raise WeightsError(
            f"{source.text}: timm has no weights {architecture}.{tag}{did_you_mean(tag, tags)}; "
            f"tags of {architecture}: {', '.join(tags) or 'none'}"
        )


def _computing_as(wanted: Component, own: Component | None) -> Component:
    """Add what the source's config says and no tensor shows: epsilons of norms and the like.

    What `wanted` says itself stays; networks of one module of timm take the same arguments.
    """
    if own is None or own == wanted:
        return wanted
    import timm

    kinds = [each.kind for each in (wanted, own) if each.kind.startswith("timm/")]
    known = [name for name in (k.removeprefix("timm/") for k in kinds) if timm.is_model(name)]
    if len(known) < 2 or len({timm.models.model_entrypoint(n).__module__ for n in known}) > 1:
        return wanted
    theirs = {key: own.arguments[key] for key in _NOT_IN_TENSORS if key in own.arguments}
    return Component.model_validate({"kind": wanted.kind, **theirs, **wanted.arguments})


def _identified(source: Source, encoder: Encoder) -> str:
    """Tell the architecture from keys and shapes.

    Torchvision's counts where it has these; of several in timm, all must give the same features.

    Raises:
        WeightsError: None, or several that differ; names what is nearest.
    """
    remedy = f"write it before the file, as in timm/resnet50@{source.path}"
    kinds = candidates(encoder.tensors)
    if not kinds:
        first = ", ".join(map(repr, list(encoder.tensors)[:3]))
        raise WeightsError(
            f"{source.text} names no architecture, and timm and torchvision have none with its "
            f"keys and shapes ({first}, ...; format: {encoder.format}); {remedy}"
        )
    of_torchvision = [kind for kind in kinds if kind.startswith("torchvision/")]
    if of_torchvision or len(kinds) == 1:
        return (of_torchvision or kinds)[0]
    # the same weights in each: which ones give other features?
    found: dict[str, Tensor] = {}
    for kind in sorted(kinds, key=len)[:MOST_CANDIDATES]:
        size = own_size(kind)
        try:
            backbone, _ = _build(Component(kind=kind), size, encoder, fixed=False)
            resized = fit_tensors(backbone, kind, encoder.tensors, kind)["resized"]
        except WeightsError:
            continue
        if resized:  # made for another size
            continue
        seeded = torch.Generator().manual_seed(0)
        with torch.no_grad():
            shape = (1, backbone.channels, size, size)
            found[kind] = backbone.eval()(torch.randn(shape, generator=seeded))
    one = next(iter(found.values()), torch.empty(0))
    if not all(
        each.shape == one.shape and (each - one).abs().max() <= _SAME * one.abs().max()
        for each in [*found.values()][1:]
    ):
        raise WeightsError(
            f"{source.text} names no architecture, and its keys and shapes are those of several "
            f"that give other features: {', '.join(kinds)}; {remedy}"
        )
    if not found or len(kinds) > MOST_CANDIDATES:
        raise WeightsError(
            f"{source.text} names no architecture; it may be of {', '.join(kinds)}; {remedy}"
        )
    return next(iter(found))


def own_size(kind: str) -> int:
    """Return the side of the images that an architecture is made for, 224 px if nothing is said."""
    family, _, name = kind.partition("/")
    if family != "timm":
        return 224
    import timm

    config = timm.get_pretrained_cfg(name)
    return 224 if config is None else int(config.input_size[-1])


def _view(
    source: Source,
    crop_px: int | None,
    kind: str,
    tag: str,
    usual: bool,
    config: dict[str, Any],
    layout: str,
    sha256: str,
) -> tuple[EvalView, list[str]]:
    """Make the view that the weights were trained for, or ImageNet's and say so.

    `usual`: without a tag, they may be the library's usual weights of this kind.
    """
    what = source.text
    if "model_type" in config:
        stated = _read_object(source.path, "preprocessor_config.json")
        return transformers_view(what, crop_px, config, stated)
    if "architecture" in config:
        stated = config.get("pretrained_cfg", config)
        arguments = config.get("model_args") or {}  # a table, or it was refused
        return timm_view(what, crop_px, stated, arguments.get("img_size"))
    family, _, architecture = kind.partition("/")
    if family == "timm" and (usual or tag):
        import timm

        name = f"{architecture}.{tag}" if tag else architecture
        if timm.models.is_model_pretrained(name):
            of_release = timm.get_pretrained_cfg(name)
            view, notes = timm_view(what, crop_px, of_release.to_dict())
            said = f"the view is that of {architecture}.{of_release.tag}, timm's usual weights"
            return view, notes if tag else [said, *notes]
    if family == "torchvision" and layout == "state dict":
        return torchvision_view(what, crop_px, architecture, sha256)
    return unknown_view(what, crop_px, size=own_size(kind))


def _build(
    component: Component, crop_px: int, encoder: Encoder, *, fixed: bool
) -> tuple[Backbone, Component]:
    """Build the network; the weights decide a ResNet's stem, unless a recipe does.

    Raises:
        TooLarge: It has far more numbers than the file; nothing was allocated.
    """
    network: nn.Module = nn.Identity()
    try:
        with within_memory("backbone"), torch.device("meta"):
            network = build_backbone(component, crop_px=crop_px).network
    except UserError as error:  # some constructors read what they compute: the real one decides
        if isinstance(error, TooLarge):
            raise
    found = first_convolution(network)
    # some see something else first than the image: its frequencies, its pixels folded
    of_image = found is not None and found[1].in_channels == RGB_CHANNELS
    sees = encoder.tensors.get(f"{found[0]}.weight") if found and of_image else None
    if sees is not None and sees.ndim == 4 and sees.shape[1] not in (1, RGB_CHANNELS):
        arguments = {**component.arguments, "channels": sees.shape[1]}
        component = Component(kind=component.kind, **arguments)
    asked = sum(tensor.numel() for tensor in network.state_dict().values())
    given = sum(tensor.numel() for tensor in encoder.tensors.values())
    if asked > MOST_ASKED * given + 2**26:
        raise TooLarge(
            f"{component.kind} is configured with {asked:,} numbers, and the file has {given:,}; "
            "its configuration is of other weights"
        )
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
