"""Show several runs on one page: what differs, results side by side, curves in one chart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from sslpipe.report.charts import line_chart
from sslpipe.report.curves import CHARTS, SPEED_CHARTS, Chart, logged, with_average
from sslpipe.report.embeddings import EMBED, Features, embedding_quality, run_colour
from sslpipe.report.label_curve import few_shot_chart
from sslpipe.report.leakage import leakage_of_runs
from sslpipe.report.over_seeds import (
    SAME_TEST,
    Recipe,
    cautions,
    digest_without_seed,
    group_by_recipe,
    has_seeds,
    over_seeds,
    seeds_head,
)
from sslpipe.report.page import (
    FOOTER,
    html,
    html_page,
    joined,
    missing,
    number,
    render,
    table,
)
from sslpipe.report.results import (
    BASELINES,
    NAMES,
    accuracy_sentence,
    first_number,
    result_table,
    unfinished_sentence,
    verdict_sentence,
)
from sslpipe.report.run import RunFiles, Tree
from sslpipe.report.sections import (
    duration,
    flat,
    measured_speed,
    standing_alarms,
    trained_sentence,
)
from sslpipe.report.tables import OTHER_MEASURES, task_tables

OPENED = ("What differs", "Results")  # the other sections are folded


def names_apart(run_dirs: Sequence[Path], runs: Sequence[RunFiles]) -> list[str]:
    """Name each run by its recipe, and by its folder too where recipes have the same name."""
    names = [str(run.recipe["name"]) for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [run_dir.resolve().name for run_dir in run_dirs]
    names = [f"{name} ({folder})" for name, folder in zip(names, folders, strict=True)]
    twice = Counter(names)
    return [f"{name}, {i + 1}" if twice[name] > 1 else name for i, name in enumerate(names)]


def build_comparison(
    runs: Sequence[RunFiles], names: Sequence[str], embedded: Sequence[Features | None]
) -> str:
    """Return the whole HTML file.

    Args:
        runs: At least two.
        names: One for each run, all different.
        embedded: Test embeddings of each run; None: there are none.
    """
    named = dict(zip(names, runs, strict=True))
    recipes = group_by_recipe(runs)
    seeds = over_seeds(recipes, cautions(named, recipes))
    colours = run_colours(named, recipes)
    sentences = [
        html(
            "<i class='dot' style='--c:{}'></i><b>{}</b>: {}{}{} {}",
            colours[name],
            name,
            unfinished_sentence(run),
            verdict_sentence(run),
            trained_sentence(run),
            accuracy_sentence(run),
        )
        for name, run in named.items()
    ]
    each_run = render("items", items=sentences, kind="verdict runs")
    sections = {
        "What differs": differences(named),
        "Results": results(named, colours),
        "Over seeds": seeds,
        "Training": charts(named, CHARTS, colours),
        "Separation": quality(named, embedded, colours),
        "Speed": speed_table(named) + charts(named, SPEED_CHARTS, colours),
    }
    if not has_seeds(recipes):
        title, footer = " against ".join(names), FOOTER
        first = html("<p class='lead'>{}</p>", first_sentence(named))
        fold = "What was trained and measured, in words and numbers"
    else:  # what holds for the recipes comes first
        title, first = seeds_head(recipes)
        footer = FOOTER + Markup(" Those under <i>Over seeds</i> are over training seeds.")
        fold = f"Each of the {len(named)} runs alone"
        sections = {"Over seeds": seeds, **sections}
    picture = first_chart(named, colours)
    head = html(
        "<header><p class='eyebrow'>sslpipe report</p><h1>{}</h1>{}{}{}</header>",
        title,
        first,
        picture,
        render("folded", title=fold, text=each_run),
    )
    opened = ("Over seeds", "What differs", "Results") if has_seeds(recipes) else OPENED
    return html_page(title, head, sections, footer=footer, opened=opened)


def first_sentence(named: Mapping[str, RunFiles]) -> str:
    """Say which run has the highest first number, and that one training each decides nothing."""
    measured = _first_numbers(named)
    if not measured:
        return "These runs have no number in common: which is better is not known."
    order = sorted(measured.values(), key=lambda each: -each[1]["value"])
    texts = [f"{name} has {100 * cell['value']:.1f} %" for name, cell in order]
    (measure,) = {measure for measure, _ in measured}
    said = f"By {measure}, {', '.join(texts)}" if len(texts) < 4 else f"By {measure}, {texts[0]}"
    return f"{said}; one training each does not tell which recipe is better."


def first_chart(named: Mapping[str, RunFiles], colours: Mapping[str, str]) -> Markup:
    """Draw the first number of each run with its interval on one scale; '' where one has none."""
    rows = []
    for name, cell in _first_numbers(named).values():
        low, high = cell["interval95"]
        ends = zip(("at", "low", "high"), (cell["value"], low, high), strict=True)
        texts = {key: f"{100 * value:.1f}" for key, value in ends}
        rows.append({"name": name, "colour": colours[name], **texts})
    measures = {measure for measure, _ in _first_numbers(named)}
    what = f"{', '.join(measures)} on the test images, %, with 95 % intervals"
    return render("bars", rows=rows, what=what) if rows else Markup()


def _first_numbers(named: Mapping[str, RunFiles]) -> dict[tuple[str, str], tuple[str, Tree]]:
    """Find the first number of each run.

    Returns:
        (measure, run) -> (run, cell); empty where fewer than two have the same measure by the same
        protocol on the same test data.
    """
    found = {name: first_number(run) for name, run in named.items()}
    cells = {
        (each[1], name): (name, each[0].cells[each[1]])
        for name, each in found.items()
        if each is not None
    }
    kinds = {(measure, cell["protocol"]) for (measure, _), (_, cell) in cells.items()}
    return cells if len(cells) > 1 and len(kinds) == 1 and len(_tests(named)) == 1 else {}


def _tests(named: Mapping[str, RunFiles]) -> set[tuple[Any, ...]]:
    """The test data that runs were evaluated on."""
    trees = [run.evaluation for run in named.values() if run.evaluation]
    return {tuple(tree["facts"].get(key) for key in SAME_TEST) for tree in trees}


def run_colours(named: Mapping[str, RunFiles], recipes: Sequence[Recipe]) -> dict[str, str]:
    """Return each run's CSS colour: that of its recipe where recipes have several seeds."""
    if not has_seeds(recipes):
        return {name: run_colour(place) for place, name in enumerate(named)}
    digests = {name: digest_without_seed(run) for name, run in named.items()}
    places = {each: place for place, each in enumerate(dict.fromkeys(digests.values()))}
    return {name: run_colour(places[each]) for name, each in digests.items()}


def differences(named: dict[str, RunFiles]) -> Markup:
    """Tabulate settings, data and environment that are not the same in all runs."""
    trees = [
        dict(
            flat(
                {
                    "recipe": {k: v for k, v in run.recipe.items() if k != "name"},
                    "data set": run.data,
                    "machine": {k: v for k, v in run.environment.items() if k != "command"},
                }
            )
        )
        for run in named.values()
    ]
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    rows = [
        [html("<code>{}</code>", text) for text in (key, *(tree.get(key, "–") for tree in trees))]
        for key in keys
        if len({tree.get(key) for tree in trees}) > 1
    ]
    if not rows:
        return Markup("<p>Nothing: recipe, data set and machine are the same.</p>")
    return html(
        "<p class='note'>Everything else in recipe, data set and machine is the same.</p>{}",
        table(["setting", *named], rows, "differs"),
    )


def results(named: dict[str, RunFiles], run_colours: Mapping[str, str]) -> Markup:
    """Show one table where the runs were evaluated on the same test data, else one for each.

    Args:
        named: The runs by name.
        run_colours: CSS colours by name.
    """
    # what can be compared
    evaluated = {name: run.evaluation for name, run in named.items() if run.evaluation}
    without = joined(
        missing(f"{name} has not been evaluated.") for name in named if name not in evaluated
    )
    if not evaluated:
        return without
    if len(_tests(named)) > 1:
        tables = joined(
            html("<h3>{}</h3>{}", name, result_table(merged({name: tree})))
            for name, tree in evaluated.items()
        )
        apart = missing(
            "These runs were not evaluated on the same test data: their numbers are not "
            "comparable, and stand apart."
        )
        return apart + tables + without
    # one table, a curve for each run, further metrics
    together = merged(evaluated)
    shortened = joined(
        missing(f"{name}: {tree['facts']['shortened']}.")
        for name, tree in evaluated.items()
        if tree["facts"].get("shortened")
    )
    colours = {row["features"]: "var(--faint)" for row in together["rows"]}
    colours |= run_colours
    random = [name for name in colours if name.startswith(("random", NAMES["random"]))]
    few = few_shot_chart(together, colours, whitened=False, dashed=random)
    chart = html("<div class='charts one'>{}</div>", few) if few else Markup()
    others = render("folded", title=OTHER_MEASURES, text=task_tables(together))
    return (
        shortened + result_table(together) + chart + leakage_of_runs(evaluated) + others + without
    )


def merged(evaluations: dict[str, Tree]) -> Tree:
    """Merge the eval.json of several runs, with each run's features under its name.

    A baseline that is the same for all stands once. A column whose protocols differ is split, a
    column for each protocol.

    Args:
        evaluations: eval.json by the run's name.
    """
    # rows of all, under the run's name
    rows: list[Tree] = []
    for name, tree in evaluations.items():
        for row in [*tree["rows"], *tree.get("geometry", [])]:
            features = name if row["features"] == "ssl" else row["features"]
            if features in evaluations and row["features"] != "ssl":  # another network of that name
                features = f"{features}, compared with {name}"
            rows.append({**row, "features": features, "run": name})
    # baselines: once where they are equal, else under the run's name
    for baseline in {row["features"] for row in rows} - set(evaluations):
        measured = {
            name: [
                (row["whitened"], row["protocol"], row["value"])
                for row in rows
                if (row["features"], row["run"]) == (baseline, name)
            ]
            for name in evaluations
        }
        first = next(iter(measured.values()))
        if all(each == first for each in measured.values()):
            keep = next(iter(evaluations))
            rows = [row for row in rows if row["features"] != baseline or row["run"] == keep]
        else:
            for row in rows:
                if row["features"] == baseline:
                    row["features"] = f"{NAMES.get(baseline, baseline)} of {row['run']}"
                    row["baseline"] = baseline in BASELINES
    # columns: a name stands for one protocol
    columns = list(
        dict.fromkeys(column for tree in evaluations.values() for column in tree["columns"])
    )
    for column in list(columns):
        protocols = list(dict.fromkeys(row["protocol"] for row in rows if row["column"] == column))
        if len(protocols) > 1:
            at = columns.index(column)
            columns[at : at + 1] = [f"{column}: {protocol}" for protocol in protocols]
            for row in rows:
                if row["column"] == column:
                    row["column"] = f"{column}: {row['protocol']}"
    not_measured = [
        f"{name}: {text}" for name, tree in evaluations.items() for text in tree["left_out"]
    ]
    metadata = next(iter(evaluations.values()))["facts"]
    return {
        "facts": metadata,
        "columns": columns,
        "rows": rows,
        "nuisance": _probes(evaluations),
        "left_out": not_measured,
    }


def _probes(evaluations: dict[str, Tree]) -> list[Tree]:
    """Merge the probes of columns; features that are no run's stand once where all are equal."""
    rows: list[Tree] = []
    known: dict[str, dict[str, float]] = {}  # features -> column -> value, of the first run
    for name, tree in evaluations.items():
        own: dict[str, dict[str, float]] = {}
        for row in tree.get("nuisance", []):
            own.setdefault(row["features"], {})[row["column"]] = row["value"]
        for row in tree.get("nuisance", []):
            features = row["features"]
            if features != "ssl" and known.setdefault(features, own[features]) != own[features]:
                features = f"{NAMES.get(features, features)} of {name}"
            rows.append({**row, "features": name if features == "ssl" else features})
    return rows


def charts(
    named: dict[str, RunFiles], wanted: Sequence[Chart], colours: Mapping[str, str]
) -> Markup:
    """Draw each chart with a line for each run that has its numbers; a second number is dashed."""
    figures = []
    for title, numbers, kind, within in wanted:
        lines = {name: run.train if kind == "train" else run.evals for name, run in named.items()}
        keys = with_average(numbers, chain(*lines.values()))
        series = [
            logged(
                f"{name}, {what}" if len(keys) > 1 else name,
                lines[name],
                key,
                colours[name],
                dashed=nth > 0,
            )
            for name in named
            for nth, (key, what) in enumerate(keys.items())
        ]
        series = [each for each in series if len(each.x)]
        if series:
            figures.append(line_chart(title, series, within=within, last_values=False))
    if not figures:
        return Markup("<p>No run has logged a step.</p>")
    return html("<div class='charts'>{}</div>", joined(figures))


def quality(
    named: dict[str, RunFiles],
    embedded: Sequence[Features | None],
    colours: Mapping[str, str],
) -> Markup:
    """Draw ROC and spectrum of the runs, where their test embeddings are of the same data."""
    there = {name: each for name, each in zip(named, embedded, strict=True) if each is not None}
    without = joined(
        missing(f"{name} has no embeddings of the test split.", EMBED.format("test"))
        for name in named
        if name not in there
    )
    embedded_data = {(e.facts.get("data_sha256"), e.facts.get("split")) for e in there.values()}
    if len(embedded_data) > 1:
        return missing("The embeddings of these runs are not of the same data.") + without
    return (embedding_quality(there, colours=colours) if there else Markup()) + without


def speed_table(named: dict[str, RunFiles]) -> Markup:
    """Tabulate steps, time, images a second, wait for data, skipped steps and quarantine."""
    rows = []
    for name, run in named.items():
        speed = measured_speed(run)
        last: dict[str, Any] = run.train[-1] if run.train else {}
        rows.append(
            (
                name,
                f"{last['step']:,}" if last else "–",
                duration(speed.seconds) if speed else "–",
                f"{speed.images_per_s:,.0f}" if speed else "–",
                f"{speed.data_wait_percent:.1f} %" if speed else "–",
                number(last["skipped_steps"]) if last else "–",
                f"{len(run.quarantine):,}",
                ", ".join(standing_alarms(run)).replace("_", " ") or "none",
            )
        )
    heads = "run, steps, time, images/s, waiting for data, skipped, quarantined, alarms"
    return table(heads.split(", "), rows)
