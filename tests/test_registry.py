import hashlib
import sys

import pytest

from sslpipe import registry
from sslpipe.errors import RecipeError, UserError
from sslpipe.recipe.base import Component, RunConfig
from sslpipe.registry import Table, UnknownName, build, plugins
from sslpipe.run.trackers import TRACKERS


def crop(size: int, mean: float = 0.0) -> tuple[int, float]:
    if size < 0:
        raise ValueError(f"size = {size} is negative")
    return size, mean


def anything(**arguments: object) -> dict[str, object]:
    return arguments


def strict(size: int) -> None:
    raise RecipeError("augment.size: no")


TABLE = {"crop": crop, "anything": anything, "strict": strict}


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
        ("corp", {}, r"augment\.kind = 'corp' is unknown; did .* 'crop'\?.*--plugin; known: any"),
        ("crop", {"sise": 3}, r"augment\.sise is not an argument .*; did you mean 'size'\?"),
        ("crop", {"size": -1}, r"\[augment\] kind = 'crop': size = -1 is negative"),
        ("crop", {}, r"\[augment\] kind = 'crop': .*missing.*'size'"),
        ("crop", {"size": "x"}, r"augment\.size = 'x': input should be a valid integer"),
        ("strict", {"size": 1}, r"^augment\.size: no$"),
    ],
)  # fmt: skip
def test_a_mistake_names_section_value_and_remedy(kind, arguments, message):
    with pytest.raises(RecipeError, match=message):
        made(kind, arguments)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with an objective that says when it is imported."""
    monkeypatch.setattr(plugins, "_versions", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made_up_parts.py").write_text("class Mine:\n    size = 3\n")
    metadata = tmp_path / "made_up_parts-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: made-up-parts\nVersion: 1.0\n")
    entries = "mine = made_up_parts:Mine\nlost = made_up_parts:Lost\n"
    (metadata / "entry_points.txt").write_text(f"[sslpipe.made_up]\n{entries}")
    yield tmp_path
    registry._tables.pop("sslpipe.made_up", None)
    for name in [name for name in sys.modules if name.startswith("made_up")]:
        del sys.modules[name]


def test_a_table_imports_what_a_package_adds_when_it_is_named(package):
    table = Table("part", {"crop": crop}, "sslpipe.made_up")
    assert table.names() == ["crop", "mine", "lost"]
    assert "mine" in table
    with pytest.raises(UnknownName, match=r"'mime'; did you mean 'mine'\?.*; known: crop, mine"):
        table["mime"]
    assert "made_up_parts" not in sys.modules
    assert table["mine"].size == 3
    with pytest.raises(UserError, match=r"made-up-parts's made_up_parts:Lost .* AttributeError"):
        table["lost"]


def test_a_module_of_the_option_is_known_by_the_sha256_of_its_file(package):
    folder = package / "made_up_company" / "parts"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 1\n")
    plugins.load_module("made_up_company.parts")
    sha256 = hashlib.sha256(b"x = 1\n").hexdigest()
    assert plugins.versions() == {"made_up_company.parts": f"sha256:{sha256}"}
    with pytest.raises(UserError, match="--plugin made_up_company has no source file"):
        plugins.load_module("made_up_company")


def test_a_plugin_file_does_not_take_the_place_of_a_module(package, monkeypatch):
    monkeypatch.chdir(package)
    (package / "json.py").write_text("raise SystemExit\n")
    with pytest.raises(UserError, match=r"--plugin json\.py .* module 'json' already; rename"):
        plugins.load_module("json.py")


def test_the_option_plugin_may_stand_anywhere_and_reaches_child_processes(package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.setenv(plugins.VARIABLE, "")
    (package / "made_up_file.py").write_text("")
    words = ["train", "--plugin", "made_up_parts", "x", "--plugin=made_up_file.py", "--y"]
    assert plugins.take_from(words) == ["train", "x", "--y"]
    assert plugins.requested() == ["made_up_parts", str(package / "made_up_file.py")]
    with pytest.raises(UserError, match="--plugin needs a module"):
        plugins.take_from(["train", "--plugin"])


def test_a_tracker_that_a_module_adds_is_one_that_a_recipe_may_name():
    with pytest.raises(ValueError, match="'mine' is unknown"):
        RunConfig(trackers=("mine",))
    TRACKERS["mine"] = crop
    try:
        assert RunConfig(trackers=("mine",)).trackers == ("mine",)
    finally:
        del TRACKERS["mine"]
