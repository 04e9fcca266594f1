"""The parts of a pretraining, built from a recipe."""

from pathlib import Path

import pytest
import torch

from sslpipe.errors import RecipeError, UserError
from sslpipe.losses import LOSSES, NTXentLoss, Objective
from sslpipe.parts import build_loss
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import load_recipe
from sslpipe.registry.plugins import VARIABLE

DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"


class LearnedTemperature(NTXentLoss):
    def setup(self) -> None:
        super().setup()
        self.scale = torch.nn.Parameter(torch.ones(()))


class NoGroups(Objective):
    def forward(self, z_a, z_b, *, ids=None, labels=None):  # type: ignore[no-untyped-def]
        return (z_a - z_b).square().mean()


def loss_named(kind: str, *overrides: str) -> Recipe:
    recipe = load_recipe(DEMO, [f"loss={{kind='{kind}'}}", *overrides])
    assert isinstance(recipe, Recipe)
    return recipe


def test_an_objective_with_weights_that_nothing_would_train_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOSSES, "learned", LearnedTemperature)
    with pytest.raises(RecipeError, match=r"kind = 'learned' has weights of its own \(scale\)"):
        build_loss(loss_named("learned"))


def test_an_objective_that_takes_no_groups_is_refused_where_a_step_gives_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOSSES, "plain", NoGroups)
    assert isinstance(build_loss(loss_named("plain")), NoGroups)
    for pairs in ("pairs.positive=product", "pairs.never_negative=['product']"):
        with pytest.raises(RecipeError, match=r"kind = 'plain' .*'groups'; write its forward"):
            build_loss(loss_named("plain", pairs))
        for kind in set(LOSSES) - {"plain", "distill"}:  # the library's own are called so
            build_loss(loss_named(kind, pairs, "momentum.start=0.9"))


def test_an_unknown_part_may_be_one_of_a_module_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"name its module with sslpipe.load_plugins; known: "):
        build_loss(loss_named("mine"))
    monkeypatch.setenv(VARIABLE, "my_parts.py")
    with pytest.raises(UserError, match="'mine' is unknown") as caught:
        build_loss(loss_named("mine"))
    assert "--plugin" not in str(caught.value)
