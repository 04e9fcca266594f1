"""Make the sections of a report that need the run alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from markupsafe import Markup

from sslpipe.recipe.shortened import shortened_note
from sslpipe.report.page import html, joined, missing, number, render, table
from sslpipe.report.results import (
    accuracy_sentence,
    headline,
    score,
    unfinished_sentence,
    verdict_sentence,
)
from sslpipe.report.run import RunFiles, Tree, trained_steps

MOST_QUARANTINED = 100
NO_PICTURE = Markup()


class Speed(NamedTuple):
    """How fast a run trained, over all its steps.

    Args:
        seconds: Of training; evaluation and saving are not counted.
        images_per_s: Images a second.
        data_wait_percent: Share of the time without data.
    """

    seconds: float
    images_per_s: float
    data_wait_percent: float


def measured_speed(run: RunFiles) -> Speed | None:
    """Sum over metrics.jsonl: steps between two lines, at the speed that the later one says."""
    batch_size = batch_images(run)
    before, seconds, waited_s = 0, 0.0, 0.0
    for line in run.train:
        passed_s = (line["step"] - before) * batch_size / line["images_per_s"]
        seconds += passed_s
        waited_s += passed_s * line["data_wait_percent"] / 100
        before = line["step"]
    if not seconds:
        return None
    return Speed(seconds, before * batch_size / seconds, 100 * waited_s / seconds)


def batch_images(run: RunFiles) -> int:
    """Count the images of a global step: the recipe's number, or a fine-tuning's PK batch."""
    if (sampler := run.recipe.get("sampler")) is None:
        return int(run.recipe["data"]["batch_size"])
    grouped = sampler["classes_per_batch"] * sampler["images_per_class"]
    return int(grouped + sampler["random_images"])


def trained_sentence(run: RunFiles, held_out: int | None = None) -> Markup:
    """Say what was trained on what, for how long, and where. held_out: Images, where counted."""
    recipe, data, speed = run.recipe, run.data, measured_speed(run)
    split = recipe["data"]["split"]
    steps, logged = trained_steps(run), run.train[-1] if run.train else {}
    epochs = logged["epoch"] / logged["step"] * steps if logged.get("step") else 0
    images, holdout = data["samples"].get(split, 0), recipe["data"].get("holdout", 0)
    labelled = data["classes"] or run.evals  # without labels nothing is held out
    count = f"about {holdout:,}" if held_out is None else f"{held_out:,}"
    without = f" ({count} held out)" if holdout and labelled else ""
    kind, loss = str(recipe["backbone"]["kind"]), str(recipe["loss"]["kind"])
    return html(
        "<code>{}</code> was trained with <code>{}</code> on {:,} images of {}{} for {:,} steps "
        "({:.1f} epochs){} on {}.",
        kind,
        loss,
        images,
        data["name"],
        without,
        steps,
        epochs,
        f" in {duration(speed.seconds)}" if speed else "",
        _machine(run),
    )


def header(run: RunFiles, held_out: int | None = None, picture: Markup = NO_PICTURE) -> Markup:
    """Begin the page: one sentence, one number with its interval, one picture; the rest folds.

    Args:
        run: The run.
        held_out: Images that were held out, where counted.
        picture: Of some queries and their neighbours.
    """
    recipe, speed = run.recipe, measured_speed(run)
    tiles = {
        "views": f"{recipe['augment'].get('preset', recipe['augment']['kind'])}",
        "batch": f"{batch_images(run):,} images",
        "last loss": number(run.train[-1]["loss"]) if run.train else "–",
        **_last_eval(run),
        **_best(run),
        "images a second": f"{speed.images_per_s:,.0f}" if speed else "–",
        "waiting for data": f"{speed.data_wait_percent:.0f} %" if speed else "–",
    }
    bad = ", ".join(standing_alarms(run)).replace("_", " ")
    warnings = [html("<p class='missing'><a href='#alarms'>{}</a></p>", bad)] if bad else []
    if note := shortened_note(recipe):
        warnings.append(missing(f"{note.capitalize()}."))
    for name, count in run.damaged.items():
        warnings.append(missing(f"{count} damaged lines of {name} were skipped."))
    sentences = [unfinished_sentence(run), verdict_sentence(run), trained_sentence(run, held_out)]
    text = html("<p class='verdict'>{} {}</p>", joined(sentences), accuracy_sentence(run))
    return render(
        "hero",
        eyebrow=recipe["name"],
        sentence=headline(run),
        score=score(run),
        picture=picture,
        warnings=joined([*warnings, unfinished_note(run)]),
        detail=text + render("tiles", tiles=list(tiles.items())),
    )


def unfinished_note(run: RunFiles) -> Markup:
    """Warn that the evaluated weights are not those of the end of training; '' where they are."""
    said = unfinished_sentence(run)
    return html("<p class='missing'>{}</p>", said) if said else said


def _last_eval(run: RunFiles) -> dict[str, str]:
    """Return the last number on held-out samples, under its name and its step if not the last."""
    last = run.evals[-1] if run.evals else {}
    names = {"holdout_knn": "held-out kNN", "validation_recall_at_1": "Recall@1, unseen classes"}
    known = {name: last[key] for key, name in names.items() if last.get(key) is not None}
    step, end = last.get("step", 0), trained_steps(run)
    early = f", step {step:,} of {end:,}" if step < end else ""
    shown = {f"{name}{early}": f"{100 * value:.1f} %" for name, value in known.items()}
    return shown or {"held-out kNN": "–"}


def _best(run: RunFiles) -> dict[str, str]:
    """Return the name of the best checkpoint, and whether its averaged weights are meant."""
    if run.best is None:
        return {}
    averaged = ", averaged weights" if run.best.weights == "ema" else ""
    return {"best checkpoint": f"{run.best.name}{averaged}"}


def standing_alarms(run: RunFiles) -> list[str]:
    """Return the names of the alarms that were raised and are not over."""
    standing: dict[str, None] = {}
    for line in run.alarms:
        standing |= dict.fromkeys(line["raised"])
        standing = {name: None for name in standing if name not in line["over"]}
    return list(standing)


def alarms(run: RunFiles) -> Markup:
    """Say when the embeddings collapsed or fell below the run's start, and when that was over."""
    if not run.alarms:
        return Markup("<p>No alarm: neither the embeddings nor their rank collapsed.</p>")
    items = [
        html(
            "step {:,}: <b>{}</b> {}, at {} (threshold {})",
            line["step"],
            name.replace("_", " "),
            word,
            number(line["value"][name]),
            number(line["threshold"][name]),
        )
        for line in run.alarms
        for word, names in (("raised", line["raised"]), ("over", line["over"]))
        for name in names
    ]
    standing = ", ".join(standing_alarms(run)).replace("_", " ")
    none = Markup("<p>None stands at the end.</p>")
    end = missing(f"Standing at the end: {standing}.") if standing else none
    return end + render("items", items=items)


def quarantine(run: RunFiles) -> Markup:
    """List the samples that could not be used, or say that there are none."""
    if not run.quarantine:
        return Markup("<p>No sample was skipped.</p>")
    keys = ("id", "shard", "key", "reason")
    rows = [[line[key] for key in keys] for line in run.quarantine[:MOST_QUARANTINED]]
    shown = html(
        "<p>{} samples could not be used; another one took the place of each.</p>{}",
        len(run.quarantine),
        table(keys, rows, "settings"),
    )
    more = len(run.quarantine) - MOST_QUARANTINED
    return shown + (html("<p>{:,} more are in quarantine.jsonl.</p>", more) if more > 0 else "")


def settings(run: RunFiles) -> Markup:
    """Show recipe, data set, environment, and where the evaluated features come from; folded."""
    trees: dict[str, Tree] = {
        "Recipe": run.recipe,
        "Data set": run.data,
        "Environment": run.environment,
    }
    if run.evaluation:
        trees["Evaluation"] = run.evaluation["facts"]
    return joined(
        render("folded", title=title, text=table(("setting", "value"), flat(tree), "settings"))
        for title, tree in trees.items()
    )


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield ("data.batch_size", "256") and so on; lists as one text."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield prefix + key, ", ".join(map(str, value)) or "none"
        else:
            yield prefix + key, "none" if value is None or value == {} else str(value)


def _machine(run: RunFiles) -> str:
    """Say 'GPU (NVIDIA H200), one process, bf16' or 'CPU (x86_64), 2 processes, fp32'."""
    versions, world = run.environment["environment"], run.environment["world"]
    device = (
        f"GPU ({versions['cuda_device']})"
        if versions["cuda_device"]
        else f"CPU ({versions['machine']})"
    )
    processes = "one process" if world == 1 else f"{world} processes"
    return f"{device}, {processes}, {run.environment['precision']}"


def duration(seconds: float) -> str:
    """Write '43 s', '3 min 5 s', '2 h 10 min'."""
    whole = round(seconds)
    for size, unit, smaller, small_unit in ((3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"
