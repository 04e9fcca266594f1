"""The memory of a step on "cuda" is near its estimate: torch's own allocator counts it here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sslpipe.planning.memory import Memory
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import ROOT

pytestmark = needs_fakecuda

SIZES = ("data.num_streams=1", "data.canvas_px=256", "backbone.kind=torchvision/resnet18")
CADENCE = ("steps=6", "run.log_steps=9", "run.save_steps=9", "run.num_workers=1")
SETTINGS = (*SIZES, *CADENCE, "run.device=cuda", "optim.warmup_steps=0", "run.max_bad_steps=99")


def _peaks(data: Path, folder: Path, *settings: str) -> tuple[Memory, list[tuple[int, int]]]:
    """The estimate; by step the most that tensors took, and what the allocator held."""
    import torch

    import sslpipe.api
    import sslpipe.planning.memory
    import sslpipe.pretrain
    from sslpipe.data.index import load_index
    from sslpipe.recipe.reading import load_recipe
    from sslpipe.run.run import Run

    estimates, seen = [], []

    def check(memory: Any, *rest: Any) -> str | None:
        estimates.append(memory)
        return original(memory, *rest)

    def steps(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for step, batch in all_steps(self, *args, **kwargs):
            torch.cuda.reset_peak_memory_stats()
            yield step, batch
            seen.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    original, sslpipe.planning.memory.check_memory = sslpipe.planning.memory.check_memory, check
    sslpipe.planning.memory._MOST_KEPT = 10**9  # else a start has nothing to count
    all_steps, Run.steps = Run.steps, steps  # type: ignore[method-assign, assignment]
    recipe = load_recipe(ROOT / "recipes" / "imagenet1k.toml", (*SETTINGS, *settings))
    sslpipe.api.train(recipe, load_index(data), folder)
    return estimates[-1], seen


def _measured(tmp_path: Path, *settings: str) -> tuple[Memory, list[tuple[int, int]]]:
    data = write_dataset(tmp_path / "data", (64, 64), px=256)
    env = {"FAKE_VALUES": "0", "FAKE_FILLED": "0"}  # nothing is computed
    (found,) = run_on_cuda(_peaks, data, tmp_path / "run", *settings, env=env)
    return found  # type: ignore[no-any-return]


def test_what_a_step_holds_is_its_estimate(tmp_path: Path) -> None:
    """Of few images, where weights and LARS's block of gradients are much of it."""
    settings = "optim.kind=lars", "data.batch_size=8", "augment.crop_px=160"
    estimate, seen = _measured(tmp_path, *settings)
    assert 0.85 * estimate.total < seen[-1][0] < 1.05 * estimate.total, (estimate, seen)
