"""Which networks a suite compares a model with, and under which names: --against, and its start."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sslpipe.errors import UserError
from sslpipe.evaluation.suite_file import own_name
from sslpipe.export.load import FrozenBackbone, load_backbone

LONGEST_NAME = 40


class Other(NamedTuple):
    """A network to compare with: the name of its rows, what was given, and what was loaded."""

    name: str
    source: str
    backbone: FrozenBackbone
    is_start: bool = False  # of the model's own training

    def metadata(self) -> dict[str, str]:
        """Return what eval.json says of it."""
        facts = self.backbone.config.facts
        is_ours = "digest" in facts  # a run of ours or its export, which may have had a start, too
        init = {} if is_ours else table_of(facts, "init")
        return {
            "name": self.name,
            "source": self.source,
            "sha256": self.backbone.config.weights_sha256,
            "format": str(init.get("format", "sslpipe")),
        }


def load_compared(
    sources: Sequence[str], model: Path | None, backbone: FrozenBackbone, taken: Collection[str]
) -> tuple[list[Other], tuple[str, ...]]:
    """Load the networks of --against, and the weights that the model's own training started from.

    Those are one of --against with the recorded sha256, or what the run keeps in RUN/init; where
    they are not to be had, a sentence says so. So it does where a network has the weights of
    another one, as the best of a run may be its start, by their hash. `taken` are names that rows
    of eval.json have.

    Raises:
        UserError: One of --against is given twice, or cannot be loaded.
    """
    others: list[Other] = []
    names = {*taken}
    for source in sources:
        if any(source == other.source for other in others):
            raise UserError(f"--against={str(source)!r} is given twice; leave one out")
        others.append(Other(short_name(source, names), source, load_backbone(source)))
        names.add(others[-1].name)
    start, remarks = _find_start(model, backbone, others, names)
    if start is not None:
        named = start.name in names
        others = [start if other.name == start.name else other for other in others]
        others += [] if named else [start]
    different: list[Other] = []
    for other in others:
        if same_network(other.backbone, backbone, any_view=other.is_start):
            remarks.append(_same_weights_text(other, own_name(backbone.config.facts, names)))
        elif twin := next((e for e in different if same_network(e.backbone, other.backbone)), None):
            remarks.append(_same_weights_text(other, twin.name))
        else:
            different.append(other)
    return different, tuple(remarks)


def same_network(one: FrozenBackbone, other: FrozenBackbone, any_view: bool = False) -> bool:
    """Return whether two models are the same weights, flattened alike, and see images alike."""

    def identity(model: FrozenBackbone) -> tuple[Any, ...]:
        view = {} if any_view else model.view.config()
        return model.config.weights_sha256, model.config.whitening_sha256, view

    return identity(one) == identity(other)


def _same_weights_text(other: Other, name: str) -> str:
    start = ", which it started from," if other.is_start else ""
    sha256 = other.backbone.config.weights_sha256[:16]
    return (
        f"{name} and {other.name}{start} are the same weights (sha256 {sha256}): they are measured "
        "once, and there is nothing to compare."
    )


def _find_start(
    model: Path | None, backbone: FrozenBackbone, others: Sequence[Other], names: Collection[str]
) -> tuple[Other | None, list[str]]:
    """Find the weights that a model's own training started from, as `load_compared` says."""
    facts = backbone.config.facts
    sha256 = str(table_of(facts, "recipe").get("init") or "")
    if not sha256:  # random weights, or no training of ours
        return None, []
    for other in others:
        if other.backbone.config.weights_sha256 == sha256:
            return other._replace(is_start=True), []
    source = str(table_of(facts, "init").get("source") or "")
    kept = None if model is None else model / "init"
    try:
        if kept is None or not kept.is_dir():
            raise UserError("it is not kept with the model")
        start = load_backbone(kept)
        if start.config.weights_sha256 != sha256:
            raise UserError("what is there now are others")
    except UserError as error:
        named = f"{source or 'weights'} with sha256 {sha256[:16]}"
        return None, [f"Not compared with its own start, {named}: {error}; name it with --against."]
    return Other(short_name(source or "start", names), source, start, is_start=True), []


def table_of(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of an export's metadata, which may be anything: {} where it is not one."""
    table = facts.get(key)
    return table if isinstance(table, dict) else {}


def short_name(source: str, taken: Collection[str]) -> str:
    """Make a readable name of a source's last part, and of more of it while that one is taken."""
    parts = [part for part in re.split(r"[:/\\]+", source) if part.strip(".")] or ["other"]
    suffix = r"\.(safetensors|pth|pt|bin|tar)(?=(@\d+)?$)"
    parts[-1] = re.sub(suffix, "", parts[-1]) or parts[-1]
    parts = [re.sub(r"[^\w.+-]+", "-", part) for part in parts]
    tries = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
    tries = [name[-LONGEST_NAME:].strip("-") for name in tries]
    tries += [f"{tries[0]}-{number}" for number in range(2, len(taken) + 3)]
    return next(name for name in tries if name not in taken)
