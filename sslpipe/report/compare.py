"""Show several runs on one page: what differs, results side by side, curves in one chart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from sslpipe.report.curves import CHARTS, SPEED_CHARTS, charts, few_shot_chart
from sslpipe.report.over_seeds import (
    cautions,
    digest_without_seed,
    group_by_recipe,
    lines,
    over_seeds,
    tests_of,
    verdicts,
)
from sslpipe.report.page import FOOTER, NAMES, flat, html_page, render
from sslpipe.report.results import (
    BASELINES,
    OTHER_MEASURES,
    First,
    first_number,
    result_table,
    summary,
    task_tables,
)
from sslpipe.report.run import RunFiles, Tree


def names_apart(run_dirs: Sequence[Path], runs: Sequence[RunFiles]) -> list[str]:
    """Name each run by its recipe, and by its folder too where recipes have the same name."""
    names = [str(run.recipe["name"]) for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [run_dir.resolve().name for run_dir in run_dirs]
    names = [f"{name} ({folder})" for name, folder in zip(names, folders, strict=True)]
    twice = Counter(names)
    return [f"{name}, {i + 1}" if twice[name] > 1 else name for i, name in enumerate(names)]


def sentences(named: Mapping[str, RunFiles]) -> list[str]:
    """Say what counts for nothing, how far numbers move over seeds, and which recipe is better."""
    recipes = group_by_recipe(named.values())
    return [*cautions(named, recipes), *lines(recipes), *map(str, verdicts(recipes))]


def build_comparison(named: Mapping[str, RunFiles]) -> str:
    """Return the whole HTML file of two runs or more, by names that are all different."""
    recipes = group_by_recipe(named.values())
    several_seeds = any(len(recipe.runs) > 1 for recipe in recipes)
    # a colour for each run, or for each recipe where recipes have several seeds
    kinds = {
        name: digest_without_seed(run) if several_seeds else name for name, run in named.items()
    }
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
    colours = {name: f"var(--series-{places[kind] % 6 + 1})" for name, kind in kinds.items()}
    sections = {
        "What differs": differences(named),
        "Results": results(named, colours),
        "Over seeds": over_seeds(recipes, cautions(named, recipes)),
        "Training": charts(named, CHARTS, colours),
        "Speed": render("runs.speed", named=named) + charts(named, SPEED_CHARTS, colours),
    }
    lead = ["One training each does not tell which recipe is better: see other seeds."]
    opened, footer = ["What differs", "Results"], FOOTER
    if several_seeds:  # what holds for the recipes comes first
        lead = [*map(str, verdicts(recipes))] or [f"{line}." for line in lines(recipes)]
        footer += Markup(" Those under <i>Over seeds</i> are over training seeds.")
        sections = {"Over seeds": sections["Over seeds"], **sections}
        opened.insert(0, "Over seeds")
    title = " against ".join([recipe.name for recipe in recipes] if several_seeds else named)
    head = render(
        "runs.header",
        title=title,
        lead=lead,
        seeds=several_seeds,
        first=first_numbers(named),
        colours=colours,
        summaries={name: summary(run) for name, run in named.items()},
    )
    return html_page(title, head, sections, footer=footer, opened=opened)


def first_numbers(named: Mapping[str, RunFiles]) -> dict[str, First]:
    """Find the first number of each run, {} where fewer than two can be compared by it."""
    every = {name: first_number(run.evaluation) for name, run in named.items()}
    found = {name: first for name, first in every.items() if first is not None}
    kinds = {(first.measure, first.cell["protocol"]) for first in found.values()}
    alike = len(found) > 1 and len(kinds) == 1 and len(tests_of(named.values())) == 1
    return found if alike else {}


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


def results(named: Mapping[str, RunFiles], colours: Mapping[str, str]) -> Markup:
    """Show one table where the runs were evaluated on the same test data, else one for each."""
    evaluated = {name: run.evaluation for name, run in named.items() if run.evaluation}
    apart = len(tests_of(named.values())) > 1
    chart, others, tables = Markup(), Markup(), {}
    if apart:
        tables = {name: result_table(merged({name: tree})) for name, tree in evaluated.items()}
    elif evaluated:
        together = merged(evaluated)
        tables, others = {"": result_table(together)}, task_tables(together)
        shown = {row["features"]: "var(--faint)" for row in together["rows"]} | dict(colours)
        random = [name for name in shown if name.startswith(("random", NAMES["random"]))]
        chart = few_shot_chart(together, shown, whitened=False, dashed=random)
    return render(
        "runs.results",
        evaluated=evaluated,
        apart=apart,
        tables=tables,
        chart=chart,
        others_title=OTHER_MEASURES,
        others=others,
        without=[name for name in named if name not in evaluated],
    )


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
        own = protocols.get(column, {})
        columns += [f"{column}: {each}" for each in own] if len(own) > 1 else [column]
    return {
        "facts": next(iter(evaluations.values()))["facts"],
        "columns": columns,
        "rows": rows,
        "nuisance": _under_names({n: tree.get("nuisance", []) for n, tree in evaluations.items()}),
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
        of_runs = [[row for row in own if row[0] == features] for own in numbers.values()]
        return features not in ("ssl", *tables) and all(own == of_runs[0] for own in of_runs)

    rows: list[Tree] = []
    for name, table in tables.items():
        for row in table:
            whose = row["features"]
            if is_equal(whose):
                rows += [{**row}] * (name == first)
                continue
            shown = name if whose == "ssl" else f"{NAMES.get(whose, whose)} of {name}"
            rows.append({**row, "features": shown, "baseline": whose in BASELINES})
    return rows
