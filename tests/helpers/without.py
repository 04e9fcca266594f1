"""The core's tests without one satellite: python -m tests.helpers.without NAME FOLDER [PYTEST...].

Copies the tracked files to FOLDER, deletes the satellite and its tests there, and runs all tests
but those that use it: their file imports it, or they, or what they call of their file, of helpers
and of fixtures, name it or one of its words.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {  # beside the module: its commands in a test's own words, a kind of recipe
    "curate": r"(^|[\"' ])(sslpipe )?curate\b|leakage",
    "metric_learning": r"fine[-_]?tun|\bsampler\b|recipes/metric|random_settings|my_images_mobile",
    "search": r"(^|[\"'])(sslpipe )?(search|gallery|choose|browse)\b|ImageSearch",
    "sensors": r"(^|[\"'])(sslpipe )?sensors (build\b|-)|[\"']sensors[\"']",
}
OF_ALL = (  # files about the whole: every page, every satellite
    *("test_docs.py", "test_page_commands.py", "test_satellites.py", "test_layers.py"),
    *("test_fault_matrix.py", "test_promises.py", "test_notebooks.py"),
)
NO_USERS = (  # they name it, and do without
    *("tests.conftest", "tests.helpers.processes", "tests.helpers.without"),
)
UNUSED = "SSLPIPE_UNUSED_TESTS"  # the variable that has what the plug-in deselects, as JSON


def copy_without(name: str, folder: Path) -> None:
    """Copy what git tracks, but a satellite with its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for file in filter(None, listed.stdout.split("\0")):
        gone = file.startswith((f"sslpipe/{name}/", f"tests/{name}/"))
        if not gone and (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)


class Module:
    """A file of tests, of helpers or of benchmarks."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name  # "tests.helpers.runs"
        self.text = path.read_text()
        self.tree = ast.parse(self.text, str(path))

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """What the file imports when it is loaded: its name here -> (module, name in it or "")."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = (node.module, alias.name)
        return found

    @cached_property
    def parts(self) -> dict[str, str]:
        """What stands at the top of the file, by its names: its text, with its decorators."""
        lines = self.text.splitlines()
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            else:
                stored = (each for each in ast.walk(node) if isinstance(each, ast.Name))
                names = [each.id for each in stored if isinstance(each.ctx, ast.Store)]
                first = node.lineno
            text = "\n".join(lines[first - 1 : node.end_lineno])
            if not isinstance(node, ast.Import | ast.ImportFrom):
                found |= {name: found.get(name, "") + "\n" + text for name in names}
        return found


def read_modules(folder: Path) -> dict[str, Module]:
    """Read the tests, their helpers and the benchmarks."""
    modules = {}
    for part in ("tests", "benchmarks"):
        for path in (folder / part).rglob("*.py"):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = Module(path, name)
    return modules


def broken(modules: dict[str, Module], name: str) -> set[str]:
    """List the modules that cannot be imported without a satellite."""
    gone = f"sslpipe.{name}"
    found: set[str] = set()
    while True:
        more = {
            module
            for module, each in modules.items()
            for source, inner in each.imports.values()
            if {source, f"{source}.{inner}"} & {gone, *found}
            or source.startswith(f"{gone}.")
            or f"{source}.{inner}" == gone
        }
        if more <= found:
            return found
        found |= more


def users(modules: dict[str, Module], name: str) -> dict[str, set[str]]:
    """List, by module, the names at its top that use a satellite."""
    words = re.compile(rf"sslpipe[./]{name}\b|{WORDS[name]}", re.MULTILINE)
    found = {
        module: {
            part
            for part, text in each.parts.items()
            if words.search(text) and module not in NO_USERS
        }
        for module, each in modules.items()
    }
    while True:
        before = {module: set(names) for module, names in found.items()}
        fixtures = {
            fixture
            for module in modules
            if module.endswith("conftest")
            for fixture in found[module]
        }
        for module, each in modules.items():
            using = found[module] | fixtures
            for here, (source, inner) in each.imports.items():
                # a helper of whole fine-tunings: all of its functions use it
                whole = f"{source}.{inner}" if inner else source
                if inner in found.get(source, ()) or words.search(whole.rpartition(".")[2]):
                    using.add(here)
            for part, text in each.parts.items():
                if using & set(re.findall(r"\w+", text)):
                    found[module].add(part)
        if found == before:
            return found


def main(name: str, place: str, *words: str) -> int:
    """Run pytest in the copy; its status."""
    folder = Path(place).resolve()
    copy_without(name, folder)
    modules = read_modules(folder)
    lost = broken(modules, name)
    ignored = []
    unused: dict[str, list[str]] = {}
    for module, names in users(modules, name).items():
        path = modules[module].path
        file = path.relative_to(folder).as_posix()
        if not path.name.startswith("test_"):
            continue
        if module in lost or path.name in OF_ALL or "pytestmark" in names:
            ignored.append(file)
        elif tests := sorted(each for each in names if each.startswith("test_")):
            unused[file] = tests
    count = sum(map(len, unused.values()))
    print(f"without {name}: {len(ignored)} files are not run: {', '.join(ignored)}")
    print(f"and {count} tests of {len(unused)} others", flush=True)
    plug_in = ("-p", "tests.helpers.without")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plug_in, *words, *(f"--ignore={f}" for f in ignored)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), UNUSED: json.dumps(unused)},
        check=False,
    ).returncode


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that `main` has found."""
    unused = json.loads(os.environ.get(UNUSED, "{}"))
    kept = []
    dropped = []
    for item in items:
        file, _, test = item.nodeid.partition("::")
        name = test.partition("[")[0].partition("::")[0]
        (dropped if name in unused.get(file, ()) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
