"""`run.cuda_graph`: where the passes cannot be recorded, check and log say why."""

import pytest

from sslpipe.build import build_loss
from sslpipe.check.pretraining import check_pretraining
from sslpipe.errors import UserError
from sslpipe.losses import Objective
from sslpipe.recipe import load_recipe
from sslpipe.run.cuda_graph import graph_refusal
from tests.helpers import finetunes
from tests.helpers.runs import command_line, train_words, write_recipe

GRAPH = "run.cuda_graph=true"


@pytest.mark.parametrize(
    ("device", "world", "settings", "reason"),
    [
        ("cpu", 1, (), "cpu has no CUDA graphs"),
        ("cuda", 2, (), "2 processes exchange gradients and statistics inside a step"),
        ("cuda", 1, ("data.micro_batch=8",), "data.micro_batch takes several passes"),
        ("cuda", 1, ("run.compile=true",), "run.compile = true makes kernels of its own"),
        ("cuda", 1, ("pairs.positive=icon",), "[pairs] gives batches of unequal numbers"),
        ("cuda", 1, ("loss.kind=sup_con",), "loss.kind = 'sup_con': its masks and positives"),
        ("cuda", 1, ("loss.mask_labels=true",), "loss.kind = 'nt_xent': its masks and positives"),
        ("cuda", 1, ("optim.precision=fp16",), "the host keeps the scale of fp16's gradients"),
        ("cuda", 1, ("optim.precision=fp64",), "torch's sgd would take fp64's rate in float32"),
        ("cuda", 1, ("optim.precision=fp64", "optim.kind=lars"), None),
        ("cuda", 1, ("run.max_bad_steps=1",), "run.max_bad_steps = 1 asks in each step"),
        ("cuda", 1, ("momentum.start=0.9", "optim.ema=0.9"), None),
        ("cuda", 1, ("loss.kind=moco", "momentum.start=0.9"), None),
        ("cuda", 1, (), None),
    ],
)
def test_the_first_reason_against_recording_is_told(device, world, settings, reason, tmp_path):
    recipe = write_recipe(tmp_path)
    asked, silent = load_recipe(recipe, (GRAPH, *settings)), load_recipe(recipe, settings)
    text = graph_refusal(asked, device, world, build_loss(asked))
    expected = f"run.cuda_graph = true has no effect: {reason}"
    assert text is None if reason is None else str(text).startswith(expected)
    assert graph_refusal(silent, device, world, build_loss(silent)) is None  # nobody asked


def test_an_objective_of_ones_own_is_not_recorded_until_it_says_that_its_calls_are_alike(tmp_path):
    class Own(Objective):
        pass

    class Alike(Objective):
        def unlike(self, ids, labels=None, groups=None):
            return None

    recipe = load_recipe(write_recipe(tmp_path), (GRAPH,))
    assert "it does not say (Objective.unlike)" in graph_refusal(recipe, "cuda", 1, Own())
    assert graph_refusal(recipe, "cuda", 1, Alike()) is None


def test_check_and_the_run_say_on_a_cpu_that_it_has_no_effect(data, tmp_path):
    reason = "run.cuda_graph = true has no effect: cpu has no CUDA graphs"
    settings = GRAPH, "run.device=cpu", "steps=1"
    run = command_line(*train_words(tmp_path, data), *settings, status=0)
    assert f"warning: {reason}" in run.stderr
    assert reason in check_pretraining(load_recipe(tmp_path / "tiny.toml", settings), None).warnings


def test_a_fine_tuning_refuses_it(tmp_path):
    with pytest.raises(UserError, match=r"run\.cuda_graph: true is for pretraining"):
        load_recipe(finetunes.write_recipe(tmp_path), (GRAPH,))
