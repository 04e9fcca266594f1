"""Metric losses on "cuda": a CPU's numbers, and the common ones never wait for the device."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda

LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 0]  # at most three positives
# loss or head, its arguments, and the miner
COMMON: list[tuple[str, dict[str, Any], str | None]] = [
    ("multi_similarity", {}, "multi_similarity"),
    ("triplet", {"triplets": "semi_hard"}, None),
    *(
        (name, {}, None)
        for name in (
            *("multi_similarity", "triplet", "batch_hard", "contrastive", "margin", "circle"),
            *("sup_con", "nt_xent", "arcface", "cosface", "sub_center_arcface", "softmax"),
            *("proxy_anchor", "proxy_nca", "soft_triple"),
        )
    ),
]


def _value_and_gradient(
    name: str, arguments: dict[str, Any], miner: str | None, device: str
) -> tuple[Tensor, Tensor, list[float], Counter[str]]:
    """Of a loss in a fine-tuning's module, called twice; where the second call waited."""
    import traceback
    import warnings

    from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS
    from sslpipe.metric_learning.losses.base import MetricLoss
    from sslpipe.metric_learning.losses.pairwise import LabelCounts
    from sslpipe.metric_learning.model import MetricTask

    torch.manual_seed(0)
    sizes = {"num_classes": 5, "dim": 6} if name in HEADS else {}
    loss = (HEADS if sizes else METRIC_LOSSES)[name](**sizes, **arguments)
    task: Any = MetricTask(
        _Rows(),
        [loss],
        miner=None if miner is None else MINERS[miner](),  # type: ignore[arg-type]
    ).to(device)
    rows = torch.randn(len(LABELS), 6).to(device).requires_grad_()
    labels, ids = torch.tensor(LABELS).to(device), torch.arange(len(LABELS)).to(device)
    places: Counter[str] = Counter()

    def show(message: object, *_: object) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = [f for f in traceback.extract_stack() if "/sslpipe/" in f.filename]
            places[f"{frames[-1].filename.split('/')[-1]}:{frames[-1].lineno}"] += 1

    for call in range(2):
        if device == "cuda" and call:
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            value, _ = task(rows, labels, ids, False, LabelCounts(0, 3))
            (gradient,) = torch.autograd.grad(value, rows)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    counts = [loss.last_count, loss.last_active] if isinstance(loss, MetricLoss) else []
    return value.detach().cpu(), gradient.cpu(), counts, places


class _Rows(torch.nn.Module):
    """A backbone whose embeddings are what it gets."""

    def raw(self, rows: Tensor) -> Tensor:
        return rows


def _on_both() -> list[Any]:
    found = []
    for case in COMMON:
        expected = _value_and_gradient(*case, "cpu")
        got = _value_and_gradient(*case, "cuda")
        found.append((expected[:3], got[:3], got[3]))
    return found


def test_common_losses_have_a_cpus_value_and_gradient_and_never_wait() -> None:
    (found,) = run_on_cuda(_on_both)
    for case, (expected, got, places) in zip(COMMON, found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=str(case))
        assert not places, (case, places)
