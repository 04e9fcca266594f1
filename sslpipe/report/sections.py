"""Make the sections of a report that need the run alone; every text from a file is escaped."""

from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from sslpipe.recipe.shortened import shortened_note
from sslpipe.report.charts import number
from sslpipe.report.results import accuracy_sentence, unfinished_sentence, verdict_sentence
from sslpipe.report.run import RunFiles, Tree, trained_steps

MOST_QUARANTINED = 100


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


def missing(text: str, command: str) -> str:
    """Say what is missing, and the command that makes it."""
    return f"<p class='missing'>{escape(text)} Run: <code>{escape(command)}</code></p>"


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


def trained_sentence(run: RunFiles, held_out: int | None = None) -> str:
    """Say what was trained on what, for how long, and where. held_out: Images, where counted."""
    recipe, data, speed = run.recipe, run.data, measured_speed(run)
    split = recipe["data"]["split"]
    steps, logged = trained_steps(run), run.train[-1] if run.train else {}
    epochs = logged["epoch"] / logged["step"] * steps if logged.get("step") else 0
    images, holdout = data["samples"].get(split, 0), recipe["data"].get("holdout", 0)
    labelled = data["classes"] or run.evals  # without labels nothing is held out
    count = f"about {holdout:,}" if held_out is None else f"{held_out:,}"
    without = f", {count} of them held out," if holdout and labelled else ""
    kind, loss = str(recipe["backbone"]["kind"]), str(recipe["loss"]["kind"])
    return (
        f"<code>{escape(kind)}</code> was trained with <code>{escape(loss)}</code> on {images:,} "
        f"images of {escape(data['name'])}{without} for {steps:,} steps ({epochs:.1f} epochs)"
        + (f" in {duration(speed.seconds)}" if speed else "")
        + f" on {_machine(run)}."
    )


def header(run: RunFiles, held_out: int | None = None) -> str:
    """Write title, a sentence on what was trained, one on how good it is, and the main numbers."""
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
    shown = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in tiles.items()
    )
    bad = ", ".join(standing_alarms(run)).replace("_", " ")
    warning = f"<p class='missing'><a href='#alarms'>{escape(bad)}</a></p>" if bad else ""
    if note := shortened_note(recipe):
        warning += f"<p class='missing'>{escape(note.capitalize())}.</p>"
    warning += "".join(
        f"<p class='missing'>{count} damaged lines of {escape(name)} were skipped.</p>"
        for name, count in run.damaged.items()
    )
    return (
        f"<h1>{escape(recipe['name'])}</h1><p class='verdict'>{unfinished_sentence(run)}"
        f"{verdict_sentence(run)}{trained_sentence(run, held_out)} "
        f"{accuracy_sentence(run)}</p>{warning}"
        f"<dl class='tiles'>{shown}</dl>"
    )


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


def alarms(run: RunFiles) -> str:
    """Say when the embeddings collapsed or fell below the run's start, and when that was over."""
    if not run.alarms:
        return "<p>No alarm: neither the embeddings nor their rank collapsed.</p>"
    items = "".join(
        f"<li>step {line['step']:,}: <b>{escape(name.replace('_', ' '))}</b> {word}, at "
        f"{number(line['value'][name])} (threshold {number(line['threshold'][name])})</li>"
        for line in run.alarms
        for word, names in (("raised", line["raised"]), ("over", line["over"]))
        for name in names
    )
    standing = standing_alarms(run)
    end = (
        f"<p class='missing'>Standing at the end: {escape(', '.join(standing).replace('_', ' '))}."
        "</p>"
        if standing
        else "<p>None stands at the end.</p>"
    )
    return f"{end}<ul>{items}</ul>"


def quarantine(run: RunFiles) -> str:
    """List the samples that could not be used, or say that there are none."""
    if not run.quarantine:
        return "<p>No sample was skipped.</p>"
    rows = "".join(
        f"<tr><td>{escape(str(line['id']))}</td><td><code>{escape(str(line['shard']))}</code></td>"
        f"<td><code>{escape(str(line['key']))}</code></td><td>{escape(str(line['reason']))}</td></tr>"
        for line in run.quarantine[:MOST_QUARANTINED]
    )
    more = len(run.quarantine) - MOST_QUARANTINED
    return (
        f"<p>{len(run.quarantine)} samples could not be used; another one took the place of each."
        f"</p><div class='wide'><table><thead><tr><th>id</th><th>shard</th><th>key</th>"
        f"<th>reason</th></tr></thead><tbody>{rows}</tbody></table></div>"
        + (f"<p>{more:,} more are in quarantine.jsonl.</p>" if more > 0 else "")
    )


def settings(run: RunFiles) -> str:
    """Show recipe, data set, environment, and where the evaluated features come from; folded."""
    trees: dict[str, Tree] = {
        "Recipe": run.recipe,
        "Data set": run.data,
        "Environment": run.environment,
    }
    if run.evaluation:
        trees["Evaluation"] = run.evaluation["facts"]
    details = ""
    for title, tree in trees.items():
        rows = "".join(
            f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(value)}</code></td></tr>"
            for key, value in flat(tree)
        )
        details += (
            f"<details><summary>{title}</summary><div class='wide'><table class='settings'>"
            f"<tbody>{rows}</tbody></table></div></details>"
        )
    return details


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
    return f"{escape(device)}, {processes}, {escape(run.environment['precision'])}"


def duration(seconds: float) -> str:
    """Write '43 s', '3 min 5 s', '2 h 10 min'."""
    whole = round(seconds)
    for size, unit, smaller, small_unit in ((3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"
