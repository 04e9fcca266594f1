"""How well scores rank checkpoints by kNN, and what is lost by choosing with them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.common import print_table
from sslpipe.evaluation.label_free import SCORES

START = "random weights"  # the row of a network that was not trained
WITH_LABELS = "holdout_knn"  # of the same images: what labels would choose
ROWS = (*SCORES, WITH_LABELS)
# the goal, on each data set
LEAST_SPEARMAN, MOST_REGRET = 0.8, 0.5

Tree = dict[str, Any]
Floats = NDArray[np.float64]


def rank_correlations(columns: Floats, values: Floats) -> Floats:
    """Compute Spearman's correlation of each column (N, C) with values (N,)."""
    ranks = rankdata(np.column_stack([values, columns]), axis=0)
    correlations: Floats = np.corrcoef(ranks, rowvar=False)[0, 1:]
    return np.nan_to_num(correlations)  # of a constant column


def table(checkpoints: list[Tree], data: str) -> Tree:
    """Compare each score with kNN on one data set."""
    here = [row for row in checkpoints if row["data"] == data]
    start = next((row["knn"] for row in here if row["run"] == START), 0.0)
    rows = [row for row in here if row["run"] != START]
    runs = [[row for row in rows if row["run"] == run] for run in {row["run"]: 0 for row in rows}]
    last = [run[-1] for run in runs]
    tree: Tree = {"runs": len(runs), "checkpoints": len(rows), "random weights": start}
    if len(runs) < 3:
        return tree
    tree["failed"] = [row["run"] for row in last if row["knn"] <= start]
    tree["best"] = max(row["knn"] for row in rows)
    healthy = [run for run in runs if run[-1]["knn"] > start]
    tree["last"] = {
        "regret within runs": regrets_within(runs, lambda run: run[-1]),
        "regret within healthy runs": regrets_within(healthy, lambda run: run[-1]),
    }
    for name in (name for name in ROWS if name in rows[0]):
        chosen = best_by(last, name)
        tree[name] = {
            "spearman": spearman(rows, name),
            "spearman of last": spearman(last, name),
            "spearman within runs": float(np.mean([spearman(run, name) for run in runs])),
            "regret among last": points(max(row["knn"] for row in last) - chosen["knn"]),
            "regret among all": points(tree["best"] - best_by(rows, name)["knn"]),
            "regret within runs": regrets_within(runs, lambda run, name=name: best_by(run, name)),
            "regret within healthy runs": regrets_within(
                healthy, lambda run, name=name: best_by(run, name)
            ),
            "picked": f"{chosen['run']}",
            "picked failed": chosen["knn"] <= start,
        }
        tree[name]["reaches the goal"] = reaches(tree[name])
    return tree


def reaches(score: Tree) -> bool:
    """Tell whether a score may choose by itself, as far as this data set goes."""
    regrets = (score["regret among all"], score["regret within runs"][0])
    return (
        score["spearman"] >= LEAST_SPEARMAN
        and max(regrets) <= MOST_REGRET
        and not score["picked failed"]
    )


def best_by(rows: list[Tree], name: str) -> Tree:
    """The checkpoint with the highest score; of equal ones the later."""
    return max(reversed(rows), key=lambda row: row[name])


def spearman(rows: list[Tree], name: str) -> float:
    """Rank correlation with kNN; 0 where one of the two is always the same."""
    scores, knn = (np.array([row[key] for row in rows]) for key in (name, "knn"))
    with np.errstate(invalid="ignore"):
        return float(rank_correlations(scores[:, None], knn)[0])


def regrets_within(runs: list[list[Tree]], choose: Callable[[list[Tree]], Tree]) -> list[float]:
    """Mean and largest regret of choosing a step within a run, in points."""
    regrets = [points(max(row["knn"] for row in run) - choose(run)["knn"]) for run in runs] or [0.0]
    return [float(np.mean(regrets)), max(regrets)]


def points(share: float) -> float:
    return round(100 * share, 2)


def show(tables: dict[str, Tree]) -> None:
    """Print a table for each data set."""
    for data, tree in tables.items():
        print(f"\n{data}: {tree['runs']} runs, {tree['checkpoints']} checkpoints, ", end="")
        print(f"random weights {100 * tree['random weights']:.1f}")
        if "best" not in tree:
            continue
        print(f"best {100 * tree['best']:.1f}; failed: {', '.join(tree['failed']) or 'none'}")
        columns, rows = list(tree["rankme"])[:-2], []  # two are said beside what is picked
        for name in (each for each in ROWS if each in tree):
            cells = [name, *(text(tree[name][key]) for key in columns)]
            cells[-1] += " (failed)" if tree[name]["picked failed"] else ""
            cells[-1] += " *" if tree[name]["reaches the goal"] else ""
            rows.append(cells)
        last = ["last", *[""] * 5, *map(text, tree["last"].values()), ""]
        print_table(["score", *columns], [*rows, last])


def text(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(f"{each:.2f}" for each in value)
    return value if isinstance(value, str) else f"{value:.2f}"
