"""Between two log lines no step makes the host wait for the device: counted by the fake runtime."""

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.helpers import finetunes
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import forget_accelerator, write_recipe
from tests.losses.test_distill import write_teacher

pytestmark = needs_fakecuda

Settings = tuple[str, ...]
COMMON = ("run.log_steps=99", "run.save_steps=99", "run.max_bad_steps=99")
CLIPPED = ("optim.kind=lars", "optim.precision=bf16", "optim.clip_norm=1")
RUNS: dict[str, Settings] = {
    "sup_con lars bf16, clipped": ("loss.kind=sup_con", *CLIPPED),
    "dcl adamw fp16": ("loss.kind=dcl", "optim.kind=adamw", "optim.precision=fp16"),
    "a ViT, nt_xent sgd fp32, masked labels": (
        *("backbone={kind='timm/test_vit'}", "augment.crop_px=32", "data.canvas_px=32"),
        "loss.mask_labels=true",
    ),
    "diet": (
        *("loss={kind='diet'}", "projector.num_layers=1", "projector.out_dim=128"),
        "projector.batchnorm=false",
    ),
    "distill": ("loss.kind=distill", "loss.nt_xent=0.5", "pairs.positive=icon"),
    "pairs in micro-batches of one image a stream": (
        *("loss.kind=hard_negatives", "pairs.positive=icon", "pairs.never_negative=tick"),
        "data.micro_batch=4",
    ),
}
ON_TWO_RANKS: dict[str, Settings] = {
    "pairs moco lars bf16, clipped": (
        *("loss.kind=moco", "loss.queue_rows=24", "momentum.start=0.9", "pairs.positive=icon"),
        *("pairs.never_negative=tick", "run.cache=device", *CLIPPED),
    ),
    "near pairs in micro-batches": (
        *("loss.kind=sup_con", "pairs.label=icon", "data.micro_batch=8"),
        *("pairs.time=tick", "pairs.within=3", "pairs.never_negative=icon"),
    ),
}


Waits = tuple[int, dict[str, int]]


@contextmanager
def counted_waits(
    counted: tuple[int, ...],
) -> Iterator[tuple[Callable[[str], None], Callable[[], Waits]]]:
    """Watch the counted steps of the trainings inside.

    Yields a function that begins a section, of which "counted" is watched, and one that says how
    often the host has waited in these since its last call, and by torch's own count in which lines.
    """
    import torch

    import sslpipe.run.run
    from tests.fakecuda.runtime import events, mark, reset, waits

    places: Counter[str] = Counter()

    def enter(section: str) -> None:
        mark(section)
        torch.cuda.set_sync_debug_mode("warn" if section == "counted" else "default")

    def show(message: object, *_: object) -> None:
        frames = [f for f in traceback.extract_stack() if "/sslpipe/" in f.filename][::-1]
        if "called a synchronizing CUDA operation" in str(message):
            lines = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames[:3]]
            places[" < ".join(lines)] += 1

    def steps(self, *args, **kwargs):
        for step, batch in all_steps(self, *args, **kwargs):
            enter("counted" if step in counted else "")
            yield step, batch
            enter("")

    def read() -> Waits:
        log = [event for event in events() if event.main_thread and event.section == "counted"]
        # a copy from or to memory that is not pinned may wait as well, asynchronous or not
        paged = [event for event in log if event.name in ("H2D", "D2H") and not event.flag]
        found = len(waits(log) + paged), dict(places)
        places.clear()
        reset()
        return found

    all_steps = sslpipe.run.run.Run.steps
    reset()
    with (
        patch.object(sslpipe.run.run.Run, "steps", steps),
        patch.object(warnings, "showwarning", show),
    ):
        warnings.simplefilter("always")
        yield enter, read


def waits_of_steps(
    recipe: Path, data: Path, folder: Path, runs: dict[str, Settings], counted: tuple[int, ...]
) -> dict[str, Waits]:
    """Train, or fine-tune, each of the runs: how often the host waited when counted, and where."""
    from sslpipe.api import train
    from sslpipe.data.index import load_index
    from sslpipe.recipe.reading import load_recipe

    found = {}
    with counted_waits(counted) as (_, read):
        for name, overrides in runs.items():
            loaded = load_recipe(recipe, (*COMMON, *overrides))
            train(loaded, load_index(data), folder / name)
            found[name] = read()
            forget_accelerator()
    return found


@pytest.mark.promise(9)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, list(RUNS)),
        (2, list(ON_TWO_RANKS)[:1]),
        pytest.param(2, list(ON_TWO_RANKS)[1:], marks=pytest.mark.slow),
    ],
)
def test_no_step_between_log_lines_waits_for_the_device(ranks, names, tmp_path):
    # the last step is a log line's; in the first ten, DDP times itself
    counted = (1, 2) if ranks == 1 else (11, 12)
    steps = f"steps={counted[-1] + 2}"
    runs = {name: (steps, *(RUNS | ON_TWO_RANKS)[name]) for name in names}
    data = write_dataset(tmp_path / "data")
    add_columns(data, icon=[i % 30 for i in range(128)], tick=[i // 3 for i in range(128)])
    write_teacher(tmp_path / "teacher.safetensors", data)
    if "distill" in runs:
        runs["distill"] = (*runs["distill"], f"teacher.features={tmp_path}/teacher.safetensors")
    arguments = write_recipe(tmp_path), data, tmp_path, runs, counted
    env = {"FAKE_VALUES": "0"}  # which steps come out as non-finite: no wait depends on that
    for found in run_on_cuda(waits_of_steps, *arguments, ranks=ranks, env=env, timeout_s=600):
        assert found == dict.fromkeys(runs, (0, {}))


TUNINGS: dict[str, Settings] = {
    "arcface": (),
    "proxy_anchor sgd bf16": ("loss.kind=proxy_anchor", "optim.kind=sgd", "optim.precision=bf16"),
    "mined multi_similarity": ("loss.kind=multi_similarity", "miner.kind=multi_similarity"),
    "triplet lars": ("loss.kind=triplet", "optim.kind=lars"),
}


@pytest.mark.promise(9)
def test_no_step_of_a_fine_tuning_waits_for_the_device(tmp_path):
    # no argument of arcface's is left to the other losses
    text = finetunes.RECIPE.replace("scale = 8.0\n", "")
    recipe = finetunes.write_recipe(tmp_path, text)
    data = write_dataset(tmp_path / "data", (40, 3, 60, 25, 72), classes=8)
    runs = {name: ("steps=4", *settings) for name, settings in TUNINGS.items()}
    env = {"FAKE_VALUES": "0"}
    arguments = recipe, data, tmp_path, runs, (1, 2)
    (found,) = run_on_cuda(waits_of_steps, *arguments, env=env, timeout_s=600)
    assert found == dict.fromkeys(TUNINGS, (0, {}))
