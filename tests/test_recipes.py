"""Every shipped recipe loads, builds, says where it comes from, and is what its source says."""

import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import typer

from sslpipe.augment.two_views import AUGMENTS
from sslpipe.build import build_loss, build_model, freeze_and_optimize
from sslpipe.models.backbones import stem_warning
from sslpipe.optim import lr_at, rate_warning
from sslpipe.recipe import load_recipe
from sslpipe.recipe.base import Component
from sslpipe.registry import build
from tests.helpers.runs import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
FIELDS = (
    "shards", "train", "launch", "source", "differs", "hardware", "time", "measured", "published",
)  # fmt: skip
EXPECTED = {
    "demo", "fashion_mnist", "fashion_mnist_asshipped", "cifar10", "cifar10_moco", "cifar100",
    "stl10",
    "tiny_imagenet", "imagenette", "imagenet100", "imagenet1k", "my_images", "my_images_small",
    "adapt_resnet50", "adapt_vit", "adapt_mobile",
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
    assert title.endswith(".")
    assert tuple(fields) == FIELDS
    assert fields["measured"] == "not yet measured" or re.search(
        r"commit [0-9a-f]{7}.*\d", fields["measured"]
    )
    if fields["published"] != "none" and not fields["published"].startswith("none"):
        assert fields["published"].startswith("elsewhere, ")  # never mistaken for our own
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


@every_recipe
def test_the_headers_commands_are_the_programs(path):
    from sslpipe.cli.app import app

    _, fields = header(path)
    shards, train, launch = (shlex.split(fields[name]) for name in FIELDS[:3])
    data, run_dir = f"out/{path.stem}/data/dataset.json", f"runs/{path.stem}"

    assert shards[:2] == ["sslpipe", "shards"]
    parsed = _parsed(app, shards[1:])
    assert str(parsed["out"]) == f"out/{path.stem}/data"

    assert train[0] == "sslpipe"
    parsed = _parsed(app, train[1:])
    expected = {"recipe": f"recipes/{path.name}", "data": data, "run_dir": run_dir}
    assert {key: str(parsed[key]) for key in expected} == expected

    begin = launch.index("-m")
    assert launch[:2] == ["accelerate", "launch"]
    assert launch[begin : begin + 2] == ["-m", "sslpipe"]
    assert launch[begin + 2 :] == train[1:]  # the same program
    assert (ROOT / options(launch)["--config_file"]).is_file()


def _parsed(app: typer.Typer, words: list[str]) -> dict[str, object]:
    """What the program's own parser makes of a command line; it raises on what it does not know."""
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup):
        _, command, words = command.resolve_command(
            command.make_context("x", list(words)), list(words)
        )
    return command.make_context("x", list(words)).params


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
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_1_2_4_and_8_processes_share_the_streams(path, world):
    data = load_recipe(path).data
    assert data.batch_size % data.num_streams == 0
    assert data.num_streams % world == 0


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
    assert freeze_and_optimize(model, recipe)
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


def distributions(path: Path) -> dict[str, object]:
    """The distribution of both views, and the mean that is taken off where the data's is 0.5."""
    augment = build(
        AUGMENTS, load_recipe(path).augment, section="augment", mean=(0.5,) * 3, std=(0.25,) * 3
    )
    first, second = augment.specs
    assert first == second
    return {**vars(first), "mean": augment.mean[0].item()}


def test_cifar10_is_the_best_public_recipe():
    path = ROOT / "recipes" / "cifar10.toml"
    recipe, views = load_recipe(path), distributions(path)
    assert (recipe.data.batch_size, recipe.epochs) == (512, 1000)
    optim = recipe.optim
    assert (optim.kind, optim.peak_lr, optim.weight_decay, optim.momentum) == (
        "sgd",
        0.06,
        5e-4,
        0.9,
    )
    assert optim.decay_one_dim
    assert (optim.schedule, optim.warmup_steps, optim.nesterov) == ("cosine", 0, False)
    assert recipe.loss.arguments["temperature"] == 0.5
    model = build_model(recipe, 32)
    widths = [tuple(layer.weight.shape) for layer in model.projector if hasattr(layer, "weight")]
    assert widths == [(1024, 512), (128, 1024)]  # no BatchNorm between
    assert model.backbone.stem == "small"
    assert views["crop_area"] == (0.2, 1.0)
    jitter = [views[key] for key in ("brightness", "contrast", "saturation", "hue", "jitter_prob")]
    assert jitter == [0.4, 0.4, 0.4, 0.1, 0.8]
    assert (views["grayscale_prob"], views["blur_prob"], views["flip_prob"]) == (0.1, 0.0, 0.5)
    assert views["mean"] == 0  # not normalised


def test_moco_on_cifar10_is_the_notebook_of_its_authors():
    path = ROOT / "recipes" / "cifar10_moco.toml"
    recipe, views = load_recipe(path), distributions(path)
    assert (recipe.data.batch_size, recipe.epochs, recipe.batchnorm) == (512, 200, "global")
    optim = recipe.optim
    actual = (optim.kind, optim.peak_lr, optim.weight_decay, optim.momentum, optim.decay_one_dim)
    assert actual == ("sgd", 0.06, 5e-4, 0.9, True)
    assert recipe.loss.arguments == {"queue_rows": 4096, "temperature": 0.1}
    assert (recipe.momentum.start, recipe.momentum.schedule) == (0.99, "constant")
    model = build_model(recipe, 32)
    assert [tuple(p.shape) for p in model.projector.parameters()] == [(128, 512), (128,)]
    assert model.backbone.stem == "small"
    assert (views["crop_area"], views["grayscale_prob"]) == ((0.08, 1.0), 0.2)
    jitter = [views[key] for key in ("brightness", "contrast", "saturation", "hue", "jitter_prob")]
    assert jitter == [0.4, 0.4, 0.4, 0.1, 0.8]
    assert views["blur_prob"] == 0.0


@pytest.mark.parametrize(
    ("name", "batch", "epochs", "peak_lr", "hidden", "out", "stem"),
    [
        ("cifar100", 512, 1000, 3e-3, 1024, 64, "small"),
        ("stl10", 512, 2000, 2e-3, 1024, 128, "small_pool"),
        ("tiny_imagenet", 512, 1000, 2e-3, 1024, 128, "small_pool"),
    ],
)
def test_w_mse_recipes_are_as_in_its_code(name, batch, epochs, peak_lr, hidden, out, stem):
    path = ROOT / "recipes" / f"{name}.toml"
    recipe, views = load_recipe(path), distributions(path)
    assert (recipe.data.batch_size, recipe.epochs) == (batch, epochs)
    assert (recipe.optim.kind, recipe.optim.peak_lr) == ("adamw", peak_lr)
    assert (recipe.optim.weight_decay, recipe.optim.warmup_steps) == (1e-6, 500)
    assert (recipe.projector.hidden_dim, recipe.projector.out_dim) == (hidden, out)
    assert recipe.loss.arguments["temperature"] == 0.5
    assert build_model(recipe, views["crop_px"]).backbone.stem == stem
    assert (views["crop_area"], views["grayscale_prob"]) == ((0.2, 1.0), 0.1)
    assert views["mean"] == 0.5
    text = path.read_text()
    assert "there Adam, here AdamW" in text
    assert "here cosine" in text


@pytest.mark.parametrize(
    ("name", "kind", "peak_lr", "decay", "temperature", "hidden", "epochs", "crop_px"),
    [
        ("imagenette", "sgd", 0.06, 5e-4, 0.5, 512, 800, 128),
        ("imagenet100", "lars", 0.3, 1e-6, 0.1, 512, 200, 224),
        ("imagenet1k", "lars", 0.075 * math.sqrt(256), 1e-6, 0.1, 2048, 100, 224),
    ],
)
def test_lightlys_recipes_are_as_in_its_benchmarks(
    name, kind, peak_lr, decay, temperature, hidden, epochs, crop_px
):
    path = ROOT / "recipes" / f"{name}.toml"
    recipe, views = load_recipe(path), distributions(path)
    assert (recipe.data.batch_size, recipe.epochs) == (256, epochs)
    assert (recipe.optim.kind, recipe.optim.weight_decay) == (kind, decay)
    assert recipe.optim.peak_lr == pytest.approx(peak_lr)
    assert (recipe.projector.hidden_dim, recipe.projector.out_dim) == (hidden, 128)
    assert recipe.loss.arguments["temperature"] == temperature
    assert (views["crop_px"], views["crop_area"], views["brightness"]) == (
        crop_px,
        (0.08, 1.0),
        0.8,
    )
    assert (views["hue"], views["grayscale_prob"], views["blur_prob"]) == (0.2, 0.2, 0.5)


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
