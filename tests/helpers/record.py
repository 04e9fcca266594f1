"""What the long tests counted, for docs: one JSON file of all, with where and when.

python -m tests.helpers.record out/test-full docs/measured/test-full.json
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch


def record(name: str, facts: dict[str, Any]) -> None:
    """Keep what a test counted, where the environment's SSLPIPE_TEST_RECORD asks for it."""
    if folder := os.environ.get("SSLPIPE_TEST_RECORD"):
        Path(folder, f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def main(folder: Path, out: Path) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    actual = {
        "command": "make test-full",
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        **{path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))},
    }
    out.write_text(json.dumps(actual, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
