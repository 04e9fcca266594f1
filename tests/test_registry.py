import pytest

from sslpipe.errors import RecipeError
from sslpipe.recipe.base import Component
from sslpipe.registry import build


def crop(size: int, mean: float = 0.0) -> tuple[int, float]:
    if size < 0:
        raise ValueError(f"size = {size} is negative")
    return size, mean


def anything(**arguments: object) -> dict[str, object]:
    return arguments


TABLE = {"crop": crop, "anything": anything}


def made(kind: str, arguments: dict[str, object], **defaults: object) -> object:
    component = Component.model_validate({"kind": kind, **arguments})
    return build(TABLE, component, section="augment", **defaults)


def test_the_named_constructor_gets_the_recipes_arguments():
    assert made("crop", {"size": 3}) == (3, 0.0)
    assert made("anything", {"size": 3, "b": [1]}) == {"size": 3, "b": [1]}


def test_what_the_program_gives_is_used_where_taken_and_the_recipe_wins():
    assert made("crop", {"size": 3}, mean=0.5, std=2.0) == (3, 0.5)
    assert made("crop", {"size": 3, "mean": 0.25}, mean=0.5) == (3, 0.25)
    assert made("anything", {}, mean=0.5) == {"mean": 0.5}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("corp", {}, r"augment\.kind = 'corp' is unknown; did you mean 'crop'\?; known: any"),
        ("crop", {"sise": 3}, r"augment\.sise is not an argument .*; did you mean 'size'\?"),
        ("crop", {"size": -1}, r"\[augment\] kind = 'crop': size = -1 is negative"),
        ("crop", {}, r"\[augment\] kind = 'crop': .*missing.*'size'"),
        ("crop", {"size": "x"}, r"\[augment\] kind = 'crop': .*not supported between"),
    ],
)  # fmt: skip
def test_a_mistake_names_section_value_and_remedy(kind, arguments, message):
    with pytest.raises(RecipeError, match=message):
        made(kind, arguments)


def test_a_recipe_error_of_the_constructor_passes_unchanged():
    def strict(size: int) -> None:
        raise RecipeError("augment.size: no")

    with pytest.raises(RecipeError, match=r"^augment\.size: no$"):
        build({"s": strict}, Component.model_validate({"kind": "s", "size": 1}), section="augment")
