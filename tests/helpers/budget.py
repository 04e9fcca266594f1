"""Lines of each package of the library beside its budget: a number to look at, no test.

python -m tests.helpers.budget
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = {  # lines of Python, docstrings included; packages that are read together count together
    "evaluation": 5000,
    "metric_learning": 4600,
    "run": 4600,
    "sharding data": 7200,
    "cli": 3800,
    "curate": 1800,
    "augment": 3700,
    "report": 1700,
    "export weights": 3500,
    "losses models optim": 4000,
    "recipe registry check": 2500,
    "": 1500,  # files that are in no package
}


def lines(paths: list[Path]) -> int:
    """Count the lines of all files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def main() -> None:
    library = ROOT / "sslpipe"
    total = 0
    for names, budget in BUDGET.items():
        folders = [library / name for name in names.split()]
        files = [file for folder in folders for file in folder.rglob("*.py")]
        count = lines(files or list(library.glob("*.py")))
        total += count
        over = f"  {count / budget - 1:+.0%}" if count > budget else ""
        print(f"{names.replace(' ', ', ') or 'loose files':<24} {count:6,} of {budget:6,}{over}")
    print(f"{'sslpipe':<24} {total:6,} of {sum(BUDGET.values()):6,}")
    for name in ("tests", "benchmarks"):
        print(f"{name:<24} {lines([*(ROOT / name).rglob('*.py')]):6,}")


if __name__ == "__main__":
    main()
