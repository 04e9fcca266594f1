"""`sslpipe check --explain`: every argument that a recipe's `kind` takes has a meaning."""

import inspect
import re

import pytest

from sslpipe.augment.presets import PRESETS, setting_docs
from sslpipe.cli.explain import explain, meanings, sections
from sslpipe.errors import RecipeError
from sslpipe.losses import LOSSES


@pytest.mark.parametrize("name", setting_docs())
def test_a_view_setting_is_explained_by_its_own_string(name):
    if name != "crop_px":  # an argument of both kinds, which document it
        assert explain(f"augment.{name}") == f"augment.{name}\n{setting_docs()[name]}"


@pytest.mark.parametrize("section", sections())
def test_no_argument_of_a_kind_is_undocumented(section):
    found = meanings(section, sections()[section])
    texts = {f"{section}.{key}: {text}" for key, lines in found.items() for text in lines}
    assert not {text for text in texts if "not documented" in text}


def test_an_argument_names_the_kinds_that_take_it_each_with_its_default():
    lines = explain("loss.temperature").splitlines()
    assert lines[0] == "loss.temperature"
    for kind, constructor in LOSSES.items():
        if kind == "diet":  # classes, no cosines
            continue
        default = inspect.signature(constructor).parameters["temperature"].default
        several = len(sections()["loss"].tables) > 1  # where a satellite has more
        name = f"{kind} (objective)" if several else kind
        (line,) = (line for line in lines if name in re.split("[,:] ?", line))
        assert line.endswith(f"(default {default!r})"), line
        assert "cosine similarities" in line  # also where a base declares it


def test_a_setting_of_kinds_has_a_type_and_what_has_no_default_says_so():
    rate = explain("optim.peak_lr").splitlines()
    assert rate[1].endswith("(no default: it has to be given)")
    assert rate[2].startswith("type: float")
    for section, kinds in sections().items():
        for name in meanings(section, kinds):
            if section != "augment" or name not in setting_docs():  # the ops declare no types
                lines = explain(f"{section}.{name}").splitlines()
                assert any(line.startswith("type") for line in lines), (section, name)


def test_kind_lists_the_entries_of_the_tables():
    listed = explain("loss.kind")
    assert "objective: nt_xent, dcl" in listed


def test_a_section_lists_its_kinds_a_plug_ins_too(monkeypatch):
    monkeypatch.setitem(LOSSES, "of_a_plug_in", LOSSES["nt_xent"])
    (objectives,) = (line for line in explain("loss").splitlines() if line.startswith("objective"))
    assert objectives.partition(": ")[2].split(", ") == LOSSES.names()


def test_a_section_lists_the_arguments_of_its_kinds():
    assert not [name for name in PRESETS if name not in explain("augment.preset")]
    assert "architecture" not in explain("backbone")


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(RecipeError, match=r"^there is no setting 'zzz'$"):
        explain("zzz")
    with pytest.raises(RecipeError, match=r"did you mean 'loss\.temperature'"):
        explain("loss.temperatur")
    with pytest.raises(RecipeError, match=r"did you mean 'augment\.flip_prob'"):
        explain("augment.flip")


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("optim.lr", {"optim.peak_lr"}),
        ("lr", {"optim.peak_lr", "tune.backbone_lr"}),
        ("temperature", {"loss.temperature"}),
        ("batch_size", {"data.batch_size", "data.micro_batch"}),
        ("optm", {"optim"}),
        ("augment.presets", {"augment.preset"}),
        ("tune.head_lr", {"tune.backbone_lr"}),
    ],
)
def test_an_unknown_setting_names_the_three_nearest_whole_keys(key, wanted):
    with pytest.raises(RecipeError) as caught:
        explain(key)
    named = re.findall(r"'([\w.]+)'", str(caught.value))[1:]
    assert len(set(named)) == 3
    assert wanted <= set(named)
    for other in named:
        assert explain(other)
        assert "." in other or "." not in key  # a section is no answer to a whole key


def test_the_command_prints_it_without_a_recipe(call):
    shown, _ = call("check", "--explain", "augment.hue")
    assert shown == f"augment.hue\n{setting_docs()['hue']}\n"
