"""Every shipped fine-tuning recipe loads, builds, and says where it comes from."""

import shlex

import pytest
import torch

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.two_views import AUGMENTS
from sslpipe.export.model import freeze
from sslpipe.metric_learning.build import build_task, with_backbone
from sslpipe.metric_learning.heads import HEADS
from sslpipe.models.backbones import build_backbone
from sslpipe.recipe import load_recipe
from sslpipe.recipe.base import Component
from sslpipe.registry import build
from tests.helpers.runs import ROOT, parsed
from tests.test_recipes import check_header, header, options

RECIPES = sorted((ROOT / "recipes" / "metric").glob("*.toml"))
FIELDS = (
    "shards", "pretrain", "finetune", "scratch", "source", "differs", "hardware", "time",
    "measured", "published",
)  # fmt: skip
STYLES = {  # recipe -> the loss that its name says
    "face_arcface": "arcface",
    "reid_batch_hard": "batch_hard",
    "cub_multi_similarity": "multi_similarity",
    "cub_proxy_anchor": "proxy_anchor",
    "sup_con": "sup_con",
    "fashion_mnist_unseen": "proxy_anchor",
    "my_images_mobile": "proxy_anchor",
}

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def test_there_is_a_recipe_for_each_style():
    actual = {path.stem: load_recipe(path).loss.kind for path in RECIPES}
    assert actual == STYLES


@every_recipe
def test_the_header_is_complete_and_its_commands_are_the_programs(path):
    title, fields = header(path)
    check_header(path, title, fields, FIELDS)
    shards, pretrain, finetune, scratch = (shlex.split(fields[name]) for name in FIELDS[:4])
    assert shards[:2] == ["sslpipe", "shards"]
    assert pretrain[:2] == ["sslpipe", "train"]
    assert finetune[:2] == scratch[:2] == ["sslpipe", "train"]
    built, started = parsed(*shards[1:]), parsed(*pretrain[1:])
    assert f"{built['out']}/dataset.json" == started["data"]
    assert (ROOT / str(started["recipe"])).is_file()
    for words in (finetune, scratch):
        given = parsed(*words[1:])
        assert str(given["recipe"]) == f"recipes/metric/{path.name}"
        assert given["data"] == started["data"]
    assert options(finetune)["--init"] == options(pretrain)["--run-dir"]
    assert "--init" not in options(scratch)
    assert options(finetune)["--run-dir"] == f"runs/{path.stem}" != options(scratch)["--run-dir"]


@every_recipe
def test_it_takes_a_run_of_any_backbone(path):
    component = Component(kind="small_resnet", widths=[4, 8])
    view = eval_view_for(32, mean=(0.5,) * 3, std=(0.25,) * 3)
    given = freeze(build_backbone(component, crop_px=32), component, view, {"name": "mine"})
    recipe = with_backbone(load_recipe(path), given)
    assert (recipe.backbone.kind, recipe.backbone.arguments["widths"]) == ("small_resnet", [4, 8])
    task = build_task(recipe, 32, given, num_classes=6)
    own = task.backbone.network.state_dict()
    for key, value in given.backbone.network.state_dict().items():
        assert torch.equal(own[key], value), key


@every_recipe
def test_every_part_builds_and_a_batch_passes_through(path):
    # some settings are for a start from weights
    scratch = parsed(*shlex.split(header(path)[1]["scratch"])[1:])
    recipe = with_backbone(load_recipe(path, scratch["overrides"]), None)
    augment = build(AUGMENTS, recipe.augment, section="augment", mean=(0.5,) * 3, std=(0.25,) * 3)
    assert recipe.data.canvas_px >= augment.crop_px
    small = Component(kind="small_resnet", widths=[4], embedding_dim=recipe.embedding.dim)
    quick = recipe.model_copy(update={"backbone": small})  # the network itself: test_recipes.py
    task = build_task(quick, augment.crop_px, None, num_classes=6)
    labels = torch.arange(6).repeat_interleave(2)
    loss, embeddings = task(torch.rand(12, 3, 32, 32), labels, torch.arange(12))
    assert embeddings.shape == (12, recipe.embedding.dim or 4)
    assert loss.isfinite()
    loss.backward()
    if recipe.tune.loss_lr != 1:
        assert recipe.loss.kind in HEADS  # there are weights to which it applies
    assert recipe.sampler.buffer >= 2 * recipe.sampler.batch_size
