"""What an objective promises the training loop, also one that is not contrastive at all."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.losses import LOSSES, DCLLoss, InBatchLoss, MoCoLoss, NTXentLoss, Objective, SupConLoss
from sslpipe.losses.base import positive_similarities
from sslpipe.losses.engine.contrast import Anchors, Sums
from sslpipe.recipe.base import Component
from sslpipe.registry import build
from tests.losses.loops import assert_same, pair, value_and_grad


class Alignment(Objective):
    """Mean squared distance of the views: no negatives, nothing to log."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        return (
            (F.normalize(z_a, dim=1) - F.normalize(z_b, dim=1)).norm(dim=1).pow(self.power).mean()
        )


class NTXentByHand(InBatchLoss):
    """What docs/extending.md would have one write: a formula and nothing else."""

    def row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        return F.softplus(sums[0] - positive_similarities(v)).mean()


def test_an_objective_without_negatives_is_registered_by_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOSSES, "alignment", Alignment)
    component = Component.model_validate({"kind": "alignment", "power": 1.0})
    objective = build(LOSSES, component, section="loss", dim=4)
    z_a, z_b = pair(6, 4)
    loss = objective(z_a, z_b, ids=torch.arange(6), labels=torch.full((6,), -1))
    loss.backward()
    assert z_a.grad is not None
    assert objective.stats() == {}
    assert objective.negatives_per_anchor(6) == 0
    assert not objective.needs_momentum_encoder
    assert not objective.uses_labels
    assert repr(objective) == "Alignment(power=1.0)"


def test_a_contrastive_objective_is_its_row_loss() -> None:
    z_a, z_b = pair(9, 4)
    ids = torch.tensor([0, 1, 2, 0, 4, 5, 6, 7, 2])
    ours, theirs = NTXentByHand(0.2, tile_rows=4), NTXentLoss(0.2)
    found, expected = (value_and_grad(each(z_a, z_b, ids=ids), z_a, z_b) for each in (ours, theirs))
    assert_same(found, expected)
    assert ours.stats() == theirs.stats() == {"negatives_per_anchor": 16 - 16 / 18}


def test_objectives_say_what_they_need() -> None:
    assert {kind for kind in LOSSES if LOSSES[kind]().needs_momentum_encoder} == {"moco"}
    assert {kind for kind in LOSSES if LOSSES[kind]().uses_labels} == {"sup_con"}
    assert NTXentLoss(mask_labels=True).uses_labels
    assert NTXentLoss().negatives_per_anchor(8) == 14
    assert MoCoLoss(queue_rows=40).negatives_per_anchor(8) == 40


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (
            NTXentLoss(temperature=0.1),
            "NTXentLoss(temperature=0.1, mask_labels=False, products='float32', tile_rows=None)",
        ),
        (
            DCLLoss(sigma=0.5, tile_rows=8),
            "DCLLoss(temperature=0.1, sigma=0.5, mask_labels=False, products='float32', "
            "tile_rows=8)",
        ),
        (SupConLoss(0.2), "SupConLoss(temperature=0.2, products='float32', tile_rows=None)"),
        (
            MoCoLoss(4, 6),
            "MoCoLoss(dim=4, queue_rows=6, temperature=0.2, products='float32', tile_rows=None)",
        ),
    ],
)
def test_a_repr_says_which_loss_it_is_and_with_what_arguments(
    objective: Objective, text: str
) -> None:
    assert repr(objective) == text


def test_a_temperature_that_is_changed_counts() -> None:
    z_a, z_b = pair(6, 4)
    loss_fn = NTXentLoss(0.5)
    loss_fn.temperature = 0.1
    assert torch.equal(loss_fn(z_a, z_b), NTXentLoss(0.1)(z_a, z_b))
