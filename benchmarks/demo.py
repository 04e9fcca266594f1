"""The numbers that `make demo` ends with, as the pages quote them.

    make demo && python -m benchmarks.demo out/demo/run --json docs/measured/demo.json

Nothing is measured here: what eval.json and run.json of the run say is kept, of the table that the
suite prints.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common import parser, save
from sslpipe.recipe.reading import load_recipe

KEPT = ("features", "whitened", "power", "column", "protocol", "value", "interval95")


def figures(run_dir: Path) -> dict[str, Any]:
    """Take the table's numbers from a run of the whole recipe. Raises: SystemExit."""
    recipe, run, evaluation = (
        json.loads((run_dir / f"{name}.json").read_text()) for name in ("recipe", "run", "eval")
    )
    if recipe["name"] != "demo" or recipe["steps"] != load_recipe("recipes/demo.toml").steps:
        raise SystemExit(f"{run_dir} is no run of the whole recipe demo.toml")
    return {
        "command": "make demo",
        "precision": run["precision"],
        "environment": run["environment"],
        "steps": recipe["steps"],
        "rows": [
            {key: row[key] for key in KEPT if key in row}
            for row in evaluation["rows"]
            if row["column"] is not None
        ],
    }


if __name__ == "__main__":
    parse = parser(__doc__)
    parse.add_argument("run_dir", type=Path)
    given = parse.parse_args()
    save(given.json, figures(given.run_dir))
