"""What is delegated to pytorch-metric-learning gives what the library gives on unit rows."""

import pytest
import torch
import torch.nn.functional as F

from sslpipe.distributed import Rank
from sslpipe.errors import UserError
from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.losses.pairwise import References
from sslpipe.metric_learning.losses.pml import DELEGATED
from tests.helpers.processes import run_processes

pytest.importorskip("pytorch_metric_learning")
# the library's own: how it indexes, and a warning about its own default
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:Values of Tp")

ARGUMENTS = {
    "HistogramLoss": {"n_bins": 10},
    "RankedListLoss": {"margin": 0.4, "Tn": 10},
}
LABELS = torch.arange(12) % 4


def rows(size=12):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(0)) * 3


def built(name):
    torch.manual_seed(0)
    return METRIC_LOSSES["pml"](name=name, arguments=ARGUMENTS.get(name))


def gradient(loss, x, labels=LABELS):
    x = x.clone().requires_grad_()
    value = loss(x, labels, ids=torch.arange(len(labels)))
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("name", DELEGATED)
def test_a_delegated_loss_is_the_library_s_on_unit_rows(name):
    x = rows().requires_grad_()
    exact = built(name).loss(F.normalize(x), LABELS)  # the library's, with the adapter's weights
    (exact_grad,) = torch.autograd.grad(exact, x)
    value, grad = gradient(built(name), rows())
    torch.testing.assert_close(value.reshape(()), exact.detach().reshape(()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad, exact_grad, rtol=1e-3, atol=1e-5)
    assert bool(torch.isfinite(grad).all())
    with torch.autocast("cpu", torch.bfloat16):
        again = built(name)(rows(), LABELS)
    torch.testing.assert_close(again.detach(), value, rtol=1e-4, atol=1e-6)
    unlabelled = torch.cat([rows(), rows(3) * 2]), torch.cat([LABELS, torch.full((3,), -1)])
    torch.testing.assert_close(gradient(built(name), *unlabelled)[0], value)


def test_what_is_known_to_be_wrong_is_refused():
    for key in ("swap", "efficient"):
        with pytest.raises(UserError, match=key):
            METRIC_LOSSES["pml"](name="FastAPLoss", arguments={key: True})
    with pytest.raises(UserError, match="did you mean 'FastAPLoss'"):
        METRIC_LOSSES["pml"](name="FastAPloss")
    ref = References(rows(), LABELS, LABELS)
    for wrong in ({"miner": torch.nn.Identity()}, {"ref": ref}):
        with pytest.raises(UserError, match=r"SmoothAPLoss takes no miner and no queue"):
            built("SmoothAPLoss")(rows(), LABELS, **wrong)


def on_ranks(process):
    mine = slice(0, 9) if process.rank == 0 else slice(9, 12)
    if process.world_size == 1:
        mine = slice(0, 12)
    names = [name for name in DELEGATED if name not in ("HistogramLoss", "RankedListLoss")]
    return {name: gradient(built(name), rows()[mine], LABELS[mine]) for name in names}


def test_two_processes_with_unequal_rows_give_the_gradient_of_one():
    one, two = on_ranks(Rank(0, 1)), run_processes(on_ranks, 2)
    for name, (value, grad) in one.items():
        for results in two:
            torch.testing.assert_close(results[name][0], value, rtol=1e-4, atol=1e-6)
        together = torch.cat([results[name][1] for results in two]) / 2
        torch.testing.assert_close(together, grad, rtol=1e-3, atol=1e-5)
