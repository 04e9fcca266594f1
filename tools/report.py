"""A run directory -> one self-contained HTML file: verdict, table, curves, views, maps, neighbours.

python -m tools.report runs/demo --data out/demo/data/dataset.json
"""

import io
from html import escape
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from sslpipe.augment.preview import preview_grid
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings, load_embeddings
from sslpipe.finetune_recipe import parse_any_recipe
from sslpipe.setup import build_augment
from sslpipe.stateless import permutation
from tools.embed import console, run
from tools.evaluate import print_suite
from tools.report_charts import MOST_NAMES, apart, class_colour, scatter
from tools.report_pictures import (
    FEWEST_MAPPED,
    mapped_rows,
    neighbour_rows,
    pca_map,
    png_uri,
    thumbnails,
    tsne_map,
)
from tools.report_results import confusion, few_shot_chart, result_table
from tools.report_run import Run, read_run
from tools.report_sections import (
    CHARTS,
    SPEED_CHARTS,
    charts,
    header,
    missing,
    neighbour_sheet,
    quarantine,
    settings,
    steps_note,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

SUITE = "python -m tools.evaluate suite RUN --data DIR/dataset.json --out RUN/eval.json"
EMBED = (
    "python -m tools.embed RUN --data DIR/dataset.json --split {0} "
    "--out RUN/features/{0}.safetensors"
)
REPORT = "python -m tools.report RUN --data DIR/dataset.json"
NEEDS_RESULTS = "<p class='missing'>Needs eval.json: see <a href='#results'>Results</a>.</p>"
PREVIEWED = 4  # images of the view grid where the run has none of its own
ASPECT = 2.0  # of the map with images: the page is wider than high


class Features(NamedTuple):
    """Embeddings of one split and the facts saved with them."""

    rows: Embeddings
    facts: dict[str, object]


@app.command(
    epilog="Example: python -m tools.report runs/demo --data out/demo/data/dataset.json "
    "--out report.html"
)
def main(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    data: Annotated[
        str | None, typer.Option(help="The dataset.json that was evaluated: adds pictures.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write.", show_default="RUN/report.html")
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
    """Write one HTML file that shows a run; it loads nothing from the network.

    Whatever is missing in the run is named there, with the command that makes it. A run needs no
    data set to be shown; with --data the report has the images, too.
    """
    facts = read_run(run_dir)
    index = load_index(data) if data is not None else None
    queries = _load(features, run_dir / "features" / "test.safetensors")
    others = _load(bank, run_dir / "features" / "train.safetensors")
    page = build_page(facts, index, queries, others)
    out = out or run_dir / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    if facts.evaluation is not None:
        print_suite(facts.evaluation)
    console.print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser", highlight=False)


def build_page(
    facts: Run, index: DatasetIndex | None, queries: Features | None, bank: Features | None
) -> str:
    """The whole HTML file."""
    evaluation, split = facts.evaluation, _split_of(index, queries, "--features")
    bank_split = _split_of(index, bank, "--bank")
    sections = {
        "Results": (
            result_table(evaluation) if evaluation else missing("No eval.json yet.", SUITE)
        ),
        "Few labels": few_labels(facts),
        "Training": charts(facts, CHARTS) + steps_note(facts),
        "Views": views(facts, index),
        "Embedding map": embedding_map(facts, queries, split),
        "Nearest neighbours": nearest_neighbours(facts, queries, split, bank, bank_split),
        "Confusion": confusion(evaluation, facts.classes) if evaluation else NEEDS_RESULTS,
        "Speed": charts(facts, SPEED_CHARTS),
        "Quarantine": quarantine(facts),
        "Settings": settings(facts),
    }
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    links = "".join(f"<a href='#{anchor}'>{title}</a>" for title, anchor in anchors.items())
    body = "".join(
        f"<section id='{anchors[title]}'><h2>{title}</h2>{html}</section>"
        for title, html in sections.items()
    )
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(facts.recipe['name'])}: sslpipe report</title><style>{style}</style>"
        f"</head><body>{header(facts)}<nav aria-label='Sections'>{links}</nav><main>{body}</main>"
        "<footer>Written by <code>python -m tools.report</code> of sslpipe. Intervals are over "
        "test images (and draws of labels), not over training seeds.</footer></body></html>\n"
    )


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


def embedding_map(facts: Run, queries: Features | None, split: Split | None) -> str:
    """PCA and t-SNE of some test features, and t-SNE again under the images themselves."""
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    rows = mapped_rows(queries.rows)
    if len(rows.ids) < FEWEST_MAPPED:
        return f"<p class='missing'>{len(rows.ids)} embeddings are too few for a map.</p>"
    names, labels = facts.classes, rows.labels.numpy()
    count = max(len(names), int(labels.max()) + 1)
    names = [*names, *(f"class {label}" for label in range(len(names), count))]
    flat, held = pca_map(rows)
    near, perplexity = tsne_map(rows)
    of = f"{len(rows.ids):,} test embeddings"
    maps = {
        f"PCA, {100 * held:.0f} % of the variance": scatter(
            f"PCA of {of}, coloured by class", flat, labels, names
        ),
        f"t-SNE, perplexity {perplexity:.0f}": scatter(
            f"t-SNE of {of}, coloured by class", near, labels, names
        ),
    }
    if split is not None:
        shown = apart(near, aspect=ASPECT)
        pictures = thumbnails(split, rows.ids[shown].tolist())
        at = {row: pictures[i] for row in shown if (i := int(rows.ids[row])) in pictures}
        maps["t-SNE with the images"] = scatter(
            f"t-SNE of {of} with {len(at)} of the images", near, labels, names, at, aspect=ASPECT
        )
    legend = "".join(
        f"<li><i class='dot' style='--c:{class_colour(label, count)}'></i>{escape(name)}</li>"
        for label, name in enumerate(names)
    )
    key = f"<ul class='legend'>{legend}</ul>" if count <= MOST_NAMES else ""
    figures = "".join(
        f"<figure class='wide'><figcaption><b>{title}</b></figcaption>{svg}</figure>"
        for title, svg in maps.items()
    )
    many = f"; colours repeat in hue, as there are {count} classes" if count > MOST_NAMES else ""
    without = missing("No images beside it without --data.", REPORT) if split is None else ""
    evaluated = facts.evaluation["facts"].get("backbone_sha256") if facts.evaluation else None
    if evaluated and queries.facts.get("backbone_sha256") != evaluated:
        without += missing(
            "These embeddings are not of the backbone in the results.", EMBED.format("test")
        )
    return (
        f"<p>{of}, of length 1, coloured by their class{many}. Distances between far groups mean "
        f"little in t-SNE.</p>{key}<div class='maps pixels'>{figures}</div>{without}"
    )


def nearest_neighbours(
    facts: Run,
    queries: Features | None,
    split: Split | None,
    bank: Features | None,
    bank_split: Split | None,
) -> str:
    """Some test images with what is nearest to them; without a bank, among the test images."""
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    if split is None:
        return missing("The images are shown with --data only.", REPORT)
    same_split = bank is None or bank_split is None
    if bank is None or bank_split is None:
        bank, bank_split = queries, split
    if len(bank.rows.ids) < 2:
        return "<p class='missing'>One embedding has no neighbour.</p>"
    rows = neighbour_rows(bank.rows, queries.rows, same_split=same_split)
    found = {i for row in rows for i in row.neighbour_ids}
    sheet = neighbour_sheet(
        rows,
        facts.classes,
        thumbnails(split, (row.id for row in rows)),
        thumbnails(bank_split, found),
        f"the split {bank_split.name!r} ({len(bank.rows.ids):,} images)",
    )
    note = missing("Searched among the test images themselves.", EMBED.format("train"))
    return sheet + (note if same_split else "")


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
    recipe = parse_any_recipe(facts.given_recipe, "recipe.json")
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
