"""How far numbers move over the seeds of a training, and which recipe is better for all of them."""

from collections.abc import Sequence
from html import escape
from itertools import combinations
from typing import NamedTuple

from sslpipe.evaluation.against import KNN, LEVEL, LINEAR
from sslpipe.evaluation.difference import Difference, holm, mean_over_seeds, paired_seeds
from sslpipe.recipe import parse_recipe
from sslpipe.recipe.identity import digest
from sslpipe.report.run import RunFiles, Tree
from sslpipe.report.sections import flat

SAME_TEST = ("data_sha256", "split", "train_split")  # metadata that two results must share
DECIDING = ((KNN, False), (LINEAR, False))  # column, whitened: the first that both recipes have

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
        measure: "kNN" or "linear".
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
    tests = {
        tuple((run.evaluation or {})["facts"].get(key) for key in SAME_TEST) for run in evaluated
    }
    if len(tests) > 1:
        return []
    groups: dict[str, list[RunFiles]] = {}
    for run in evaluated:
        groups.setdefault(_digest_without_seed(run), []).append(run)
    recipes = []
    for members, name in zip(groups.values(), _names(list(groups.values())), strict=True):
        by_seed: dict[int, Tree] = {}
        for run in members:
            by_seed.setdefault(int(run.recipe["seed"]), run.evaluation or {})
        recipes.append(Recipe(name, by_seed))
    return recipes


def verdicts(recipes: Sequence[Recipe]) -> list[Verdict]:
    """Compare each two recipes over the seeds that both have, two at least."""
    found: list[tuple[str, str, str, tuple[float, float], Difference]] = []
    for ours, theirs in combinations(recipes, 2):
        for cell in DECIDING:
            a, b = ours.values(cell), theirs.values(cell)
            # a number of another protocol is another number
            seeds = [seed for seed in a if seed in b and a[seed][0] == b[seed][0]]
            if len(seeds) < 2:
                continue
            values = [a[seed][1] for seed in seeds], [b[seed][1] for seed in seeds]
            means = tuple(sum(each) / len(each) for each in values)
            found.append(
                (ours.name, theirs.name, cell[0], (means[0], means[1]), paired_seeds(*values))
            )
            break
    adjusted = holm([each[-1].p for each in found])
    return [
        Verdict(*each, answer=_answer(each[-1], p)) for each, p in zip(found, adjusted, strict=True)
    ]


def over_seeds(recipes: Sequence[Recipe]) -> str:
    """Return the section: mean and spread of each recipe's numbers, then the verdicts."""
    if all(len(recipe.runs) < 2 for recipe in recipes):
        return (
            "<p class='missing'>How far these numbers move with the seed of the training is not "
            "known: it takes runs of one recipe with several seeds, evaluated on the same test "
            "data.</p>"
        )
    told = "".join(f"<li>{escape(str(each))}</li>" for each in verdicts(recipes))
    alone = [recipe.name for recipe in recipes if len(recipe.runs) < 2]
    note = f" One seed alone, and so no verdict: {escape(', '.join(alone))}." if alone else ""
    return (
        "<p class='note'>Each recipe's mean over its seeds, the standard deviation between them, "
        "and the mean's 95 % interval (t). Other trainings of the recipe move as much; intervals "
        f"over test images know nothing of it.{note}</p>{_table(recipes)}"
        + (
            "<p class='note'>Recipes by seeds that both have (paired t; the answers hold together "
            f"at 5 %, Holm).</p><ul class='verdict runs'>{told}</ul>"
            if told
            else ""
        )
    )


def lines(recipes: Sequence[Recipe]) -> list[str]:
    """Say the same in lines for a terminal; nothing where no recipe has two seeds."""
    said = []
    for recipe in recipes:
        numbers = [
            f"{_title(cell)} {100 * mean:.1f} +- {100 * spread:.1f}"
            for cell in _cells([recipe])
            for mean, spread, _ in _statistics(recipe, cell)
        ]
        if numbers:
            said.append(f"{recipe.name}, {len(recipe.runs)} seeds: {', '.join(numbers)} %")
    return [*said, *map(str, verdicts(recipes))] if said else []


def _digest_without_seed(run: RunFiles) -> str:
    recipe = parse_recipe(run.given_recipe, "recipe.json", recorded=True)
    return digest(recipe.model_copy(update={"seed": 0}), str(run.data["index_sha256"]), 0)


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
    if len(found) < 2 or len({protocol for protocol, _ in found.values()}) > 1:
        return []
    return [mean_over_seeds([value for _, value in found.values()])]


def _title(cell: Cell) -> str:
    return f"{'whitened ' if cell[1] else ''}{cell[0]}"


def _table(recipes: Sequence[Recipe]) -> str:
    several = [recipe for recipe in recipes if len(recipe.runs) > 1]
    cells = _cells(several)
    head = "".join(f"<th scope='col'>{escape(_title(cell))}</th>" for cell in cells)
    body = ""
    for recipe in several:
        filled = ""
        for cell in cells:
            shown = "–"
            for mean, spread, (low, high) in _statistics(recipe, cell):
                shown = (
                    f"<data value='{mean!r}'>{100 * mean:.1f}</data> ± {100 * spread:.1f} "
                    f"<small>{100 * low:.1f}–{100 * high:.1f}</small>"
                )
            filled += f"<td>{shown}</td>"
        seeds = ", ".join(map(str, sorted(recipe.runs)))
        body += f"<tr><th scope='row'>{escape(recipe.name)}</th><td>{seeds}</td>{filled}</tr>"
    return (
        "<div class='wide'><table class='numbers'><thead><tr><th scope='col'>recipe, in %</th>"
        f"<th scope='col'>seeds</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _answer(difference: Difference, p: float) -> str:
    if p > LEVEL:
        return "no clear difference"
    return "better" if difference.value > 0 else "worse"
