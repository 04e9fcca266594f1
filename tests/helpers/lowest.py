"""The lowest supported version of every direct dependency, as pins for pip.

python -m tests.helpers.lowest > lowest.txt && pip install -r lowest.txt
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in dict.fromkeys([*project["dependencies"], *extras["dev"]]):
    name, lowest, marker = re.fullmatch(
        r"([\w\[\],.-]+?)[>=]=([\w.]+)\s*(;.*)?", requirement
    ).groups()
    print(f"{name}=={lowest}{' ' + marker if marker else ''}")
