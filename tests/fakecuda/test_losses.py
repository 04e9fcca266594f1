"""Losses on "cuda": a CPU's numbers, without a kernel that has to be compiled first."""

import itertools

import torch

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda

KINDS = ("nt_xent", "hard_negatives", "sup_con", "moco")
# (temperature, pairs): sums are taken plainly, and about the maximum
FORMS = ((0.2, False), (0.01, True))


def _value_and_gradient(
    kind: str, temperature: float, device: str, pairs: bool
) -> list[torch.Tensor]:
    from sslpipe.losses import LOSSES
    from sslpipe.recipe.base import Component
    from sslpipe.registry import build

    config = Component(kind=kind, temperature=temperature, tile_rows=8)
    if kind == "moco":  # its usual queue is many tiles long
        config = Component(**config.model_dump(), queue_rows=48)
    columns = {"group_columns": 2 if pairs else 0}
    loss_fn = build(LOSSES, config, section="loss", dim=8, **columns).to(device)
    z = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    leaf = z.to(device).requires_grad_()
    ids = torch.arange(12)
    known = {"ids": ids, "labels": ids % 3}
    if pairs:  # views of two samples, and groups of these
        shown = torch.stack([ids, (ids + ids % 2) % 12], 1)
        groups = torch.stack([shown % 5 - 1, shown // 4], 2)
        known = {"ids": shown, "labels": shown % 3, "groups": groups}
    for _ in range(2):  # a queue is filled by the first
        loss = loss_fn(leaf[0], leaf[1], **known)
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach().cpu(), temperature * leaf.grad.cpu()]


def _all() -> tuple[list[list[list[torch.Tensor]]], int]:
    from tests.fakecuda.runtime import events

    results = [
        [_value_and_gradient(kind, temperature, device, pairs) for device in ("cpu", "cuda")]
        for kind, (temperature, pairs) in itertools.product(KINDS, FORMS)
    ]
    return results, sum(event.name == "jiterator kernel" for event in events())


def test_losses_on_cuda_have_a_cpus_values_and_gradients_and_compile_nothing():
    ((results, compiled),) = run_on_cuda(_all)
    for expected, got in results:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert compiled == 0
