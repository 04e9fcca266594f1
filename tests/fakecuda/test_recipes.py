"""Every shipped recipe on "cuda", small: it trains without a wait, resumes, and evaluates."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.runs import TINY
from tests.fakecuda.test_waits import Waits, counted_waits
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import ROOT, final_weights, forget_accelerator

pytestmark = needs_fakecuda

SAVED, LAST = 13, 15
COUNTED = (11,)  # in the first ten steps DDP times itself; those below are saves and log lines
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").rglob("*.toml"))}
# they start from weights
ADAPTED = [name for name in RECIPES if name.startswith("adapt_") or name == "my_images_mobile"]
# sizes, the split and the cadence; all else is the recipe's own, its precision too
CADENCE = (
    *(f"steps={LAST}", f"run.save_steps={SAVED}", f"run.log_steps={LAST}", "run.num_workers=1"),
    *(f"run.monitor_steps={LAST}", "optim.warmup_steps=2"),
)
PRETRAINING = (
    *(text for text in TINY if not text.startswith(("optim.", "backbone.", "run."))),
    *("data.holdout=16", "data.split=train"),
)
FINETUNING = (
    *("data.canvas_px=32", "data.validation_classes=2", "augment.crop_px=32", "embedding.dim=8"),
    *("sampler.classes_per_batch=4", "sampler.images_per_class=3", "sampler.buffer=48"),
)
BACKBONE = ("backbone.kind=small_resnet", "backbone.widths=[8, 16, 16]")
IN_FIRST_STEPS = ("tune.projector_first_steps=3", "tune.ramp_steps=4")
OWN = {
    **dict.fromkeys(ADAPTED, IN_FIRST_STEPS),
    "my_images_mobile": ("tune.ramp_steps=4",),
    # the small ResNet has BatchNorms
    "adapt_vit": (*IN_FIRST_STEPS, "run.activation_checkpointing=false"),
    "my_images_diet": ("projector.out_dim=0",),
    "cifar10_moco": ("loss.queue_rows=24",),
}


def _trained(names: list[str], data: Path, folder: Path) -> dict[str, Waits]:
    """Train, resume and evaluate each recipe; how often the host waits in a step, and where."""
    with counted_waits(COUNTED) as (_, read):
        return {name: _waits_of(name, data, folder, read) for name in names}


def _waits_of(name: str, data: Path, folder: Path, read: Any) -> Waits:
    from sslpipe.api import train
    from sslpipe.data.index import load_index
    from sslpipe.distributed import current_rank
    from sslpipe.evaluation.embed import EmbedOptions, embed
    from sslpipe.evaluation.knn import knn_results
    from sslpipe.export.load import load_run
    from sslpipe.recipe.reading import load_recipe
    from sslpipe.run.checkpoint_files import latest
    from sslpipe.run.log import read_metrics

    path, index, run_dir = RECIPES[name], load_index(data), folder / name
    sizes = FINETUNING if path.parent.name == "metric" else PRETRAINING
    adapted = name in ADAPTED
    backbone, init_from = ((), load_run(folder / "demo")) if adapted else (BACKBONE, None)
    recipe = load_recipe(path, (*sizes, *backbone, *CADENCE, *OWN.get(name, ())))
    is_main = os.environ.get("RANK", "0") == "0"

    # it trains, and again from its checkpoint on, to the same bits
    assert train(recipe, index, run_dir, init=init_from) == LAST
    found = read()
    if is_main:
        straight = final_weights(run_dir)
        shutil.rmtree(latest(run_dir))
        (run_dir / "DONE").unlink()
    _reset()
    assert train(recipe, index, run_dir, init=init_from) == LAST
    if is_main:
        assert [line["step"] for line in read_metrics(run_dir, "start")] == [0, SAVED]
        resumed = final_weights(run_dir)
        assert all(torch.equal(resumed[key], value) for key, value in straight.items())
        lines = read_metrics(run_dir)
        assert {line["skipped_steps"] for line in lines} == {0}
        assert len(read_metrics(run_dir, "eval")[-1]) > 2

    # its features and their neighbours are those of a CPU
    frozen, split = load_run(run_dir), index.split("train")
    process = current_rank()
    options = EmbedOptions(process=process, batch_size=16)  # of larger ones, no values
    on_cpu = embed(frozen.backbone, frozen.view, split, options)
    options = replace(options, device="cuda", rows_on="cuda")
    rows = embed(frozen.backbone.cuda(), frozen.view, split, options)
    torch.testing.assert_close(rows.features.cpu(), on_cpu.features, rtol=1e-3, atol=1e-4)
    search: dict[str, Any] = {"k": (5,), "exclude_same_id": True}
    on_cuda = knn_results(rows, rows, **search, process=process)
    on_cpu = type(rows)(*(tensor.cpu() for tensor in rows))
    assert on_cuda == knn_results(on_cpu, on_cpu, **search)
    _reset()
    return found


def _reset() -> None:
    if dist.is_initialized():
        dist.barrier()
    forget_accelerator()


@pytest.mark.promise(9)
@pytest.mark.timeout(900)  # two minutes on two idle cores
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["face_arcface"]),
        # every recipe once
        pytest.param(1, ["demo", *list(RECIPES)[::2]], marks=pytest.mark.slow),
        pytest.param(2, ["demo", *list(RECIPES)[1::2]], marks=pytest.mark.slow),
    ],
)
def test_every_recipe_trains_without_a_wait_resumes_and_evaluates(ranks, names, tmp_path):
    data = write_dataset(tmp_path / "data", (40, 3, 60, 25, 72), px=32, classes=8)
    names = sorted(set(names), key=lambda name: (name != "demo", name))  # whose weights others take
    # the table of noise is computed, too, and the view of it from all its places
    env = {"FAKE_FILLED": str(2**23), "FAKE_VALUES": str(2**33)}
    for found in run_on_cuda(_trained, names, data, tmp_path, ranks=ranks, env=env, timeout_s=800):
        assert found == dict.fromkeys(names, (0, {}))
