"""`sslpipe report`: a run directory -> one self-contained HTML file."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sslpipe.cli.inputs import check_file, check_run, load_recipe_or_run, open_data
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import argument, command, option
from sslpipe.cli.terminal import new_app, say, working
from sslpipe.errors import UserError
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from sslpipe.data.index import DatasetIndex
    from sslpipe.report.embeddings import Features

app = new_app()


@command(
    app,
    examples=[
        "sslpipe report runs/photos --data out/photos/dataset.json --out report.html",
        "sslpipe report runs/photos runs/others",
    ],
)
def report(
    run_dirs: Annotated[list[Path], argument("A run directory, or several.", metavar="RUN")],
    data: Annotated[
        str | None, option("The dataset.json that was evaluated, to show its images.")
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "The HTML file to write.",
            show_default="RUN/report.html; for several, comparison.html beside the first",
        ),
    ] = None,
) -> None:
    """Show a run, or several side by side, in one HTML file.

    The page loads nothing from the network. What is missing in a run is named there, with the
    command that makes it. With --data the report also shows images, and views as training saw them.
    """
    if len(run_dirs) > 1 and data is not None:
        raise UserError("--data is for the report of one run; leave it out")
    run_dir = run_dirs[0]
    folders = [each.resolve() for each in run_dirs]
    for number, each in enumerate(run_dirs):
        check_run(each)
        if folders[number] in folders[:number]:
            raise UserError(f"{each} is named twice; name each run once")
    index = None if data is None else open_data(data)
    several = len(run_dirs) > 1
    target = out or (run_dir.parent / "comparison.html" if several else run_dir / "report.html")
    check_file(target)

    from sslpipe.cli.suite import print_suite
    from sslpipe.report.build import build_page, searched_split, shown_split
    from sslpipe.report.compare import build_comparison, names_apart
    from sslpipe.report.run import read_run

    runs = [read_run(each) for each in run_dirs]
    if several:
        named = dict(zip(names_apart(run_dirs, runs), runs, strict=True))
        page = build_comparison(named)
    else:
        (run,) = runs
        split = shown_split(run)
        queries = _load(run_dir, split)
        bank = searched_split(run)
        others = None if bank == split else _load(run_dir, bank)  # None: among themselves
        with working("report") as stage:
            own = index is not None and index.has_sha256(run.data["index_sha256"])
            if index is not None and own and run.views_png is None:
                run = run._replace(views_png=_views(run_dir, index))
            page = build_page(run, index, queries, others, stage)
        if run.evaluation is not None:
            print_suite(run.evaluation)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    say(f"{target}: {len(page) / 1e6:.1f} MB, open it in a browser")
    if not several and not (run_dir / "backbone").exists():
        say_next(["export", run_dir, "--out", run_dir / "backbone"])


def _views(run_dir: Path, index: "DatasetIndex") -> bytes | None:
    """Draw the PNG of `sslpipe preview RUN`; None, with the reason shown, where that cannot be."""
    from sslpipe.api import make_plan
    from sslpipe.check.preview import preview

    try:
        plan = make_plan(load_recipe_or_run(run_dir, []), index, run_dir=run_dir)
        grid, _ = preview(plan)
    except UserError as error:
        say(f"without a picture of the views: {error}")
        return None
    grid.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def _load(run_dir: Path, split: str) -> "Features | None":
    """Read the run's features, if any."""
    from sslpipe.evaluation.embed import load_embeddings
    from sslpipe.report.embeddings import Features

    path = run_dir / "features" / f"{split}.safetensors"
    return Features(*load_embeddings(path)) if path.is_file() else None
