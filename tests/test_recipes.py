"""Every shipped recipe loads, builds, says where it comes from, and is what its source says."""

import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from sslpipe.augment.two_views import AUGMENTS
from sslpipe.build import build_loss, build_model, freeze_and_group
from sslpipe.models.backbones import stem_warning
from sslpipe.optim import lr_at, rate_warning
from sslpipe.recipe import load_recipe
from sslpipe.recipe.base import Component
from sslpipe.registry import build
from tests.helpers.runs import ROOT, parsed

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
FIELDS = (
    "shards", "train", "launch", "source", "differs", "hardware", "time", "measured", "published",
)  # fmt: skip
EXPECTED = {
    "demo", "fashion_mnist", "fashion_mnist_asshipped", "cifar10", "cifar10_moco", "cifar100",
    "stl10",
    "tiny_imagenet", "imagenette", "imagenet100", "imagenet1k", "my_images", "my_images_small",
    "adapt_resnet50", "adapt_vit", "adapt_mobile", "sensors",
}  # fmt: skip
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


def test_the_recipes_are_those_that_are_promised():
    assert {path.stem for path in RECIPES} == EXPECTED


@every_recipe
def test_the_header_is_complete(path):
    title, fields = header(path)
    check_header(path, title, fields, FIELDS)


def check_header(path: Path, title: str, fields: dict[str, str], names: tuple[str, ...]) -> None:
    assert title.endswith(".")
    assert tuple(fields) == names
    measured = fields["measured"]
    assert measured == "not yet measured" or re.search(r"commit [0-9a-f]{7}.*\d", measured)
    assert fields["published"].startswith(("none", "elsewhere, "))  # not mistaken for our own
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


@every_recipe
def test_the_headers_commands_are_the_programs(path):
    _, fields = header(path)
    shards, train, launch = (shlex.split(fields[name]) for name in FIELDS[:3])
    data, run_dir = f"out/{path.stem}/data/dataset.json", f"runs/{path.stem}"

    assert shards[:2] == ["sslpipe", "shards"]
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
    recipe = load_recipe(path)
    if path.stem in STARTS:
        assert recipe.backbone is None
        component = Component(kind=STARTS[path.stem])
        recipe = recipe.model_copy(update={"backbone": component, "init": "0" * 64})
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    augment = build(AUGMENTS, recipe.augment, section="augment", mean=mean, std=std)
    assert stem_warning(recipe.backbone, augment.crop_px) is None
    model = build_model(recipe, augment.crop_px)
    z = model(torch.rand(2, 3, augment.crop_px, augment.crop_px))
    assert z.shape == (2, recipe.projector.out_dim)
    loss = build_loss(recipe)(z[:1], z[1:])
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
    augment = build(AUGMENTS, recipe.augment, section="augment", **half)
    first, second = augment.specs
    assert first == second
    tree["views"] = {**vars(first), "mean": augment.mean[0].item()}
    model = build_model(recipe, augment.crop_px)
    projector = [tuple(p.shape) for p in model.projector.parameters()]
    tree["model"] = {"projector": projector, "stem": getattr(model.backbone, "stem", None)}
    flat = {f"{a}.{b}": v for a, part in tree.items() if isinstance(part, dict)
            for b, v in part.items()}  # fmt: skip
    return tree | flat


SGD = {"optim.kind": "sgd", "optim.peak_lr": 0.06, "optim.weight_decay": 5e-4}
# of CIFAR-10's best public recipe and of MoCo's own notebook
JITTER = {"views.brightness": 0.4, "views.contrast": 0.4, "views.saturation": 0.4,
          "views.hue": 0.1, "views.jitter_prob": 0.8}  # fmt: skip
ON_CIFAR = SGD | JITTER | {
    "data.batch_size": 512, "optim.momentum": 0.9, "optim.decay_one_dim": True,
    "views.blur_prob": 0.0, "model.stem": "small",
}  # fmt: skip
W_MSE = {  # of its code
    "data.batch_size": 512, "optim.kind": "adamw", "optim.weight_decay": 1e-6,
    "optim.warmup_steps": 500, "projector.hidden_dim": 1024, "loss.temperature": 0.5,
    "views.crop_area": (0.2, 1.0), "views.grayscale_prob": 0.1, "views.mean": 0.5,
}  # fmt: skip
LIGHTLY = {  # of its benchmarks
    "data.batch_size": 256, "projector.out_dim": 128, "views.crop_area": (0.08, 1.0),
    "views.brightness": 0.8, "views.hue": 0.2, "views.grayscale_prob": 0.2, "views.blur_prob": 0.5,
}  # fmt: skip
LARS = LIGHTLY | {"optim.kind": "lars", "optim.weight_decay": 1e-6, "loss.temperature": 0.1,
                  "views.crop_px": 224}  # fmt: skip
PUBLISHED = {
    "cifar10": ON_CIFAR | {
        "epochs": 1000, "optim.schedule": "cosine", "optim.warmup_steps": 0,
        "optim.nesterov": False, "loss.temperature": 0.5, "views.crop_area": (0.2, 1.0),
        "model.projector": [(1024, 512), (1024,), (128, 1024), (128,)],  # no BatchNorm between
        "views.grayscale_prob": 0.1, "views.flip_prob": 0.5, "views.mean": 0,  # not normalised
    },
    "cifar10_moco": ON_CIFAR | {
        "epochs": 200, "batchnorm": "global", "loss.queue_rows": 4096, "loss.temperature": 0.1,
        "momentum.start": 0.99, "momentum.schedule": "constant", "views.crop_area": (0.08, 1.0),
        "model.projector": [(128, 512), (128,)], "views.grayscale_prob": 0.2,
    },
    "cifar100": W_MSE | {"epochs": 1000, "optim.peak_lr": 3e-3, "projector.out_dim": 64,
                         "model.stem": "small"},
    "stl10": W_MSE | {"epochs": 2000, "optim.peak_lr": 2e-3, "projector.out_dim": 128,
                      "model.stem": "small_pool"},
    "tiny_imagenet": W_MSE | {"epochs": 1000, "optim.peak_lr": 2e-3, "projector.out_dim": 128,
                              "model.stem": "small_pool"},
    "imagenette": LIGHTLY | SGD | {"epochs": 800, "loss.temperature": 0.5, "views.crop_px": 128,
                                   "projector.hidden_dim": 512},
    "imagenet100": LARS | {"epochs": 200, "optim.peak_lr": 0.3, "projector.hidden_dim": 512},
    "imagenet1k": LARS | {"epochs": 100, "optim.peak_lr": 1.2,
                          "projector.hidden_dim": 2048},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_as_its_source_has_it(name):
    path = ROOT / "recipes" / f"{name}.toml"
    actual = what_it_says(path)
    assert {key: actual[key] for key in PUBLISHED[name]} == PUBLISHED[name]
    if PUBLISHED[name].items() >= W_MSE.items():
        assert "there Adam, here AdamW" in path.read_text()


def test_the_papers_imagenet_run_is_four_overrides_away():
    """The line in imagenet1k's header is valid and is appendix B.1's rule at 4,096."""
    path = ROOT / "recipes" / "imagenet1k.toml"
    (line,) = re.findall(r"# The paper's own run: (.*)", path.read_text())
    recipe = load_recipe(path, line.split())
    assert recipe.data.batch_size == 4096
    assert recipe.optim.peak_lr == pytest.approx(0.3 * 4096 / 256) == 0.075 * math.sqrt(4096)
    assert recipe.optim.warmup_steps == 10 * (1_281_167 // 4096)
    assert recipe.epochs == 1000


@pytest.mark.parametrize("name", ["my_images", "my_images_small"])
def test_your_own_recipe_explains_every_line(name):
    text = (ROOT / "recipes" / f"{name}.toml").read_text().partition("\n\n")[2]
    settings = [x for x in text.splitlines() if " = " in x]
    assert len(settings) > 20
    assert not [x for x in settings if "#" not in x]
