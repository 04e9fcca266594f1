"""Load a backbone with all it needs beside it: from an export, a run, or weights of others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sslpipe.arguments import checked
from sslpipe.augment.eval_view import EvalView, eval_view_for, normalisation
from sslpipe.data.image_type import RGB8
from sslpipe.errors import CheckpointError, UserError, WeightsError, shown
from sslpipe.evaluation.suite_file import read_suite
from sslpipe.evaluation.verdict import against_sentences
from sslpipe.evaluation.whiten import load_whitening
from sslpipe.export.folder import read_folder, refusing_damage
from sslpipe.export.join import at_size, join
from sslpipe.export.model import FrozenBackbone
from sslpipe.export.saved import Config
from sslpipe.files import Tree, write_json
from sslpipe.models.backbones import BACKBONES, build_backbone
from sslpipe.models.limits import check_side
from sslpipe.models.state import module_sha256
from sslpipe.portable import memory_is_short
from sslpipe.precision import torch_defaults
from sslpipe.recipe.reading import parse_recipe
from sslpipe.recipe.sections import RunRecipe
from sslpipe.registry.plugins import made_with
from sslpipe.registry.schema import SparseSettings, refusals
from sslpipe.run.checkpoint_files import State, choose_checkpoint, read_state
from sslpipe.run.description import DataDescription, plugins_of, read_description
from sslpipe.weights.reader import read_weights
from sslpipe.weights.source import HUBS, Source, fetch, parse_source

__all__ = ["Config", "FrozenBackbone"]  # of other modules

# what timm's networks say of their images
_OF_TIMM_VIEWS = ("tag", "input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
# beginnings of the names of layers that change no feature in evaluation, and settings of others
_DO_NOTHING = ("Identity", "Drop", "StochasticDepth", "Flatten")
_SETTINGS = ("kernel_size", "stride", "padding", "dilation", "negative_slope", "approximate")


@checked
@torch_defaults()
def load_backbone(
    source: str | Path | nn.Module,
    *,
    architecture: str | None = None,
    checkpoint: str | None = None,
    component: SparseSettings | None = None,
    crop_px: int | None = None,
) -> FrozenBackbone:
    """Load a backbone with its weights; in eval mode, on the CPU.

    Safe for files from strangers: tensors and JSON are read, nothing is unpickled or run.

    Args:
        source: An export with the safetensors format, its timm or hf folder, a run directory, or
            weights of another program, see `weights.source`. SOURCE@PX is one for images of PX px,
            A+B several side by side. Or a network in memory, whose weights are copied.
        architecture: Of a network in memory: "torchvision/resnet50", "timm/NAME"; a timm network
            knows its own.
        checkpoint: Of a run directory: "step-00000012", "best" or "last". None: the best of a run
            whose start was a candidate (run.keep = "best"), else the newest.
        component: A recipe's [backbone], which weights of another program must fit; None: theirs.
        crop_px: Side of the images that weights of another program will see; None: as in training.
            An export and a run have their own.

    Returns:
        The backbone; of another program's, `config.facts["init"]` is the report of `read_weights`.

    Raises:
        ExportError: An export is damaged, or not what its SHA256SUMS says.
        WeightsError: Weights of another program cannot be read, or do not fit the whole backbone;
            a network in memory computes otherwise than its architecture.
        UserError: There is no run or checkpoint, or a file is damaged: an older checkpoint is taken
            only where it is named.
    """
    if isinstance(source, FrozenBackbone):
        return _as_trained(source)
    if isinstance(source, nn.Module):
        return _load_module(source, architecture, component=component, crop_px=crop_px)
    if architecture is not None:
        raise UserError(f"architecture is for a network in memory; write {architecture}@{source}")
    parsed = parse_source(source)
    _check_size(parsed, crop_px)
    if parsed.scheme in HUBS:
        parsed = replace(fetch(parsed), px=parsed.px)
    is_run = parsed.scheme == "sslpipe" and (parsed.path / "recipe.json").exists()
    if checkpoint is not None and not is_run:
        raise UserError(f"--checkpoint={checkpoint!r} is for a run directory; {source} is not one")
    if parsed.scheme == "join":
        return join([load_backbone(part.text) for part in parsed.parts], parsed.text)
    if parsed.scheme != "sslpipe":
        return _load_weights(parsed, component, parsed.px or crop_px)
    if is_run:
        model = load_run(parsed.path, checkpoint=checkpoint)
    else:
        saved = read_folder(parsed.path)
        whitening = None
        if saved.config.whitening_sha256 is not None:
            with refusing_damage(parsed.path):
                file = parsed.path / "whitening.safetensors"
                whitening = load_whitening(file, saved.config.whitening_sha256)
        model = FrozenBackbone(saved.backbone, saved.view, saved.config, whitening)
    return model if parsed.px is None else at_size(model, parsed.px, parsed.text)


def _check_size(source: Source, crop_px: int | None) -> None:
    """Raise UserError where a source cannot have images of the size that is wanted."""
    if source.px is not None:
        if crop_px not in (None, source.px):
            raise UserError(f"{source.text}: images have {crop_px} px here; leave @{source.px} out")
        check_side(source.text, source.px)
    if source.scheme == "join" and crop_px is not None:
        raise UserError(
            f"{source.text}: a join is not trained, and each part has a size; name one part"
        )


def _as_trained(model: FrozenBackbone) -> FrozenBackbone:
    """Have a loaded backbone say what its weights are: they may have been trained further."""
    before = model.config.weights_sha256
    if module_sha256(model.backbone) == before:
        return model
    exported = copy.deepcopy(model.backbone).cpu().float()  # as an export has it
    sha256 = module_sha256(exported)
    if sha256 != before:
        facts = model.config.facts
        notes = ["then trained further in a program of its user"]
        init = {
            "source": model.name,
            "format": "sslpipe",
            "weights_sha256": before,
            "notes": notes,
        }
        kept = {key: facts[key] for key in ("name", "plugins") if key in facts}
        model.update_config(weights_sha256=sha256, facts={**kept, "init": init})
    return model


def weights_text(model: FrozenBackbone) -> str:
    """Return which weights of a run were chosen; "" where they are its newest ones."""
    facts = model.config.facts
    if not {"checkpoint", "checkpoint_reason"} & {*facts}:
        return ""
    name = facts.get("checkpoint", f"step {facts.get('step')}")
    reason = f", {facts['checkpoint_reason']}" if "checkpoint_reason" in facts else ""
    return f"weights: {name} of {facts.get('name')}{reason}"


def _load_weights(
    source: Source, component: SparseSettings | None, crop_px: int | None
) -> FrozenBackbone:
    """Load weights of another program."""
    backbone, component, view, report = read_weights(source, component, crop_px)
    name = component.kind.rpartition("/")[2]
    name = component.arguments.get("config", {}).get("model_type", name)  # of transformers
    return FrozenBackbone.of(backbone, component, view, {"name": name, "init": report})


def _load_module(
    module: nn.Module,
    architecture: str | None,
    *,
    component: SparseSettings | None,
    crop_px: int | None,
) -> FrozenBackbone:
    """Copy a network in memory, through a file, as weights of another program are read."""
    pretrained_cfg = getattr(module, "pretrained_cfg", None) or {}  # of timm
    if architecture is None and pretrained_cfg.get("architecture"):
        architecture = f"timm/{pretrained_cfg['architecture']}"
    what = type(module).__name__
    if architecture is None:
        raise WeightsError(
            f"a {what} does not say which architecture it is: load_backbone(module, "
            'architecture="torchvision/resnet50"); of a network of your own compare its features, '
            "as sslpipe.knn and ImageSearch take them"
        )
    if "/" not in architecture and architecture not in BACKBONES.names():
        raise WeightsError(
            f"architecture = {shown(architecture)} is no KIND/NAME; give 'torchvision/"
            f"{architecture}' or 'timm/{architecture}'"
        )
    with TemporaryDirectory() as name:
        folder = Path(name)
        state = module.state_dict()
        # beside quantized tensors there are packed ones, which are none
        quantized = [key for key in state if getattr(state[key], "is_quantized", True)]
        if quantized:
            raise WeightsError(
                f"a {what} in memory: {quantized[0]} is quantized; give the network that it was "
                "made from"
            )
        tensors = {key: each.detach().clone() for key, each in state.items()}
        save_file(tensors, folder / "model.safetensors")
        if architecture == f"timm/{pretrained_cfg.get('architecture')}":  # it knows its images
            config = {
                "architecture": pretrained_cfg["architecture"],
                "pretrained_cfg": {key: pretrained_cfg.get(key) for key in _OF_TIMM_VIEWS},
                "model_args": _made_with(module),
            }
            write_json(folder / "config.json", config)
        source = Source(f"a {what} in memory", "path", folder, architecture)
        model = _load_weights(source, component, crop_px)
    _check_alike(module, model.backbone.network, source)
    return model


def _check_alike(module: nn.Module, network: nn.Module, source: Source) -> None:
    """Raise WeightsError where a network in memory computes otherwise than what it is named as.

    Its tensors do not show that a max-pool was removed or a stride changed. Layers are compared by
    their names; those of a network that names them otherwise are not.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return  # whose layers do not show what they are
    layers = {name: each for name, each in network.named_modules() if not [*each.children()]}
    weighted = {name for name, each in layers.items() if [*each.parameters(recurse=False)]}
    for part in module.modules():
        theirs = dict(part.named_modules())
        if theirs.keys() >= weighted:
            break
    else:
        return
    for name, layer in layers.items():
        their = theirs.get(name, layer)
        is_unpooled = "Adaptive" in type(layer).__name__ and isinstance(their, nn.Identity)
        # of a stem that was named as one without pooling; other layers for nothing are heads
        is_pooled = _computed(layer) == {} and isinstance(their, nn.MaxPool2d | nn.AvgPool2d)
        differs = is_pooled or _computed(layer) not in ({}, _computed(their))
        if differs and not is_unpooled:
            raise WeightsError(
                f"{source.text}: its {name} is {shown(their)}, and that of {source.kind} "
                f"{shown(layer)}, so its features are others: compare them as sslpipe.knn and "
                "ImageSearch take them; or save its state_dict(), and name the file as the weights "
                "of the unchanged network"
            )


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    return chain(layer.parameters(recurse=False), layer.buffers(recurse=False))


def _computed(layer: nn.Module) -> dict[str, Any]:
    """Return what a layer computes in evaluation, but for its tensors; {}: nothing."""
    kind = type(layer).__name__
    if kind.startswith(_DO_NOTHING):
        return {}
    # the tensors of a layer that has some are compared when they are read
    computed: dict[str, Any] = {"kind": kind} if next(_tensors(layer), None) is None else {}
    for name in _SETTINGS:
        value: Any = getattr(layer, name, None)
        is_repeated = isinstance(value, tuple) and len({*value}) == 1  # (1, 1) is 1
        computed[name] = value[0] if is_repeated else value
    return computed


def _made_with(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of a network of timm that its tensors do not show."""
    from timm.layers import SelectAdaptivePool2d

    arguments = {}
    if not any(hasattr(each, "window_size") for each in module.modules()):  # of Swin: by the size
        arguments["img_size"] = getattr(getattr(module, "patch_embed", None), "img_size", None)
    pools = {each.pool_type for each in module.modules() if isinstance(each, SelectAdaptivePool2d)}
    pools |= {pool for pool in [getattr(module, "global_pool", None)] if isinstance(pool, str)}
    pools.discard("")  # features of every place: the usual pooling makes rows of them
    if len(pools) == 1:
        arguments["global_pool"] = pools.pop()
    return {key: value for key, value in arguments.items() if value is not None}


def load_run(run_dir: Path, *, checkpoint: str | None = None) -> FrozenBackbone:
    """Load the backbone of a run's checkpoint: the one place that knows its files.

    Args:
        run_dir: Its folder.
        checkpoint: As in `load_backbone`; `Config.facts` names it.

    Raises:
        UserError: As in `load_backbone`.
    """
    # what the run wrote down; what the checkpoint says of it counts
    folder, is_named, reason = choose_checkpoint(run_dir, checkpoint)
    state = read_state(folder)
    identity = state.identity
    written = read_description(run_dir, "recipe.json", Tree)
    tree = {**written, **identity.recipe}
    if isinstance(teacher := written.get("teacher"), dict) and tree["teacher"]:
        # where its file was, which the identity omits
        tree["teacher"] = {"features": teacher.get("features"), **tree["teacher"]}
    with made_with(plugins_of(run_dir)):
        recipe = parse_recipe(tree, f"{run_dir}/recipe.json", recorded=True)
        assert recipe.backbone is not None  # a run has written down what it built
        data = read_description(run_dir, "data.json", DataDescription)
        if data.index_sha256 != identity.index_sha256:
            raise UserError(
                f"{run_dir / 'data.json'} is damaged: it is not of the checkpoint's data; resume "
                "the run with its own `sslpipe train` command, or restore a copy"
            )
        # the view of evaluation: the training's crop and normalisation, without its distortions
        channels = (data.image or RGB8).channels
        with refusals("augment", recipe.augment.kind):
            views = recipe.augment.build(mean=data.mean, std=data.std, channels=channels)
        crop_px = int(views.crop_px)
        mean_std = normalisation(recipe.augment, data.mean, data.std)
        view = eval_view_for(crop_px, mean=mean_std["mean"], std=mean_std["std"])
        if state.view is not None:  # of a run from weights: resized as they are used to
            view = EvalView(**state.view)
        # the weights
        backbone = build_backbone(recipe.backbone, crop_px=crop_px)
    try:
        prefix = "backbone."
        tensors = load_file(folder / "model.safetensors")
        weights = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        backbone.load_state_dict(weights, strict=True)
    except (SafetensorError, RuntimeError) as error:
        if memory_is_short(error):
            raise
        raise CheckpointError(f"{folder}: {' '.join(str(error).split())}") from error
    # what a reader of the export should know
    chosen = {"checkpoint": folder.name} if is_named else {}
    if reason:
        chosen["checkpoint_reason"] = reason
    metadata = _run_metadata(run_dir, recipe, data, state, chosen)
    if (run_dir / "eval.json").exists():
        metadata |= _evaluation(run_dir / "eval.json", module_sha256(backbone))
    return FrozenBackbone.of(
        backbone=backbone,
        component=recipe.backbone,
        view=view,
        facts=metadata,
        image=data.image,
    )


def _run_metadata(
    run_dir: Path,
    recipe: RunRecipe,
    data: DataDescription,
    state: State,
    chosen: Mapping[str, str],
) -> dict[str, Any]:
    """Return what an export says of its run; `chosen`: which checkpoint, and why."""
    metadata = {
        "name": recipe.name,
        "recipe": recipe.model_dump(mode="json"),
        "learns_classes": recipe.learns_classes,
        "digest": state.identity.digest,
        "step": state.step,
        "data": data.model_dump(
            include={"name", "license", "classes", "index_sha256"}, mode="json"
        ),
        **chosen,
    }
    if state.init is not None:  # the weights that the run started from
        metadata["init"] = state.init
    if plugins := plugins_of(run_dir):  # whoever gets an export has them elsewhere
        metadata["plugins"] = [Path(name).name for name in plugins]
    is_untrained = state.step == 0 and "classes_seen" not in (state.init or {})  # by any label
    if state.classes is not None and not is_untrained:  # of a fine-tuning
        metadata["classes_seen"] = state.classes
    return metadata


def _evaluation(path: Path, weights_sha256: str) -> dict[str, Any]:
    """Read the numbers in the table of RUN/eval.json, without details, and what they are of.

    Numbers of other weights (the run was resumed after it was evaluated) are not taken.
    """
    suite = read_suite(path)
    facts = suite["facts"]
    if facts.get("backbone_sha256") != weights_sha256:
        return {"evaluation_left_out": "eval.json is not of these weights; evaluate the run again"}
    rows = [row for row in suite["rows"] if row["column"] is not None]
    against = facts.get("against", [])
    keys = ("data", "data_sha256", "split", "train_split")
    optional = {
        "evaluation_against": [{k: o[k] for k in ("name", "format", "sha256")} for o in against],
        "evaluation_verdict": against_sentences(suite),
    }
    return {
        "evaluation": [{k: row[k] for k in row if k != "details"} for row in rows],
        "evaluation_data": {key: facts[key] for key in keys if key in facts},
        **{key: value for key, value in optional.items() if value},
    }
