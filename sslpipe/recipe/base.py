"""A run's settings: TOML in, one frozen tree out; each is documented where it is defined."""

import hashlib
import json
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
