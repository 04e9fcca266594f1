"""What a release must agree on, and the repository's address, which is written by one command.

python -m tests.helpers.release check DIST    the version of the files in DIST, where they are a
                                              release, is that of citation and changelog
python -m tests.helpers.release address URL   the address in each place that names it
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNKNOWN = "REPOSITORY"
# file -> the line that names the address, as a comment until it is known
PLACES = {
    "README.md": "git clone {} sslpipe && cd sslpipe",
    "docs/quickstart.md": "git clone {} sslpipe && cd sslpipe",
    "mkdocs.yml": "repo_url: {}",
    "pyproject.toml": 'Repository = "{}"',
    "CITATION.cff": 'repository-code: "{}"',
}


def pattern(line: str) -> re.Pattern[str]:
    """The whole line, its address as group 1."""
    before, after = (re.escape(part) for part in line.split("{}"))
    return re.compile(rf'^(?:# )?{before}([^\s"]+){after}( +#.*)?$', re.MULTILINE)


def addresses(root: Path = ROOT) -> dict[str, str]:
    """The address that each file names."""
    return {
        name: pattern(line).search((root / name).read_text())[1] for name, line in PLACES.items()
    }


def write_address(url: str, root: Path = ROOT) -> None:
    """Put the address into all places, instead of none or an earlier one."""
    if not re.fullmatch(r"https://[\w.:/@~%+-]+[\w~]", url):
        sys.exit(f"URL={url}: no address https://... without a slash at its end")
    for name, line in PLACES.items():
        text, count = pattern(line).subn(line.format(url), (root / name).read_text())
        assert count == 1, f"{name}: {count} lines {line}"
        (root / name).write_text(text)


def faults(dist: Path, root: Path = ROOT) -> list[str]:
    """Say in a line each what keeps the files in `dist` from being a release."""
    sdists = [path.name[8:-7] for path in dist.glob("sslpipe-*.tar.gz")]
    wheels = [path.name[8:-17] for path in dist.glob("sslpipe-*-py3-none-any.whl")]
    if len(sdists) != 1 or sdists != wheels:
        return [f"{dist}: not one sdist and one wheel of one version: {sdists}, {wheels}"]
    version = sdists[0]
    if re.search(r"\.dev|\+", version):
        print(f"sslpipe {version}: no release, as the commit has no tag or files have changed")
        return []
    found = []
    citation = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)[1]
    if citation != version:
        found.append(f"CITATION.cff: version is {citation}, not {version}")
    changes = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", changes[0]):
        found.append(f"CHANGELOG.md: the first heading is {changes[0]!r}, not '{version} - DATE'")
    unknown = [name for name, url in addresses(root).items() if url == UNKNOWN]
    if unknown:
        found.append(f"{', '.join(unknown)}: no address yet; run `make address URL=https://...`")
    return found


if __name__ == "__main__":
    if sys.argv[1] == "address":
        write_address(sys.argv[2])
    else:
        sys.exit("\n".join(faults(Path(sys.argv[2]))) or 0)
