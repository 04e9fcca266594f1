"""Random, boundary and hostile settings, drawn from each field's own type.

    python -m tests.helpers.random_settings 1000 [first]

Each is accepted and then trains a step with a finite loss, or is refused in one line that names its
key. Setting k is a function of k alone; FUZZ_PROGRESS names a file that holds the one at work.
"""

import contextlib
import inspect
import io
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel

from benchmarks.common import Peak
from sslpipe import portable
from sslpipe.api import plan_from
from sslpipe.augment.ops import draws
from sslpipe.augment.spec import ViewSpec
from sslpipe.augment.two_views import FusedSettings, build_augment
from sslpipe.check import estimate
from sslpipe.check.estimate import noise_batch
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import UserError
from sslpipe.kinds import run_kind
from sslpipe.losses import LOSSES
from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.finetune_parts import build_task, freeze_and_group
from sslpipe.metric_learning.finetune_plan import with_backbone
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.models import backbones, limits
from sslpipe.parts import build_loss, build_model
from sslpipe.planning import memory
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import load_recipe
from sslpipe.recipe.sections import RunRecipe
from sslpipe.registry import Table
from sslpipe.registry.schema import KindSettings, settings_class
from tests.helpers import finetunes, runs
from tests.helpers.dataset import write_dataset
from tests.helpers.optimizers import build_optimizer

SLOWEST_S = 60.0  # for one setting, on a busy machine
MACHINE_BYTES = 2**31  # what the machine pretends to have
MOST_WARNINGS = 3
WORDS = (
    "", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "\0", "a\nb", "\x1b[31m", "x" * 300, "x" * 9999,
    "mean", "0", "nan", "true", "résumé", "train", "fp64", "bf16", "auto",
)  # fmt: skip
INTEGERS = (0, 1, 2, 3, 7, -1, 10**4, 2**16, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1,
            2**63, 2**64 - 1, 2**64, 10**30, -(2**63), 10**5000)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-3, 1e-12, 5e-324, 1e-300, 1e12, math.inf,
          -math.inf, math.nan)  # fmt: skip
DATE = "1979-05-27"


class Key(typing.NamedTuple):
    """A setting: its dotted key and type, and what else must be set for it to exist."""

    name: str
    annotation: Any
    metadata: tuple[Any, ...]
    needs: tuple[str, ...] = ()


def section_keys(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Every field of a recipe, those of its sections too."""
    keys = []
    for name, field in model.model_fields.items():
        inner = [k for k in alternatives(field.annotation) if inspect.isclass(k)]
        section = next((k for k in inner if issubclass(k, BaseModel)), None)
        if section is not None and not issubclass(section, KindSettings):
            keys += section_keys(section, f"{prefix}{name}.")
        keys.append(Key(prefix + name, field.annotation, tuple(field.metadata)))
    return keys


def component_keys(section: str, table: Table[Any], kinds: Sequence[str], *needs: str) -> list[Key]:
    """Every setting of some kinds of a table."""
    keys = [Key(f"{section}.kind", str, (), needs)]
    for kind in kinds:
        also = (*needs, f"{section}={{kind='{kind}'}}")
        keys += [
            Key(f"{section}.{name}", field.annotation, tuple(field.metadata), also)
            for name, field in settings_class(table, kind).model_fields.items()
            if name != "kind"
        ]
    return keys


def without_files(table: Table[Any]) -> list[str]:
    """What needs no other package and no file."""
    return [name for name in table if name not in ("pml", "distill")]


TIMM_ARGUMENTS = {
    "depth": int, "embed_dim": int, "num_heads": int, "mlp_ratio": float, "drop_path_rate": float,
    "drop_rate": float, "patch_size": int, "img_size": int, "global_pool": str, "in_chans": int,
    "class_token": bool, "layers": list[int], "pretrained": bool, "features_only": bool,
}  # fmt: skip
SMALL_TIMM = "backbone={kind='timm/vit_tiny_patch16_224', depth=1, embed_dim=24, num_heads=2}"
NETWORKS = ("small_resnet", "torchvision/resnet18", "torchvision/vit_b_32", "timm/resnet10t")


def all_keys() -> dict[str, list[list[Key]]]:
    """The settings of each kind of run, in groups that are drawn from alike."""
    own = FusedSettings.model_fields.items()
    views = [
        *(Key(f"augment.{each.name}", each.type, ()) for each in fields(ViewSpec)),
        *(Key(f"augment.{name}", field.annotation, ()) for name, field in own),
        Key("augment.jitter_strength", float, ()),
    ]
    networks = [
        *component_keys("backbone", backbones.BACKBONES, NETWORKS),
        *(Key("backbone.embedding_dim", int, ()), Key("backbone.normalize", bool, ())),
        *(Key(f"backbone.{k}", t, (), (SMALL_TIMM,)) for k, t in TIMM_ARGUMENTS.items()),
    ]
    return {
        "pretrain": [
            section_keys(Recipe),
            [*views, Key("augment.extra", list[dict[str, Any]], ())],
            networks,
            component_keys("loss", LOSSES, without_files(LOSSES), "momentum.start=0.99"),
        ],
        "finetune": [
            section_keys(FinetuneRecipe),
            views,
            component_keys("loss", METRIC_LOSSES, without_files(METRIC_LOSSES)),
            component_keys("loss", HEADS, [*HEADS]),
            component_keys("miner", MINERS, [*MINERS], "loss={kind='triplet'}"),
            [*networks, Key("queue.size", int, ())],
        ],
    }


def alternatives(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def drawn(annotation: Any, metadata: tuple[Any, ...], rng: random.Random) -> Any:
    """A value of this type: of its middle, at a bound, hostile, or of another type."""
    if rng.random() < 0.08:
        return rng.choice((True, 3, 0.5, "text", [], [1, 2], {}, {"a": {"b": [1]}}, DATE, [[[[]]]]))
    kind = rng.choice([k for k in alternatives(annotation) if k is not types.NoneType] or [Any])
    if typing.get_origin(kind) is Annotated:
        kind, *more = typing.get_args(kind)
        metadata = (*metadata, *(m for e in more for m in getattr(e, "metadata", [e])))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return rng.choice([*inner, *inner, inner[0], "nonsense"])
    if origin in (tuple, list) or "Sequence" in str(origin):
        fixed = origin is tuple and Ellipsis not in inner and rng.random() < 0.7
        count = (fixed and len(inner)) or rng.choice((0, 1, 2, 3, 3, 4, 50))
        return [drawn((inner or (float,))[0], (), rng) for _ in range(count)]
    bounds = [
        getattr(entry, name)
        for entry in metadata
        for name in ("gt", "ge", "lt", "le")
        if getattr(entry, name, None) is not None
    ]
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        near = [bound + step for bound in bounds for step in (-1, 0, 1)]
        return rng.choice([rng.randrange(1, 65), rng.choice(INTEGERS), rng.choice(near or [1])])
    if kind is float:
        near = [bound + step for bound in bounds for step in (-1e-3, 0, 1e-3)]
        return rng.choice([10 ** rng.uniform(-3, 1), rng.choice(FLOATS), rng.choice(near or [0.1])])
    if kind is str:
        return rng.choice(WORDS)
    if origin is dict:
        return rng.choice(({}, {"name": "RandomErasing"}, {"name": rng.choice(WORDS), "view": 3}))
    return drawn(rng.choice((int, float, str, bool, list[float])), (), rng)


def as_toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value if value == DATE else json.dumps(value).replace("\\u007f", "\\u007F")
        case int() if abs(value) > 10**4000:
            return "9" * 5000
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{k} = {as_toml(v)}' for k, v in value.items())}}}"
    return str(value)


def changes(keys: list[list[Key]], rng: random.Random) -> tuple[list[str], list[str]]:
    """Overrides, and the keys among them that were drawn."""
    overrides, names = [], []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        key = rng.choice(rng.choice(keys))
        if key.needs and overrides:
            continue  # would replace what was drawn before
        value = drawn(key.annotation, key.metadata, rng)
        overrides += [*key.needs, f"{key.name}={as_toml(value)}"]
        names.append(key.name)
    return overrides, names


def step(recipe: RunRecipe, index: DatasetIndex) -> float:
    """Views, forward, loss, backward and optimizer step of a few images of noise; the loss."""
    augment = build_augment(recipe, index)
    batch = noise_batch(min(64, recipe.data.canvas_px))
    batch = batch._replace(labels=torch.arange(8) // 2)
    params = draws(recipe.seed, 0, batch.ids, batch.sizes, augment.specs)
    dtype = torch.float64 if recipe.optim.precision == "fp64" else torch.float32
    views = augment(batch, params).to(dtype)
    if isinstance(recipe, FinetuneRecipe):
        task = (
            build_task(with_backbone(recipe, None, index), augment.crop_px, None, 6)
            .to(dtype)
            .train()
        )
        optimizer = recipe.optim.build(groups=freeze_and_group(task, recipe))
        rows = views, batch.labels.repeat(2), batch.ids.repeat(2)
        loss = task(*(each[: 8 * recipe.views] for each in rows))
        loss = loss[0] if isinstance(loss, tuple) else loss
    else:
        assert isinstance(recipe, Recipe)
        model, loss_fn = build_model(recipe, augment.crop_px).to(dtype).train(), build_loss(recipe)
        optimizer = build_optimizer(model, recipe.optim)
        z_a, z_b = model(views).chunk(2)
        loss = loss_fn.to(dtype)(z_a, z_b, ids=batch.source_ids, labels=batch.labels)
    assert torch.isfinite(views).all(), "views are not finite"
    if loss.requires_grad:
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def attempt(recipe_path: Path, overrides: list[str], names: list[str], index: DatasetIndex) -> str:
    """What became of one setting. Raises: AssertionError where that is not as promised."""
    try:
        recipe = load_recipe(recipe_path, overrides)
        result = run_kind(recipe).check(plan_from(recipe, index))
        if any("an estimated" in warning for warning in result.warnings):
            return "does not fit"
        value = step(result.recipe, index)
    except (MemoryError, RuntimeError) as error:
        if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return "does not fit"  # a run reports it in one line: portable.explain_lack_of_memory
    except UserError as error:
        text = str(error)
        assert "\n" not in text, f"not one line: {text}"
        assert text.isprintable(), f"unprintable: {text!r}"
        assert len(text) < 5000, f"{len(text)} characters: {text}"
        parts = {part for name in names for part in name.split(".")}
        assert any(part in text for part in parts), f"names no key of {names}: {text}"
        return "refused"
    assert math.isfinite(value), f"accepted, and the loss is {value}"
    return "accepted"


def run(count: int, first: int = 0) -> dict[str, Any]:
    """Settings first to first + count: how many were accepted and refused, and every fault."""
    for module in (portable, limits, memory):
        module.total_memory_bytes = lambda: MACHINE_BYTES
        module.free_memory_bytes = lambda: MACHINE_BYTES
    estimate._LONG_ENOUGH_S = 0.0
    torch.set_num_threads(1)
    progress, keys = os.environ.get("FUZZ_PROGRESS"), all_keys()
    outcomes: Counter[str] = Counter()
    faults = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(tempfile.mkdtemp(dir=folder)):
        index = load_index(write_dataset(Path(folder, "data"), (24, 24), classes=6))
        paths = {}
        for kind, text in (("pretrain", runs.RECIPE), ("finetune", finetunes.RECIPE)):
            paths[kind] = Path(folder, f"{kind}.toml")
            paths[kind].write_text(text)
        for number in range(first, first + count):
            rng = random.Random(f"settings {number}")
            kind = rng.choice(list(paths))
            overrides, names = changes(keys[kind], rng)
            if progress:
                Path(progress).write_text(f"{number}: {overrides}")
            portable.return_freed_memory()  # else networks before this one are counted with it
            begin_s = time.monotonic()
            peak = Peak()
            problem, outcome = "", "fault"
            with (
                warnings.catch_warnings(record=True) as heard,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                warnings.simplefilter("always")
                try:
                    outcome = attempt(paths[kind], overrides, names, index)
                except Exception:
                    problem = traceback.format_exc(limit=-4)
            taken_s = time.monotonic() - begin_s
            taken_bytes = peak.extra_mb() * 2**20
            if len(heard) > MOST_WARNINGS:
                problem = problem or f"{len(heard)} warnings: {heard[:1]}"
            if taken_s > SLOWEST_S:
                problem = problem or f"took {taken_s:.0f} s"
            if taken_bytes > MACHINE_BYTES:
                problem = problem or f"{taken_bytes / 2**30:.1f} GiB of memory"
            outcomes["fault" if problem else outcome] += 1
            if problem:
                faults.append({"number": number, "kind": kind, "overrides": overrides,
                               "problem": problem, "seconds": taken_s})  # fmt: skip
    return {"outcomes": dict(outcomes), "faults": faults}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file
    print(json.dumps(run(*map(int, sys.argv[1:]))))
