"""The oracle of contrastive objectives: loops over single pairs, as their papers have them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def pair(images: int, dim: int, *, seed: int = 0, closeness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Embeddings of two views in float64, with gradient; of any length."""
    generator = torch.Generator().manual_seed(seed)
    z_a = torch.randn(images, dim, generator=generator, dtype=torch.float64) * 3
    z_b = closeness * z_a + torch.randn(images, dim, generator=generator, dtype=torch.float64)
    return z_a.requires_grad_(), z_b.requires_grad_()


def value_and_grad(loss: Tensor, z_a: Tensor, z_b: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.cat(torch.autograd.grad(loss, (z_a, z_b)))


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def assert_same(actual: Any, expected: Any, rtol: float = 1e-9) -> None:
    """The value to two digits more than the gradient."""
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol / 100, atol=1e-13)
    torch.testing.assert_close(actual[1], expected[1], rtol=rtol, atol=1e-12)


def dcl(positive: Tensor, negatives: list[Tensor], weight: Tensor | float = 1.0) -> Tensor:
    if not negatives:
        return positive * 0
    return torch.logsumexp(torch.stack(negatives), 0) - weight * positive


def hard(
    positive: Tensor, negatives: list[Tensor], temperature: float, beta: float, prior: float
) -> Tensor:
    """Robinson et al. 2021, eq. 4, with their estimators put in."""
    if not negatives:
        return positive * 0
    s = torch.stack(negatives)
    importance = torch.softmax(beta * s, 0)
    g = ((importance * s.exp()).sum() - prior * positive.exp()) / (1 - prior)
    g = torch.clamp(g, min=math.exp(-1 / temperature))
    return -torch.log(positive.exp() / (positive.exp() + len(negatives) * g))


def sup_con(positives: list[Tensor], negatives: list[Tensor]) -> Tensor:
    total = torch.logsumexp(torch.stack(positives + negatives), 0)
    return torch.stack([total - s for s in positives]).mean()


def is_masked(a: tuple[int, int], b: tuple[int, int], ids: Any, groups: Any) -> bool:
    """Views (row, view) of two rows: they share a group, or one shows what the other's row does."""
    (i, u), (j, v) = a, b
    if groups is not None:
        shared = zip(groups[i][u], groups[j][v], strict=True)
        if any(x == y >= 0 for x, y in shared):
            return True
    return ids[j][v] in ids[i] or ids[i][u] in ids[j]


def of_views(numbers: Any) -> Any:
    """What is known of each view, (N, 2), of numbers (N,) too."""
    return [[x, x] if isinstance(x, int) else x for x in numbers]


def unit(row: Tensor) -> Tensor:
    """A zero row stays so."""
    return row / row.norm() if row.any() else row


def loops(kind: str, z_a: Tensor, z_b: Tensor, t: float, **known: Any) -> tuple[Tensor, float]:
    """The mean over the anchors, pair by pair, and the mean number of negatives.

    known: an entry of KNOWN, and settings of the objective.
    """
    ids = of_views(known.get("ids", range(len(z_a))))
    labels = of_views(known.get("labels", [-1] * len(z_a)))
    z = [[unit(row) for row in rows] for rows in zip(z_a, z_b, strict=True)]
    views = [(i, u) for u in (0, 1) for i in range(len(z))]
    cosines = torch.stack([(a * b).sum() for a, b in z])
    total, count = z_a.new_zeros(()), 0
    for i, u in views:
        positives, negatives = [cosines[i] / t], []
        for j, v in views:
            s, same_label = (z[i][u] * z[j][v]).sum() / t, labels[i][u] == labels[j][v] >= 0
            if i == j:
                continue
            if kind == "sup_con" and same_label:
                positives.append(s)
            elif is_masked((i, u), (j, v), ids, known.get("groups")):
                continue
            elif not (known.get("mask_labels") and same_label):
                negatives.append(s)
        count += len(negatives)
        own = positives[0]
        if kind == "sup_con":
            value = sup_con(positives, negatives)
        elif kind == "hard_negatives":
            beta, prior = known.get("beta", 1.0), known.get("class_prior", 0.1)
            value = hard(own, negatives, t, beta, prior)
        elif kind == "nt_xent":  # Chen et al. 2020, algorithm 1
            value = torch.logsumexp(torch.stack([own, *negatives]), 0) - own
        elif kind in ("dcl", "dclw"):
            weights = (cosines / known.get("sigma", 0.5)).exp()
            value = dcl(own, negatives, 2 - weights[i] / weights.mean() if kind == "dclw" else 1.0)
        else:
            raise KeyError(f"{kind} has no loop here")
        total = total + value
    return total / len(views), count / len(views)


class LargestTensor(TorchDispatchMode):
    """Records the most numbers in any tensor an operation gave back."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.itemsize)
        return result


class NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "c10d" not in str(func), f"{func} in backward"
        return func(*args, **(kwargs or {}))


# what may be known of nine images: their samples, or those of their views, labels, groups
IDS = [[0, 0], [1, 2], [2, 2], [3, 4], [4, 9], [5, 5], [6, 1], [2, 8], [7, 7]]
_LABEL_OF = (0, 1, -1, 0, 2, -1, 1, 0, 0, 5)  # of each sample
_PAIRED = (0, 3, 3, 5, 5, 0, 3, 7, 3, 5)  # equal in both views of each row
_TWO = [(0, 0, 1, 1, -1, 2, 2, 3, 3, 0), (0, 1, 1, 2, 0, -1, 4, 4, 0, 2)]
_GROUPS_OF: dict[str, list[tuple[int, ...]]] = {
    "one group": [(0, 1, 1, -1, 2, -1, 0, 2, 2, -1)],
    "paired": [_PAIRED],
    "paired and another": [_PAIRED, (1, 1, 2, -1, 2, 3, 3, 3, -1, 4)],
    "two groups": _TWO,
    "three groups": [*_TWO, (-1,) * 7 + (4,) * 3],
}
_VIEWS = {"ids": IDS, "labels": [[_LABEL_OF[i] for i in row] for row in IDS]}
KNOWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    # images 2 and 7 show one sample
    "images": {"ids": [0, 1, 2, 3, 4, 5, 6, 2, 8], "labels": [0, 1, -1, 0, 5, -1, 1, -1, 0]},
    "many copies": {"ids": [3, 3, 9, 9, 9, 1, 2, 1, 5], "labels": [-1] * 9},
    "one sample": {"ids": [4] * 9, "labels": [-1] * 9},
    "views": _VIEWS,
    **{
        name: {**_VIEWS, "groups": [[[of[i] for of in columns] for i in row] for row in IDS]}
        for name, columns in _GROUPS_OF.items()
    },
}


def tensors(known: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(numbers) for name, numbers in known.items()}
