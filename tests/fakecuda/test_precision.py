"""precision = "auto" on a GPU: what does not fit, or is not there, is not chosen."""

import torch
from torch import nn

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _times(rows: int) -> tuple[dict[str, float], int]:
    from sslpipe.run.launch import _time_precisions

    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    times_s = _time_precisions(nn.Sequential(*layers), rows, 128, torch.device("cuda"))
    return times_s, torch.cuda.memory_reserved()


def test_what_does_not_fit_is_not_chosen_and_leaves_its_memory():
    # a layer's output: 64 images x 64 channels x 128 x 128, 268 MB in fp32, 134 MB in bf16
    quick = {"FAKE_VALUES": "0"}
    ((times_s, left_bytes),) = run_on_cuda(_times, 64, memory_gib=3, env=quick)
    assert list(times_s) == ["bf16", "fp32"]
    assert times_s["bf16"] < times_s["fp32"] == float("inf")
    assert left_bytes < 2**28
    ((times_s, _),) = run_on_cuda(_times, 64, memory_gib=80, env=quick)
    assert max(times_s.values()) < float("inf")


def test_a_card_without_bf16_is_offered_fp16():
    quick = {"FAKE_VALUES": "0", "FAKE_MAJOR": "7"}
    ((times_s, _),) = run_on_cuda(_times, 4, name="Tesla V100-SXM2-16GB", env=quick)
    assert list(times_s) == ["fp16", "fp32"]
