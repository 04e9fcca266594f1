"""What a release needs agrees with itself: version, citation, extras, typing."""

import re
import runpy
import shutil
import tomllib
from importlib.metadata import PackageNotFoundError

import pytest
import yaml
from setuptools import Distribution

import sslpipe
from tests.helpers import release
from tests.helpers.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_the_version_is_that_of_the_tag_and_of_files_without_git_the_next_one():
    assert "version" in PROJECT["project"]["dynamic"]
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
    tools = {"all", "bench", "dev", "docs"}
    needed = {requirement for name in EXTRAS.keys() - tools for requirement in EXTRAS[name]}
    assert set(EXTRAS["all"]) == needed


@pytest.fixture
def copy(tmp_path):
    """The files that a release must agree on, alone."""
    for name in ("CHANGELOG.md", *release.PLACES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_places_name_the_same_repository():
    assert len(set(release.addresses().values())) == 1


def test_the_address_is_written_once_for_all_places_and_again(copy):
    for url in ("https://forge.example/them/sslpipe", "https://else.example/us/sslpipe"):
        release.write_address(url, copy)
        project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
        assert project["urls"] == {"Repository": url}
        assert yaml.safe_load((copy / "CITATION.cff").read_text())["repository-code"] == url
        assert f"\nrepo_url: {url}\n" in (copy / "mkdocs.yml").read_text()
        for page in ("README.md", "docs/quickstart.md"):
            assert f"\ngit clone {url} sslpipe && cd sslpipe\n" in (copy / page).read_text()
    assert not [name for name in release.PLACES if "REPOSITORY" in (copy / name).read_text()]


@pytest.fixture(scope="module")
def description():
    """The function of setup.py; nothing is set up."""
    return runpy.run_path(str(ROOT / "setup.py"))["long_description"]


def targets(text):
    return re.findall(r"\]\(([^)]*)\)", text)


def test_the_long_description_links_to_files_of_the_repository(description):
    text, url = (ROOT / "README.md").read_text(), "https://forge.example/them/sslpipe"
    after = targets(description(text, url))
    assert len(after) > 30
    for before, target in zip(targets(text), after, strict=True):
        kind = "raw" if before.endswith(".png") else "blob"  # a picture
        elsewhere = before.startswith("https://")
        assert target == (before if elsewhere else f"{url}/{kind}/HEAD/{before}")


def test_without_an_address_the_long_description_links_to_nothing_that_is_not_there(description):
    text = (ROOT / "README.md").read_text()
    plain = description(text, None)
    assert targets(plain) == [target for target in targets(text) if target.startswith("https://")]
    assert "quickstart explains them." in " ".join(plain.split())
    assert "![" not in plain


@pytest.mark.parametrize("url", ["", "git@forge.example:us/sslpipe", "https://a.example/b/"])
def test_what_is_no_address_is_refused(url, copy):
    with pytest.raises(SystemExit, match=r"no address https://\.\.\."):
        release.write_address(url, copy)


def test_a_release_says_what_does_not_agree_and_a_build_between_releases_is_none(copy, capsys):
    dist = copy / "dist"
    (copy / "CITATION.cff").write_text('version: 0.1.0\nrepository-code: "https://a.example/b"\n')
    (copy / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-12-31\n")
    (copy / "README.md").write_text("git clone REPOSITORY sslpipe && cd sslpipe    # or a fork\n")

    def built(sdist, wheel):
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir()
        (dist / f"sslpipe-{sdist}.tar.gz").touch()
        (dist / f"sslpipe-{wheel}-py3-none-any.whl").touch()
        return release.faults(dist, copy)

    assert built("0.1.1.dev3+gabc", "0.1.1.dev3+gabc") == []
    assert "no release" in capsys.readouterr().out
    assert "not one sdist and one wheel of one version" in built("0.2.0", "0.1.0")[0]
    citation, changes, address = built("0.2.0", "0.2.0")
    assert citation == "CITATION.cff: version is 0.1.0, not 0.2.0"
    assert changes == "CHANGELOG.md: the first heading is 'Unreleased', not '0.2.0 - DATE'"
    assert address.startswith("README.md")
    assert "make address" in address

    release.write_address("https://forge.example/us/sslpipe", copy)
    for name, old, new in (
        ("CITATION.cff", "version: 0.1.0", "version: 0.2.0"),
        ("CHANGELOG.md", "## Unreleased", "## 0.2.0 - 2027-01-31"),
    ):
        (copy / name).write_text((copy / name).read_text().replace(old, new))
    assert built("0.2.0", "0.2.0") == []


def test_a_build_of_the_package_has_all_recipes(tmp_path):
    command = runpy.run_path(str(ROOT / "setup.py"))["BuildWithRecipes"](Distribution())
    command.ensure_finalized()
    command.build_lib = str(tmp_path)
    for is_editable in (True, False):
        assert not [*tmp_path.iterdir()]
        command.editable_mode = is_editable
        command.run()
    built = tmp_path / "sslpipe" / "recipes"
    files = {path.relative_to(built): path.read_bytes() for path in built.rglob("*.toml")}
    recipes = ROOT / "recipes"
    assert files == {p.relative_to(recipes): p.read_bytes() for p in recipes.rglob("*.toml")}
