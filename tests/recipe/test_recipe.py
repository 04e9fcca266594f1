import pickle
import shlex
from pathlib import Path

import pytest

from sslpipe.augment.two_views import AUGMENTS
from sslpipe.errors import RecipeError
from sslpipe.losses import LOSSES
from sslpipe.models.backbones import BACKBONES
from sslpipe.optim.optimizers import OPTIMIZERS
from sslpipe.recipe import reading
from sslpipe.recipe.identity import differences, identity
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import (
    RecipeKind,
    labelled_recipes,
    load_recipe,
    parse_recipe,
    read_tree,
)
from tests.helpers import finetunes
from tests.helpers.runs import ROOT

TEXT = """
name = "tiny"
epochs = 3
[data]
batch_size = 64
num_streams = 8
[augment]
kind = "fused"
crop_px = 32
[backbone]
kind = "small_resnet"
[loss]
kind = "nt_xent"
temperature = 0.2
[optim]
kind = "sgd"
momentum = 0.8
peak_lr = 1e-1
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TEXT)
    return file


def test_a_key_missing_in_the_file_has_its_default(path):
    recipe = load_recipe(path)
    assert (recipe.data.batch_size, recipe.data.shuffle_window) == (64, 256)
    assert recipe.optim.peak_lr == 0.1
    assert recipe.loss.temperature == 0.2
    assert recipe.projector.out_dim == 128


@pytest.mark.promise(8)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_sise=64", r"unknown key data\.batch_sise; did you mean 'batch_size'\?.*split"),
        ("optim.lr=1", r"unknown key optim\.lr; did you mean 'optim\.peak_lr'\?; known here: kind"),
        ("batch_size=64", r"unknown key batch_size; did you mean 'data\.batch_size'\?; known here"),
        ("optin.peak_lr=1", r"unknown key optin; did you mean 'optim'\?"),
        ("data.batch_size=many", r"data\.batch_size = 'many': .*integer"),
        ("optim.kind=sdg", r"optim\.kind = 'sdg' is unknown; did you mean 'sgd'"),
        ("backbone.kind=resnet18", r"did you mean 'torchvision/resnet18'\?.*known: .*/resnet18"),
        ("backbone.kind=resnet50", r"follows its family, as in 'torchvision/resnet18'"),
        ("backbone.kind=ResNet", r"follows its family, as in 'torchvision/resnet18'"),
        ("backbone.kind=vit_base_patch16_224", r"family, as in 'timm/vit_small_patch16_224'"),
        ("backbone.kind=small_resnt", r"did you mean 'small_resnet'\?"),
        ("optim.kind=adamw", r"unknown key optim\.momentum; known here: .*betas"),
        ("optim.nestrov=true", r"unknown key optim\.nestrov; did you mean 'nesterov'"),
        ("optim.betas=[0.9, 0.99]", r"unknown key optim\.betas;"),
        ("data.num_streams=7", r"not a multiple of .*num_streams = 7; use num_streams = 8 or 4"),
        ("data.micro_batch=0", r"data\.micro_batch = 0: input should be greater than 0"),
        ("run.compile=true", r"run\.compile = .*'off', 'default' or 'reduce-overhead'"),
        ("run.keep_checkpoints=1", r"run\.keep_checkpoints = 1: .*greater than or equal to 2"),
        ("pairs.within=[3]", r": pairs\.within = \[3\] is neither float \(>= 0\) nor str$"),
        ("run.trackers=[wandb]", r"= '\[wandb\]': input should be a list; a shell takes quotes"),
        ("peak_lr", r"override 'peak_lr' is not section\.key=value"),
        ("name.first=3", r"override 'name\.first=3': name is a value, not a section"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_the_remedy(path, override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(path, [override])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ('optim={kind="adamw",betaz=[0.9,0.99]}', "unknown key optim.betaz"),
        ('optim={kind="adamw"}', "optim.peak_lr is missing"),
        ('backbone={kind="small_resnet",widths=3}', "backbone.widths = 3"),
    ],
)
def test_a_mistake_in_a_section_that_is_replaced_is_not_blamed_on_the_file(path, override, key):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert str(caught.value).startswith("overrides: ")
    assert key in str(caught.value)


def test_the_name_of_a_model_is_not_taken_for_that_of_the_run(path):
    with pytest.raises(RecipeError, match="section 'model'; take it out"):
        load_recipe(path, ["model.name=resnet50"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.epochs=2", "section 'train'; did you mean 'epochs'?"),
        ("hidden.dim=3", "section 'hidden'; did you mean 'projector.out_dim'?"),
        ("epoch=2", "unknown key epoch; did you mean 'epochs'?"),
        ("optim.peak_lr=-1", "optim.peak_lr = -1"),
        ("data.batch_size=[3]", "data.batch_size = [3]"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(path, override, key):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert str(caught.value).startswith("overrides: ")
    assert key in str(caught.value)

    # the same in the file
    section, _, setting = override.rpartition(".")
    setting = setting.replace("=", " = ")
    if section:
        lines = [line for line in TEXT.splitlines() if line.split(" = ")[0] != setting.split()[0]]
        text = "\n".join(lines)
        heading = f"[{section}]"
        text = text.replace(heading, f"{heading}\n{setting}")
        text += "" if heading in text else f"\n{heading}\n{setting}\n"
    else:
        text = f"{setting}\n{TEXT}"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert key in str(caught.value)


def test_a_section_is_replaced_as_a_whole_as_the_message_about_another_kind_says(path):
    override = 'optim={kind="adamw"}'
    with pytest.raises(RecipeError, match=rf"unknown key optim\.momentum.*'{override}'$"):
        load_recipe(path, {"optim.kind": "adamw"})
    assert load_recipe(path, [override, "optim.peak_lr=0.1"]).optim.kind == "adamw"
    with pytest.raises(RecipeError) as caught:  # not the file's keys
        load_recipe(path, ["optim.kind=sgd", "optim.betas=[0.9, 0.99]"])
    assert "optim={" not in str(caught.value)


def test_a_graph_is_not_replayed_for_micro_batches_which_would_overwrite_each_other(path):
    overrides = ["data.batch_size=64", "data.num_streams=4", "data.micro_batch=16"]
    assert load_recipe(path, [*overrides, "run.compile=default"]).run.compile == "default"
    with pytest.raises(RecipeError, match=r"run\.compile = .*data\.micro_batch = 16.*'default'$"):
        load_recipe(path, [*overrides, "run.compile=reduce-overhead"])


@pytest.mark.parametrize("value", ["-1", "1.5", "[3]", "x"])
def test_what_no_alternative_of_a_setting_takes_is_one_mistake(tmp_path, value):
    kinds = r'neither "auto" nor int \(>= 0, <= 2147483647\) nor list of str$'
    with pytest.raises(RecipeError, match=rf"validation_classes = .* is {kinds}"):
        load_recipe(finetunes.write_recipe(tmp_path), [f"data.validation_classes={value}"])


def test_a_micro_batch_takes_an_equal_slice_of_every_stream_or_the_valid_ones_are_named(path):
    streams = "data.num_streams=16"  # 64 images: 4 from each
    for micro_batch in (16, 32, 64):
        recipe = load_recipe(path, [streams, f"data.micro_batch={micro_batch}"])
        assert recipe.data.micro_batches == 64 // micro_batch
    for micro_batch in (8, 24, 48, 128):
        with pytest.raises(RecipeError, match=r"use micro_batch = 16 or 32 or 64$"):
            load_recipe(path, [streams, f"data.micro_batch={micro_batch}"])
    assert load_recipe(path).data.micro_batches == 1


def test_what_is_missing_is_named_with_what_it_takes_and_the_usual_value(path):
    def said(*dropped):
        path.write_text("\n".join(line for line in TEXT.splitlines() if line not in dropped))
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        return str(caught.value)

    assert said('kind = "fused"') == (
        f'{path}: augment.kind is missing: The views; `kind` is "fused", the usual one, or '
        '"kornia", the slow reference; the usual one: augment.kind="fused"; '
        "all of them: `sslpipe check --explain augment.kind`"
    )
    text = said("[optim]", 'kind = "sgd"', "momentum = 0.8", "peak_lr = 1e-1")
    assert "optim is missing: The optimizer and its schedule" in text
    assert 'optim.kind="sgd"' in text
    assert "optim.peak_lr is missing: The learning rate at the peak" in said("peak_lr = 1e-1")
    path.write_text(TEXT)
    with pytest.raises(RecipeError, match=r"'fused' is no section; write augment\.kind=\"fused\"$"):
        load_recipe(path, ["augment=fused"])


def test_the_usual_kind_of_each_section_is_one_of_its_table():
    for model, section, table in (
        (Recipe, "augment", AUGMENTS),
        (Recipe, "loss", LOSSES),
        (Recipe, "backbone", BACKBONES),
        (Recipe, "optim", OPTIMIZERS),
    ):
        (usual,) = model.model_fields[section].examples
        assert usual in table, section


def test_two_mistakes_are_reported_at_once(path):
    with pytest.raises(RecipeError, match=r"data\.batch_sise.*optim\.momentum = 2"):
        load_recipe(path, ["data.batch_sise=1", "optim.momentum=2"])


def test_an_override_has_the_type_it_would_have_in_the_file(path):
    words = "optim.peak_lr=1e-3 data.batch_size=128 optim.nesterov=true name=a=b"
    words += ' run.trackers=["wandb"] backbone.kind=torchvision/resnet18'
    recipe = load_recipe(path, [*words.split(), "augment.crop_area=[0.2, 1]"])
    assert (recipe.optim.peak_lr, recipe.data.batch_size, recipe.name) == (1e-3, 128, "a=b")
    assert recipe.optim.nesterov is True
    assert recipe.run.trackers == ("wandb",)
    assert recipe.backbone.kind == "torchvision/resnet18"
    assert recipe.augment.arguments["crop_area"] == [0.2, 1]


def test_a_section_of_another_kind_is_replaced_as_the_error_says():
    """A mapping, also of sections, changes settings: it cannot take the other kind's keys away."""
    recipe = ROOT / "recipes" / "my_images_small.toml"
    kind = "torchvision/resnet18"
    remedy = f'backbone={{kind="{kind}"}}'
    for given in ({"backbone.kind": kind}, {"backbone": {"kind": kind}}, [f"backbone.kind={kind}"]):
        with pytest.raises(RecipeError) as refused:
            load_recipe(recipe, given)
        assert remedy in str(refused.value)
        assert ("texts in a list" in str(refused.value)) == isinstance(given, dict)
    assert load_recipe(recipe, [remedy]).backbone.kind == kind


def test_steps_and_epochs_replace_each_other_and_the_later_override_wins(path):
    recipe = load_recipe(path, ["steps=5", "steps=10"])
    assert (recipe.steps, recipe.epochs) == (10, None)
    assert load_recipe(path, ["steps=10", "epochs=0.5"]).epochs == 0.5
    for text in ("steps = 5\n" + TEXT, TEXT.replace("epochs = 3", "")):
        path.write_text(text)
        with pytest.raises(RecipeError, match="exactly one of steps and epochs"):
            load_recipe(path)


def test_epochs_become_steps_by_the_steps_of_an_epoch(path):
    recipe = load_recipe(path)
    with pytest.raises(RecipeError, match="epochs is given"):
        _ = recipe.total_steps
    assert recipe.resolved(97).total_steps == 291
    assert load_recipe(path, ["epochs=0.001"]).resolved(97).total_steps == 1  # never none
    assert load_recipe(path, ["steps=10"]).resolved(97).total_steps == 10
    assert recipe.resolved(97).resolved(50).total_steps == 291


def test_the_digest_ignores_the_name_and_run_and_nothing_else(path):
    def of(*overrides):
        return identity(load_recipe(path, overrides), "a" * 64, 1)["digest"]

    same = {of(), of("name=other"), of("run.log_steps=7"), of("run.device=cpu")}
    same |= {of("run.deterministic=true")}
    changes = [
        "steps=9", "seed=1", "data.holdout=4",
        "data.micro_batch=32", "augment.crop_px=28",
        "backbone.widths=[8]", "backbone.pool=max",
        "projector.out_dim=8", "loss.temperature=0.1", "optim.peak_lr=0.2",
        "optim.precision=bf16",
    ]  # fmt: skip
    assert len(same) == 1
    assert len({*same, *(of(change) for change in changes)}) == 1 + len(changes)
    recipe = load_recipe(path)
    others = (identity(recipe, "b" * 64, 1), identity(recipe, "a" * 64, 2))
    assert len({of(), *(other["digest"] for other in others)}) == 3
    # nor does the order in the file count
    lines = "batch_size = 64\nnum_streams = 8", "num_streams = 8\nbatch_size = 64"
    path.write_text(TEXT.replace(*lines))
    assert of() in same


def test_what_differs_is_said_with_what_mends_it(path):
    old, new = load_recipe(path), load_recipe(path, ["optim.peak_lr=0.2", "loss.tile_rows=64"])
    stored, ours = identity(old, "a" * 64, 1), identity(new, "b" * 64, 1)
    stored["plugins"], ours["plugins"] = {"parts": "c" * 64}, {"parts": "d" * 64}
    said = differences(stored, ours)
    assert "loss.tile_rows = not set when it began, 64 now" in said
    assert "optim.peak_lr = 0.1 when it began, 0.2 now" in said
    assert f"built anew (sha256 {'a' * 12} when it began, {'b' * 12} now)" in said
    assert "the plug-in parts is another version: " in said
    assert said.endswith("began with: add optim.peak_lr=0.1, and leave out loss.tile_rows")
    # the overrides that it names give the recipe back
    back = load_recipe(path, ["optim.peak_lr=0.2", "optim.peak_lr=0.1"])
    assert differences(identity(old, "a", 1), identity(back, "a", 1)).startswith("nothing")
    # what is no setting is no override
    newer = differences(ours, {**ours, "order_version": 2})
    assert newer.startswith("order_version = 1")
    assert newer.endswith("what it began with")
    # a plug-in that only one of them had
    del ours["plugins"]
    assert "the plug-in parts, which it began with, is not there" in differences(stored, ours)
    assert "parts was not there when it began" in differences(ours, stored)


@pytest.mark.parametrize("value", ["simclr", "true", "5", "timm/resnet50", [0.2, 1.0], True, 1e-6])
def test_a_value_that_the_remedy_names_is_read_as_itself(path, value):
    old = {"recipe": {"augment": {"x": value}}}
    said = differences(old, {"recipe": {"augment": {"x": "other"}}})
    (word,) = shlex.split(said.partition("began with: add ")[2])
    assert read_tree(path, [word])["augment"]["x"] == value


def test_a_recipe_survives_being_stored_and_parsed_again(path):
    recipe = load_recipe(path).resolved(10)
    assert parse_recipe(recipe.model_dump(mode="json"), "recipe.json") == recipe


def test_a_recipe_survives_a_pickle_as_for_a_process_that_is_spawned(path):
    recipe = load_recipe(path, ["augment.preset=grey", "loss.kind=moco"])
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe
    assert identity(again, "0" * 64, 1) == identity(recipe, "0" * 64, 1)


@pytest.mark.parametrize(
    ("column_key", "overrides"), [("moon.column", [["moon.column=species"]]), ("", [])]
)
def test_labels_of_a_column_are_for_kinds_of_recipes_that_name_one(
    monkeypatch, column_key, overrides
):
    kind = RecipeKind("moon", Recipe, Path("recipes/my_images.toml"), column_key)
    monkeypatch.setattr(reading, "_brought", lambda: {"lunar": kind})
    assert [own for _, own in labelled_recipes("species")] == overrides
    assert [own for _, own in labelled_recipes()] == [[]]


def test_a_missing_recipe_names_those_beside_it_and_no_toml_its_line(path):
    with pytest.raises(RecipeError, match=r"no recipe at .*other\.toml; recipes in .*: tiny"):
        load_recipe(path.with_name("other.toml"))
    path.write_text("name = \n")
    with pytest.raises(RecipeError, match=r"not valid TOML.*line 1"):
        load_recipe(path)


def test_a_recipe_of_an_editor_on_windows_is_the_same_and_no_utf_8_names_the_remedy(path):
    expected = load_recipe(path)
    text = path.read_text()
    path.write_text(text, encoding="utf-8-sig", newline="\r\n")
    assert load_recipe(path) == expected
    path.write_text(text, encoding="utf-16")
    with pytest.raises(RecipeError, match=r"not valid TOML.*save it in UTF-8"):
        load_recipe(path)


@pytest.mark.parametrize("override", [None, "data.num_streams=16", "run.log_steps=1"])
def test_settings_that_are_wrong_together_are_blamed_on_the_file(path, override):
    """An override may be one of them, or none."""
    path.write_text(
        TEXT.replace("batch_size = 64\nnum_streams = 8", "batch_size = 250\nnum_streams = 16")
    )
    with pytest.raises(RecipeError, match=r"batch_size = 250 is not a multiple") as caught:
        load_recipe(path, [] if override is None else [override])
    assert str(caught.value).startswith(f"{path}: ")
