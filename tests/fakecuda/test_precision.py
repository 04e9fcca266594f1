"""Precision on "cuda": what "auto" is, and which products are rounded."""

import pytest
import torch

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _auto() -> str:
    from sslpipe.run.device import resolve_precision

    return resolve_precision("auto", torch.device("cuda"))


@pytest.mark.parametrize(("major", "precision"), [(7, "fp32"), (8, "bf16"), (9, "bf16")])
def test_auto_is_bf16_on_a_card_that_has_it(major, precision):
    assert run_on_cuda(_auto, env={"FAKE_MAJOR": str(major)}) == [precision]


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
