"""Evaluations of a model on "cuda": they run, and give a CPU's numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import load_index
from tests.evaluation.test_embed import VIEW, make_backbone
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _numbers(data: Path) -> list[list[float]]:
    """Of the suite, on the CPU and on "cuda"."""
    from sslpipe.evaluation.embed import embed
    from sslpipe.evaluation.suite import run_suite

    index, found = load_index(data), []
    splits = index.split("train"), index.split("test")
    for device in ("cpu", "cuda"):
        backbone, view = make_backbone().to(device), EvalView(**VIEW)
        options: dict[str, Any] = {"batch_size": 20, "device": device}
        train, test = (embed(backbone, view, split, rows_on=device, **options) for split in splits)
        report = run_suite({"ssl": (train, test)}, {"seed": 0})
        found.append([*_floats(report["rows"])])
    return found


def _floats(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _floats(part)
    elif isinstance(tree, float):
        yield tree


def test_the_suite_gives_a_cpus_numbers(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", (40, 40))
    write_dataset(tmp_path / "data", (24,), split="test")
    ((expected, found),) = run_on_cuda(_numbers, data)
    assert len(expected) > 10
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
