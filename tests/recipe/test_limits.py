"""Whatever a recipe or an override holds, it is read at once or refused in one line."""

import time

import pytest

from sslpipe.errors import RecipeError, UserError, one_line, shown
from sslpipe.recipe.reading import load_recipe, parse_recipe
from sslpipe.recipe.sections import divisors
from tests.helpers import finetunes, runs

SLOWEST_S = 60.0  # without the limits minutes, or for ever


def refused(tmp_path, *overrides: str, text: str = runs.RECIPE) -> str:
    """The one line of a recipe that is refused, at once."""
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    begin_s = time.monotonic()
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert time.monotonic() - begin_s < SLOWEST_S
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 5000
    return line


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("epochs=inf", "epochs"),
        ("seed=18446744073709551616", "seed"),
        ("data.shuffle_window=9223372036854775808", "data.shuffle_window"),
        ("data.canvas_px=65536", "data.canvas_px"),
        ("run.num_workers=1000000", "run.num_workers"),
        ("projector.num_layers=1000000", "projector.num_layers"),
        ("optim={kind='adamw', peak_lr=1, betas=[2, 2]}", "optim.betas"),
        ("optim={kind='sgd', peak_lr=1, nesterov=true, momentum=0}", "nesterov"),
        ("optim.peak_lr=true", "optim.peak_lr"),
        ("loss.temperature=nan", "loss.temperature"),
        ("loss.temperature=9223372036854775808", "loss.temperature"),
        ("loss.temperature=1979-05-27", "loss.temperature"),
        (f"loss.kind={'x' * 100_000}", "loss.kind"),
        (f"loss.tile_rows={'9' * 10_000}", "loss"),
    ],
)
def test_a_value_out_of_its_range_is_one_line_that_names_the_key(tmp_path, override, key):
    assert key in refused(tmp_path, override)


@pytest.mark.parametrize("name", ["", "..", "/etc/x", "a/b", "a\\\\b", "a\\nb", "x" * 201])
def test_a_name_that_would_be_a_path_is_refused_for_trackers_make_files_of_it(tmp_path, name):
    assert "name" in refused(tmp_path, f'name="{name}"')
    assert "name" in refused(tmp_path, f'name="{name}"', text=finetunes.RECIPE)


def test_a_name_with_letters_of_any_language_is_taken_and_recorded_runs_still_load(tmp_path):
    path = runs.write_recipe(tmp_path)
    recipe = load_recipe(path, ["name=grün 1.5 (ok)"])
    assert recipe.name == "grün 1.5 (ok)"
    tree = {**recipe.model_dump(mode="json"), "name": "old/one"}
    assert parse_recipe(tree, "recipe.json", recorded=True).name == "old/one"


@pytest.mark.parametrize(
    "override",
    [
        "loss.x=" + "[" * 50_000,
        "loss.x=[" + "1," * 200_000 + "1]",
        "=1",
        "\n=1",
    ],
    ids=range(4),
)
def test_an_override_that_is_too_long_or_too_deep_is_refused_at_once(tmp_path, override):
    assert "override" in refused(tmp_path, override)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 50_000,
        "a = 1\n" * 10,
        "# " + "x" * 2**20,
        "\x00",
    ],
    ids=range(4),
)
def test_a_file_that_is_too_large_or_too_deep_is_refused_at_once(tmp_path, text):
    assert "tiny.toml" in refused(tmp_path, text=text)


def test_a_folder_is_no_recipe_and_a_key_with_line_breaks_stays_one_line(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(RecipeError, match=r"no recipe at .*; shipped recipes are in .*recipes$"):
        load_recipe(tmp_path / "folder.toml")
    assert "unknown key" in refused(tmp_path, text=runs.RECIPE.replace("[run]", '[run]\n"a\\nb"=1'))


def test_shipped_limits_take_what_a_recipe_may_hold(tmp_path):
    path = runs.write_recipe(tmp_path)
    recipe = load_recipe(path, ["seed=18446744073709551615", "optim.momentum=0", "steps=1e4"])
    assert (recipe.seed, recipe.optim.momentum, recipe.steps) == (2**64 - 1, 0.0, 10_000)
    assert load_recipe(path, ["data.split=a b c.d.e.f"]).data.split == "a b c.d.e.f"
    with pytest.raises(RecipeError, match="epochs = 1e\\+12"):
        load_recipe(path, ["epochs=1e12"]).resolved(10)


def test_divisors_are_all_of_them_in_order():
    for number in (1, 2, 12, 36, 97, 5040):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(2**31 - 1) == [1, 2**31 - 1]  # a prime, in a moment


def test_a_message_is_one_line_whatever_it_quotes():
    assert str(UserError("a\nb\r\n c\x1b[31m\u2028\ud800")) == "a b c\\x1b[31m\\u2028\\ud800"
    assert len(one_line("x" * 10**6)) < 5000
    for value in (10**9000, [10**9000], "x" * 10**6, list(range(10**5)), {1: "y" * 999}):
        assert len(shown(value)) <= 80
    assert shown([1, "a"]) == "[1, 'a']"
