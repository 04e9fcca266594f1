"""Each satellite is a folder that can be deleted: the program works without it."""

import os
import shutil
import subprocess
import sys

import pytest

from sslpipe.errors import RecipeError
from sslpipe.kinds import run_kind
from sslpipe.recipe.reading import load_recipe
from tests.helpers.finetunes import write_recipe
from tests.helpers.runs import ROOT
from tests.test_layers import SATELLITES

OWN = {  # commands
    "curate": {"curate"},
    "search": {"browse", "choose", "gallery", "search"},
    "sensors": {"sensors"},
}


def listed(folder):
    """The commands that `sslpipe --help` lists, of the package in this folder."""
    program = "from sslpipe.cli.app import COMMANDS; print(*COMMANDS)"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {*answer.stdout.split()}


@pytest.mark.parametrize("name", SATELLITES)
def test_a_folder_that_is_gone_takes_its_commands_along_and_nothing_else(name, tmp_path):
    shutil.copytree(ROOT / "sslpipe", tmp_path / "sslpipe")
    shutil.rmtree(tmp_path / "sslpipe" / name)
    assert listed(tmp_path) == listed(ROOT) - OWN.get(name, set())


def test_a_recipe_whose_satellite_is_gone_is_refused_by_its_section(tmp_path):
    shutil.copytree(ROOT / "sslpipe", tmp_path / "sslpipe")
    shutil.rmtree(tmp_path / "sslpipe" / "metric_learning")
    answer = subprocess.run(
        [sys.executable, "-m", "sslpipe", "check", write_recipe(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert "section 'sampler'" in line
    assert "install" in line


def test_a_kind_of_recipe_without_a_run_is_refused(monkeypatch, tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    assert run_kind(recipe).make.__self__.__name__ == "Finetuning"
    monkeypatch.setattr("sslpipe.kinds.offered", lambda name: ())
    with pytest.raises(RecipeError, match=r"FinetuneRecipe.*install sslpipe"):
        run_kind(recipe)
