"""run.open: what a run says last."""

from pathlib import Path

import pytest
import torch

from sslpipe.recipe import load_recipe
from sslpipe.run.open import open_run
from tests.helpers.processes import run_processes
from tests.helpers.runs import write_recipe


def out_of_memory_in_rank(process, recipe, run_dir):
    with open_run(load_recipe(recipe), Path(run_dir)):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("names", "said"),
    [((), "no checkpoint was written yet"), ((99, 100), "the last checkpoint is step-00000100")],
)
def test_a_device_without_memory_names_the_checkpoint_that_there_is(tmp_path, names, said):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    for number in names:
        (run_dir / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)
    with pytest.raises(AssertionError, match="UserError: CUDA out of memory"):
        run_processes(out_of_memory_in_rank, 1, str(recipe), str(run_dir))
    failed = (run_dir / "FAILED").read_text()
    assert f"UserError: CUDA out of memory; {said}. The same command with more processes" in failed
