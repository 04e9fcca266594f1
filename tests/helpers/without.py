"""The core's tests without one satellite: python -m tests.helpers.without NAME FOLDER [PYTEST...].

Copies the tracked files to FOLDER, deletes the satellite and its tests there, and runs all tests
but those of files that use it: they import it, or a helper that does, or name one of its words.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = {  # beside the module: its commands in a test's own words, a kind of recipe
    "curate": r"(^|[\"' ])(sslpipe )?curate\b|leak",
    "metric_learning": r"finetune|fine-tun|fine_tun",
    "search": r"(^|[\"'])(sslpipe )?(search|gallery|choose|browse)\b|ImageSearch",
    "sensors": r"(^|[\"'])(sslpipe )?sensors\b",
}
OF_ALL = (  # files about the whole: every page, every command, every satellite
    *("test_docs.py", "test_page_commands.py", "test_satellites.py", "test_layers.py"),
    *("test_app.py", "test_faults.py", "test_promises.py", "test_notebooks.py"),
)

NO_USERS = ("conftest.py", "processes.py", "without.py")  # they name it, and do without


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


def imports(path: Path, text: str) -> Iterator[str]:
    """Yield the modules that a file imports; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users(name: str, folder: Path) -> list[str]:
    """List the test files that cannot work without it."""
    files = {
        path: path.read_text()
        for part in ("tests", "benchmarks")
        for path in (folder / part).rglob("*.py")
    }
    uses = re.compile(rf"sslpipe[./]{name}\b|{WORDS[name]}", re.MULTILINE)
    found = {path for path, text in files.items() if uses.search(text)}
    found -= {path for path in found if path.name in NO_USERS}
    imported = {path: set(imports(path, text)) for path, text in files.items()}
    more = found
    while more:  # those that import these
        names = {".".join(path.relative_to(folder).with_suffix("").parts) for path in more}
        more = {path for path, own in imported.items() if own & names} - found
        more -= {path for path in more if path.name in NO_USERS}
        found |= more
    found |= {path for path in files if path.name in OF_ALL}
    return sorted(str(each.relative_to(folder)) for each in found if each.name.startswith("test_"))


def main(name: str, place: str, *words: str) -> int:
    """Run pytest in the copy; its status."""
    folder = Path(place).resolve()
    copy_without(name, folder)
    ignored = users(name, folder)
    print(f"without {name}: {len(ignored)} test files use it: {', '.join(ignored)}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(f"--ignore={file}" for file in ignored)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
