"""How far numbers move over the seeds of a training, and which recipe is better for all of them."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from markupsafe import Markup

from sslpipe.evaluation.against import KNN, LEVEL, LINEAR, RECALL
from sslpipe.evaluation.difference import Difference, holm, mean_over_seeds, paired_seeds
from sslpipe.recipe import parse_recipe
from sslpipe.recipe.identity import digest
from sslpipe.report.page import html, joined, missing, render, table
from sslpipe.report.results import evaluated_weights
from sslpipe.report.run import RunFiles, Tree
from sslpipe.report.sections import flat

SAME_TEST = ("data_sha256", "split", "train_split")  # metadata that two results must share
# column, whitened: the first that both recipes have; Recall@1 where train has not test's classes
DECIDING = ((KNN, False), (LINEAR, False), (RECALL, False))

Cell = tuple[str, bool]  # column of eval.json, whitened


class Recipe(NamedTuple):
    """Runs of one recipe that differ in their seed alone.

    Args:
        name: Of the recipe, with settings where another recipe has the same name.
        runs: Seed -> eval.json.
    """

    name: str
    runs: dict[int, Tree]

    def values(self, cell: Cell) -> dict[int, tuple[str, float]]:
        """Seed -> protocol and value of the run's own features, where they were measured."""
        return {
            seed: (row["protocol"], row["value"])
            for seed, evaluation in self.runs.items()
            for row in evaluation["rows"]
            if (row["features"], row["column"], row["whitened"]) == ("ssl", *cell)
            and row.get("unit", "share") == "share"
        }


class Verdict(NamedTuple):
    """One recipe against another on the deciding number.

    Args:
        ours: Name of the recipe.
        theirs: Name of the other one.
        measure: "kNN", "linear" or "Recall@1".
        means: Of both, over the seeds that both have.
        difference: Over these seeds.
        answer: "better", "no clear difference" or "worse", for all pairs together (Holm, 5 %).
    """

    ours: str
    theirs: str
    measure: str
    means: tuple[float, float]
    difference: Difference
    answer: str

    def __str__(self) -> str:
        low, high = (100 * end for end in self.difference.interval95)
        ours, theirs = (100 * mean for mean in self.means)
        relation = {"better": "is better than", "worse": "is worse than"}.get(
            self.answer, "is not clearly different from"
        )
        return (
            f"{self.ours} {relation} {self.theirs}: {self.measure} {ours:.1f} against "
            f"{theirs:.1f} % ({100 * self.difference.value:+.1f} points over "
            f"{self.difference.number} seeds, 95 % interval {low:+.1f} to {high:+.1f})."
        )


def group_by_recipe(runs: Sequence[RunFiles]) -> list[Recipe]:
    """Put evaluated runs together that differ in their seed alone: weights, data and all settings.

    Of two runs with one recipe and one seed the first counts: their weights are the same. Empty
    where the runs were not evaluated on the same test data.
    """
    evaluated = [run for run in runs if run.evaluation is not None]
    if len(_tests(evaluated)) > 1:
        return []
    groups: dict[str, list[RunFiles]] = {}
    for run in evaluated:
        groups.setdefault(digest_without_seed(run), []).append(run)
    recipes = []
    for members, name in zip(groups.values(), _names(list(groups.values())), strict=True):
        by_seed: dict[int, Tree] = {}
        for run in members:
            by_seed.setdefault(int(run.recipe["seed"]), run.evaluation or {})
        recipes.append(Recipe(name, by_seed))
    return recipes


def digest_without_seed(run: RunFiles) -> str:
    """Compute what two runs have in common that differ in their seed alone."""
    recipe = parse_recipe(run.given_recipe, "recipe.json", recorded=True)
    return digest(recipe.model_copy(update={"seed": 0}), str(run.data["index_sha256"]), 0)


def has_seeds(recipes: Sequence[Recipe]) -> bool:
    """Say whether any recipe has two seeds, so that there is something to say of seeds."""
    return any(len(recipe.runs) > 1 for recipe in recipes)


def cautions(named: Mapping[str, RunFiles], recipes: Sequence[Recipe]) -> list[str]:
    """Say which runs or numbers count for nothing over seeds, or are not of a whole training.

    Args:
        named: The runs by their names on the page.
        recipes: What `group_by_recipe` made of them.
    """
    evaluated = {name: run for name, run in named.items() if run.evaluation is not None}
    said = [f"{name} has not been evaluated" for name in named if name not in evaluated]
    if len(_tests(list(evaluated.values()))) > 1:
        said.append("These runs were not evaluated on the same test data: nothing over seeds")
    # of one recipe and seed the first counts
    first: dict[tuple[str, int], str] = {}
    for name, run in evaluated.items():
        same = first.setdefault((digest_without_seed(run), int(run.recipe["seed"])), name)
        if same != name:
            said.append(f"{name} has recipe and seed of {same}, and is not counted again")
    # an evaluation of weights that were trained further, or averaged
    others = {name: evaluated_weights(run) for name, run in evaluated.items()}
    said += [f"{name} was {text}" for name, text in others.items() if text]
    # means and differences that cannot be
    for recipe in recipes:
        mixed = [_title(cell) for cell in _cells([recipe]) if not _of_one_protocol(recipe, cell)]
        if mixed:
            said.append(
                f"The seeds of {recipe.name} were evaluated by different protocols, so that there "
                f"is no mean of {', '.join(mixed)}; evaluate them with one command"
            )
    several = [recipe for recipe in recipes if len(recipe.runs) > 1]
    compared = {(each.ours, each.theirs) for each in verdicts(recipes)}
    said += [
        f"{a.name} and {b.name} have no two seeds with the same protocol in common: no verdict"
        for a, b in combinations(several, 2)
        if (a.name, b.name) not in compared
    ]
    alone = [recipe.name for recipe in recipes if len(recipe.runs) < 2]
    if alone and several:
        said.append(f"One seed alone, and so no verdict: {', '.join(alone)}")
    return said


def verdicts(recipes: Sequence[Recipe]) -> list[Verdict]:
    """Compare each two recipes over the seeds that both have, two at least."""
    found: list[tuple[str, str, str, _Paired]] = []
    for ours, theirs in combinations(recipes, 2):
        pairs = [(cell[0], _paired(ours, theirs, cell)) for cell in DECIDING]
        for measure, pair in pairs:
            if pair is not None:
                found.append((ours.name, theirs.name, measure, pair))
                break
    adjusted = holm([pair.difference.p for *_, pair in found])
    return [
        Verdict(ours, theirs, measure, pair.means, pair.difference, _answer(pair.difference, p))
        for (ours, theirs, measure, pair), p in zip(found, adjusted, strict=True)
    ]


def seeds_head(recipes: Sequence[Recipe]) -> tuple[str, Markup]:
    """Return the title of a page on recipes with seeds, and as HTML what it says first."""
    names = [recipe.name for recipe in recipes]
    title = " against ".join(names) if len(names) < 4 else f"{len(names)} recipes"
    if len(recipes) == 1:
        title = f"{title}, {len(recipes[0].runs)} seeds"
    told = list(map(str, verdicts(recipes))) or [f"{line}." for line in lines(recipes)]
    return title, render("items", items=told, kind="lead runs")


def over_seeds(recipes: Sequence[Recipe], notes: Sequence[str] = ()) -> Markup:
    """Return the section: mean and spread of each recipe's numbers, and the differences.

    Args:
        recipes: All that were evaluated.
        notes: What `cautions` says.
    """
    warned = joined(missing(f"{note}.") for note in notes)
    if not has_seeds(recipes):
        unknown = missing(
            "How far these numbers move with the seed of the training is not known: it takes runs "
            "of one recipe with several seeds, evaluated on the same test data."
        )
        return unknown + warned
    return html(
        "<p class='note'>Each recipe's mean over its seeds, the standard deviation between them, "
        "and the mean's 95 % interval (t). Other trainings of the recipe move as much; intervals "
        "over test images know nothing of it.</p>{}{}"
        "<p class='note'>Differences are of equal seeds, in points, each with the 95 % interval of "
        "the paired t test. The answer at the top is of the plain kNN alone (of the linear "
        "probe where there is none, of Recall@1 where train has not the classes of test), a "
        "measure fixed before; it holds for all pairs of recipes together at 5 % (Holm).</p>",
        warned,
        _table(recipes),
    )


def lines(recipes: Sequence[Recipe]) -> list[str]:
    """Say mean and spread of each recipe in a line; nothing of one with a single seed."""
    said = []
    for recipe in recipes:
        numbers = [
            f"{_title(cell)} {100 * mean:.1f} ± {100 * spread:.1f}"
            for cell in _cells([recipe])
            for mean, spread, _ in _statistics(recipe, cell)
        ]
        if numbers:
            said.append(
                f"{recipe.name}, mean ± standard deviation of {len(recipe.runs)} seeds in %: "
                + "; ".join(numbers)
            )
    return said


class _Paired(NamedTuple):
    """One number of two recipes over the seeds that both have: the means, and the difference."""

    means: tuple[float, float]
    difference: Difference


def _paired(ours: Recipe, theirs: Recipe, cell: Cell) -> _Paired | None:
    """Compare one number; None where fewer than two seeds have it by one protocol."""
    a, b = ours.values(cell), theirs.values(cell)
    # a number of another protocol is another number
    seeds = [seed for seed in a if seed in b and a[seed][0] == b[seed][0]]
    if len(seeds) < 2:
        return None
    values = [a[seed][1] for seed in seeds], [b[seed][1] for seed in seeds]
    means = sum(values[0]) / len(seeds), sum(values[1]) / len(seeds)
    return _Paired(means, paired_seeds(*values))


def _tests(evaluated: Sequence[RunFiles]) -> set[tuple[Any, ...]]:
    """The test data that runs were evaluated on."""
    return {
        tuple((run.evaluation or {})["facts"].get(key) for key in SAME_TEST) for run in evaluated
    }


def _names(groups: Sequence[Sequence[RunFiles]]) -> list[str]:
    """Name each group by its recipe; where that is not enough, by the settings that differ."""
    names = [", ".join(dict.fromkeys(str(run.recipe["name"]) for run in runs)) for runs in groups]
    trees = []
    for runs in groups:
        ours = {k: v for k, v in runs[0].recipe.items() if k not in ("name", "seed", "run")}
        trees.append(dict(flat({**ours, "data": {**ours["data"], "set": runs[0].data["name"]}})))
    given = list(names)
    for place, name in enumerate(given):
        others = [trees[at] for at, other in enumerate(given) if other == name and at != place]
        differs = [
            f"{key} = {value}"
            for key, value in trees[place].items()
            if any(tree.get(key) != value for tree in others)
        ]
        if differs:
            names[place] = f"{name} ({'; '.join(differs[:3])})"
    return names


def _cells(recipes: Sequence[Recipe]) -> list[Cell]:
    """Every number of the tables, in the order in which they stand there."""
    rows = [row for recipe in recipes for tree in recipe.runs.values() for row in tree["rows"]]
    ours = [row for row in rows if row["features"] == "ssl" and row["column"] is not None]
    return list(dict.fromkeys((row["column"], row["whitened"]) for row in ours))


def _statistics(recipe: Recipe, cell: Cell) -> list[tuple[float, float, tuple[float, float]]]:
    """Mean, spread and interval of one number; [] where two seeds have not the same protocol."""
    found = recipe.values(cell)
    if len(found) < 2 or not _of_one_protocol(recipe, cell):
        return []
    return [mean_over_seeds([value for _, value in found.values()])]


def _of_one_protocol(recipe: Recipe, cell: Cell) -> bool:
    return len({protocol for protocol, _ in recipe.values(cell).values()}) < 2


def _title(cell: Cell) -> str:
    return f"{'whitened ' if cell[1] else ''}{cell[0]}"


def _table(recipes: Sequence[Recipe]) -> Markup:
    several = [recipe for recipe in recipes if len(recipe.runs) > 1]
    cells = _cells(several)
    rows: list[list[object]] = []
    # means
    for recipe in several:
        rows.append([recipe.name, ", ".join(map(str, sorted(recipe.runs)))])
        for cell in cells:
            shown = Markup("–")
            for mean, spread, (low, high) in _statistics(recipe, cell):
                shown = html(
                    "<data value='{!r}'>{:.1f}</data> ± {:.1f} <small>{:.1f}–{:.1f}</small>",
                    mean,
                    *(100 * each for each in (mean, spread, low, high)),
                )
            rows[-1].append(shown)
    # differences
    for ours, theirs in combinations(several, 2):
        pairs = [_paired(ours, theirs, cell) for cell in cells]
        numbers = {pair.difference.number for pair in pairs if pair is not None}
        title = "difference" if len(several) == 2 else f"{ours.name} less {theirs.name}"
        count = f"{'/'.join(map(str, sorted(numbers)))} pairs" if numbers else "–"
        rows.append([title, count])
        for pair in pairs:
            shown = Markup("–")
            if pair is not None:
                value, ends = pair.difference.value, pair.difference.interval95
                shown = html(
                    "<data value='{!r}'>{:+.1f}</data> <small>{:+.1f} to {:+.1f}</small>",
                    value,
                    *(100 * each for each in (value, *ends)),
                )
            rows[-1].append(shown)
    return table(["recipe, in %", "seeds", *map(_title, cells)], rows)


def _answer(difference: Difference, p: float) -> str:
    if p > LEVEL:
        return "no clear difference"
    return "better" if difference.value > 0 else "worse"
