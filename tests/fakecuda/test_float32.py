"""Products on "cuda": TF32 where a user allows it, but never in views and searches."""

import torch

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _rounded_products(current: bool) -> dict[str, set[int]]:
    from sslpipe.augment.batched import Lines, crop_by_products
    from sslpipe.augment.resample import gaussian_blur
    from sslpipe.evaluation.neighbours import SMALL_BANK, nearest
    from sslpipe.losses.engine.products import FEW_PAIRS, Multiply
    from tests.fakecuda.runtime import events, reset, section

    if current:
        torch.backends.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    x = torch.zeros(8, 8, device=device)
    zeros = torch.zeros(2, 1, device=device)
    lines = Lines(zeros, zeros + 15, zeros + 2, zeros + 2, zeros + 1.5, zeros + 0.5)
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8, device=device)
    reset()
    with section("a user's own"):
        x @ x
    with section("crop"):
        views = crop_by_products(images, lines, 8).transpose(1, 2).contiguous()
    with section("blur"):
        gaussian_blur(views, torch.ones(1, device=device), 7, 2.0)
    with section("search"):
        bank = torch.randn(SMALL_BANK + 1, 4, generator=torch.Generator().manual_seed(0)).cuda()
        nearest(bank, bank[:2], 1)
    for products in ("float32", "bfloat16"):
        multiply = Multiply(products, x, 1.0, FEW_PAIRS)
        with section(f"loss, {products}"), multiply.kernels():
            multiply.similarities(x, x, torch.empty_like(x))
    flags: dict[str, set[int]] = {}
    for event in events():
        if event.kind == "G":
            flags.setdefault(event.section, set()).add(event.flag)
    return flags


def test_views_and_searches_are_never_rounded_losses_where_asked_for():
    expected = {"a user's own": {1}, "crop": {0}, "blur": {0}, "search": {0}, "loss, bfloat16": {1}}
    for current in (True, False):
        (flags,) = run_on_cuda(_rounded_products, current)
        flags.pop("loss, float32")  # as the user says
        assert flags == expected
