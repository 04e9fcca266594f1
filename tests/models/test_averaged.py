"""The moving average of an encoder's weights, against its recurrence written out.

In a run that is killed: run/test_best.py.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file

from sslpipe.errors import ExportError
from sslpipe.export.load import load_backbone, load_run
from sslpipe.models.averaged import averaged, decay_at, follow_average
from sslpipe.models.backbones import small_resnet
from sslpipe.run.checkpoint_files import checkpoint_names
from sslpipe.run.log import read_metrics
from tests.helpers.runs import assert_same_weights, final_weights, train_over, write_recipe


def decays(steps: int, decay: float) -> list[float]:
    return [min(decay, (1 + step) / (10 + step)) for step in range(steps)]


def test_the_average_is_its_recurrence_in_every_weight_and_statistic():
    torch.manual_seed(0)
    backbone = small_resnet((4, 8)).double()
    average = averaged(backbone)
    assert not list(average.parameters())  # the optimizer and DDP leave it alone
    expected = copy.deepcopy(backbone.state_dict())
    assert average.state_dict().keys() == expected.keys()
    for step, decay in enumerate(decays(30, 0.6)):
        assert decay_at(step, 0.6) == decay
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.add_(torch.randn_like(parameter))
        backbone(torch.randn(6, 3, 8, 8).double())  # moves the running statistics
        follow_average(average, backbone, 0.6, step)
        for key, value in backbone.state_dict().items():
            counted = not value.is_floating_point()
            expected[key] = value if counted else decay * expected[key] + (1 - decay) * value
    for key, value in average.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-14)
    assert any(not torch.equal(value, average.state_dict()[k]) for k, value in expected.items())


EVERY_STEP = ("steps=6", "run.save_steps=1", "run.keep_checkpoints=6")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The folder of a run with an average, and of the same one without."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_recipe(folder)
    train_over(1, recipe, data, folder / "ema", *EVERY_STEP, "optim.ema=0.3", "run.monitor_steps=3")
    train_over(1, recipe, data, folder / "plain", *EVERY_STEP)
    return folder


def test_a_runs_average_is_that_of_its_checkpoints_and_changes_no_trained_weight(run):
    names = checkpoint_names(run / "ema" / "checkpoints")
    states = [load_file(run / "ema" / "checkpoints" / name / "model.safetensors") for name in names]
    plain = final_weights(run / "plain")
    assert_same_weights(plain, {key: states[-1][key] for key in plain})
    weights = [key for key in plain if key.startswith("backbone.") and "num_batches" not in key]
    for before, now, decay in zip(states[:-1], states[1:], decays(6, 0.3)[1:], strict=True):
        for key in weights:
            ours = key.replace("backbone.", "ema.", 1)
            expected = decay * before[ours].double() + (1 - decay) * now[key].double()
            torch.testing.assert_close(now[ours].double(), expected, rtol=1e-5, atol=1e-7)


def test_the_average_is_exported_on_request_and_told_of(run):
    trained, average = load_run(run / "ema"), load_backbone(run / "ema", weights="ema")
    assert "weights" not in trained.config.facts
    assert average.config.facts["weights"] == "ema"
    saved = final_weights(run / "ema")
    exported = average.backbone.state_dict()
    assert_same_weights({key: saved[f"ema.{key}"] for key in exported}, exported)
    assert average.config.weights_sha256 != trained.config.weights_sha256
    with pytest.raises(ExportError, match=r"trained without optim\.ema"):
        load_run(run / "plain", weights="ema")


def test_the_monitor_scores_the_average_too(run):
    for line in read_metrics(run / "ema", "eval"):
        ours = {key.removeprefix("ema_") for key in line if key.startswith("ema_")}
        assert "holdout_knn" in ours
        assert ours == {key for key in line if key.startswith("holdout_")}
