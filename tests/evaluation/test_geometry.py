"""Uniformity against loops; the effective rank is that of RankMe, see test_label_free."""

from itertools import combinations

import numpy as np
import pytest
import torch

from sslpipe.evaluation.geometry import uniformity


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0])
def test_uniformity_of_collapsed_rows_keeps_its_digits(spread, dtype):
    generator = torch.Generator().manual_seed(0)
    noise = torch.nn.functional.normalize(torch.randn(32, 64, generator=generator))
    u = (torch.full((64,), 0.125) + spread * noise).to(dtype)
    wide = u.double().numpy()
    expected = np.log1p(
        np.mean([np.expm1(-2 * ((a - b) ** 2).sum()) for a, b in combinations(wide, 2)])
    )
    assert float(uniformity(u)) == pytest.approx(expected, rel=1e-6)
