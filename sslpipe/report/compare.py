"""Show several runs on one page: what differs, results side by side, and what holds over seeds."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from sslpipe.evaluation.difference import Difference, holm, mean_over_seeds, paired_seeds
from sslpipe.evaluation.verdict import KNN, LEVEL, LINEAR, RECALL
from sslpipe.recipe import parse_recipe
from sslpipe.report.charts import CHARTS, SPEED_CHARTS, charts, few_shot_chart
from sslpipe.report.page import FOOTER, NAMES, flat, html_page, percent, render
from sslpipe.report.results import (
    BASELINES,
    OTHER_MEASURES,
    First,
    first_number,
    result_table,
    summary,
    task_tables,
    unfinished_text,
)
from sslpipe.report.run import RunFiles, Tree

SAME_TEST = ("data_sha256", "split", "train_split")  # metadata that two results must share
# the first that both recipes have; Recall@1 where train has not test's classes
DECIDING = (KNN, LINEAR, RECALL)


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


class Recipe(NamedTuple):
    """Runs of one recipe that differ in their seed alone."""

    name: str  # with settings where another recipe has the same name
    runs: dict[int, dict[str, Tree]]  # seed -> "kNN", "flattened kNN" and so on -> row of eval.json

    def statistics(self, measure: str) -> tuple[float, float, tuple[float, float]] | None:
        """Mean, spread and interval; None where two seeds have not the same protocol."""
        rows = [run[measure] for run in self.runs.values() if measure in run]
        if len(rows) < 2 or len({row["protocol"] for row in rows}) > 1:
            return None
        return mean_over_seeds([row["value"] for row in rows])


class Verdict(NamedTuple):
    """One recipe against another on the deciding number."""

    ours: str  # names of the recipes
    theirs: str
    measure: str  # "kNN", "linear" or "Recall@1"
    means: tuple[float, float]  # over the seeds that both have
    difference: Difference
    answer: str = "no clear difference"  # or "better", "worse": for all pairs together (Holm, 5 %)

    def __str__(self) -> str:
        (low, high), (ours, theirs) = self.difference.interval95, self.means
        clear = self.answer in ("better", "worse")
        relation = f"is {self.answer} than" if clear else "is not clearly different from"
        return (
            f"{self.ours} {relation} {self.theirs}: {self.measure} {percent(ours)} against "
            f"{percent(theirs)} % ({percent(self.difference.value, True)} points over "
            f"{self.difference.number} seeds, 95 % interval {percent(low, True)} to "
            f"{percent(high, True)})."
        )


def group_by_recipe(runs: Iterable[RunFiles]) -> list[Recipe]:
    """Put evaluated runs together that differ in their seed alone: weights, data and all settings.

    Of two runs with one recipe and one seed the first counts: their weights are the same. Empty
    where the runs were not evaluated on the same test data.
    """
    evaluated = [run for run in runs if run.evaluation is not None]
    if len(tests_of(evaluated)) > 1:
        return []
    groups: dict[str, list[RunFiles]] = {}
    for run in evaluated:
        groups.setdefault(digest_without_seed(run), []).append(run)
    recipes = [Recipe(name, {}) for name in _names(list(groups.values()))]
    for recipe, members in zip(recipes, groups.values(), strict=True):
        for run in members:
            recipe.runs.setdefault(int(run.recipe["seed"]), _own_numbers(run))
    return recipes


def tests_of(runs: Iterable[RunFiles]) -> set[tuple[Any, ...]]:
    """The test data that evaluated runs were evaluated on."""
    return {tuple(run.facts.get(key) for key in SAME_TEST) for run in runs if run.evaluation}


def digest_without_seed(run: RunFiles) -> str:
    """Compute what two runs have in common that differ in their seed alone."""
    recipe = parse_recipe(run.given_recipe, "recipe.json", recorded=True)
    settings = recipe.model_dump(mode="json", exclude={"run", "name", "seed"})
    return json.dumps([settings, str(run.data["index_sha256"])])


def cautions(named: Mapping[str, RunFiles], recipes: Sequence[Recipe]) -> list[str]:
    """Say which runs count for nothing over seeds, or are not of a whole training."""
    said = [f"{name} has not been evaluated" for name, run in named.items() if not run.evaluation]
    if len(tests_of(named.values())) > 1:
        said.append("These runs were not evaluated on the same test data: nothing over seeds")
    texts = {name: unfinished_text(run) for name, run in named.items() if run.evaluation}
    said += [f"{name}: {text.removesuffix('.')}" for name, text in texts.items() if text]
    alone = [recipe.name for recipe in recipes if len(recipe.runs) < 2]
    if alone and len(alone) < len(recipes):
        said.append(f"One seed alone, and so no verdict: {', '.join(alone)}")
    return said


def verdicts(recipes: Sequence[Recipe]) -> list[Verdict]:
    """Compare each two recipes over the seeds that both have, two at least."""
    found: list[Verdict] = []
    for ours, theirs in combinations(recipes, 2):
        pairs = ((measure, _paired(ours, theirs, measure)) for measure in DECIDING)
        if deciding := next(((measure, *pair) for measure, pair in pairs if pair), None):
            found.append(Verdict(ours.name, theirs.name, *deciding))
    adjusted = holm([each.difference.p for each in found])
    for place, p in enumerate(adjusted):
        if p <= LEVEL:
            answer = "better" if found[place].difference.value > 0 else "worse"
            found[place] = found[place]._replace(answer=answer)
    return found


def over_seeds(recipes: Sequence[Recipe], notes: Sequence[str] = ()) -> Markup:
    """Return the section: mean and spread of each recipe's numbers."""
    several = [recipe for recipe in recipes if len(recipe.runs) > 1]
    return render("runs.over_seeds", several=several, notes=notes, columns=_measures(several))


def lines(recipes: Sequence[Recipe]) -> list[str]:
    """Say mean and spread of each recipe in a line; nothing of one with a single seed."""
    said = []
    for recipe in recipes:
        numbers = [
            f"{measure} {percent(found[0])} ± {percent(found[1])}"
            for measure in _measures([recipe])
            if (found := recipe.statistics(measure))
        ]
        if numbers:
            seeds = f"mean ± standard deviation of {len(recipe.runs)} seeds in %"
            said.append(f"{recipe.name}, {seeds}: {'; '.join(numbers)}")
    return said


def _measures(recipes: Iterable[Recipe]) -> list[str]:
    """Every number of the tables, in the order in which they stand there."""
    return list(dict.fromkeys(m for each in recipes for run in each.runs.values() for m in run))


def _own_numbers(run: RunFiles) -> dict[str, Tree]:
    """The run's own numbers; each seed is flattened by a power of its own, chosen by one rule."""
    numbers = {}
    for row in run.evaluation["rows"] if run.evaluation else ():
        if row["features"] == "ssl" and row["column"] is not None:
            form = ("flattened " if "power" in row else "whitened ") if row["whitened"] else ""
            numbers[f"{form}{row['column']}"] = row
    return numbers


def _paired(
    ours: Recipe, theirs: Recipe, measure: str
) -> tuple[tuple[float, float], Difference] | None:
    """Means and difference over the seeds that both have by one protocol; None: fewer than two."""
    values = [
        (own["value"], other["value"])
        for seed, run in ours.runs.items()
        if (own := run.get(measure)) and (other := theirs.runs.get(seed, {}).get(measure))
        if own["protocol"] == other["protocol"]
    ]
    if len(values) < 2:
        return None
    a, b = map(list, zip(*values, strict=True))
    return (sum(a) / len(a), sum(b) / len(b)), paired_seeds(a, b)


def _names(groups: Sequence[Sequence[RunFiles]]) -> list[str]:
    """Name each group by its recipe, with the settings that differ from others of that name."""
    given = [str(runs[0].recipe["name"]) for runs in groups]
    trees = []
    for runs in groups:
        ours = {k: v for k, v in runs[0].recipe.items() if k not in ("name", "seed", "run")}
        trees.append(dict(flat({**ours, "data": {**ours["data"], "set": runs[0].data["name"]}})))
    names = []
    for name, tree in zip(given, trees, strict=True):
        others = [each for each, other in zip(trees, given, strict=True) if other == name]
        differs = [
            f"{key} = {value}"
            for key, value in tree.items()
            if any(other.get(key) != value for other in others)
        ]
        names.append(f"{name} ({'; '.join(differs[:3])})" if differs else name)
    return names
