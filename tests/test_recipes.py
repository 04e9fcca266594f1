"""Every shipped recipe loads, builds, says where it comes from, and is what its source says."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.export.model import FrozenBackbone
from sslpipe.metric_learning.finetune_parts import build_task
from sslpipe.metric_learning.finetune_plan import with_backbone
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.stems import stem_warning
from sslpipe.optim.parameter_groups import rate_warning
from sslpipe.optim.step import lr_at
from sslpipe.parts import build_loss, build_model, freeze_and_group
from sslpipe.recipe.reading import load_recipe
from tests.helpers.runs import ROOT, parsed

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
FIELDS = (
    "shards", "train", "launch", "source", "differs", "hardware", "time", "measured", "published",
)  # fmt: skip
STARTS = {  # of recipes that take the backbone of the weights: one that fits
    "adapt_resnet50": "torchvision/resnet50",
    "adapt_vit": "timm/vit_small_patch16_224",
    "adapt_mobile": "timm/tf_efficientnet_lite0",
}

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def header(path: Path) -> tuple[str, dict[str, str]]:
    """The title and the fields of the comment at the head: `# name: text`, and indented lines."""
    title, _, *lines = path.read_text().partition("\n\n")[0].splitlines()
    fields: dict[str, str] = {}
    for line in lines:
        if match := re.fullmatch(r"# (\w+): +(\S.*)", line):
            fields[match[1]] = match[2]
        else:
            match = re.fullmatch(r"# {12}(\S.*)", line)
            assert match, f"{path.name}: {line!r}"
            name = next(reversed(fields))
            fields[name] += " " + match[1]
    return title.removeprefix("# "), fields


def options(words: list[str]) -> dict[str, str]:
    return {a: b for a, b in zip(words, [*words[1:], ""], strict=True) if a.startswith("--")}


@every_recipe
def test_the_header_is_complete(path):
    title, fields = header(path)
    check_header(path, title, fields, FIELDS)


def check_header(path: Path, title: str, fields: dict[str, str], names: tuple[str, ...]) -> None:
    assert title.endswith(".")
    assert tuple(name for name in fields if name != "watch") == names
    measured = fields["measured"]
    assert measured == "not yet measured" or re.search(r"commit [0-9a-f]{7}.*\d", measured)
    assert fields["published"].startswith(("none", "elsewhere, "))  # not mistaken for our own
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


@every_recipe
def test_the_headers_commands_are_the_programs(path):
    _, fields = header(path)
    shards, train, launch = (shlex.split(fields[name]) for name in FIELDS[:3])
    data, run_dir = f"out/{path.stem}/data/dataset.json", f"runs/{path.stem}"

    assert shards[:3] in (["sslpipe", name, "build"] for name in ("shards", "sensors"))
    assert str(parsed(*shards[1:])["out"]) == f"out/{path.stem}/data"

    assert train[0] == "sslpipe"
    given = parsed(*train[1:])
    expected = {"recipe": f"recipes/{path.name}", "data": data, "run_dir": run_dir}
    assert {key: str(given[key]) for key in expected} == expected

    begin = launch.index("-m")
    assert launch[:2] == ["accelerate", "launch"]
    assert launch[begin : begin + 2] == ["-m", "sslpipe"]
    assert launch[begin + 2 :] == train[1:]  # the same program
    assert (ROOT / options(launch)["--config_file"]).is_file()


@every_recipe
def test_the_values_hold_no_place_on_a_machine(path):
    def strings(tree):
        for value in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(value, dict | list):
                yield from strings(value)
            elif isinstance(value, str):
                yield value

    recipe = tomllib.loads(path.read_text())
    assert not [s for s in strings(recipe) if re.search(r"^[/~.]|://|\\", s)]
    assert recipe["name"] == path.stem


@every_recipe
def test_1_2_4_and_8_processes_share_the_streams(path):
    data = load_recipe(path).data
    assert data.batch_size % data.num_streams == data.num_streams % 8 == 0


@every_recipe
def test_every_part_builds_and_a_view_passes_through(path):
    recipe = load_recipe(path).with_outputs(128)
    if path.stem in STARTS:
        assert recipe.backbone is None
        component = backbone_settings(kind=STARTS[path.stem])
        recipe = recipe.model_copy(update={"backbone": component, "init": "0" * 64})
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    augment = recipe.augment.build(mean=mean, std=std)
    assert stem_warning(recipe.backbone, augment.crop_px) is None
    model = build_model(recipe, augment.crop_px)
    z = model(torch.rand(4, 3, augment.crop_px, augment.crop_px))
    assert z.shape == (4, recipe.projector.out_dim)
    loss = build_loss(recipe)(z[:2], z[2:], ids=torch.tensor([0, 127]))
    assert loss.isfinite()
    assert freeze_and_group(model, recipe)
    assert recipe.data.canvas_px >= augment.crop_px


TRAIN_IMAGES = {  # of the data sets' own papers; ImageNet-100's differ a little by list
    "demo": 8_000 - 500,
    "fashion_mnist": 60_000 - 500,
    "fashion_mnist_asshipped": 60_000 - 500,
    "cifar10": 50_000,
    "cifar10_moco": 50_000,
    "cifar100": 50_000,
    "stl10": 105_000,
    "tiny_imagenet": 100_000,
    "imagenette": 9_469,
    "imagenet100": 126_689,
    "imagenet1k": 1_281_167,
}


@every_recipe
def test_no_rate_is_called_absurd_at_any_size_of_batch(path):
    optim = load_recipe(path).optim
    rates = {optim.peak_lr, *map(float, re.findall(r"optim\.peak_lr=(\S+)", path.read_text()))}
    for peak_lr in rates:
        named = type(optim).model_validate({**optim.model_dump(), "peak_lr": peak_lr})
        assert not any(rate_warning(named, 2**power) for power in range(14))


@pytest.mark.parametrize("name", TRAIN_IMAGES)
def test_the_steps_in_the_comments_are_the_arithmetic(name):
    path = ROOT / "recipes" / f"{name}.toml"
    recipe = load_recipe(path)
    an_epoch = TRAIN_IMAGES[name] // recipe.data.batch_size
    line = next(x for x in path.read_text().splitlines() if re.match("(epochs|steps) = ", x))
    assert re.search(rf"\b{an_epoch:,} steps|of {an_epoch:,} steps", line), line
    steps = recipe.resolved(an_epoch).total_steps
    assert recipe.optim.warmup_steps < steps / 2
    assert max(lr_at(s, recipe.optim, steps) for s in range(recipe.optim.warmup_steps + 1)) == (
        pytest.approx(recipe.optim.peak_lr)
    )


def what_it_says(path: Path) -> dict[str, object]:
    """A recipe's settings by dotted key, its model's stem and projector, its views' distribution.

    `views.mean` is what is taken off where the data's mean is 0.5.
    """
    recipe = load_recipe(path)
    tree = recipe.model_dump()
    half = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    augment = recipe.augment.build(**half)
    first, second = augment.specs
    assert first == second
    tree["views"] = {**vars(first), "mean": augment.mean[0].item()}
    model = build_model(recipe, augment.crop_px)
    projector = [tuple(p.shape) for p in model.projector.parameters()]
    tree["model"] = {"projector": projector, "stem": getattr(model.backbone, "stem", None)}
    flat = {f"{a}.{b}": v for a, part in tree.items() if isinstance(part, dict)
            for b, v in part.items()}  # fmt: skip
    return tree | flat


# of CIFAR-10's best public recipe and of MoCo's own notebook
ON_CIFAR = {
    "optim.kind": "sgd", "optim.peak_lr": 0.06, "optim.weight_decay": 5e-4, "optim.momentum": 0.9,
    "optim.decay_one_dim": True, "data.batch_size": 512, "model.stem": "small",
    "views.brightness": 0.4, "views.contrast": 0.4, "views.saturation": 0.4, "views.hue": 0.1,
    "views.jitter_prob": 0.8, "views.blur_prob": 0.0,
}  # fmt: skip
PUBLISHED = {
    "cifar10": ON_CIFAR | {
        "epochs": 1000, "optim.schedule": "cosine", "optim.warmup_steps": 0,
        "optim.nesterov": False, "loss.temperature": 0.5, "views.crop_area": (0.2, 1.0),
        "model.projector": [(1024, 512), (1024,), (128, 1024), (128,)],  # no BatchNorm between
        "views.grayscale_prob": 0.1, "views.flip_prob": 0.5, "views.mean": 0,  # not normalised
    },
    "cifar10_moco": ON_CIFAR | {
        "epochs": 200, "loss.queue_rows": 4096, "loss.temperature": 0.1,
        "momentum.start": 0.99, "momentum.schedule": "constant", "views.crop_area": (0.08, 1.0),
        "model.projector": [(128, 512), (128,)], "views.grayscale_prob": 0.2,
    },
    "imagenet1k": {
        "data.batch_size": 256, "epochs": 100, "optim.kind": "lars", "optim.peak_lr": 1.2,
        "optim.weight_decay": 1e-6, "loss.temperature": 0.1, "projector.hidden_dim": 2048,
        "projector.out_dim": 128, "views.crop_area": (0.08, 1.0), "views.brightness": 0.8,
        "views.hue": 0.2, "views.grayscale_prob": 0.2, "views.blur_prob": 0.5, "views.crop_px": 224,
    },  # of lightly's benchmarks
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_as_its_source_has_it(name):
    actual = what_it_says(ROOT / "recipes" / f"{name}.toml")
    assert {key: actual[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_the_papers_imagenet_run_is_four_overrides_away():
    path = ROOT / "recipes" / "imagenet1k.toml"
    (line,) = re.findall(r"# The paper's own run: (.*)", path.read_text())
    recipe = load_recipe(path, line.split())
    assert recipe.data.batch_size == 4096
    assert recipe.optim.peak_lr == pytest.approx(0.3 * 4096 / 256)  # appendix B.1's rule
    assert recipe.optim.warmup_steps == 10 * (1_281_167 // 4096)
    assert recipe.epochs == 1000


METRIC_RECIPES = sorted((ROOT / "recipes" / "metric").glob("*.toml"))
METRIC_FIELDS = (
    "shards", "pretrain", "finetune", "scratch", "source", "differs", "hardware", "time",
    "measured", "published",
)  # fmt: skip

every_metric_recipe = pytest.mark.parametrize("path", METRIC_RECIPES, ids=lambda path: path.stem)


@pytest.mark.promise(15)
@pytest.mark.parametrize("path", [*RECIPES, *METRIC_RECIPES], ids=lambda path: path.stem)
def test_a_recipe_from_weights_or_with_labels_is_watched_or_says_why_not(path):
    fields = header(path)[1]
    recipe = load_recipe(path)
    labelled = isinstance(recipe, FinetuneRecipe)
    if not labelled and "--init" not in fields["train"]:
        return
    held_out = recipe.data.validation_classes if labelled else recipe.data.holdout
    watched = held_out != 0 and recipe.run.monitor_steps != 0 and recipe.run.keep != "last"
    assert watched != ("watch" in fields)


@every_metric_recipe
def test_the_header_of_a_fine_tuning_is_complete_and_its_commands_are_the_programs(path):
    title, fields = header(path)
    check_header(path, title, fields, METRIC_FIELDS)
    shards, pretrain, finetune, scratch = (shlex.split(fields[name]) for name in METRIC_FIELDS[:4])
    assert shards[:3] in (["sslpipe", name, "build"] for name in ("shards", "sensors"))
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


@every_metric_recipe
def test_a_fine_tuning_takes_a_run_of_any_backbone(path, index):
    component = backbone_settings("small_resnet", {"widths": [4, 8]})
    view = eval_view_for(32, mean=(0.5,) * 3, std=(0.25,) * 3)
    given = FrozenBackbone.of(
        build_backbone(component, crop_px=32), component, view, {"name": "mine"}
    )
    recipe = with_backbone(load_recipe(path), given, index)
    assert (recipe.backbone.kind, recipe.backbone.arguments["widths"]) == ("small_resnet", [4, 8])
    task = build_task(recipe, 32, given, num_classes=6)
    own = task.backbone.network.state_dict()
    for key, value in given.backbone.network.state_dict().items():
        assert torch.equal(own[key], value), key


@every_metric_recipe
def test_every_part_of_a_fine_tuning_builds_and_a_batch_passes_through(path, index):
    # some settings are for a start from weights
    scratch = parsed(*shlex.split(header(path)[1]["scratch"])[1:])
    recipe = with_backbone(load_recipe(path, scratch["overrides"]), None, index)
    augment = recipe.augment.build(mean=(0.5,) * 3, std=(0.25,) * 3)
    assert recipe.data.canvas_px >= augment.crop_px
    small = backbone_settings(
        "small_resnet", {"widths": [4], "embedding_dim": recipe.embedding.dim}
    )
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
