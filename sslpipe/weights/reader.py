"""Read a SOURCE of another program: the network with its weights, its view, and a report."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import UserError, WeightsError, did_you_mean, one_line, shown
from sslpipe.files import Tree, read_json
from sslpipe.models.backbones import RGB_CHANNELS, Backbone, backbone_settings, build_backbone
from sslpipe.models.channels import first_convolution
from sslpipe.models.limits import TooLarge, sketch, within_memory
from sslpipe.models.transfer import Tensors
from sslpipe.registry import REFUSALS
from sslpipe.registry.schema import SparseSettings
from sslpipe.weights.files import read_tree
from sslpipe.weights.fit import AVERAGED_NORM, Report, check_tensors, fit_tensors
from sslpipe.weights.huggingface import (
    MOST,
    OPEN_CLIP,
    folder_view,
    open_clip_component,
    open_clip_view,
    transformers_component,
    transformers_tensors,
)
from sslpipe.weights.layouts import (
    Checkpoint,
    Encoder,
    classifier_of_torchvision,
    find_encoder,
    nearest,
    open_checkpoint,
)
from sslpipe.weights.source import VECTORS, Source
from sslpipe.weights.views import (
    StatedView,
    tag_of_file,
    timm_remarks,
    timm_view,
    torchvision_view,
    unknown_view,
    usual_timm_view,
)

# arguments in timm's config.json that a backbone has not, or whose place the view takes
_NOT_BUILT = ("img_size", "in_chans", "num_classes")
# arguments that change what the same tensors compute
_NOT_IN_TENSORS = ("act_layer", "fc_norm", "global_pool", "head_norm_eps", "norm_eps", "norm_layer")
BEFORE_PROJECTION = (
    "features are those before visual_projection; those that are compared with texts, as by "
    "get_image_features and open_clip, are behind it"
)
MOST_ASKED = 2  # numbers that a network may have for each of the file; tables are resized


def read_weights(
    source: Source, component: SparseSettings | None, crop_px: int | None
) -> tuple[Backbone, SparseSettings, EvalView, Report]:
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
    # the architecture: the user's word, the folder's or the file's own
    opened = _open(source)
    stated = _stated(opened)
    kind, tag = _named_by_the_user(opened)
    notes: list[str] = []
    if kind is not None:
        architecture = backbone_settings(kind=kind)
    else:
        architecture = stated or component or _named_by_the_file(opened, notes)
    wanted = _computing_as(component or architecture, stated)
    # where the encoder lies
    dropped: list[str] = []
    with _errors_of(what, component):
        sketch = _sketch(wanted, crop_px or own_size(wanted), opened)
        if wanted.kind == "transformers" and wanted == stated and source.kind is None:
            # as they are: some models have parts that are called as wrappers are
            tensors = opened.plain or opened.checkpoint.tensors
            renamed, dropped = transformers_tensors(wanted, tensors, what)
            opened = replace(opened, checkpoint=Checkpoint(renamed, frozenset([""])), plain={})
            if any(key.startswith("visual_projection.") for key in dropped):
                notes.append(BEFORE_PROJECTION)
    encoder = find_encoder(opened.checkpoint, sketch, wanted.kind, what)
    may_be_usual = encoder is not None and encoder.is_plain  # but not if only an fc_norm fits it
    if encoder is not None and kind is not None:
        _check_arch(opened, wanted, sketch)
    if encoder is None and component is None and _averages(sketch, opened.checkpoint):
        wanted = backbone_settings(wanted.kind, {**wanted.arguments, "global_pool": "avg"})
        sketch = _sketch(wanted, own_size(wanted), opened)
        encoder = find_encoder(opened.checkpoint, sketch, wanted.kind, what)
        notes.append("its last norm is fc_norm: features are the average of the patches")
    if encoder is None:
        encoder = nearest(opened.checkpoint, sketch, wanted.kind)
    check_tensors(encoder.tensors, what)
    # images as it knows them
    with _naming_a_garbled_view(what):
        view, more = _view(opened, architecture, tag, may_be_usual=may_be_usual).make(what, crop_px)
    # the network, with its weights
    with _errors_of(what, component):
        backbone, wanted = _build(wanted, view.crop_px, encoder, fixed=component is not None)
    if component is None:
        _check_pooling(opened, wanted.kind, backbone)
    layout = _layout(opened, encoder)
    report = fit_tensors(backbone, wanted.kind, encoder.tensors, f"{what} (format: {layout})")
    report["unexpected"] += [*encoder.beside, *dropped]
    origin = {"source": what, "format": layout, "sha256": opened.sha256}
    notes += [*encoder.notes, *more]
    return backbone, wanted, view, {**origin, **report, "notes": notes}


@dataclass(frozen=True)
class _Opened:
    """A source whose file has been read."""

    source: Source
    sha256: str  # of its file
    checkpoint: Checkpoint  # its tensors
    plain: Tensors  # those that no table holds, under their names in the file
    arch: str | None  # the architecture that the file names; None: it names none
    # the config.json beside it, of timm or transformers; {}: none, or the user names a network
    config: dict[str, Any]


def _open(source: Source) -> _Opened:
    """Read the files of a source. Raises: WeightsError."""
    tree, sha256 = read_tree(source.path)
    config = _read_object(source.path, "config.json")
    if source.kind is not None and "architecture" not in config:
        config = {}  # of transformers: it says which network it is, and the user says another
    return _Opened(
        source=source,
        sha256=sha256,
        checkpoint=open_checkpoint(tree, source.text),
        plain={key: value for key, value in tree.items() if isinstance(value, Tensor)},
        arch=_arch(tree),
        config=config,
    )


@contextmanager
def _errors_of(what: str, component: SparseSettings | None) -> Iterator[None]:
    """Let errors name the source whose network fails; those of a recipe's network name its keys."""
    try:
        yield
    except UserError as error:
        if component is not None:
            raise
        raise WeightsError(f"{what}: {error}") from error


@contextmanager
def _naming_a_garbled_view(what: str) -> Iterator[None]:
    """Raise WeightsError where what a source says of its images is nothing to make a view of."""
    try:
        yield
    except UserError:
        raise
    except REFUSALS as error:
        text = str(error) if isinstance(error, ValueError) else repr(error)
        raise WeightsError(f"{what}: its own view cannot be made: {text}") from error


def _named_by_the_user(opened: _Opened) -> tuple[str | None, str]:
    """Return the kind that stands before the file, and the tag of timm's weights; "": no tag."""
    kind = opened.source.kind
    if kind is None or not kind.startswith("timm/"):
        return kind, ""
    kind, _, tag = kind.partition(".")
    if tag:
        _check_tag(opened, kind.removeprefix("timm/"), tag)
    return kind, tag


def _layout(opened: _Opened, encoder: Encoder) -> str:
    """Name the layout of a file, for reports."""
    if "architecture" in opened.config:
        return "timm"
    if "model_type" in opened.config:
        return "transformers"
    if not encoder.is_found:
        return "none that is known"
    if encoder.match.spelling:
        return encoder.match.spelling
    return "state dict" if encoder.is_plain else "part of a larger model"


def _named_by_the_file(opened: _Opened, notes: list[str]) -> SparseSettings:
    """Return the network that a file names, or whose whole classifier it is; `notes` get it.

    Programs write `arch`, a name of torchvision or timm, beside their tables or into `args`.

    Raises:
        WeightsError: There is no such name: the user has to give it.
    """
    import timm
    import torchvision

    source = opened.source
    arch = opened.arch
    kind = classifier_of_torchvision(opened.checkpoint)
    if kind is not None:
        notes.append(f"its tensors are those of torchvision's classifier {kind}")
        return backbone_settings(kind=kind)
    known = {
        "torchvision": torchvision.models.list_models(module=torchvision.models),
        "timm": [arch] if arch is not None and timm.is_model(arch) else [],
    }
    for family, names in known.items():
        component = backbone_settings(kind=f"{family}/{arch}")
        if arch not in names:
            continue
        try:
            sketch = _sketch(component, own_size(component), opened)
        except UserError:
            continue
        if find_encoder(opened.checkpoint, sketch, component.kind, source.text) is not None:
            notes.append(f"the file names its network: arch = {shown(arch)}")
            return component
    if {"features", "ids"} <= opened.checkpoint.tensors.keys():
        raise WeightsError(f"{source.text} {VECTORS}")
    first = ", ".join(map(repr, list(opened.checkpoint.tensors)[:3]))
    named = "" if arch is None else f"; its arch = {shown(arch)} is not a name of theirs that fits"
    raise WeightsError(
        f"{source.text} names no architecture of timm or torchvision (it has {first}, ...{named}); "
        f"write it before the file, as in timm/resnet50@{source.path} or "
        f"torchvision/resnet50@{source.path}"
    )


def _arch(tree: dict[str, Any]) -> str | None:
    """Return the architecture that a checkpoint names; None: it names none."""
    tables = [tree, *(tree.get(key) for key in ("args", "hyper_parameters", "opt"))]
    for table in tables:
        entries = table if isinstance(table, dict) else getattr(table, "__dict__", {})
        for key in ("arch", "architecture", "model"):
            name = entries.get(key)
            if isinstance(name, str) and name:
                return name
    return None


def _check_arch(opened: _Opened, wanted: SparseSettings, sketch: Backbone) -> None:
    """Raise WeightsError where a file names a network of the same tensors that computes otherwise.

    Of timm's networks some differ by padding, activation or an epsilon alone.
    """
    import timm

    source = opened.source
    arch = opened.arch
    family, _, architecture = wanted.kind.partition("/")
    if family != "timm" or arch in (None, architecture) or not timm.is_model(arch):
        return
    try:
        named = backbone_settings(f"timm/{arch}", wanted.arguments)
        named_network = _sketch(named, own_size(named), opened)
    except UserError:
        return
    if str(named_network.network) == str(sketch.network):
        return
    if find_encoder(opened.checkpoint, named_network, named.kind, source.text) is not None:
        raise WeightsError(
            f"{source.text}: the file names its network, arch = {shown(arch)}, which has the same "
            f"tensors as {architecture} and computes otherwise; write timm/{arch}@{source.path}"
        )


def _read_object(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a folder; {} where there is none. Raises: UserError for damage."""
    if not (path / name).is_file():
        return {}
    return read_json(path / name, Tree, remedy="copy the folder again")


def _stated(opened: _Opened) -> SparseSettings | None:
    """Take the network from a folder's configuration; None where none is there.

    Raises:
        WeightsError: The configuration is not one of timm, transformers or open_clip.
    """
    source = opened.source
    config = opened.config
    if "architecture" not in config and "model_type" in config:
        return transformers_component(config, source.text)
    if "architecture" not in config:
        of_open_clip = {} if source.kind is not None else _read_object(source.path, OPEN_CLIP)
        return open_clip_component(of_open_clip, source.text) if of_open_clip else None
    name = config["architecture"]
    stated = config.get("model_args") or {}
    if not isinstance(name, str):
        raise WeightsError(
            f"{source.path}/config.json: architecture = {shown(name)} is not the name of a "
            "network of timm"
        )
    try:
        if not isinstance(stated, dict):
            raise TypeError(f"{shown(stated)} is no table of arguments")
        for key, value in stated.items():  # some are counted to before anything is built
            if any(isinstance(each, int) and abs(each) > MOST for each in tree_leaves(value)):
                raise ValueError(f"{key} = {shown(value)} is more than {MOST:,}")
        settings = {key: value for key, value in stated.items() if key not in _NOT_BUILT}
        return backbone_settings(f"timm/{name}", settings)
    except (TypeError, ValueError) as error:  # pydantic's are of the latter
        text = one_line(str(error))
        raise WeightsError(f"{source.path}/config.json: model_args: {text}") from error


def _check_pooling(opened: _Opened, kind: str, backbone: Backbone) -> None:
    """Raise WeightsError where a folder of timm says that its network pools in another way.

    No tensor says so, and earlier releases of timm wrote it without the arguments that make it so.
    """
    stated = opened.config.get("global_pool")
    built = getattr(backbone.network, "global_pool", None)
    is_of_it = kind == f"timm/{opened.config.get('architecture')}"
    if is_of_it and isinstance(stated, str) and isinstance(built, str) and stated != built:
        raise WeightsError(
            f"{opened.source.text}: config.json says global_pool = {shown(stated)}, and by its "
            f"model_args the network pools by {built!r}; write both into model_args: "
            f'"global_pool": "{stated}", and "fc_norm": false where the last norm of a vision '
            "transformer is before the pooling"
        )


def _check_tag(opened: _Opened, architecture: str, tag: str) -> None:
    """Raise WeightsError where timm has no such weights, or a folder of timm says it has others."""
    import timm

    source = opened.source
    config = opened.config
    tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{architecture}.*")]
    stated = config.get("pretrained_cfg", config)
    named = stated.get("tag") if "architecture" in config and isinstance(stated, dict) else None
    if named and named != tag and source.text.startswith(f"{source.kind}@"):
        raise WeightsError(
            f"{source.text}: {source.path}/config.json says that its weights are {named!r}, not "
            f"{tag!r}; leave the tag out"
        )
    if tag not in tags and tag != named and timm.is_model(architecture):
        raise WeightsError(
            f"{source.text}: timm has no weights {architecture}.{tag}{did_you_mean(tag, tags)}; "
            f"tags of {architecture}: {', '.join(tags) or 'none'}"
        )


def _computing_as(wanted: SparseSettings, stated: SparseSettings | None) -> SparseSettings:
    """Add what the source's config says and no tensor shows: epsilons of norms and the like.

    What `wanted` says itself stays; networks of one module of timm take the same arguments.
    """
    if stated is None or stated == wanted:
        return wanted
    import timm

    kinds = [each.kind for each in (wanted, stated) if each.kind.startswith("timm/")]
    known = [name for name in (k.removeprefix("timm/") for k in kinds) if timm.is_model(name)]
    if len(known) < 2 or len({timm.models.model_entrypoint(n).__module__ for n in known}) > 1:
        return wanted
    arguments = {key: stated.arguments[key] for key in _NOT_IN_TENSORS if key in stated.arguments}
    return backbone_settings(wanted.kind, {**arguments, **wanted.arguments})


def own_size(component: SparseSettings) -> int:
    """Return the side of the images that a network is made for, 224 px if nothing is said."""
    family, _, name = component.kind.partition("/")
    arguments = component.arguments
    stated = arguments.get("config") or arguments.get("vision") or {}
    side = stated.get("image_size")
    side = side[0] if isinstance(side, list) and side else side
    if type(side) is int and 0 < side <= MOST:
        return side
    if family != "timm":
        return 224
    import timm

    config = timm.get_pretrained_cfg(name)
    return 224 if config is None else int(config.input_size[-1])


def _averages(sketch: Backbone, checkpoint: Checkpoint) -> bool:
    """Return whether a file is of a vision transformer that averages before its last norm.

    No tensor says that it averages, but only such a network has an `fc_norm`: those of MAE's and
    BEiT's fine-tunings.
    """
    has_norm = any(f".{key}".endswith(f".{AVERAGED_NORM}") for key in checkpoint.tensors)
    return has_norm and "fc_norm" in dict(sketch.network.named_children())


def _view(
    opened: _Opened, component: SparseSettings, tag: str, *, may_be_usual: bool
) -> StatedView:
    """Read the view that the weights were trained for, or take ImageNet's and say so.

    `may_be_usual`: without a tag, they may be the library's usual weights of this kind.
    """
    source = opened.source
    config = opened.config
    kind = component.kind
    if kind == "transformers":
        return folder_view(source.path, source.text, component.arguments["config"])
    if kind.startswith("open_clip/"):
        return open_clip_view(component, _read_object(source.path, OPEN_CLIP))
    family, _, architecture = kind.partition("/")
    if "architecture" in config:
        stated = config.get("pretrained_cfg", config)
        arguments = config.get("model_args") or {}  # a table, or it was refused
        own_view = timm_view(source.text, stated, arguments.get("img_size"))
        remarks = timm_remarks(architecture, tag or str(stated.get("tag")))
        return replace(own_view, notes=(*own_view.notes, *remarks))
    view: StatedView | None = None
    if family == "timm":
        tag = tag or tag_of_file(architecture, source.path.name)
        if may_be_usual or tag:
            view = usual_timm_view(source.text, architecture, tag)
    if family == "torchvision" and may_be_usual:
        view = torchvision_view(architecture, opened.sha256)
    return view or unknown_view(own_size(component))


def _sketch(component: SparseSettings, crop_px: int, opened: _Opened) -> Backbone:
    """Build a network whose keys and shapes count, without memory for its weights if that works.

    Raises:
        TooLarge: It has far more numbers than the file; nothing was allocated.
    """
    stored = sum(tensor.numel() for tensor in opened.checkpoint.tensors.values())
    try:
        backbone = sketch("backbone", partial(build_backbone, component, crop_px=crop_px))
    except UserError as error:  # some constructors read what they compute
        if isinstance(error, TooLarge):
            raise
        with within_memory("backbone"):
            return build_backbone(component, crop_px=crop_px)
    asked = sum(tensor.numel() for tensor in backbone.network.state_dict().values())
    if asked > MOST_ASKED * stored + 2**26:
        raise TooLarge(
            f"{component.kind} is configured with {asked:,} numbers, and the file has {stored:,}; "
            "its configuration is of other weights"
        )
    return backbone


def _build(
    component: SparseSettings, crop_px: int, encoder: Encoder, *, fixed: bool
) -> tuple[Backbone, SparseSettings]:
    """Build the network; the weights decide its channels and a ResNet's stem, unless a recipe does.

    Args:
        component: What it is built from.
        crop_px: Side of its images.
        encoder: The weights.
        fixed: A recipe decides.
    """
    tensors = encoder.match.stored if encoder.is_found else encoder.tensors
    with within_memory("backbone"):
        backbone = build_backbone(component, crop_px=crop_px)
    convolution = first_convolution(backbone.network)
    # some see something else first than the image: its frequencies, its pixels folded
    of_image = convolution is not None and convolution[1].in_channels == RGB_CHANNELS
    sees = tensors.get(f"{convolution[0]}.weight") if convolution and of_image else None
    if sees is not None and sees.ndim == 4 and sees.shape[1] not in (1, RGB_CHANNELS):
        arguments = {**component.arguments, "channels": sees.shape[1]}
        component = backbone_settings(component.kind, arguments)
        backbone = build_backbone(component, crop_px=crop_px)
    first = tensors.get("conv1.weight")
    if fixed or backbone.stem is None or first is None or first.ndim != 4:
        return backbone, component
    fitting = "imagenet" if first.shape[-1] == 7 else encoder.stem
    if fitting is None:
        raise WeightsError(
            "the first convolution is 3x3, and whether a max-pool follows is not in the file; "
            f'train from it with \'backbone={{kind="{component.kind}",stem="small"}}\', or '
            "'small_pool' where one follows; without training, export it in Python, and name that "
            "folder: sslpipe.export_backbone(sslpipe.load_backbone(SOURCE, component="
            f"sslpipe.models.backbones.backbone_settings({component.kind!r}, "
            "{'stem': 'small'})), FOLDER)"
        )
    if fitting != backbone.stem:
        component = backbone_settings(component.kind, {**component.arguments, "stem": fitting})
        backbone = build_backbone(component, crop_px=crop_px)
    return backbone, component
