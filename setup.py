"""Put the recipes into the package, and make its long description of README.md.

All other metadata are in pyproject.toml. Recipes lie in `sslpipe/recipes` of a wheel. A registry
shows the description at another address than the repository's, where links to files of the
repository would lead nowhere.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")


def long_description(text: str, url: str | None) -> str:
    """Let each link to a file of the repository lead there from anywhere.

    Args:
        text: README.md.
        url: The repository's address, on GitHub or GitLab; None: not known, and a link becomes its
            text, and a picture nothing.
    """

    def absolute(link: re.Match[str]) -> str:
        if url is None:
            return "" if link["image"] else link["text"]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({url}/{kind}/HEAD/{link['path']})"

    return _LINK.sub(absolute, text)


class BuildWithRecipes(build_py):
    """Copy recipes/ beside the modules, but for an editable installation, which has the clone's."""

    def run(self) -> None:
        """Build the modules, then copy."""
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "sslpipe"
            recipes = Path(__file__).parent / "recipes"
            shutil.copytree(recipes, package / "recipes", dirs_exist_ok=True)


if __name__ == "__main__":
    root = Path(__file__).parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        cmdclass={"build_py": BuildWithRecipes},
        long_description=long_description(
            (root / "README.md").read_text(encoding="utf-8"),
            project.get("urls", {}).get("Repository"),
        ),
        long_description_content_type="text/markdown",
    )
