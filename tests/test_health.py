"""Health numbers against loops, closed forms and real processes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sslpipe.distributed import Shard
from sslpipe.health import MOST_IMAGES, effective_rank, health
from tests.processes import run_processes


def views(images: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z_a = torch.randn(images, dim, generator=generator, dtype=torch.float64)
    return z_a * 5, z_a + torch.randn(images, dim, generator=generator, dtype=torch.float64)


def by_loops(z_a: Tensor, z_b: Tensor) -> dict[str, float]:
    a, b = ([row / np.linalg.norm(row) for row in z.numpy()] for z in (z_a, z_b))
    n, dim = len(a), len(a[0])
    every = np.array(a + b)
    uniformity = [
        math.log(
            np.mean([math.exp(-2 * ((v[i] - v[j]) ** 2).sum()) for i in range(n) for j in range(i)])
        )
        for v in (a, b)
    ]
    s = np.linalg.svd(every, compute_uv=False)
    p = s / s.sum()
    negatives = [every[i] @ every[j] for i in range(2 * n) for j in range(2 * n) if i % n != j % n]
    return {
        "alignment": float(np.mean([((x - y) ** 2).sum() for x, y in zip(a, b, strict=True)])),
        "uniformity": float(np.mean(uniformity)),
        "embedding_std": float(every.std(0).mean() * math.sqrt(dim)),
        "effective_rank": float(np.exp(-(p * np.log(p)).sum())),
        "positive_similarity": float(np.mean([x @ y for x, y in zip(a, b, strict=True)])),
        "negative_similarity": float(np.mean(negatives)),
    }


@pytest.mark.parametrize(("images", "dim"), [(12, 5), (4, 9)])
def test_health_equals_loops(images: int, dim: int) -> None:
    z_a, z_b = views(images, dim)
    assert health(z_a.requires_grad_(), z_b) == pytest.approx(by_loops(z_a.detach(), z_b), rel=1e-9)


def test_a_collapsed_batch_looks_collapsed() -> None:
    z = torch.tensor([[1.0, -2.0, 3.0]]).expand(20, 3)
    numbers = health(z, z)
    assert numbers == pytest.approx(
        {
            "alignment": 0.0,
            "uniformity": 0.0,
            "embedding_std": 0.0,
            "effective_rank": 1.0,
            "positive_similarity": 1.0,
            "negative_similarity": 1.0,
        },
        abs=1e-3,
    )


def test_orthogonal_images_have_full_rank_and_no_negative_similarity() -> None:
    z = torch.eye(8) * 3
    numbers = health(z, z)
    assert numbers["effective_rank"] == pytest.approx(8)
    assert numbers["negative_similarity"] == pytest.approx(0, abs=1e-7)
    assert numbers["uniformity"] == pytest.approx(-4)
    assert numbers["embedding_std"] == pytest.approx(math.sqrt(1 / 8 - 1 / 64) * math.sqrt(8))


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_effective_rank_counts_equal_directions(rank: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, rank, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(16, rank, dtype=torch.float64))
    whitened, _ = torch.linalg.qr(rows)
    assert float(effective_rank(whitened @ basis.T)) == pytest.approx(rank, rel=1e-5)


def test_a_large_batch_is_judged_by_rows_at_fixed_places() -> None:
    z_a, z_b = views(3 * MOST_IMAGES, 6)
    numbers, subset = health(z_a, z_b), health(z_a[::3], z_b[::3])
    for key in numbers.keys() - {"effective_rank"}:
        assert numbers[key] == pytest.approx(subset[key], rel=1e-12)
    assert numbers["effective_rank"] == pytest.approx(
        float(effective_rank(torch.cat([torch.nn.functional.normalize(z) for z in (z_a, z_b)])))
    )


def test_one_image_and_half_precision_give_finite_numbers() -> None:
    for z in (torch.randn(1, 4), torch.randn(6, 4).bfloat16(), torch.zeros(3, 4)):
        assert all(math.isfinite(value) for value in health(z, z).values())


def _on_ranks(shard: Shard, split: tuple[int, ...], z_a: Tensor, z_b: Tensor) -> dict[str, float]:
    return health(z_a.split(split)[shard.rank], z_b.split(split)[shard.rank])


@pytest.mark.parametrize("split", [(6, 6), (2, 10), (3, 4, 5)])
def test_all_ranks_say_what_one_process_says(split: tuple[int, ...]) -> None:
    z_a, z_b = views(12, 5)
    for numbers in run_processes(_on_ranks, len(split), split, z_a, z_b):
        assert numbers == pytest.approx(health(z_a, z_b), rel=1e-12)


def test_a_non_finite_batch_is_reported_as_nan_instead_of_failing() -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    z[2, 1] = math.nan
    assert math.isnan(health(z, z)["effective_rank"])
