"""Losses on "cuda": a CPU's numbers, no kernel that has to be compiled first, and no wait."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from tests.fakecuda.test_waits import counted_waits
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda

KINDS = ("nt_xent", "hard_negatives", "sup_con", "moco")
# (temperature, pairs): sums are taken plainly, and about the maximum
FORMS = ((0.2, False), (0.01, True))


def _value_and_gradient(kind: str, temperature: float, device: str, pairs: bool) -> list[Tensor]:
    from sslpipe.losses import LOSSES
    from sslpipe.registry.schema import settings_class

    settings = {"temperature": temperature, "tile_rows": 8}
    if kind == "moco":  # its usual queue is many tiles long
        settings["queue_rows"] = 48
    loss_fn = settings_class(LOSSES, kind)(**settings).build(dim=8, group_columns=2 * pairs)
    loss_fn = loss_fn.to(device)
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
    return [loss.detach().cpu(), temperature * leaf.grad.cpu()]


def _all() -> tuple[list[list[list[Tensor]]], int]:
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


# -- of metric learning: the common ones -----------------------------------------------------------

LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 0]  # at most three positives
NAMES = (
    *("multi_similarity", "triplet", "batch_hard", "contrastive", "margin", "circle", "sup_con"),
    *("nt_xent", "arcface", "cosface", "sub_center_arcface", "softmax", "proxy_anchor"),
    *("proxy_nca", "soft_triple"),
)
# loss or head, its arguments, and the miner
COMMON: list[tuple[str, dict[str, Any], str | None]] = [
    ("multi_similarity", {}, "multi_similarity"),
    ("triplet", {"triplets": "semi_hard"}, None),
    *((name, {}, None) for name in NAMES),
]


class _Rows(nn.Module):
    """A backbone whose embeddings are what it gets."""

    def raw(self, rows: Tensor) -> Tensor:
        return rows


def _twice(name: str, arguments: dict[str, Any], miner: str | None, device: str, mark: Any) -> Any:
    """Value, gradient and counts of a loss in a fine-tuning's module; the second call is marked."""
    from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS
    from sslpipe.metric_learning.losses.pairwise import LabelCounts
    from sslpipe.metric_learning.metric_task import MetricTask

    torch.manual_seed(0)
    sizes = {"num_classes": 5, "dim": 6} if name in HEADS else {}
    loss = (HEADS if sizes else METRIC_LOSSES)[name](**sizes, **arguments)
    task: Any = MetricTask(_Rows(), [loss], miner=miner and MINERS[miner]()).to(device)
    rows = torch.randn(len(LABELS), 6).to(device).requires_grad_()
    labels, ids = torch.tensor(LABELS).to(device), torch.arange(len(LABELS)).to(device)
    for section in ("", "counted"):
        mark(section)
        value, _ = task(rows, labels, ids, LabelCounts(0, 3))
        (gradient,) = torch.autograd.grad(value, rows)
    mark("")
    counts = [] if sizes else [loss.last_count, loss.last_active]
    return value.detach().cpu(), gradient.cpu(), counts


def _on_both() -> list[Any]:
    found = []
    with counted_waits(()) as (mark, read):
        for case in COMMON:
            expected = _twice(*case, "cpu", lambda section: None)
            found.append((expected, _twice(*case, "cuda", mark), read()))
    return found


def test_common_metric_losses_have_a_cpus_value_and_gradient_and_never_wait() -> None:
    (found,) = run_on_cuda(_on_both)
    for case, (expected, got, waits) in zip(COMMON, found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=str(case))
        assert waits == (0, {}), case
