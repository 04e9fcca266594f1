"""A run directory -> one self-contained HTML file: verdict, table, curves, views, maps, neighbours.

python -m tools.report runs/demo --data out/demo/data/dataset.json
python -m tools.report runs/demo runs/other
"""

import io
from pathlib import Path
from typing import Annotated

import typer

from sslpipe.augment.build import build_augment
from sslpipe.augment.preview import preview_grid
from sslpipe.cli.embed import console, run
from sslpipe.cli.evaluate import print_suite
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import load_embeddings
from sslpipe.portable import write_atomically
from sslpipe.random import permutation
from sslpipe.recipe import parse_recipe
from sslpipe.report.compare import build_comparison, names_apart
from sslpipe.report.confusion import confusion
from sslpipe.report.embeddings import (
    EMBED,
    Features,
    embedding_map,
    embedding_quality,
    nearest_neighbours,
)
from sslpipe.report.more import more_tables
from sslpipe.report.page import html_page
from sslpipe.report.pictures import png_uri
from sslpipe.report.results import few_shot_chart, result_table
from sslpipe.report.run import Run, read_run
from sslpipe.report.sections import (
    CHARTS,
    FINETUNE_CHARTS,
    SPEED_CHARTS,
    alarms,
    charts,
    header,
    missing,
    quarantine,
    settings,
    steps_note,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

SUITE = "python -m tools.evaluate suite RUN --data DIR/dataset.json --out RUN/eval.json"
NEEDS_RESULTS = "<p class='missing'>Needs eval.json: see <a href='#results'>Results</a>.</p>"
USUAL = "features/{}.safetensors"
PREVIEWED = 4  # images of the view grid where the run has none of its own


@app.command(
    epilog="Example: python -m tools.report runs/demo --data out/demo/data/dataset.json "
    "--out report.html"
)
def main(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several to compare.")
    ],
    data: Annotated[
        str | None, typer.Option(help="The dataset.json that was evaluated: adds pictures.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file to write.",
            show_default="RUN/report.html; for several, comparison.html beside the first",
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="Embeddings of the test split.", show_default="RUN/features/test.safetensors"
        ),
    ] = None,
    bank: Annotated[
        Path | None,
        typer.Option(
            help="Embeddings to search in.", show_default="RUN/features/train.safetensors"
        ),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares several; it loads nothing from the network.

    Whatever is missing in the run is named there, with the command that makes it. A run needs no
    data set to be shown; with --data the report has the images, too.
    """
    if len(run_dirs) > 1:
        given = {"--data": data, "--features": features, "--bank": bank}
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option} is for the report of one run; leave it out")
        runs = [read_run(run_dir) for run_dir in run_dirs]
        embedded = [_load(None, run_dir / USUAL.format("test")) for run_dir in run_dirs]
        page = build_comparison(runs, names_apart(run_dirs, runs), embedded)
        _write(out or run_dirs[0].parent / "comparison.html", page)
        return
    (run_dir,) = run_dirs
    facts = read_run(run_dir)
    index = load_index(data) if data is not None else None
    queries = _load(features, run_dir / USUAL.format("test"))
    others = _load(bank, run_dir / USUAL.format("train"))
    page = build_page(facts, index, queries, others)
    if facts.evaluation is not None:
        print_suite(facts.evaluation)
    _write(out or run_dir / "report.html", page)


def _write(out: Path, page: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    console.print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser", highlight=False)


def build_page(
    facts: Run, index: DatasetIndex | None, queries: Features | None, bank: Features | None
) -> str:
    """The whole HTML file."""
    evaluation, split = facts.evaluation, _split_of(index, queries, "--features")
    bank_split = _split_of(index, bank, "--bank")
    sections = {
        "Results": (
            result_table(evaluation) + more_tables(evaluation)
            if evaluation
            else missing("No eval.json yet.", SUITE)
        ),
        "Few labels": few_labels(facts),
        "Training": charts(facts, FINETUNE_CHARTS if "sampler" in facts.recipe else CHARTS)
        + steps_note(facts),
        "Alarms": alarms(facts),
        "Views": views(facts, index),
        "Embedding map": embedding_map(facts, queries, split),
        "Separation": (
            embedding_quality({facts.recipe["name"]: queries}, evaluation)
            if queries
            else missing("No embeddings of the test split yet.", EMBED.format("test"))
        ),
        "Nearest neighbours": nearest_neighbours(facts, queries, split, bank, bank_split),
        "Confusion": confusion(evaluation, facts.classes) if evaluation else NEEDS_RESULTS,
        "Speed": charts(facts, SPEED_CHARTS),
        "Quarantine": quarantine(facts),
        "Settings": settings(facts),
    }
    return html_page(facts.recipe["name"], header(facts), sections)


def few_labels(facts: Run) -> str:
    if facts.evaluation is None:
        return NEEDS_RESULTS
    chart = few_shot_chart(facts.evaluation)
    if not chart:
        return "<p class='missing'>eval.json has no kNN with few labels a class.</p>"
    return (
        "<p>How many labels the features need: the same kNN vote, with few labelled images a class "
        f"(mean over several draws) and with all. Bars: 95 % intervals.</p><div class='charts one'>"
        f"{chart}</div>"
    )


def views(facts: Run, index: DatasetIndex | None) -> str:
    """The grid that `sslpipe preview` left in the run, else one made from the data set."""
    raw = facts.views_png
    if raw is None and index is not None and index.sha256 == facts.data["index_sha256"]:
        raw = _preview(facts, index)
    if raw is None:
        return missing(
            "No views.png yet, and no --data of the data set that was trained on.",
            "sslpipe preview RECIPE --data DIR/dataset.json --out RUN/views.png",
        )
    alt = "A row for each image: the image with the crops framed, and the views training made of it"
    return (
        "<p>What training sees: images, and beside each the two views of an epoch with the "
        "parameters that were drawn.</p>"
        f"<div class='wide views'><img src='{png_uri(raw)}' alt='{alt}'></div>"
    )


def _load(given: Path | None, usual: Path) -> Features | None:
    if given is None and not usual.is_file():
        return None
    return Features(*load_embeddings(given or usual))


def _split_of(index: DatasetIndex | None, features: Features | None, option: str) -> Split | None:
    """The split that was embedded. Raises: UserError where --data is another data set."""
    if index is None or features is None:
        return None
    if features.facts.get("data_sha256") != index.sha256:
        raise UserError(
            f"--data is not the data set of {option} (its sha256 is another one); "
            "embed it again with `python -m tools.embed`"
        )
    return index.split(str(features.facts["split"]))


def _preview(facts: Run, index: DatasetIndex) -> bytes:
    """The grid of `sslpipe preview`, of the run's own recipe, as PNG."""
    recipe = parse_recipe(facts.given_recipe, "recipe.json")
    split = index.split(recipe.data.split)
    grid = preview_grid(
        index,
        split,
        build_augment(recipe, index),
        seed=recipe.seed,
        epoch=0,
        ids=sorted(permutation(len(split), recipe.seed)[:PREVIEWED].tolist()),
        canvas_px=recipe.data.canvas_px,
    )
    file = io.BytesIO()
    grid.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    run(app)
