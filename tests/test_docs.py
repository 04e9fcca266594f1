"""README and the pages: links lead somewhere, commands are the program's, Python runs."""

import ast
import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from PIL import Image

from sslpipe import registry
from sslpipe.cli.explain import explain
from sslpipe.data.index import load_index
from sslpipe.evaluation.suite_file import features_name
from sslpipe.recipe.reading import load_recipe
from tests.helpers.dataset import picture
from tests.helpers.runs import ROOT, python, resolved, write_recipe

OUTSIDE = ("README", "CONTRIBUTING", "SECURITY", "launch/README", "slurm/README", "tests/faults")
OUTSIDE += ("benchmarks/README",)
PAGES = [
    *(ROOT / f"{name}.md" for name in OUTSIDE),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
# of their Python: a test below, test_extending.py, export/test_formats.py, cli/test_search.py
OWN_TESTS = (
    "README.md",
    "docs/extending.md",
    "docs/export.md",
    "docs/search.md",
    "docs/your-data.md",
)
ATTRIBUTES = ("backbone.projector",)  # of Python, which read like settings
SECTIONS = (
    "augment|backbone|data|embedding|loss|miner|momentum|optim|pairs|projector|queue|run|sampler"
    "|tune"
)

every_page = pytest.mark.parametrize("name", TEXTS)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, code) of each fenced or indented block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^    .*\n)+", prose(text), re.MULTILINE):
        yield "", re.sub("^    ", "", block, flags=re.MULTILINE)


def prose(text: str) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each line of the blocks that are no Python, lines ending in \\ joined."""
    for language, code in blocks(text):
        if language in ("", "sh", "bash"):
            for line in code.replace("\\\n", " ").splitlines():
                with contextlib.suppress(ValueError):  # of drawings and file trees
                    yield shlex.split(line, comments=True)


def inline(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(text).replace("\\|", "|"))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {re.sub(r"[ ]+", "-", heading.strip()) for heading in kept}


def parse(words: list[str], *, strict: bool) -> None:
    """Parse the words behind `sslpipe`; if not `strict`, raise on unknown names alone."""
    plugin = ("--plugin", "my_parts.py", "my_module")
    command, words = resolved(*(word for word in words if word not in plugin))
    if strict:
        with contextlib.suppress(typer.Exit):  # of --explain, which needs nothing else
            command.make_context("x", words)
        return
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    unknown = {word for word in words if word.startswith("--")} - known - {"--help", "--plugin"}
    assert not unknown, (command.name, unknown)


@every_page
def test_a_page_is_short(name):
    """One to two screens, and what its Python takes; as text at most 120 columns wide."""
    text = TEXTS[name]
    short = re.sub(r"^```python\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    limit = 150 if name == "README.md" else 120
    assert len((text if name == "README.md" else short).splitlines()) <= limit
    if name.startswith("docs/") and name != "docs/extending.md":
        text = "".join(line for line in text.splitlines(True) if not line.startswith("|"))
    if name.startswith(("docs/", "README")):
        assert max(map(len, text.splitlines())) <= 120


@every_page
def test_commands_fit_the_width_of_the_site(name):
    for language, code in blocks(TEXTS[name]):
        if language in ("sh", "bash"):
            assert max(map(len, code.splitlines())) <= 110


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("docs/")])
def test_a_guide_begins_with_a_question_and_a_command(name):
    if name == "docs/architecture.md":
        return
    opening, fence, _ = TEXTS[name].partition("```")
    assert fence
    assert "?" in opening
    assert opening.count("\n") <= 8


def test_there_are_at_most_twenty_guides():
    assert len([*(ROOT / "docs").glob("*.md")]) <= 20


@every_page
def test_links_lead_somewhere(name):
    page = ROOT / name
    text = re.sub(r"`[^`\n]+`", "", prose(TEXTS[name]))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(other.read_text()), f"{name}: {target}"


def test_every_page_is_linked_from_another():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in [*TEXTS][1:]:  # all but README.md
        link = rf"\]\([^)]*{re.escape(name.rpartition('/')[2])}[)#]"
        linked = any(re.search(link, text) for other, text in TEXTS.items() if other != name)
        in_navigation = f" {name.removeprefix('docs/')}\n" in navigation
        assert linked or in_navigation, f"no page leads to {name}"


@every_page
def test_commands_are_the_programs(name):
    for words in command_lines(TEXTS[name]):
        if "sslpipe" not in words or words[0] not in ("sslpipe", "accelerate", "torchrun"):
            continue
        words = words[words.index("sslpipe") + 1 :]
        if "..." not in words:
            parse(words, strict=True)
    for code in inline(TEXTS[name]):
        if code.startswith("sslpipe ") and "'" not in code:
            words = [word for word in code.split()[1:] if word not in ("...", "COMMAND", "X")]
            if words:
                parse(words, strict=False)


@every_page
def test_recipes_in_commands_exist_and_take_their_overrides(name):
    for words in command_lines(TEXTS[name]):
        for recipe in words:
            if re.fullmatch(r"recipes/[\w/]+\.toml", recipe):
                overrides = [word for word in words if re.match(r"[a-z_]+(\.[a-z_]+)?=", word)]
                load_recipe(ROOT / recipe, overrides)


@every_page
def test_files_targets_and_modules_in_commands_exist(name):
    text = "\n".join(code for _, code in blocks(TEXTS[name])) + "\n".join(inline(TEXTS[name]))
    for file in re.findall(r"(?<![\w/.])(?:launch|slurm|recipes)/[\w/]+\.\w+", text):
        assert (ROOT / file).exists(), file
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?<![\w-])make ([a-z][\w-]*)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python3? -m ((?:benchmarks|tests|tools)[\w.]*\w)", text):
        assert module == "tools.X" or find_spec(module), module


@every_page
def test_settings_exist(name):
    for code in inline(TEXTS[name]):
        found = re.fullmatch(rf"((?:{SECTIONS})\.[a-z][a-z_0-9]*)( ?= ?.*)?", code)
        if found and found[1] not in ATTRIBUTES and not found[1].endswith(".json"):
            explain(found[1])  # raises on an unknown one


@pytest.mark.parametrize("name", ["did_it_help", "search_engine"])
def test_a_notebook_imports_what_is_there(name):
    # the slow test_notebooks.py runs the rest
    cells = json.loads((ROOT / "docs" / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imports = re.findall(r"^(?:from|import) sslpipe.*", text, re.MULTILINE)
    assert len(imports) > 2
    for line in imports:
        exec(line, {})


def python_blocks(name: str) -> list[str]:
    return [code for language, code in blocks(TEXTS[name]) if language == "python"]


@pytest.mark.parametrize(
    "name",
    [name for name in TEXTS if name not in ("README.md", *OWN_TESTS) and python_blocks(name)],
)
def test_the_python_of_a_page_runs(name, capsys):
    exec("\n".join(python_blocks(name)), {"__name__": "page"})
    for table in registry._tables.values():
        for kind in [kind for kind, part in table.items() if part.__module__ == "page"]:
            del table[kind]


def test_the_python_of_the_readme_builds_trains_loads_and_embeds(tmp_path):
    """On a few photos and a tiny recipe under the names that the README has."""
    for number in range(160):
        folder = tmp_path / "MY_PHOTOS" / f"class {number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, 16)).save(folder / f"{number}.png")
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path).rename(tmp_path / "recipes" / "my_images_diet.toml")
    for number, name in enumerate(("a.jpg", "b.jpg")):
        Image.fromarray(picture(number, 48 + number)).save(tmp_path / name)
    (code,) = python_blocks("README.md")
    done = python("-c", code, cwd=tmp_path, status=0)
    assert "torch.Size([2, 16]) tensor(" in done.stdout
    assert (tmp_path / "runs" / "photos" / "DONE").exists()


def test_the_python_of_your_data_joins_the_lists_of_coco(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(1, 8):
        (tmp_path / "IMAGES").mkdir(exist_ok=True)
        Image.fromarray(picture(number, 16)).save(tmp_path / "IMAGES" / f"{number}.png")
    kinds = {1: 90, 2: 7, 3: 90, 4: 7, 5: 90, 6: 7}  # of an image; 7 has no box
    boxes = [{"image_id": image, "category_id": kind} for image, kind in kinds.items()]
    boxes.append({"image_id": 1, "category_id": 7})  # a second box
    coco = {
        "info": {},
        "images": [{"id": image, "file_name": f"{image}.png"} for image in range(1, 8)],
        "annotations": [{"id": 100 + place, **box} for place, box in enumerate(boxes)],
        "categories": [{"id": 7, "name": "owl"}, {"id": 90, "name": "ape"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    (code,) = python_blocks("docs/your-data.md")
    exec(code.replace("test_fraction=0.1", "test_fraction=0"), {"__name__": "page"})
    split = load_index(tmp_path / "out" / "data").split("train")
    paths = split.column("path").cells.to_pylist()
    named = [split.class_name(int(label)) for label in split.labels]
    found = dict(zip(paths, named, strict=True))
    owl_or_ape = {f"{image}.png": {90: "ape", 7: "owl"}[kind] for image, kind in kinds.items()}
    assert found == {**owl_or_ape, "7.png": None}


def test_the_map_for_maintainers_names_files_that_exist():
    part = TEXTS["docs/architecture.md"].partition("## If you want to change")[2]
    rows = [line for line in part.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for line in rows:
        files = re.findall(r"`(sslpipe/[\w/]+\.py)`", line)
        assert len(files) == 2, line
        assert all((ROOT / file).is_file() for file in files), line


def defined_in(file: Path) -> set[str]:
    """What a module defines: NAME, Class and Class.attribute."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        own = names_of(node)
        names |= own
        if isinstance(node, ast.ClassDef):
            inner = {name for each in node.body for name in names_of(each)}
            names |= inner | {f"{node.name}.{name}" for name in inner}
    return names


def names_of(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_architecture_page_names_what_its_files_define():
    """A file is there; a name is a package, a setting, a command, or of a file named beside it."""
    page = prose(TEXTS["docs/architecture.md"])
    settings = {"loss.temperature", "data.batch_size", "data.micro_batch", "[loss]", "kind"}
    commands = {"sslpipe", "sslpipe train", "evaluate suite", "check", "preview"}
    seen = 0
    for paragraph in re.split(r"\n(?=\n|\|)", page):
        names = re.findall(r"`([^`]+)`", paragraph)
        paths = [name for name in names if re.search(r"/|\.pyi?$", name)]
        files = [(top / path) for path in paths for top in (ROOT, ROOT / "sslpipe")]
        there = [file for file in files if file.exists()]
        assert len(there) == len(paths), (paths, there)
        defined = {name for file in there if file.suffix == ".py" for name in defined_in(file)}
        for name in {*names} - {*paths} - settings - commands:
            module = name.removeprefix("sslpipe.")
            known = [ROOT / "sslpipe" / f"{module}.py", ROOT / "sslpipe" / module, ROOT / name]
            assert name in defined or any(each.exists() for each in known), (name, paragraph)
            seen += name in defined
    assert seen >= 20


def figures(name: str) -> list[dict]:
    tree = json.loads((ROOT / "docs" / "measured" / name).read_text())
    return tree.get("records") or tree.get("results") or [tree]


def row(text: str, begin: str) -> str:
    """The line of a table that begins so."""
    return next(line for line in text.splitlines() if line.startswith(f"| {begin}"))


def view_speeds(case: str, machine: str = "") -> tuple[float, float, float, float]:
    """Images a second: ours, the faster of kornia's two ways, torchvision with PIL, lightly."""
    speed = {
        r["contender"]: r["images_per_s"]
        for r in figures(f"views_speed{machine}.json")
        if r["case"].startswith(case)
    }
    kornia = max(speed["kornia, slice"], speed["kornia, resample"])
    return speed["ours"], kornia, speed.get("torchvision, PIL", 0.0), speed["lightly"]


MACHINES = ("", "_xeon")  # whose figures the README shows, from the lowest to the highest


def span(measured: list[float], digits: str = ",.0f") -> str:
    """As "67 to 79"; one number where both are the same."""
    return " to ".join(dict.fromkeys(format(each, digits) for each in sorted(measured)))


def test_the_headline_figures_are_those_that_were_measured():
    text = TEXTS["README.md"]
    line, shares = row(text, "NT-Xent"), []
    for machine in MACHINES:
        records = figures(f"nt_xent{machine}.json")
        loss = {(r["rows"], r["contender"]): r for r in records}
        ours, peer = loss[8192, "ours"], loss[8192, "lightly"]
        shares.append(100 * ours["floor_ms"] / ours["ms"])
        assert 7 < peer["ms"] / ours["ms"] < 14
        assert round(ours["extra_mb"]) <= 14
        assert f"lightly: {peer['extra_mb']:,.0f} MB" in line
    assert f"{span(shares)} % of the limit |" in line
    assert "7 to 14 x" in line

    line = row(text, "two views")
    ours, kornia, _, lightly = zip(*(view_speeds("500x375", m) for m in MACHINES), strict=True)
    assert f"| {span(ours)} |" in line
    assert f"kornia {span(kornia)}, lightly {span(lightly)}" in line

    steps = [figures(f"step_speed{machine}.json")[0]["seconds"] for machine in MACHINES]
    line = row(text, "step")
    shares = [100 * each["bare encoder, fp32"] / each["ours, fp32"] for each in steps]
    assert f"| {span(shares)} % of the encoder alone" in line
    naive = [100 * each["ours, fp32"] / each["naive"] for each in steps]
    assert f"kornia, lightly: {span(naive)} %" in line

    (full,) = figures("test-full.json")
    kills = full["kills"]
    assert f"{kills['survived']} of {kills['kills']}" in row(text, "kills")
    inputs = sum(sum(full[key].values()) for key in full if key.startswith("fuzz_"))
    assert f"{inputs:,}:" in row(text, "damaged")


def shown_percent(row: dict) -> str:
    low, high = row["interval95"]
    return f"{100 * row['value']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def test_the_demos_numbers_are_those_that_it_ended_with():
    measured = json.loads((ROOT / "docs" / "measured" / "demo.json").read_text())
    names = {"ssl": "pretrained", "pixels": "raw pixels", "random": "random weights"}
    cells = {
        (features_name(each, names[each["features"]]), each["column"]): each
        for each in measured["rows"]
    }
    # the whole table of the quickstart
    text = TEXTS["docs/quickstart.md"].replace("**", "")
    for name in dict.fromkeys(name for name, _ in cells):
        shown = [
            shown_percent(cells[name, column]) if (name, column) in cells else ""
            for column in ("kNN", "kNN, 100/class", "kNN, 10/class", "linear")
        ]
        assert [cell.strip() for cell in row(text, f"{name} |").split("|")[2:-1]] == shown
    assert f"training in {measured['precision']}" in text
    # the README's row
    line = row(TEXTS["README.md"], "kNN top-1")
    assert f"| {shown_percent(cells['pretrained', 'kNN'])} |" in line
    for name in ("raw pixels", "random weights"):
        assert f"{name} {100 * cells[name, 'kNN']['value']:.1f}" in line


def test_the_tables_of_performance_are_those_that_were_measured():
    text = TEXTS["benchmarks/README.md"]
    loss = {(r["rows"], r["contender"]): r for r in figures("nt_xent.json")}
    for rows in (128, 512, 2048, 8192, 16384):
        peer = loss[rows, "lightly"]["ms"]
        shown = [f"{peer / loss[rows, name]['ms']:.1f} x" for name in ("textbook", "ours")]
        assert row(text, f"{rows:,} ").startswith(f"| {rows:,} | {' | '.join(shown)} |")
    for begin, case in (("32 px", "32x32"), ("96 px", "96x96"), ("500 x 375", "500x375")):
        ours, *peers = view_speeds(case)
        shown = f"| {ours:,.0f} | {' | '.join(f'{ours / peer:.1f}' for peer in peers)} |"
        assert row(text, begin).endswith(shown)
    (loader,) = (tree["images_per_s"] for tree in figures("loader.json"))
    parts = {"shards to uint8": "decoding", "one crop": "one view", "two crops": "two views"}
    for begin, part in parts.items():
        assert f"| {loader[part]['ours, shards to batches']:,.0f} |" in row(text, begin)
    (step,) = (tree["seconds"] for tree in figures("step_speed.json"))
    for own in (step["ours, fp32"], step["ours, bf16"]):
        assert f"| {own * 1e3:,.0f} | {step['naive'] / own:.1f} |" in text
