"""Objectives honour their signatures: whoever adds a line is held to it here.

Backbones: models/test_backbones.py; views: augment/test_two_views.py; metric losses, heads,
miners: metric_learning/.
"""

import inspect

import pytest
import torch

from sslpipe.losses import LOSSES, TeacherFeatures

SMALL_LOSSES = {  # where the defaults do not fit below
    "moco": {"dim": 5, "queue_rows": 16},
    "distill": {"teacher": TeacherFeatures(torch.eye(12), torch.arange(12))},
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_objective_takes_two_views_ids_and_labels_and_gives_one_number(name):
    objective = LOSSES[name](**SMALL_LOSSES.get(name, {}))
    names = list(inspect.signature(objective.forward).parameters)
    assert names == ["z_a", "z_b", "ids", "labels", "groups"]
    torch.manual_seed(0)
    width = 12 if name == "diet" else 5  # an output for each id
    objective(*torch.randn(2, 6, width), ids=torch.arange(6, 12), labels=torch.full((6,), -1))
    saved = {key: value.clone() for key, value in objective.state_dict().items()}
    objective.eval()  # from here on a call changes no buffer
    z_a, z_b = torch.randn(2, 6, width, requires_grad=True).unbind()
    ids, labels = torch.arange(6), torch.tensor([0, 0, 1, 1, -1, -1])
    loss = objective(z_a, z_b, ids=ids, labels=labels)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (z_a, z_b), allow_unused=True)
    for gradient in gradients[: 1 if name == "moco" else 2]:  # its keys take none
        assert bool(torch.isfinite(gradient).all())
        assert bool(gradient.any(1).all())
    order = torch.randperm(6)
    shuffled = objective(z_a[order], z_b[order], ids=ids[order], labels=labels[order])
    torch.testing.assert_close(shuffled, loss)  # rows have no order
    if objective.embeds:
        scaled = objective(3 * z_a, 3 * z_b, ids=ids, labels=labels)
        torch.testing.assert_close(scaled, loss)  # nor has z a length
    if objective.negatives_per_anchor(6):
        assert objective.last_negatives > 0
        assert objective.masked_pairs == 0
    torch.testing.assert_close(objective.state_dict(), saved, rtol=0, atol=0)
