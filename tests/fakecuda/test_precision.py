"""Precision on "cuda": what "auto" chooses from, and which products are rounded."""

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


# -- TF32 where a user allows it, but never in views and searches ----------------------------------


def _rounded_products(current: bool) -> dict[str, set[int]]:
    from sslpipe.augment.resample import gaussian_blur
    from sslpipe.evaluation.neighbours import nearest
    from tests.fakecuda.runtime import events, reset, section

    if current:
        torch.backends.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    x = torch.zeros(8, 8, device=device)
    reset()
    with section("a user's own"):
        x @ x
    with section("blur"):
        gaussian_blur(torch.zeros(1, 3, 8, 8, device=device), torch.ones(1, device=device), 7, 2.0)
    with section("search"):
        bank = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)).cuda()
        nearest(bank, bank[:2], 1)
    flags: dict[str, set[int]] = {}
    for event in events():
        if event.kind == "G":
            flags.setdefault(event.section, set()).add(event.flag)
    return flags


def test_views_and_searches_are_never_rounded():
    expected = {"a user's own": {1}, "blur": {0}, "search": {0}}
    for current in (True, False):
        (flags,) = run_on_cuda(_rounded_products, current)
        assert flags == expected
