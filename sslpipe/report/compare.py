"""Show several runs on one plain page: their results side by side, and what differs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from sslpipe.evaluation.comparison import BASELINES
from sslpipe.files import Tree
from sslpipe.report.page import NAMES, flat, html_page, render
from sslpipe.report.result_tables import result_table, unfinished_text
from sslpipe.report.run_files import RunFiles

SUITE = "sslpipe evaluate suite RUN --data DIR/dataset.json --out RUN/eval.json"
SAME_TEST = ("data_sha256", "split", "train_split")  # metadata that two results must share


def names_apart(run_dirs: Sequence[Path], runs: Sequence[RunFiles]) -> list[str]:
    """Name each run by its recipe, and by its folder too where recipes have the same name."""
    names = [str(run.recipe["name"]) for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [run_dir.resolve().name for run_dir in run_dirs]
    names = [f"{name} ({folder})" for name, folder in zip(names, folders, strict=True)]
    twice = Counter(names)
    return [f"{name}, {i + 1}" if twice[name] > 1 else name for i, name in enumerate(names)]


def build_comparison(named: Mapping[str, RunFiles]) -> str:
    """Return the whole HTML file of two runs or more, by names that are all different."""
    sections = {"Results": results(named), "What differs": differences(named)}
    head = render("runs.header", title=" and ".join(named))
    return html_page(" and ".join(named), head, sections, opened=list(sections))


def differences(named: Mapping[str, RunFiles]) -> Markup:
    """Tabulate settings, data and environment that are not the same in all runs."""
    trees = []
    for run in named.values():
        recipe = {k: v for k, v in run.recipe.items() if k != "name"}
        machine = {k: v for k, v in run.environment.items() if k != "command"}
        trees.append(dict(flat({"recipe": recipe, "data set": run.data, "machine": machine})))
    keys = dict.fromkeys(key for tree in trees for key in tree)
    rows = [(key, *(tree.get(key, "–") for tree in trees)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return render("runs.differences", names=list(named), rows=rows)


def results(named: Mapping[str, RunFiles]) -> Markup:
    """Show one table where the runs were evaluated on the same test data, else one for each."""
    evaluated = {name: run.evaluation for name, run in named.items() if run.evaluation}
    tests = {
        tuple(run.metadata.get(key) for key in SAME_TEST)
        for run in named.values()
        if run.evaluation
    }
    apart = len(tests) > 1
    tables = {}
    if apart:
        tables = {name: result_table(merged({name: tree})) for name, tree in evaluated.items()}
    elif evaluated:
        tables = {"": result_table(merged(evaluated))}
    notes = []
    for name, run in named.items():
        if name not in evaluated:
            command = SUITE if run.data["classes"] else ""  # which needs labels
            notes.append((f"{name} has not been evaluated.", command))
        elif text := unfinished_text(run):
            notes.append((f"{name}: {text}", ""))
    return render("runs.results", apart=apart, tables=tables, notes=notes)


def merged(evaluations: Mapping[str, Tree]) -> Tree:
    """Merge the eval.json of several runs, with each run's features under its name.

    A baseline that is the same for all stands once. A column whose protocols differ is split, a
    column for each protocol.
    """
    rows = _under_names({name: tree["rows"] for name, tree in evaluations.items()})
    protocols: dict[str, dict[str, None]] = {}  # of each column
    for row in rows:
        protocols.setdefault(row["column"], {})[row["protocol"]] = None
    for row in rows:
        if len(protocols[row["column"]]) > 1 and row["column"] is not None:
            row["column"] = f"{row['column']}: {row['protocol']}"
    columns = []
    for column in dict.fromkeys(c for tree in evaluations.values() for c in tree["columns"]):
        of_column = protocols.get(column, {})
        columns += [f"{column}: {each}" for each in of_column] if len(of_column) > 1 else [column]
    return {
        "facts": next(iter(evaluations.values()))["facts"],
        "columns": columns,
        "rows": rows,
        "left_out": [
            f"{n}: {text}" for n, tree in evaluations.items() for text in tree["left_out"]
        ],
    }


def _under_names(tables: Mapping[str, Sequence[Tree]]) -> list[Tree]:
    """Join a table of several runs, with each run's features under its name."""
    first, *_ = tables
    # what was measured of the features of others, by run: equal baselines stand once
    numbers = {
        name: [(row["features"], row["whitened"], row["protocol"], row["value"]) for row in table]
        for name, table in tables.items()
    }

    def is_equal(features: str) -> bool:
        of_runs = [[row for row in table if row[0] == features] for table in numbers.values()]
        return features not in ("ssl", *tables) and all(each == of_runs[0] for each in of_runs)

    rows: list[Tree] = []
    for name, table in tables.items():
        for row in table:
            features = row["features"]
            if is_equal(features):
                if name == first:
                    rows.append({**row})
                continue
            shown = name if features == "ssl" else f"{NAMES.get(features, features)} of {name}"
            rows.append({**row, "features": shown, "baseline": features in BASELINES})
    return rows
