"""benchmarks.gpu on "cuda", small: its checks hold, and a wait in a step is found."""

from pathlib import Path
from unittest.mock import patch

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


def test_parts_run_on_cuda(tmp_path):
    names = ["waits", "resnet18", "nt_xent", "knn", "batchnorm"]
    (found,) = run_on_cuda(_measured, names, tmp_path)
    assert {name: part["error"] for name, part in found.items() if "error" in part} == {}
    assert found["waits"]["figures"] == {"steps without a wait": 3}  # of 8: 3 first, 2 of log lines
    figures = found["resnet18"]["figures"]
    assert {"images/s", "MFU %", "peak GiB", "bare encoder: MFU %"} <= figures.keys()


def test_a_wait_in_a_step_is_an_error(tmp_path):
    (found,) = run_on_cuda(_measured, ["waits"], tmp_path, True)
    assert "synchronizing CUDA operation" in found["waits"]["error"]
