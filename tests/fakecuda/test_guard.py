"""What the guard remembers on "cuda": buffers of any kind, in one launch each way."""

import pytest
import torch
from torch import nn

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _module() -> nn.Module:
    """Buffers of several dtypes and layouts; each has other values."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for name, buffer in {
        "floats": torch.randn(3, 5, generator=generator),
        "transposed": torch.randn(7, 2, generator=generator).T,
        "count": torch.tensor(2**40),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(33, dtype=torch.uint8),
        "wide": torch.randn(9, dtype=torch.float64, generator=generator),
        "rounded": torch.randn(1, 2, 3, 3, generator=generator).bfloat16(),
    }.items():
        module.register_buffer(name, buffer.cuda())
    return module


def _changed(module: nn.Module) -> dict[str, torch.Tensor]:
    """Change every buffer in place; copies of what they were."""
    before = {name: buffer.cpu().clone() for name, buffer in module.named_buffers()}
    for buffer in module.buffers():
        buffer.copy_(buffer == 0)
    return before


def _remembered(tie: bool) -> tuple[list[bool], list[bool], list[tuple[int, ...]], list[int]]:
    """Whether buffers are kept and restored, their strides, and operations of either."""
    from sslpipe.run.guard import _Memory
    from tests.fakecuda.runtime import events, operations, reset

    module = _module()
    if tie:  # two buffers of one memory stay in it
        assert isinstance(module.wide, torch.Tensor)
        module.register_buffer("part", module.wide[2:5])
    owned = list(module.buffers())
    memory = _Memory(owned)
    assert all(own is buffer for own, buffer in zip(owned, module.buffers(), strict=True))
    kept, restored, counts = [], [], []
    for bad, outcome in ((False, kept), (True, restored)):
        reset()
        memory.remember()
        counts.append(operations(events()))
        before = _changed(module)
        after = {name: buffer.cpu().clone() for name, buffer in module.named_buffers()}
        flag = torch.tensor(bad, device="cuda")
        reset()
        memory.restore_where(flag)
        counts.append(operations(events()))
        expected = before if bad else after
        outcome += [buffer.cpu().equal(expected[name]) for name, buffer in module.named_buffers()]
        memory.restore()
    return kept, restored, [buffer.stride() for buffer in owned], counts


@pytest.mark.parametrize("tie", [False, True])
def test_buffers_of_every_kind_are_restored_where_the_device_says_so(tie):
    ((kept, restored, strides, counts),) = run_on_cuda(_remembered, tie)
    assert all(kept)
    assert all(restored)
    if not tie:
        assert strides[:2] == [(5, 1), (1, 2)]
        assert counts == [1] * 4
