"""`sslpipe report`: a run directory -> one self-contained HTML file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sslpipe.cli.inputs import check_features, check_file, check_run
from sslpipe.cli.next_step import after_report
from sslpipe.cli.progress import working
from sslpipe.cli.terminal import console
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from sslpipe.report.embeddings import Features

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

USUAL = "features/{}.safetensors"


@app.command(
    epilog="Examples: sslpipe report runs/photos --data out/photos/dataset.json --out report.html "
    "| sslpipe report runs/photos runs/others"
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
    """Write one HTML file that shows a run, or compares several.

    Runs that differ in their seed alone are taken together: how far each number moves over seeds,
    and which recipe is better for all of them.

    It loads nothing from the network. Whatever is missing in the run is named there, with the
    command that makes it. A run needs no data set to be shown; with --data the report has the
    images, too.
    """
    if len(run_dirs) > 1:
        for option, value in (("--data", data), ("--features", features), ("--bank", bank)):
            if value is not None:
                raise UserError(f"{option} is for the report of one run; leave it out")
    for run_dir in run_dirs:
        check_run(run_dir)
    folders = [run_dir.resolve() for run_dir in run_dirs]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise UserError(f"{run_dirs[place]} is named twice; name each run once")
    index = load_index(data) if data is not None else None
    check_features([features, bank])
    target = out or (
        run_dirs[0].parent / "comparison.html" if len(run_dirs) > 1 else run_dirs[0] / "report.html"
    )
    check_file(target)

    from sslpipe.cli.suite_tables import print_suite
    from sslpipe.report.build import build_page
    from sslpipe.report.compare import build_comparison, names_apart
    from sslpipe.report.over_seeds import cautions, group_by_recipe, lines, verdicts
    from sslpipe.report.run import read_run

    if len(run_dirs) > 1:
        runs = [read_run(run_dir) for run_dir in run_dirs]
        embedded = [_load(None, run_dir / USUAL.format("test")) for run_dir in run_dirs]
        names = names_apart(run_dirs, runs)
        page = build_comparison(runs, names, embedded)
        recipes = group_by_recipe(runs)
        said = [*cautions(dict(zip(names, runs, strict=True)), recipes), *lines(recipes)]
        for line in [*said, *map(str, verdicts(recipes))]:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        _write(target, page)
        return
    (run_dir,) = run_dirs
    run = read_run(run_dir)
    queries = _load(features, run_dir / USUAL.format("test"))
    others = _load(bank, run_dir / USUAL.format("train"))
    with working("report") as say:
        page = build_page(run, index, queries, others, say)
    if run.evaluation is not None:
        print_suite(run.evaluation)
    _write(target, page)
    after_report(run_dir)


def _write(out: Path, page: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    console.print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser", highlight=False)


def _load(path: Path | None, usual: Path) -> "Features | None":
    if path is None and not usual.is_file():
        return None

    from sslpipe.evaluation.embed import load_embeddings
    from sslpipe.report.embeddings import Features

    return Features(*load_embeddings(path or usual))
