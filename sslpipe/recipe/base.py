"""What both kinds of recipe share: sections, reading, overrides, validation, digest."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sslpipe import registry
from sslpipe.errors import RecipeError, did_you_mean

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
TRACKER_NAMES = ("wandb", "tensorboard", "trackio")
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of a recipe: unknown keys are errors, values never change.

    The string under each field documents it: `sslpipe check --explain KEY` prints it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Component(BaseModel):
    """An entry of a table by name (`kind`) and the keyword arguments of its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    kind: str
    """The name of the entry; further keys are arguments of its constructor."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the constructor."""
        return dict(self.model_extra or {})


class Optim(Section):
    """The optimizer, its learning rate over the run, and the precision of the arithmetic."""

    kind: Literal["sgd", "adamw", "lars"] = "lars"
    """Which optimizer."""
    peak_lr: Rate
    """The learning rate at the peak; no scaling rule is applied to it."""
    weight_decay: Rate = 1e-6
    """Weight decay; not on biases and norms unless `decay_one_dim`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd and lars; no effect on adamw."""
    nesterov: bool = False
    """Nesterov momentum of sgd; no effect on the others."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of adamw; no effect on the others."""
    trust_coefficient: Rate = 0.001
    """Trust coefficient of lars; no effect on the others."""
    decay_one_dim: bool = False
    """Apply weight decay to biases and norms, too."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the rate rises linearly from 0 to `peak_lr`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The rate after the warm-up; cosine ends at 0."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the global gradient; none: not clipped."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """Of the model's arithmetic. auto: the faster of fp32 and bf16, two steps of each timed at the
    start; fp16 needs CUDA; fp64: for reference runs, exact to rounding."""


class RunConfig(Section):
    """What may not change a trained weight beyond float rounding: not part of the digest."""

    log_steps: Positive = 10
    """Optimizer steps between two log lines."""
    monitor_steps: NonNegative = 0
    """Optimizer steps between two evaluations on held-out samples; 0: never."""
    save_steps: Positive = 500
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """How many checkpoints stay; one of them may be in the middle of being written."""
    trackers: tuple[str, ...] = ()
    """Where metrics are copied to, beside metrics.jsonl: wandb, tensorboard, trackio, or what an
    installed package adds."""
    num_workers: NonNegative = 2
    """Decoding threads of each process; 0: decode in the training thread."""
    prefetch: Positive = 4
    """Batches decoded ahead."""
    cache: Literal["none", "memory", "device"] = "none"
    """memory: keep decoded images after their first use. device: decode all into the device's
    memory before the first step (pretraining only)."""
    cache_dir: str = ""
    """A folder for blocks of shards that are read over a network; "": none."""
    cache_gb: Rate = 50.0
    """Gigabytes of blocks kept in `cache_dir`."""
    compile: bool = False
    """torch.compile the model and the colour operations of the views."""
    window_bytes: Positive = 64 * 2**20
    """Bytes of the largest single read of a shard."""
    allow_pipe: bool = False
    """Allow `pipe:` URLs: they run shell commands."""
    max_bad_steps: Positive = 10
    """Non-finite steps in a row before the run stops."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the samples that may be quarantined before the run stops."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA where torch sees it, else the CPU."""
    timeout_s: Positive = 1800
    """Seconds; a collective, a loader or a save that takes longer ends the job."""

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not names or info.context == "recorded":  # who only loads a run needs no trackers
            return names
        known = list(dict.fromkeys([*TRACKER_NAMES, *registry.added("sslpipe.trackers")]))
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}"
                )
        return names


class RunRecipe(Section):
    """What a pretraining and a fine-tuning both say; each kind adds its own sections."""

    name: str
    """The run's name in logs and trackers; not part of the digest."""
    steps: Positive | None = None
    """Optimizer steps of the whole run; give these or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training samples, instead of `steps`; converted to steps once."""
    seed: NonNegative = 0
    """Decides initial weights, order and views."""
    batchnorm: Literal["global", "local"] = "global"
    """Statistics over the rows of all processes, or of each process alone."""
    augment: Component
    """The views; `kind` is fused (fast) or kornia (the reference)."""
    loss: Component
    """The objective."""
    optim: Optim
    """The optimizer and its schedule."""
    run: RunConfig = RunConfig()
    """Cadence, devices and caches; changes no weight beyond rounding."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self

    def resolved(self, steps_per_epoch: int, **changes: Any) -> Self:
        """Return the same recipe with `epochs` converted to `steps`, validated anew.

        Args:
            steps_per_epoch: Optimizer steps of one pass over the data.
            **changes: Fields to replace.
        """
        tree = {**self.model_dump(), **changes}
        if self.epochs is not None:
            tree |= {"steps": max(1, round(self.epochs * steps_per_epoch)), "epochs": None}
        return type(self).model_validate(tree)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run. Raises: RecipeError before `resolved`."""
        if self.steps is None:
            raise RecipeError("epochs is given; call resolved(steps_per_epoch) first")
        return self.steps


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe's TOML and apply the overrides; nothing is validated yet.

    Raises:
        RecipeError: No such file (names the recipes beside it), no TOML, or a wrong override.
    """
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


def identity(recipe: Section, index_sha256: str, order_version: int) -> dict[str, Any]:
    """Return everything that decides the trained weights, as plain values.

    That is the recipe without [run] and name, the data, the order's algorithm and, where parts of
    plug-ins are loaded, the hashes of their source: call it when all parts are built.
    """
    tree = {
        "recipe": recipe.model_dump(mode="json", exclude={"run", "name"}),
        "index_sha256": index_sha256,
        "order_version": order_version,
    }
    loaded = registry.fingerprints()
    return {**tree, "plugins": loaded} if loaded else tree


def digest(recipe: Section, index_sha256: str, order_version: int) -> str:
    """Hash everything that decides the trained weights; see `identity`."""
    tree = identity(recipe, index_sha256, order_version)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """List `key: old -> new` for every leaf in which two trees of plain values differ."""
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


def explain_errors(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """Rewrite a pydantic error for users: key, value, what is wrong, nearest valid key."""
    lines = []
    for item in sorted(error.errors(), key=lambda item: [str(part) for part in item["loc"]]):
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


def known_keys(model: type[BaseModel]) -> list[str]:
    """List "section.key" of all settings, and the sections themselves."""
    return [name for name, _ in _all_fields(model)]


def describe_key(model: type[BaseModel], key: str) -> str | None:
    """Say what a setting means, with its type, default and range; None where there is no such key.

    Args:
        model: The recipe class.
        key: "section.key", or a key or section of the top.
    """
    fields = dict(_all_fields(model))
    if key not in fields:
        parent = fields.get(key.rpartition(".")[0])
        if parent is not None and _section_of(parent) is Component:
            return "An argument of the constructor that `kind` names; see its documentation."
        return None
    field = fields[key]
    text = " ".join((field.description or "").split())
    section = _section_of(field)
    if section is not None:
        names = ", ".join(section.model_fields)
        return f"{text}\nA section: {names}{', and arguments' if section is Component else ''}."
    lines = [text, f"type: {_written_type(field)}"]
    if field.is_required():
        lines.append("no default: it has to be given")
    else:
        default = None if field.default is PydanticUndefined else field.default
        lines.append(f"default: {'none' if default is None else json.dumps(default)}")
    return "\n".join(lines)


def _all_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = _section_of(field)
        if section is not None and section is not Component:
            yield from _all_fields(section, f"{prefix}{name}.")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in _alternatives(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """A | B -> (A, B), however it was written."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _written_type(field: FieldInfo) -> str:
    """As a user would say it: "int, > 0, or none"; '"a" | "b"'; "list of float"."""
    kinds, metadata, texts = _alternatives(field.annotation), list(field.metadata), []
    for kind in kinds:
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            metadata += [m for entry in more for m in getattr(entry, "metadata", [entry])]
        if kind is NoneType:
            continue
        if get_origin(kind) is Literal:
            texts.append(" | ".join(json.dumps(value) for value in get_args(kind)))
        elif get_origin(kind) is tuple:
            (inner, *_) = get_args(kind)
            names = " | ".join(map(json.dumps, get_args(inner)))  # of a Literal
            texts.append(f"list of {names or inner.__name__}")
        else:
            texts.append(getattr(kind, "__name__", str(kind)))
    bounds = [
        f"{sign} {getattr(entry, name)}"
        for entry in metadata
        for name, sign in _BOUNDS.items()
        if getattr(entry, name, None) is not None
    ]
    text = ", ".join([" or ".join(texts), *bounds])
    return text + (", or none" if NoneType in kinds else "")


def _fields_at(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    """Fields of the model that stands at a place of the tree: in a field, a dict or a tuple."""
    at: Any = model
    for parent in parents:
        if isinstance(at, type) and issubclass(at, BaseModel):
            at = at.model_fields[str(parent)].annotation
        else:  # dict[str, X] or tuple[X, ...]
            at = next(kind for kind in reversed(get_args(at)) if kind is not Ellipsis)
        at = _alternatives(at)[0]  # a section may be optional
    return list(at.model_fields)
