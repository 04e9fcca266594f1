"""What a release needs agrees with itself: version, citation, extras, typing."""

import re
import tomllib

import sslpipe
from tests.helpers.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_package_project_and_citation_name_one_version():
    assert PROJECT["project"]["version"] == sslpipe.__version__
    text = (ROOT / "sslpipe" / "__init__.py").read_text()
    assert f'\n__version__ = "{sslpipe.__version__}"\n' in text  # as the release workflow looks
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == sslpipe.__version__


def test_all_is_every_extra_that_a_command_needs():
    tools = {"all", "bench", "dev", "docs", "release"}
    needed = {requirement for name in EXTRAS.keys() - tools for requirement in EXTRAS[name]}
    assert set(EXTRAS["all"]) == needed


def test_types_are_published():
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    assert (ROOT / "sslpipe" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["sslpipe"]
