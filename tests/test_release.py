"""What a release needs agrees with itself: version, citation, extras, typing."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError

import sslpipe
from tests.helpers.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_the_version_is_that_of_the_tag_and_of_files_without_git_the_next_one():
    assert PROJECT["project"]["dynamic"] == ["version"]
    scm = PROJECT["tool"]["setuptools_scm"]
    assert any(each.startswith("setuptools-scm") for each in PROJECT["build-system"]["requires"])
    citation = (ROOT / "CITATION.cff").read_text()
    released = re.search(r"^version: (.*)$", citation, re.MULTILINE)[1]
    assert scm["fallback_version"] == f"{released}.dev0"
    changes = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^The first release, (.*)\.$|^## \[?(\d[\d.]*)", changes, re.MULTILINE)
    assert released in first.groups()
    assert re.fullmatch(scm["tag_regex"], f"v{released}")["version"] == released


def test_the_package_knows_its_version_installed_or_not(monkeypatch):
    assert re.match(r"\d", sslpipe.__version__)

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert sslpipe.__version__ == "0+unknown"


def test_all_is_every_extra_that_a_command_needs():
    tools = {"all", "bench", "dev", "docs", "release"}
    needed = {requirement for name in EXTRAS.keys() - tools for requirement in EXTRAS[name]}
    assert set(EXTRAS["all"]) == needed


def test_types_are_published():
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    assert (ROOT / "sslpipe" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["sslpipe"]
