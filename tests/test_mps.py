"""On a device without float64, as Apple's MPS: trains, embeds, evaluates as on the CPU.

Inside `fakemps()` what is moved to "mps" computes on the CPU in tensors that say that they are on
"mps". They refuse what a Mac refuses: float64, and tensors of the CPU beside them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from typer.testing import CliRunner

import sslpipe.api
import sslpipe.cli.embed
import sslpipe.cli.evaluate
import sslpipe.pretrain
import sslpipe.search.cli.search
from sslpipe.data.index import load_index
from sslpipe.evaluation.feature_files import load_embeddings
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.runs import write_recipe

MPS = torch.device("mps")


class OnMps(torch.Tensor):
    """A tensor on the stand-in; `inner` holds its numbers on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnMps":
        # "meta" for torch's own code: moving it to the CPU is then a copy
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"OnMps({self.inner!r})"

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, **_: Any):
        raise TypeError("can't convert mps:0 device type tensor to numpy")


COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, OnMps)]
    others = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, OnMps)]
    target = kwargs.get("device")
    target = torch.device(target) if target is not None else None
    if ours and func not in COPIES and any(x.ndim for x in others):
        raise RuntimeError(f"{func}: expected all tensors on mps, found some on the CPU")
    to_mps = target.type == "meta" if target is not None else bool(ours)
    if func is torch.ops.aten.copy_.default:
        to_mps = isinstance(args[0], OnMps)
    own = [tree_map_only(OnMps, lambda x: x.inner, each) for each in (args, kwargs)]
    if target is not None:
        own[1]["device"] = "cpu"
    found = func(*own[0], **own[1])
    if not to_mps:
        return found
    if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(found)):
        raise TypeError(f"{func}: the MPS framework has no float64")
    wrapped = tree_map_only(torch.Tensor, OnMps, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.device:
            args, kwargs = tree_map(_as_meta, (args, kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)):
            return func(*args, **kwargs).to(device)
        return func(*args, **(kwargs or {}))


def _as_meta(value: Any) -> Any:
    is_mps = isinstance(value, (str, torch.device)) and str(value).split(":")[0] == "mps"
    return torch.device("meta") if is_mps else value


@contextmanager
def fakemps() -> Iterator[None]:
    """Make "mps" a device of this thread, without float64."""
    with patch("torch.backends.mps.is_available", cache(lambda: True)), _Functions(), _Dispatch():
        yield


STATISTICS = ("loss", "grad_norm", "effective_rank", "alignment", "uniformity")


def test_the_stand_in_refuses_what_a_mac_refuses():
    with fakemps():
        x = torch.arange(3.0).to("mps")
        assert (x.device.type, (2 * x).tolist()) == ("mps", [0, 2, 4])
        for wrong, error in (
            (lambda: x.double(), TypeError),
            (lambda: torch.zeros(2, dtype=torch.float64, device="mps"), TypeError),
            (lambda: x + torch.ones(3), RuntimeError),
            (x.numpy, TypeError),
        ):
            with pytest.raises(error):
                wrong()
        assert x.cpu().double().numpy().tolist() == [0, 1, 2]


def invoke(command, words):
    return CliRunner().invoke(command.app, words, catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same training, features and evaluation on the CPU and on the stand-in."""
    folder = tmp_path_factory.mktemp("mps")
    data = write_dataset(folder / "data")
    write_dataset(folder / "data", (20, 20), split="test")
    recipe = write_recipe(folder)

    def on(device):
        run, words = folder / device, ["--data", str(data), "--num-workers", "0"]
        options = ["steps=4", "run.monitor_steps=2", "run.log_steps=1", f"run.device={device}"]
        sslpipe.api.train(load_recipe(recipe, options), load_index(data), run)
        own = [str(folder / "cpu"), *words, "--device", device]
        invoke(sslpipe.cli.embed, [*own, "--split", "test", "--out", f"{run}.safetensors"])
        invoke(
            sslpipe.cli.evaluate, ["suite", *own, "--no-baselines", "--out", str(run / "eval.json")]
        )
        return run

    cpu = on("cpu")
    with fakemps():
        return cpu, on("mps")


def test_training_there_logs_the_numbers_of_the_cpu(made):
    ours, theirs = ([line for line in read_metrics(run, "train")] for run in reversed(made))
    assert [line["step"] for line in ours] == [1, 2, 3, 4]
    for one, other in zip(ours, theirs, strict=True):
        for key in STATISTICS:
            assert one[key] == pytest.approx(other[key], rel=1e-3), key


def test_features_and_evaluations_there_are_those_of_the_cpu(made):
    (own, _), (other, _) = (load_embeddings(f"{run}.safetensors") for run in made)
    torch.testing.assert_close(own.features, other.features)
    ours, theirs = (json.loads((run / "eval.json").read_text())["rows"] for run in made)
    assert ours
    assert [row["value"] for row in ours] == pytest.approx([row["value"] for row in theirs])


def test_a_search_by_its_features_finds_what_one_on_the_cpu_finds(made, tmp_path):
    Image.fromarray(picture(3)).save(tmp_path / "query.png")
    query = [f"{made[0]}.safetensors", str(tmp_path / "query.png")]
    words = ["search", *query, "--model", str(made[0])]
    words += ["--data", str(made[0].parent / "data"), "--json"]
    with fakemps():
        found = invoke(sslpipe.search.cli.search, [*words, "--device", "mps"])
    assert found == invoke(sslpipe.search.cli.search, words)
    assert len(json.loads(found)) == 10


def test_arrays_on_it_are_scored_as_on_the_cpu():
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 3
    expected = sslpipe.knn(rows[:40], labels[:40], rows[40:], labels[40:], k=5)
    with fakemps():
        there = rows.to("mps")
        assert sslpipe.knn(there[:40], labels[:40], there[40:], labels[40:], k=5) == expected
