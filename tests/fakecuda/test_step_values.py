"""Steps that are decided on the device leave the weights that a CPU's host decides."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState

from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import at_each_step, final_weights, forget_accelerator, write_recipe

pytestmark = needs_fakecuda

Settings = tuple[str, ...]
# a small rate: views that differ in their last bits would be driven apart
COMMON = ("steps=4", "run.log_steps=1", "run.save_steps=4", "optim.peak_lr=0.002")
RUNS: dict[str, Settings] = {
    "lars": (
        *("optim.kind=lars", "optim.clip_norm=1"),
        *("loss.kind=hard_negatives", "loss.mask_labels=true"),
    ),
    "moco": ("loss.kind=moco", "loss.queue_rows=24", "momentum.start=0.9"),
    "micro-batches": ("data.micro_batch=8", "loss.kind=sup_con"),
}


def train_poisoned(recipe: Path, data: Path, folder: Path, device: str) -> None:
    """Train each of RUNS in turn; the views of a run's third step are NaN."""
    from sslpipe.augment.two_views import FusedViews
    from sslpipe.data.index import load_index
    from sslpipe.recipe import load_recipe
    from sslpipe.train import train

    poisoned = False

    def poison(step, batch):
        nonlocal poisoned
        poisoned = step == 2

    def views(self, *args, **kwargs):
        made = make_views(self, *args, **kwargs)
        return made * float("nan") if poisoned else made

    at_each_step(poison)
    make_views, FusedViews.forward = FusedViews.forward, views
    for name, overrides in RUNS.items():
        settings = (*COMMON, *overrides, f"run.device={device}")
        train(load_recipe(recipe, settings), load_index(data), folder / device / name)
        forget_accelerator()
        PartialState._reset_state()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    parts = write_recipe(folder), write_dataset(folder / "data"), folder
    for device in ("cuda", "cpu"):
        run_on_cuda(train_poisoned, *parts, device, timeout_s=600)
    return folder


@pytest.mark.parametrize("name", list(RUNS))
def test_a_bad_step_among_good_ones_gives_the_weights_of_a_cpu(name, trained):
    on_cuda, on_cpu = (trained / device / name for device in ("cuda", "cpu"))
    expected = final_weights(on_cpu)
    for key, weight in final_weights(on_cuda).items():
        torch.testing.assert_close(
            weight, expected[key], rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )
    for run in (on_cuda, on_cpu):
        lines = read_metrics(run)
        assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
        assert [line["loss"] is None for line in lines] == [False, False, True, False]
    records = [(run / "bad_steps.0.jsonl").read_text().splitlines() for run in (on_cuda, on_cpu)]
    assert json.loads(records[0][0])["ids"] == json.loads(records[1][0])["ids"]
