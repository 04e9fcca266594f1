"""Installed packages are satellites, too: commands, recipe kinds and names by entry points."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sslpipe.run.checkpoint_files import newest, read_state
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import write_recipe

FILES = {
    "moon/__init__.py": "",
    "moon/commands.py": """
COMMANDS = {
    "tides": ("moon.cli", "Print the tides."),
    "phases": ("moon.phase_cli", "Print the phases."),
    "train": ("moon.cli", "Not the core's."),
}
NEXT = {"tides": "sslpipe train RECIPE"}
""",
    "moon/cli.py": """
import typer

app = typer.Typer()


@app.command()
def tides(days: int = 1) -> None:
    \"\"\"Print the tides.\"\"\"
    print("high, low " * days)
""",
    "moon/phase_cli.py": """
import typer

app = typer.Typer()


@app.command()
def phases() -> None:
    \"\"\"Print the phases.\"\"\"
    print("new, full")
""",
    "moon/names.py": 'NAMES = {"FULL": "moon.phases"}\n',
    "moon/phases.py": "FULL = 3\n",
    "moon/recipes.py": """
from sslpipe.recipe.reading import RecipeKind
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry.schema import Settings


class Moon(Settings):
    \"\"\"Of the moon.\"\"\"

    phase: int = 1
    \"\"\"Which quarter.\"\"\"


class MoonRecipe(Recipe):
    \"\"\"A pretraining by night.\"\"\"

    moon: Moon
    \"\"\"Which moon.\"\"\"


RECIPES = {"lunar": RecipeKind(section="moon", model=MoonRecipe)}
""",
    "moon/runs.py": """
from types import SimpleNamespace

from moon.recipes import MoonRecipe
from sslpipe.data.holdout import plan_order
from sslpipe.kinds import RunKind
from sslpipe.plan import Pretraining


def check(plan):
    return SimpleNamespace(render=lambda: f"the moon will be in phase {plan.recipe.moon.phase}")


def run(plan, run_dir):
    from sslpipe.pretrain import pretrain

    print(f"the moon is in phase {plan.recipe.moon.phase}")
    return pretrain(plan, run_dir)


RUNS = {MoonRecipe: RunKind(make=Pretraining.make, order=plan_order, check=check, run=run)}
""",
}
GROUPS = ("commands", "names", "recipes", "runs")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of the path, as `pip install --target` leaves it."""
    folder = tmp_path / "packages"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    describe(folder, "moon", {group: f"moon.{group}" for group in GROUPS})
    return folder


def describe(folder: Path, name: str, modules: dict[str, str]) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (f"[sslpipe.{group}]\n{name} = {module}\n" for group, module in modules.items())
    (metadata / "entry_points.txt").write_text("\n".join(groups))


def program(folder: Path, *words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has these packages."""
    answer = subprocess.run(
        [sys.executable, "-m", "sslpipe", *map(str, words)],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.getcwd()}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == status, answer.stderr
    return answer


def test_a_package_brings_a_command_and_replaces_none(installed):
    listed = program(installed, "--help")
    assert "Print the tides." in listed.stdout
    assert "Not the core's." not in listed.stdout
    (warning,) = listed.stderr.splitlines()
    assert "moon.commands" in warning
    assert "'train'" in warning
    assert "high, low high, low" in program(installed, "tides", "--days", "2").stdout
    assert "Next: sslpipe train RECIPE" in program(installed, "tides", "--help").stdout
    # NEXT has no row of this one
    assert "new, full" in program(installed, "phases").stdout
    assert "Next: " not in program(installed, "phases", "--help").stdout


def test_a_package_brings_a_kind_of_recipe_and_a_name(installed, tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + "\n[moon]\nphase = 2\n")
    assert "moon.phase" in program(installed, "check", recipe).stdout
    assert "Which quarter." in program(installed, "check", "--explain", "moon.phase").stdout
    wrong = program(installed, "check", recipe, "moon.phse=1", status=2).stderr
    assert "unknown key moon.phse; did you mean 'phase'?" in wrong
    assert "section 'moon'" in program(tmp_path, "check", recipe, status=2).stderr
    code = "import sslpipe; print(sslpipe.FULL, 'FULL' in dir(sslpipe))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{os.getcwd()}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert answer.stdout.split() == ["3", "True"]


def test_a_package_runs_its_recipes_and_its_version_is_in_the_digest(installed, tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + "\n[moon]\nphase = 2\n")
    data, run_dir = write_dataset(tmp_path / "data", (40,)), tmp_path / "run"
    planned = program(installed, "check", recipe, "--data", data, "steps=2").stdout
    assert "the moon will be in phase 2" in planned
    words = ("train", recipe, "--data", data, "--run-dir", run_dir, "steps=2")
    assert "the moon is in phase 2" in program(installed, *words).stdout
    assert read_state(newest(run_dir)).identity.plugins == {"moon": "1.0"}


def test_a_package_that_is_broken_is_reported_and_the_rest_works(installed):
    describe(installed, "mars", {"commands": "mars.commands", "names": "json"})
    said = program(installed, "shards", "--help").stderr
    assert any(
        "mars.commands" in line and "ModuleNotFoundError" in line for line in said.splitlines()
    )
    assert "high, low" in program(installed, "tides").stdout
    names = [sys.executable, "-c", "import sslpipe; print(sslpipe.FULL)"]
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{os.getcwd()}"}
    answer = subprocess.run(names, env=environment, capture_output=True, text=True, timeout=60)
    assert answer.stdout == "3\n"
    assert "mars's json" in answer.stderr
    assert "NAMES" in answer.stderr
