"""What an objective promises the training loop, also one that is not contrastive at all."""

import pytest
import torch

from sslpipe.losses import LOSSES, MoCoLoss, NTXentLoss, Objective
from tests.losses.loops import pair


def test_objectives_say_what_they_need() -> None:
    alone = {kind: LOSSES[kind]() for kind in LOSSES if kind != "distill"}  # which needs a teacher
    assert {kind for kind in alone if alone[kind].needs_momentum_encoder} == {"moco"}
    assert {kind for kind in alone if alone[kind].uses_labels} == {"sup_con"}
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
