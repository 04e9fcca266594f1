"""How far numbers move over the seeds of a training, and which recipe is better for all of them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from markupsafe import Markup

from sslpipe.evaluation.difference import Difference, holm, mean_over_seeds, paired_seeds
from sslpipe.evaluation.verdict import KNN, LEVEL, LINEAR, RECALL
from sslpipe.recipe import parse_recipe
from sslpipe.recipe.identity import digest
from sslpipe.report.page import flat, percent, render
from sslpipe.report.results import unfinished_text
from sslpipe.report.run import RunFiles, Tree

SAME_TEST = ("data_sha256", "split", "train_split")  # metadata that two results must share
# the first that both recipes have; Recall@1 where train has not test's classes
DECIDING = (KNN, LINEAR, RECALL)


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
    answer: str  # "better", "no clear difference" or "worse", for all pairs together (Holm, 5 %)

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
    return digest(recipe.model_copy(update={"seed": 0}), str(run.data["index_sha256"]), 0)


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
    found = []
    for ours, theirs in combinations(recipes, 2):
        pairs = ((measure, _paired(ours, theirs, measure)) for measure in DECIDING)
        if deciding := next(((measure, *pair) for measure, pair in pairs if pair), None):
            found.append((ours.name, theirs.name, *deciding))
    adjusted = holm([difference.p for *_, difference in found])
    answers = [
        "no clear difference" if p > LEVEL else "better" if each[-1].value > 0 else "worse"
        for each, p in zip(found, adjusted, strict=True)
    ]
    return [Verdict(*each, answer) for each, answer in zip(found, answers, strict=True)]


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
