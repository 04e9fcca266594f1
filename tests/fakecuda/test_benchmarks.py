"""benchmarks.gpu on "cuda", small: its checks hold, and a wait in a step is found."""

from pathlib import Path
from unittest.mock import patch

import pytest

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _measured(names: list[str], folder: Path, waiting: bool = False):
    """The outcomes of the parts; `waiting`: the loss makes the host wait for the device."""
    import torch

    from benchmarks.gpu.__main__ import PARTS, measure
    from benchmarks.gpu.common import Bench
    from sslpipe.losses.base import InBatchLoss

    original = InBatchLoss.forward

    def waits(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        loss.item()
        return loss

    bench = Bench(torch.device("cuda"), True, folder)
    with patch.object(InBatchLoss, "forward", waits if waiting else original):
        return {name: measure(PARTS[name], bench) for name in names}


@pytest.mark.slow
def test_parts_run_on_cuda(tmp_path):
    (found,) = run_on_cuda(_measured, ["resnet18", "nt_xent", "knn", "batchnorm"], tmp_path)
    assert {name: part["error"] for name, part in found.items() if "error" in part} == {}
    figures = found["resnet18"]["figures"]
    assert {"images/s", "peak GiB", "bare encoder: images/s"} <= figures.keys()


def _with_and_without(folder: Path):
    return [_measured(["waits"], folder / str(waiting), waiting) for waiting in (False, True)]


@pytest.mark.slow
def test_a_wait_in_a_step_is_an_error(tmp_path):
    ((without, found),) = run_on_cuda(_with_and_without, tmp_path)
    # of 8: 3 first, 2 of log lines
    assert without["waits"].get("figures") == {"steps without a wait": 3}, without
    assert "synchronizing CUDA operation" in found["waits"]["error"]
