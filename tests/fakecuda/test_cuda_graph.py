"""`run.cuda_graph` on "cuda": two launches instead of the model's, in order; reasons where not."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.fakecuda.test_training import OVERRIDES, train_and_count
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import write_recipe

pytestmark = needs_fakecuda
GRAPH = "run.cuda_graph=true"


class Waiting(nn.Module):
    """Its forward pass asks the device for a number, as no recorded one can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, views: Tensor) -> Tensor:
        means: Tensor = self.linear(views.mean((2, 3)))
        return means * float(means.detach().sum())


def _recorded() -> tuple[dict[str, bool], str | None, list[str], bool]:
    """What of weights and buffers stays, the warning, a call's order, whether eval is eager."""
    from sslpipe.run.cuda_graph import record_graphs
    from tests.fakecuda.runtime import events, reset

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1), nn.Linear(144, 5)]
    model: Any = nn.Sequential(*layers).cuda()
    model[1].running_mean += 0.5
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    warning = record_graphs(model.train(), torch.zeros(6, 3, 8, 8, device="cuda"))
    after = {name: value.cpu() for name, value in model.state_dict().items()}
    same = {name: value.equal(before[name]) for name, value in after.items()}
    views = torch.ones(6, 3, 8, 8, device="cuda")
    order = []
    for _ in range(2):
        reset()
        z = model(views)
        z.sum().backward()
        order = [event.name if event.kind == "M" else event.kind for event in events()]
        order = [kind for kind in order if kind in ("D2D", "L", "K")]
        for p in model.parameters():
            assert p.grad is not None
            p.grad = None
    reset()
    model.eval()(views)
    return same, warning, order, not any(event.kind == "L" for event in events())


def test_a_call_copies_the_views_and_replays_each_pass_and_nothing_else_has_changed() -> None:
    ((same, warning, order, eager),) = run_on_cuda(_recorded)
    assert same
    assert all(same.values()), same
    assert warning is None
    assert order[:2] == ["D2D", "L"]  # views into the recorded memory, forward
    assert order.count("L") == 2
    assert "K" in order[2 : order.index("L", 2)]  # the loss, between forward and backward
    assert len(order) <= 8  # what is left are the sum, its gradient, and the copy of it
    assert eager


def _refused() -> tuple[str | None, bool]:
    from sslpipe.run.cuda_graph import record_graphs

    model: Any = Waiting().cuda()
    warning = record_graphs(model.train(), torch.zeros(6, 3, 8, 8, device="cuda"))
    z = model(torch.ones(6, 3, 8, 8, device="cuda"))
    z.sum().backward()
    return warning, bool(model.linear.weight.grad.abs().sum() > 0)


def test_a_model_that_waits_for_the_device_trains_as_before_and_the_reason_is_told() -> None:
    ((warning, trained),) = run_on_cuda(_refused)
    assert warning is not None
    assert warning.startswith("run.cuda_graph = true has no effect: ")
    assert "captur" in warning
    assert trained  # by passes that are launched as ever


def _counted(recipe: Path, data: Path, folder: Path) -> list[dict[str, int]]:
    """Counts of step 1 without and with recorded passes."""
    from accelerate.state import AcceleratorState, GradientState

    from tests.fakecuda.runtime import reset

    tables = []
    for number, settings in enumerate(((), (GRAPH,))):
        reset()
        bf16 = "optim.precision=bf16", "run.max_bad_steps=99", *settings
        done, table = train_and_count(recipe, data, folder / str(number), *OVERRIDES, *bf16)
        assert done == 3
        tables.append(table["step 1"])
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return tables


def test_a_run_replays_its_passes_without_a_wait(tmp_path: Path) -> None:
    arguments = write_recipe(tmp_path), write_dataset(tmp_path / "data"), tmp_path
    ((without, recorded),) = run_on_cuda(_counted, *arguments, env={"FAKE_VALUES": "0"})
    assert "graphs" not in without
    assert recorded["graphs"] == 2
    assert recorded["operations"] < without["operations"] - 100
    assert "waits" not in recorded
