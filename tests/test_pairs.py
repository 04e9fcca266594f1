"""Trainings with [pairs]: the same on any number of processes, and resumed in mid-epoch."""

import shlex

import pytest

from sslpipe.api import plan_from
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.recipe.identity import identity
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from tests.cli.test_evaluate import call
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, png, write_dataset
from tests.helpers.runs import (
    RECIPE,
    assert_same_numbers,
    assert_same_weights,
    command_line,
    kill_over,
    train_on_equal_views,
    train_over,
    write_recipe,
)

PAIRS = ("pairs.positive=icon", "pairs.different=vendor", 'pairs.never_negative="patient"')
FP64 = ("optim.precision=fp64", "steps=5")
MOCO = ("momentum.start=0.9", "loss.kind=moco", "loss.queue_rows=40")
ICON = [None if i % 11 == 0 else f"icon{i // 2 % 20}" for i in range(128)]
PATIENT = [None if i % 5 == 0 else i % 9 for i in range(128)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    manifest = write_dataset(tmp_path_factory.mktemp("data"), (40, 3, 60, 25))
    add_columns(manifest, icon=ICON, patient=PATIENT, vendor=[i % 3 for i in range(128)])
    return manifest


KINDS = {
    "micro-batches": ("data.micro_batch=4", "data.shuffle_window=32"),
    "sup_con": ("loss.kind=sup_con", "pairs.label=icon"),
    "moco": (*MOCO, "run.cache=device"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_the_weights_of_one(data, tmp_path, kind):
    recipe, settings = write_recipe(tmp_path), (*PAIRS, *FP64, *KINDS[kind])
    for world in (1, 2):
        where = tmp_path / str(world)
        train_over(world, recipe, data, where, *settings, by=train_on_equal_views)
    keys = ("loss", "partners", "without_partner", "negatives_per_anchor")
    lines = assert_same_numbers(tmp_path / "1", tmp_path / "2", keys)
    assert 0.2 < sum(line["partners"] for line in lines) / 5 < 1
    assert sum(line["negatives_per_anchor"] for line in lines) / 5 < 30
    assert_same_weights(tmp_path / "1", tmp_path / "2", rtol=1e-9, atol=1e-11)


@pytest.mark.promise(11)
def test_duplicates_that_the_command_found_are_no_negatives(tmp_path):
    """A batch holds all 16 samples; three pairs, each 4 views, mask 2 of 30 for 4 anchors."""
    from sslpipe.curate import cli as curate_tool

    plants = {9: png(picture(3)), 11: png(picture(5)), 12: png(picture(0))}
    data = write_dataset(tmp_path / "data", (16,), broken=plants)
    call(curate_tool, "duplicates", data, "--out", tmp_path / "duplicates")
    recipe, shown = write_recipe(tmp_path), {}
    masked = ('pairs.never_negative="duplicate_group"',)
    for name, settings in {"all": (), "masked": masked}.items():
        words = ("data.holdout=0", "data.shuffle_window=16", "steps=2", *settings)
        train_over(1, recipe, data, tmp_path / name, *words)
        shown[name] = [line["negatives_per_anchor"] for line in read_metrics(tmp_path / name)]
    assert shown["all"] == [30, 30]
    assert shown["masked"] == pytest.approx([30 - 3 * 4 * 2 / 32] * 2)


@pytest.mark.promise(2)
def test_a_run_that_was_killed_in_mid_epoch_resumes_bitwise(data, tmp_path):
    """With a queue that keeps the groups of its keys."""
    recipe, settings = write_recipe(tmp_path), (*PAIRS, *MOCO)
    kill_over(1, "train.step:9", recipe, data, tmp_path / "run", *settings)
    for name in ("run", "reference"):
        train_over(1, recipe, data, tmp_path / name, *settings)
    assert_same_weights(tmp_path / "reference", tmp_path / "run")


def test_pairs_are_part_of_the_digest_and_their_absence_is_not(data, tmp_path):
    recipe, sha256 = write_recipe(tmp_path), load_index(data).sha256
    recipes = [load_recipe(recipe, s) for s in ((), PAIRS, PAIRS[:2])]
    assert len({identity(each, sha256, 1)["digest"] for each in recipes}) == 3
    assert recipes[0].model_dump(mode="json")["pairs"] is None


def test_a_resume_without_pairs_is_told_which_to_add(data, tmp_path):
    recipe = write_recipe(tmp_path)
    train_over(1, recipe, data, tmp_path / "run", *PAIRS, "steps=2")
    words = ("--data", str(data), "--run-dir", str(tmp_path / "run"), "steps=2")
    said = command_line("train", str(recipe), *words, status=2).stderr
    assert "order_version" not in said  # no setting is called so
    remedy = shlex.split(said.rpartition(": add ")[2])
    assert {word.partition("=")[0] for word in remedy} == {
        *("pairs.positive", "pairs.different", "pairs.never_negative")
    }
    command_line("train", str(recipe), *words, *remedy, status=0)  # nothing is left to do


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('positive = "icon"\ndifferent = "icon"', "both name 'icon'"),
        ('different = "vendor"', "pairs.different is about partners"),
        ('positive = ["icon", "icon"]', "pairs.positive names 'icon' twice"),
        ('positive = "icon"\nwithin = "60 s"', "pairs.time and pairs.within"),
        ('time = "icon"\nwithin = "60 parsecs"', "'60 parsecs' is no span of time"),
        ('positive = "icon"\nshare = 0.5', "share"),
        ("", "pairs says nothing"),
        ('positive = "icom"', "no column 'icom'; did you mean 'icon'"),
    ],
)
def test_settings_that_contradict_are_one_line(data, tmp_path, text, message, capsys):
    recipe = write_recipe(tmp_path, f"{RECIPE}\n[pairs]\n{text}\n")
    with pytest.raises(UserError, match=message):
        plan_from(load_recipe(recipe), load_index(data))


def test_check_says_who_finds_a_partner_and_what_it_costs(data, tmp_path):
    arguments = ("check", str(write_recipe(tmp_path)), "--data", str(data), *PAIRS)
    result = command_line(*arguments, COLUMNS="200", status=0)
    assert "partners" in result.stdout
    assert "single reads" in result.stdout
