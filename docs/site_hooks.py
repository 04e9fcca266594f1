"""What the site adds to the pages: files from outside docs/, the API, and all settings.

The README is the home page, notebooks are shown as text and code, and links between files are
rewritten to where the site has them. Settings are listed from their own documentation, so that no
page repeats it.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from json import dumps, loads
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import sslpipe
from sslpipe.cli.explain import meanings, sections
from sslpipe.recipe.reading import recipe_models
from sslpipe.registry.schema import kinds_of

ROOT = Path(__file__).parents[1]
OUTSIDE = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "launch.md": "launch/README.md",
    "performance.md": "benchmarks/README.md",
    "slurm.md": "slurm/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "faults.md": "tests/faults.md",
    "changelog.md": "CHANGELOG.md",
}
NOTEBOOKS = {  # page of the site -> notebook, shown as text and code
    "search-engine.md": "docs/notebooks/search_engine.ipynb",
    "did-it-help.md": "docs/notebooks/did_it_help.ipynb",
}
API = {  # page of the site, generated -> its title and first sentence
    "api.md": (
        "API reference",
        "What a notebook needs is in `sslpipe` itself, imported when it is first used.",
    ),
    "api-metric.md": (
        "API reference: metric learning",
        "Every loss, head and miner, with its formula, arguments and paper.",
    ),
}
MORE = (  # what public names return or are built on
    "sslpipe.check.outcome.Check",
    "sslpipe.sharding.build.Built",
    "sslpipe.export.model.FrozenBackbone",
    "sslpipe.augment.spec.ViewSpec",
    "sslpipe.losses.base.Objective",
    "sslpipe.losses.base.InBatchLoss",
    "sslpipe.evaluation.result.Result",
    "sslpipe.evaluation.embed.Embeddings",
    "sslpipe.metric_learning.losses.metric_loss.MetricLoss",
    "sslpipe.metric_learning.heads.head.Head",
    "sslpipe.search.gallery.Gallery",
    "sslpipe.errors",
)
METRIC = ("losses.pair", "losses.triplet", "losses.tuplet", "losses.clusters", "losses.multi_label")
METRIC += ("heads.margin_softmax", "heads.proxies", "miners", "pk_sampler")
PAGES = {file: page for page, file in (OUTSIDE | NOTEBOOKS).items()}
SETTINGS = "<!-- all settings -->"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages out of the navigation that are not written yet."""
    for entries in (entry for group in config.nav or [] for entry in group.values()):
        if isinstance(entries, list):
            there = [
                entry
                for entry in entries
                for page in entry.values()
                if page in OUTSIDE | NOTEBOOKS | API or (ROOT / "docs" / page).exists()
            ]
            entries[:] = there
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are files outside docs/, and the notebooks."""
    for page, file in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    for page, file in NOTEBOOKS.items():
        files.append(File.generated(config, page, content=notebook_page(ROOT / file)))
    for page, (title, opening) in API.items():
        text = "\n\n".join([f"# {title}", opening, *api_entries(page)])
        files.append(File.generated(config, page, content=text))
    for kind, model in recipe_models().items():  # for editors
        schema = dumps(model.model_json_schema(), indent=1)
        files.append(File.generated(config, f"schema/{kind}.json", content=schema))
    return files


def api_entries(page: str) -> Iterator[str]:
    """Yield what mkdocstrings fills in, under a heading for each package or module."""
    if page == "api-metric.md":
        for module in METRIC:
            yield f"## {module}"
            yield f"::: sslpipe.metric_learning.{module}"
        return
    public = [getattr(sslpipe, name) for name in dir(sslpipe)]
    entries = [f"{each.__module__}.{each.__qualname__}" for each in public]
    for package, names in groupby(sorted({*entries, *MORE}), lambda name: name.split(".")[1]):
        yield f"## {package}"
        yield from (f"::: {name}" for name in names)


def notebook_page(file: Path) -> str:
    """Write a notebook's cells and outputs as Markdown; the notebook itself can be downloaded."""
    parts = []
    for cell in loads(file.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append("```text\n" + "".join(output["text"]) + "```")
            else:
                picture = "".join(output["data"]["image/jpeg"])
                parts.append(f'<img alt="" src="data:image/jpeg;base64,{picture}">')
    link = f"<a href='../notebooks/{file.name}' download>Download this notebook</a>"
    parts.insert(1, f"{link}, and run it with Jupyter from a clone.")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to where the site has their targets; put the settings in."""
    origin = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        there = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({there}{'#' * bool(anchor)}{anchor})"

    markdown = re.sub(r"\]\(([^)\s]+)\)", rewrite, markdown)
    return markdown.replace(SETTINGS, "\n".join(settings_tables()))


def settings_tables() -> Iterator[str]:
    """Yield the lines of a table for each section of every kind of recipe."""
    for title, recipe in recipe_models().items():
        yield f"\n## Settings of a {title}\n"
        plain = {
            name: field for name, field in recipe.model_fields.items() if _section(field) is None
        }
        yield from _table("at the top of the file", plain)
        for name, field in recipe.model_fields.items():
            section = _section(field)
            if section is not None:
                yield f"\n**[{name}]** {field.description or ''}\n"
                yield from _table(name, section.model_fields)
    yield "\n## Settings of the kinds\n"
    for name, kinds in sections().items():
        yield f"\n**[{name}]**\n"
        yield "| setting | meaning |"
        yield "|---|---|"
        for setting, lines in meanings(name, kinds).items():
            yield f"| `{name}.{setting}` | {_cell('<br>'.join(lines))} |"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section without a `kind`; None for all others."""
    if kinds_of(field) is not None:
        return None
    options = getattr(field.annotation, "__args__", (field.annotation,))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _table(title: str, fields: Mapping[str, Any]) -> Iterator[str]:
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    prefix = f"{title}." if " " not in title else ""
    for name, field in fields.items():
        if field.is_required():
            default = "needed"
        else:
            value = field.get_default(call_default_factory=True)
            default = "" if value is None or isinstance(value, BaseModel) else f"`{dumps(value)}`"
        yield f"| `{prefix}{name}` | {default} | {_cell(field.description or '')} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
