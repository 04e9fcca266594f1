"""augment.half_size_share: the first steps of a run see its views at half the size."""

import numpy as np
import pytest
import torch

import sslpipe.api
from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.export.load import load_run
from sslpipe.metric_learning.finetune import finetune
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.models.simclr import SimCLR
from sslpipe.plan import Pretraining
from sslpipe.pretrain import pretrain
from sslpipe.recipe.reading import load_recipe
from tests.helpers import finetunes
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import final_weights, forget_accelerator, write_recipe


@pytest.fixture
def plan_of(data, tmp_path):
    recipe = write_recipe(tmp_path)
    return lambda *words: Pretraining.make(load_recipe(recipe, words), load_index(data))


@pytest.mark.parametrize(
    ("share", "steps", "half"),
    [(0.0, 10, 0), (0.7, 10, 7), (0.29, 100, 29), (0.9, 3, 2), (0.9, 1, 0), (0.04, 10, 0)],
)
def test_so_many_first_steps_are_of_half_the_size_and_never_the_last(plan_of, share, steps, half):
    words = (f"augment.half_size_share={share}", f"steps={steps}")
    assert plan_of(*words).recipe.half_size_steps == half


@pytest.mark.parametrize("micro_batch", [16, 4])
def test_those_steps_see_the_means_of_2_x_2_pixels_and_evaluations_the_whole(
    data, tmp_path, micro_batch
):
    """What the model is given, against the views of the same run without the setting."""
    seen = {}
    words = (
        *("steps=4", f"data.micro_batch={micro_batch}", "optim.precision=fp64"),
        "optim.peak_lr=0",
    )
    for name, share in (("whole", 0.0), ("half", 0.5)):
        views = seen[name] = []
        recipe = load_recipe(write_recipe(tmp_path), (*words, f"augment.half_size_share={share}"))
        plan = Pretraining.make(recipe, load_index(data))
        parts = plan.build()
        parts.model.register_forward_pre_hook(
            # what looks at the network beforehand gives it zeros
            lambda model, given, views=views: views.extend(x.clone() for x in given if x.any())
        )
        pretrain(plan, tmp_path / name, parts)
        forget_accelerator()
    counts = len(seen["whole"]) // 2
    assert len(seen["half"]) == len(seen["whole"])
    for number, (whole, half) in enumerate(zip(seen["whole"], seen["half"], strict=True)):
        expected = whole
        if number < counts:
            corners = [whole[:, :, y::2, x::2] for y in (0, 1) for x in (0, 1)]
            expected = torch.stack(corners).mean(0)
        torch.testing.assert_close(half, expected, rtol=1e-12, atol=1e-12)
    assert load_run(tmp_path / "half").view.crop_px == 16


def test_running_statistics_of_micro_batches_are_those_of_all_their_values_at_either_size(
    data, tmp_path
):
    """After a step at half the size and one at the whole size; momentum is 0.1."""
    stem = []  # what the first norm is given, in the forward passes that have a gradient

    def watch(norm, given):
        if torch.is_grad_enabled() and given[0].any():
            stem.append(given[0].detach())

    words = ("steps=2", "data.micro_batch=8", "augment.half_size_share=0.5", "optim.precision=fp64")
    plan = Pretraining.make(load_recipe(write_recipe(tmp_path), words), load_index(data))
    parts = plan.build()
    parts.backbone.network[1].register_forward_pre_hook(watch)
    pretrain(plan, tmp_path / "run", parts)
    forget_accelerator()
    assert [x.shape[-1] for x in stem] == [4, 4, 8, 8]
    expected = torch.ones(8, dtype=torch.float64)
    for step in (stem[:2], stem[2:]):
        of_channel = torch.cat(step).transpose(0, 1).flatten(1)  # (8, values)
        expected = 0.9 * expected + 0.1 * of_channel.var(1)
    weights = final_weights(tmp_path / "run")
    torch.testing.assert_close(weights["backbone.network.1.running_var"], expected)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("augment.half_size_share=1",), "augment.half_size_share"),
        (("augment.half_size_share=-0.1",), "augment.half_size_share"),
        (("augment.half_size_share=0.5", "augment.crop_px=15"), "half_size_share = 0.5"),
        (("augment.half_size_share=0.5", "augment.crop_px=2"), "half_size_share = 0.5"),
    ],
)
def test_a_share_or_a_side_that_cannot_be_halved_is_refused(tmp_path, words, key):
    with pytest.raises(RecipeError, match=key):
        load_recipe(write_recipe(tmp_path), words)


VIT = (
    "backbone={kind='timm/vit_tiny_patch16_224', depth=1, embed_dim=24, num_heads=2}",
    *("augment.crop_px=32", "data.canvas_px=32"),
)


def test_a_network_of_one_size_is_refused_before_the_first_step(plan_of, data, tmp_path):
    half = "augment.half_size_share=0.5"
    assert check_pretraining(plan_of(*VIT)).rows
    with pytest.raises(RecipeError, match=r"augment\.half_size_share .* 16 px .*leave it out"):
        check_pretraining(plan_of(*VIT, half))
    with pytest.raises(RecipeError, match=r"augment\.half_size_share"):
        sslpipe.api.train(plan_of(*VIT, half).recipe, load_index(data), tmp_path / "run")
    forget_accelerator()
    assert check_pretraining(plan_of(half)).rows  # a convolutional one takes both


def test_a_fine_tuning_has_it_too_and_refuses_the_same(tmp_path):
    data = load_index(write_dataset(tmp_path / "data", (40, 60, 72), classes=8))
    path = finetunes.write_recipe(tmp_path)
    sides = []

    def watch(stem, given):
        if torch.is_grad_enabled() and given[0].any():
            sides.append(given[0].shape[-1])

    plan = Finetuning.make(load_recipe(path, ("augment.half_size_share=0.5", "steps=4")), data)
    parts = plan.build()
    parts.backbone.network[0].register_forward_pre_hook(watch)
    finetune(plan, tmp_path / "run", parts)
    forget_accelerator()
    assert sides == [8, 8, 16, 16]
    plan = Finetuning.make(load_recipe(path, (*VIT, "augment.half_size_share=0.5")), data)
    parts = plan.build()
    with pytest.raises(RecipeError, match=r"augment\.half_size_share"):
        plan.remarks(parts)


def test_the_check_and_the_picture_name_the_steps(plan_of):
    plan = plan_of("augment.half_size_share=0.5")
    assert " in all (the first 6 steps " in dict(check_pretraining(plan).rows)["time"]
    ids = np.arange(2)
    plain = plan_of("augment.half_size_share=0").draw_views(ids)
    assert plan.draw_views(ids).height > plain.height  # a line below


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_compiled_network_has_a_graph_for_each_size_of_views_alone(
    data, tmp_path, monkeypatch, share
):
    """Else a resumed run, which sees the whole size alone, would compute by another graph."""
    graphs = []

    def count(graph, inputs):
        assert not any(isinstance(each, torch.SymInt) for each in inputs)  # a size of any value
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda part, *, mode=None, **options: (
            compiled(part, backend=count, **options) if isinstance(part, SimCLR) else part
        ),
    )
    counts = []
    for steps in (4, 8):
        torch.compiler.reset()
        graphs.clear()
        words = (f"augment.half_size_share={share}", f"steps={steps}", "run.compile=default")
        recipe = load_recipe(write_recipe(tmp_path), words)
        sslpipe.api.train(recipe, load_index(data), tmp_path / str(steps))
        forget_accelerator()
        counts.append(len(graphs))
    torch.compiler.reset()
    assert counts == [counts[0]] * 2
    assert counts[0] == (2 if share else 1)
