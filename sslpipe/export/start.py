"""The weights that a run starts from: random, named by the user, or kept in RUN/init.

RUN/init is an export in the safetensors format, `load_backbone` reads it. It is what a resume, the
decay towards the start and comparisons with the start take: the source is not needed again.
"""

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from sslpipe.augment.eval_view import EvalView, eval_view_for, normalisation
from sslpipe.data.index import DatasetIndex
from sslpipe.errors import RecipeError, UserError
from sslpipe.export.folder import read_folder, sha256_sums, write_folder
from sslpipe.export.saved import SavedBackbone
from sslpipe.models.backbones import RGB_CHANNELS, backbone_settings, build_backbone
from sslpipe.models.channels import adapt_kernels, first_convolution
from sslpipe.portable import explain_file_error
from sslpipe.recipe.sections import RunRecipe, Tune
from sslpipe.registry.schema import SparseSettings
from sslpipe.run.checkpoint_files import checkpoint_names

RecipeT = TypeVar("RecipeT", bound=RunRecipe)

KEPT = "init"  # folder of a run directory


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        kind: "random": weights drawn from recipe.seed. "named": what the command names, in a run
            that keeps none yet. "kept": what the run keeps in RUN/init.
        weights: The backbone; None for random ones.
    """

    kind: Literal["random", "named", "kept"]
    weights: SavedBackbone | None

    @classmethod
    def find(
        cls, named: SavedBackbone | None, index: DatasetIndex, run_dir: Path | None = None
    ) -> "Start":
        """Decide between what the command names and what the run keeps; writes nothing.

        Args:
            named: The weights that the command names, if any.
            index: The data set, whose channels the first layer is fitted to.
            run_dir: The run directory, if there is one.

        Raises:
            UserError: The run has checkpoints that came from other weights, RUN/init cannot be
                read, or the weights are for other channels.
        """
        named = fit_channels(named, index)
        fresh = cls("random" if named is None else "named", named)
        if run_dir is None:
            return fresh
        folder = run_dir / KEPT
        begun = bool(checkpoint_names(run_dir / "checkpoints"))
        if not folder.exists():
            if named is not None and begun:
                raise UserError(
                    f"{run_dir} started from random weights, and --init names others: leave "
                    "--init out to resume it, or use another --run-dir"
                )
            return fresh
        kept = read_folder(folder)
        kept_sha256 = kept.config.weights_sha256
        if named is None or named.config.weights_sha256 == kept_sha256:
            return cls("kept", kept)
        if begun:
            raise UserError(
                f"{run_dir} started from weights with sha256 {kept_sha256}, and --init names "
                f"others, with {named.config.weights_sha256}: leave --init out to resume it, or "
                "use another --run-dir"
            )
        return cls("named", named)  # what is kept is of a start that failed at once

    def keep(self, run_dir: Path) -> None:
        """Write named weights to RUN/init; on rank 0, with the directory's lock held.

        Raises:
            UserError: There is no room, or the directory cannot be written.
        """
        if self.kind != "named" or self.weights is None:
            return
        folder = run_dir / KEPT
        start = SavedBackbone(self.weights.backbone, self.weights.view, self.weights.config)
        start.update_config(
            facts={"init": init_facts(self.weights)},
            whitening_sha256=None,
        )
        scratch = run_dir / f".{KEPT}.{secrets.token_hex(8)}.tmp"
        try:
            for left in run_dir.glob(f".{KEPT}.*tmp"):  # of starts that were killed
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.mkdir(parents=True)
            write_folder(start, scratch)
            (scratch / "SHA256SUMS").write_text(sha256_sums(scratch))
            os.replace(scratch, folder)
        except OSError as error:
            raise UserError(explain_file_error(error, folder)) from error

    def view(self, recipe: RunRecipe, index: DatasetIndex, crop_px: int) -> EvalView:
        """Return the view of the run's evaluations; the recipe is one of `with_init`.

        It has the training's mean and std, and its crop or tune.eval_crop_px. Started from
        weights, it resizes as they are used to.
        """
        mean_std = normalisation(recipe.augment, index.manifest.mean, index.manifest.std)
        crop_px = int(recipe.tune.eval_crop_px or crop_px)
        if self.weights is None or self.weights.view.crop_px != crop_px:
            return eval_view_for(crop_px, mean=mean_std["mean"], std=mean_std["std"])
        return EvalView.from_config({**self.weights.view.config(), **mean_std})

    def metadata(self, view: EvalView) -> dict[str, Any]:
        """Return what a checkpoint says of the start, and the view; {} for random weights."""
        if self.weights is None:
            return {}
        return {"init": init_facts(self.weights), "view": view.config()}

    def describe(self, tune: Tune) -> str:
        """Return which weights a run starts from, as the console and `check` say it."""
        if self.weights is None:
            return "random weights"
        facts = init_facts(self.weights)
        first = tune.projector_first_steps
        frozen = f"; frozen, its BatchNorms in eval mode, for the first {first} steps"
        source = f"{facts['source'] or 'a model'} (sha256 {facts['weights_sha256'][:16]})"
        part = f", its part {facts['part']}" if "part" in facts else ""
        channels = facts.get("channels", ())
        fitted = f", the first layer fitted to {', '.join(channels)}" if channels else ""
        notes = "".join(f"; {note}" for note in facts.get("notes", ()))
        return f"weights of {source}{part}{fitted}{frozen if first else ''}{notes}"

    def remark(self, recipe: RunRecipe) -> str | None:
        """Return which settings of a [backbone] as it was given the weights replace, if any."""
        unlike = [] if self.weights is None else _unlike(recipe, self.weights)
        if unlike and unlike[0][0] == "kind":  # the arguments of another one do not compare
            del unlike[1:]
        if not unlike:
            return None
        texts = [f"backbone.{key} = {present!r}, not {value!r}" for key, value, present in unlike]
        return (
            f"the backbone is that of the given weights: {', '.join(texts)}; the recipe's "
            "[backbone] is for random weights"
        )


def fit_channels(init_from: SavedBackbone | None, index: DatasetIndex) -> SavedBackbone | None:
    """Make the first layer of RGB weights fit the channels of a data set, by `adapt_kernels`.

    The view gets the data's mean and standard deviation. Weights of others for C channels, which
    have no names, take data of as many, in their order.

    Raises:
        UserError: The weights are for other channels than RGB, which are not the data's.
    """
    if init_from is None or init_from.config.is_join:
        return init_from
    image_type = index.image_type
    seen = init_from.backbone.channels
    backbone = init_from.backbone
    component = init_from.config.backbone
    name = f"--init: {init_from.name}"
    data_channels = ", ".join(image_type.channels)
    if init_from.config.image is None and seen != RGB_CHANNELS:
        if seen != len(image_type.channels):
            raise UserError(
                f"{name} sees {seen} channels, and the data have {len(image_type.channels)} "
                f"({data_channels}); choose {seen} by data.channels, in the order of the weights"
            )
    else:
        own_type = init_from.image_type
        # of the same depth, too: its view gets their range
        if own_type.channels == image_type.channels:
            return init_from.seeing(image_type) if own_type.dtype == image_type.dtype else init_from
        if not own_type.is_rgb:
            raise UserError(
                f"{name} was trained on the channels {', '.join(own_type.channels)}, and the data "
                f"have {data_channels}; choose among them by data.channels"
            )
        component = with_channels(component, len(image_type.channels))
        backbone = build_backbone(component, crop_px=init_from.config.crop_px)
        state = init_from.backbone.state_dict()
        convolution = first_convolution(backbone.network)
        if convolution is None:
            raise UserError(
                f"{name} does not begin with a convolution, which could be fitted to the channels "
                f"{data_channels}"
            )
        first = f"network.{convolution[0]}.weight"
        state[first] = adapt_kernels(state[first], image_type.channels)
        backbone.load_state_dict(state)
    statistics = {"mean": index.manifest.mean, "std": index.manifest.std}
    view = EvalView.from_config(init_from.view.config() | statistics)
    init = {**init_facts(init_from), "channels": list(image_type.channels)}
    facts = {**init_from.config.facts, "init": init}
    return SavedBackbone.of(backbone, component, view, facts, image=index.manifest.image)


def with_channels(component: SparseSettings, channels: int | None) -> SparseSettings:
    """Return a [backbone] for images of so many channels; None: without a word of them."""
    settings = component.arguments
    settings.pop("channels", None)
    if channels not in (None, RGB_CHANNELS):
        settings["channels"] = channels
    return backbone_settings(component.kind, settings)


def init_facts(init_from: SavedBackbone) -> dict[str, Any]:
    """Return what run.json, checkpoints and exports say of a start: source, format, sha256."""
    recorded = init_from.config.facts
    facts = dict(recorded.get("init", {"source": "", "format": "sslpipe"}))
    if "classes_seen" in recorded:  # of a fine-tuning that is given as it was loaded
        facts["classes_seen"] = recorded["classes_seen"]
    return {**facts, "weights_sha256": init_from.config.weights_sha256}


def with_init(
    recipe: RecipeT,
    init_from: SavedBackbone | None,
    index: DatasetIndex,
) -> RecipeT:
    """Return the recipe with backbone, hash and views of the weights that it starts from.

    The weights' backbone counts, not the recipe's, but for `pool`: weights fit any. Views get the
    weights' mean, std and crop_px where [augment] does not say them and the data's are others.

    Args:
        recipe: Of any kind.
        init_from: The weights; None: random ones of the recipe's [backbone].
        index: The data set.

    Raises:
        RecipeError: There is no backbone, or another one or other weights are named.
    """
    if init_from is None:
        component = _of_random_weights(recipe)
        sha256 = ""
    elif init_from.config.is_join:
        raise UserError(
            f"--init: {init_from.name} is a join, and a join is not trained; name one part"
        )
    else:
        component = _fitted(recipe, init_from)
        sha256 = init_from.config.weights_sha256
    component = _of_the_datas_channels(component, index)
    if recipe.init not in ("", sha256):
        raise RecipeError(
            f"init = {recipe.init[:16]!r}..., but the given backbone's weights have sha256 "
            f"{sha256[:16] or 'none: they are random'}; give the one that the recipe was made for"
        )
    changes: dict[str, Any] = {"backbone": component.model_dump(), "init": sha256}
    if init_from is not None:
        if recipe.tune.eval_crop_px == "auto":
            changes["tune"] = {**recipe.tune.model_dump(), "eval_crop_px": init_from.view.crop_px}
        changes["augment"] = {**_own_view(recipe, init_from, index), **recipe.augment.model_dump()}
    tree = {**recipe.model_dump(), **changes}
    fitted = type(recipe).model_validate(tree, context="recorded")  # its words were checked
    eval_crop_px: Any = fitted.tune.eval_crop_px
    crop_px: Any = fitted.augment.arguments.get("crop_px")
    if eval_crop_px is not None and not _takes_both_sides(component, crop_px, eval_crop_px, "meta"):
        raise RecipeError(
            f"tune.eval_crop_px = {eval_crop_px}, but a {component.kind} trained on {crop_px} px "
            "takes images of no other size; leave it out, or set augment.crop_px to it"
        )
    return fitted


def _of_random_weights(recipe: RunRecipe) -> SparseSettings:
    """Return the recipe's [backbone]. Raises: RecipeError: none, or a key that needs weights."""
    if recipe.backbone is None:
        raise RecipeError(
            "the recipe has no [backbone]; give one, or name weights to start from with --init"
        )
    settings = recipe.tune.model_dump(exclude_defaults=True)
    of_weights = [
        f"tune.{key} = {settings.pop(key)!r}" for key in recipe.of_weights if key in settings
    ]
    if of_weights:
        # the section as a whole, without what freezes: an override of a key cannot take it away
        others = ",".join(
            f"{key}={json.dumps(value)}"
            for key, value in settings.items()
            if key not in ("last_blocks", "batchnorm")
        )
        raise RecipeError(
            f"{' and '.join(of_weights)}: for a run that starts from weights; name them with "
            f"--init, or leave such settings out by 'tune={{{others}}}'"
        )
    return recipe.backbone


def _of_the_datas_channels(component: SparseSettings, index: DatasetIndex) -> SparseSettings:
    """Return a backbone for the data set's images. Raises: RecipeError: it says other channels."""
    channels = len(index.image_type.channels)
    wanted = component.arguments.get("channels", channels)
    if wanted != channels:
        raise RecipeError(
            f"backbone.channels = {wanted!r}, and the data's images have {channels} "
            f"({', '.join(index.image_type.channels)}); leave the key out"
        )
    return with_channels(component, channels)


def _takes_both_sides(
    component: SparseSettings, crop_px: int, eval_crop_px: int, device: str
) -> bool:
    """Return whether a network for images of one size has the weights for another one."""
    try:
        with torch.device(device), torch.no_grad():
            trained = build_backbone(component, crop_px=crop_px).eval()
            other = build_backbone(component, crop_px=eval_crop_px).state_dict()
            state = trained.state_dict()
            trained(torch.empty(1, trained.channels, eval_crop_px, eval_crop_px))
    except RecipeError:
        if device == "cpu":
            raise
        # some constructors read what they compute, which meta tensors are without
        return _takes_both_sides(component, crop_px, eval_crop_px, "cpu")
    except (AssertionError, RuntimeError, ValueError):
        return False
    return {k: t.shape for k, t in state.items()} == {k: t.shape for k, t in other.items()}


def _unlike(recipe: RunRecipe, init_from: SavedBackbone) -> list[tuple[str, Any, Any]]:
    """List (key, the recipe's value, the weights') where a [backbone] names another network."""
    any_fit = {"pool", "pool_power", *recipe.said_elsewhere}  # which a record repeats
    settings = init_from.config.backbone.model_dump()
    different = []
    for key, value in ({} if recipe.backbone is None else recipe.backbone.model_dump()).items():
        present = settings.get(key)
        same = (list(present) if isinstance(present, tuple) else present) == value
        if not same and key not in any_fit and (key, value) != ("stem", "auto"):
            different.append((key, value, present))
    return different


def _fitted(recipe: RunRecipe, init_from: SavedBackbone) -> SparseSettings:
    """The weights' component; a recipe's `pool` counts, and what its [embedding] says elsewhere."""
    for key, value, present in _unlike(recipe, init_from):
        if key in recipe._backbone_overrides:
            raise RecipeError(
                f"backbone.{key} = {value!r}, but the given backbone has {present!r}; leave "
                f"backbone.{key} out, or give other weights"
            )
    requested = {} if recipe.backbone is None else recipe.backbone.arguments
    settings = init_from.config.backbone.arguments
    heads = {"embedding_dim", "embedding_taps", "normalize"}
    for key in heads - {*requested}:  # the network is what counts
        settings.pop(key, None)
    if "pool" in requested:
        settings.pop("pool_power", None)
    pooling = {key: requested[key] for key in ("pool", "pool_power") if key in requested}
    return backbone_settings(init_from.config.backbone.kind, settings | pooling)


def _own_view(recipe: RunRecipe, init_from: SavedBackbone, index: DatasetIndex) -> dict[str, Any]:
    """What [augment] takes from the weights, unless it says so itself or the data say the same."""
    view = init_from.view.config()
    settings = recipe.augment.arguments
    view_settings: dict[str, Any] = {"crop_px": view["crop_px"]}
    for key in ("mean", "std"):
        data = [float(v) for v in getattr(index.manifest, key)]
        if settings.get("normalize", True) and view[key] != data:
            view_settings[key] = view[key]
    return view_settings
