"""A slow machine trains fewer steps, chosen before the first, and whatever shows them says so."""

import pytest

from sslpipe.recipe import load_recipe
from sslpipe.recipe.shortened import shorten, shortened_note
from tests.helpers.runs import ROOT

DEMO = ROOT / "recipes" / "demo.toml"


@pytest.mark.parametrize("step_s", [0.01, 0.2, 0.25])
def test_a_machine_that_is_fast_enough_or_nearly_trains_the_whole_recipe(step_s):
    assert shorten(load_recipe(DEMO, ()), step_s, 120) == []  # 600 steps: 6, 120 and 150 s
    assert shorten(load_recipe(DEMO, ()), step_s, 60, 150) == []
    for whole_within_s in (None, 30, 75, 150):  # a slow one for less than the whole one may take
        assert shorten(load_recipe(DEMO, ()), 0.251, 60, whole_within_s)[0] == "steps=239"


@pytest.mark.parametrize(
    ("step_s", "steps", "warmup"), [(0.251, 478, 96), (0.65, 184, 37), (120, 1, 0), (500, 1, 0)]
)
def test_a_slow_machine_trains_what_fits_with_the_same_shares_of_the_schedule(
    step_s, steps, warmup
):
    overrides = shorten(load_recipe(DEMO, ()), step_s, 120)
    short = load_recipe(DEMO, overrides)
    assert (short.steps, short.optim.warmup_steps, short.run.full_steps) == (steps, warmup, 600)
    note = f"trained {steps} of 600 steps, as this machine is slow: the numbers are below those of"
    assert shortened_note(short.model_dump()).startswith(note)


def test_all_stretches_that_are_counted_in_steps_are_shortened():
    recipe = load_recipe(DEMO, ("tune.projector_first_steps=60", "tune.ramp_steps=30"))
    short = load_recipe(DEMO, shorten(recipe, 1.0, 60))
    assert (short.tune.projector_first_steps, short.tune.ramp_steps) == (6, 3)


@pytest.mark.parametrize("recipe", [{}, {"run": None}, {"run": {}}, {"run": {"full_steps": 0}}])
def test_a_whole_recipe_and_one_of_before_say_nothing(recipe):
    assert shortened_note(recipe) == ""
