import hashlib
import json
import math
import sys
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

import sslpipe
from sslpipe import registry
from sslpipe.errors import RecipeError, UserError
from sslpipe.recipe.messages import explain_errors
from sslpipe.recipe.sections import RunConfig
from sslpipe.registry import Table, UnknownName, plugins
from sslpipe.registry.part import Derived, Part
from sslpipe.registry.schema import Kinds, KindSettings, Settings, refusals
from sslpipe.run.trackers import TRACKERS


class Crop(Part):
    """A part with a setting that is needed, one with a default, and what the data decide."""

    size: Annotated[int, Field(ge=0)]
    """Its side."""
    share: float = 0.5
    shapes: tuple[float, ...] = (1.0,)
    channels: Annotated[int, Derived()] = 3

    def setup(self):
        super().setup()
        if self.size == 13:
            raise ValueError("size = 13 is unlucky")


class Wider(Crop):
    share: float = 0.75
    margin: float = 0.0


CROPS = Table("crop", {"crop": Crop, "wider": Wider})


class Plan(Settings):
    crop: Annotated[KindSettings, Kinds("tests.test_registry:CROPS")]


def read(**tree):
    try:
        return Plan.model_validate({"crop": tree}).crop
    except ValidationError as error:
        raise RecipeError(explain_errors(error, Plan, "x.toml", {"crop": tree})) from None


def test_a_part_is_built_with_its_settings_and_of_what_else_is_known_with_what_it_declares():
    crop = read(kind="crop", size=3).build(channels=5, dim=128)
    assert repr(crop) == "Crop(size=3, share=0.5, shapes=(1.0,), channels=5)"
    wider = read(kind="wider", size=3, share=0.25)
    assert type(wider.build()) is Wider
    assert Plan(crop=wider).model_dump() == {
        "crop": {"kind": "wider", "size": 3, "share": 0.25, "shapes": (1.0,), "margin": 0.0}
    }
    assert wider.__class__.model_fields["size"].description == "Its side."


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"kind": "corp"}, r"crop\.kind = 'corp' is unknown; did .* 'crop'\?.*load_plugins; known"),
        ({"kind": "crop", "sise": 3}, r"unknown key crop\.sise; did you mean 'size'\?; known here"),
        ({"kind": "crop", "size": 3, "channels": 1}, r"unknown key crop\.channels"),
        ({"kind": "crop"}, r"crop\.size is missing: Its side"),
        ({"kind": "crop", "size": "x"}, r"crop\.size = 'x': input should be a valid integer"),
        ({"kind": "crop", "size": True}, r"crop\.size: true is no value"),
        ({"kind": "crop", "size": 1, "shapes": [True]}, r"crop\.shapes.* no numbers"),
        ({"kind": "crop", "size": 1, "share": math.nan}, r"crop\.share = nan: .*finite number"),
        ({"size": 3}, r"crop\.kind is missing"),
    ],
)  # fmt: skip
def test_a_mistake_names_section_value_and_remedy(tree, message):
    with pytest.raises(RecipeError, match=message):
        read(**tree)


def test_what_a_part_refuses_names_its_section_and_in_a_notebook_its_argument():
    unlucky = read(kind="crop", size=13)
    message = r"\[crop\] kind = 'crop': size = 13 is unlucky"
    with pytest.raises(RecipeError, match=message), refusals("crop", "crop"):
        unlucky.build()
    for kwargs, kind, message in (
        ({"size": -1}, ValueError, "size = -1: .*greater than or equal to 0"),
        ({"size": 13}, ValueError, "^size = 13 is unlucky$"),
        ({}, TypeError, "Crop needs size"),
        ({"sise": 3}, TypeError, "Crop takes no sise; did you mean 'size'"),
    ):
        with pytest.raises(kind, match=message):
            Crop(**kwargs)
    with pytest.raises(TypeError, match="by name: size"):
        Crop(3, 0.5, *[(1.0,)] * 9)
    with pytest.raises(TypeError, match="declare its settings as fields"):
        type("Old", (Part,), {"__init__": lambda self: None})


def test_a_kind_that_a_recorded_run_had_is_read_without_its_module_and_cannot_be_built():
    tree = {"kind": "mine", "weight": 3}
    settings = Plan.model_validate({"crop": tree}, context="recorded").crop
    assert settings.model_dump() == tree
    with pytest.raises(RecipeError, match="'mine' is unknown"):
        settings.build()


def test_the_schema_of_a_section_has_a_case_for_each_kind():
    cases = Plan.model_json_schema()["properties"]["crop"]["oneOf"]
    text = json.dumps(Plan.model_json_schema())
    assert len(cases) == 2
    assert '"const": "wider"' in text
    assert "Its side." in text


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
    table = Table("part", {"crop": Crop}, "sslpipe.made_up")
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
    with pytest.raises(UserError, match=r"load_plugins\('made_up_company'\) has no source file"):
        plugins.load_module("made_up_company")


def test_a_plugin_file_does_not_take_the_place_of_a_module(package, monkeypatch):
    monkeypatch.chdir(package)
    (package / "json.py").write_text("raise SystemExit\n")
    with pytest.raises(
        UserError, match=r"load_plugins\(.*json\.py.\) .* module 'json' already; rename"
    ):
        plugins.load_module("json.py")


def test_the_option_plugin_may_stand_anywhere_and_reaches_child_processes(package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.setenv(plugins.VARIABLE, "")
    (package / "made_up_file.py").write_text("")
    words = ["train", "--plugin", "made_up_parts", "x", "--plugin=made_up_file.py", "--y"]
    assert plugins.take_from(words) == ["train", "x", "--y"]
    assert plugins.requested() == ["made_up_parts", str(package / "made_up_file.py")]
    with pytest.raises(UserError, match="load_plugins needs a module"):
        plugins.take_from(["train", "--plugin"])


def test_a_tracker_that_a_module_adds_is_one_that_a_recipe_may_name():
    with pytest.raises(ValueError, match="'mine' is unknown"):
        RunConfig(trackers=("mine",))
    TRACKERS["mine"] = Crop
    try:
        assert RunConfig(trackers=("mine",)).trackers == ("mine",)
    finally:
        del TRACKERS["mine"]


def test_a_parts_first_settings_may_be_given_by_place():
    assert sslpipe.NTXentLoss(0.3).temperature == 0.3
    with pytest.raises(TypeError, match="temperature"):
        sslpipe.NTXentLoss(0.3, temperature=0.2)
    with pytest.raises(TypeError, match="by name"):
        sslpipe.NTXentLoss(0.3, 64, False, 1)
