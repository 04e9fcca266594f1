"""A run's settings: TOML in, one frozen tree out; each is documented where it is defined."""

import hashlib
import json
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sslpipe.errors import RecipeError, did_you_mean

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(BaseModel):
    """A table entry by name (`kind`) and the keyword arguments of its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(Section):
    split: str = "train"  # the split of dataset.json that is trained on
    batch_size: Positive = 256  # images in a global step, over all processes
    # images whose activations are alive at once, over all processes; none: the whole batch. The
    # negatives stay those of the whole batch (gradient caching); a step costs a forward more.
    micro_batch: Positive | None = None
    num_streams: Positive = 64  # parts of the data read side by side; processes divide it
    shuffle_window: Positive = 256  # samples shuffled together inside a stream
    holdout: NonNegative = 0  # samples of the split kept from training, for the kNN monitor
    canvas_px: Positive = 256  # decoded images larger than this are reduced to fit, never squashed
    # nvjpeg: JPEGs are decoded on the CUDA device; pixels differ from the CPU's by a few levels
    decoder: Literal["cpu", "nvjpeg"] = "cpu"

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a global step is cut into; 1 without micro_batch."""
        return self.batch_size // (self.micro_batch or self.batch_size)


class Projector(Section):
    hidden_dim: Positive = 2048
    out_dim: Positive = 128
    num_layers: Positive = 2  # linear layers; ReLU between them
    batchnorm: bool = True  # after every linear layer, the last without scale and shift


class Momentum(Section):
    """A second encoder that follows the first and makes the keys of the second views (MoCo)."""

    start: Annotated[float, Field(ge=0, le=1)] = 0.999  # weight of its own weights at each step
    schedule: Literal["constant", "cosine"] = "constant"  # cosine: rises to 1 over the run


class Optim(Section):
    kind: Literal["sgd", "adamw", "lars"] = "lars"
    peak_lr: Rate  # the rate used at the peak; no scaling rule is applied to it
    weight_decay: Rate = 1e-6
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # sgd, lars
    nesterov: bool = False  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adamw
    trust_coefficient: Rate = 0.001  # lars
    decay_one_dim: bool = False  # weight decay on biases and norms too
    warmup_steps: NonNegative = 0  # linear from 0 to peak_lr
    schedule: Literal["cosine", "constant"] = "cosine"  # after the warm-up; cosine ends at 0
    clip_norm: Annotated[float, Field(gt=0)] | None = None  # on the global gradient norm
    # auto: two steps timed of fp32 and bf16; fp64: for reference runs, exact to rounding
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"


class Run(Section):
    """What may not change a trained weight beyond float rounding: not part of the digest."""

    log_steps: Positive = 10
    monitor_steps: NonNegative = 0  # kNN on the held-out slice; 0: never
    save_steps: Positive = 500
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2  # one may be in the middle of being written
    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    num_workers: NonNegative = 2  # decoding threads of each process; 0: decode in the loop
    prefetch: Positive = 4  # batches decoded ahead
    # memory: keep decoded images after their first use; device: all in its memory before the start
    cache: Literal["none", "memory", "device"] = "none"
    cache_dir: str = ""  # a folder for blocks of shards that are read over a network; "": none
    cache_gb: Rate = 50.0  # of blocks kept there
    compile: bool = False
    window_bytes: Positive = 64 * 2**20  # the largest single read of a shard
    allow_pipe: bool = False  # pipe: URLs run shell commands
    max_bad_steps: Positive = 10  # non-finite steps in a row before the run stops
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = (
        0.05  # quarantined samples before it stops
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 1800  # a collective, a loader or a save that takes longer ends the job


class Recipe(Section):
    name: str
    steps: Positive | None = None  # optimizer steps
    epochs: Annotated[float, Field(gt=0)] | None = None  # instead of steps; becomes steps once
    seed: NonNegative = 0
    batchnorm: Literal["global", "local"] = (
        "global"  # statistics over all processes, or each its own
    )
    data: Data = Data()
    augment: Component
    backbone: Component
    projector: Projector = Projector()
    momentum: Momentum | None = None  # without the section one encoder makes both views' z
    loss: Component
    optim: Optim
    run: Run = Run()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.data.holdout == 1:
            raise ValueError(
                "data.holdout = 1 leaves the kNN monitor no neighbour; use 0 (no monitor), or at "
                "least 2"
            )
        batch, streams = self.data.batch_size, self.data.num_streams
        if batch % streams:
            valid = [s for s in range(1, batch + 1) if batch % s == 0]
            near = sorted(valid, key=lambda s: abs(s - streams))[:4]
            raise ValueError(
                f"data.batch_size = {batch} is not a multiple of data.num_streams = {streams}; "
                f"use num_streams = {' or '.join(map(str, near))}"
            )
        share, micro = batch // streams, self.data.micro_batch
        valid = [batch // count for count in range(share, 0, -1) if share % count == 0]
        if micro is not None and micro not in valid:
            raise ValueError(
                f"data.micro_batch = {micro} does not cut the {share} images that each of "
                f"{streams} streams gives to a batch of {batch} into equal slices; use "
                f"micro_batch = {' or '.join(map(str, valid))}"
            )
        return self

    def resolved(self, steps_per_epoch: int) -> "Recipe":
        """The same recipe with `epochs` turned into `steps`."""
        if self.epochs is None:
            return self
        steps = max(1, round(self.epochs * steps_per_epoch))
        return Recipe.model_validate({**self.model_dump(), "steps": steps, "epochs": None})

    @property
    def total_steps(self) -> int:
        if self.steps is None:
            raise RecipeError("epochs is given; call resolved(steps_per_epoch) first")
        return self.steps


def load_recipe(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Read a TOML recipe, apply `section.key=value` overrides, validate everything.

    Raises: RecipeError naming the key, its value, the remedy and the nearest valid key.
    """
    tree = read_tree(path, overrides)
    if "sampler" in tree:
        raise RecipeError(f"{path} has a [sampler]: it is a recipe of `python -m tools.finetune`")
    return parse_recipe(tree, str(path))


def read_tree(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> dict[str, Any]:
    """A recipe's TOML with the overrides put in, not yet validated. Raises: RecipeError."""
    path = Path(path)
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; recipes in {path.parent}: {', '.join(known)}" if known else ""
        raise RecipeError(f"no recipe at {path}{hint}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    return tree


def parse_recipe(tree: dict[str, Any], origin: str) -> Recipe:
    """Validate a tree of plain values. origin: where it came from, for messages."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(explain(error, Recipe, origin)) from None


def digest(recipe: Section, index_sha256: str, order_version: int) -> str:
    """sha256 over everything that decides the trained weights: all but [run] and name."""
    tree = recipe.model_dump(mode="json", exclude={"run", "name"})
    tree = {"recipe": tree, "index_sha256": index_sha256, "order_version": order_version}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two trees of plain values differ."""
    lines = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"override {override!r} is not section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, as on any command line
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise RecipeError(f"override {override!r}: {parent} is a value, not a section")
    if leaf in ("steps", "epochs") and not parents:  # one replaces the other
        tree.pop("epochs" if leaf == "steps" else "steps", None)
    tree[leaf] = value


def explain(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """A pydantic error as lines a user can act on: key, value, what is wrong, nearest valid key."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _fields_at(model, item["loc"][:-1])
            lines.append(
                f"unknown key {key}{did_you_mean(str(item['loc'][-1]), known)}; "
                f"known here: {', '.join(known)}"
            )
        elif item["type"] == "missing":
            lines.append(f"{key} is missing")
        elif item["type"] == "value_error":
            lines.append(f"{key + ': ' if key else ''}{item['ctx']['error']}")
        else:
            lines.append(f"{key} = {item['input']!r}: {item['msg'].lower()}")
    return f"{origin}: " + "; ".join(lines)


def _fields_at(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    """Fields of the model that stands at a place of the tree: in a field, a dict or a tuple."""
    at: Any = model
    for parent in parents:
        if isinstance(at, type) and issubclass(at, BaseModel):
            at = at.model_fields[str(parent)].annotation
        else:  # dict[str, X] or tuple[X, ...]
            at = next(kind for kind in reversed(get_args(at)) if kind is not Ellipsis)
        if get_origin(at) is UnionType:  # a section may be optional
            at = get_args(at)[0]
    return list(at.model_fields)
