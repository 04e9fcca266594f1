"""`sslpipe report`: a run directory -> one self-contained HTML file."""

from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_file, open_data
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import argument, command, option
from sslpipe.cli.terminal import new_app, say, working
from sslpipe.run.recorded import check_run, report_file

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
    for each in run_dirs:
        check_run(each)
    target = out or report_file(run_dirs)
    check_file(target, (".html", ".htm"))
    index = None if data is None else open_data(data)

    from sslpipe.api import write_report
    from sslpipe.cli.suite_output import print_suite
    from sslpipe.report.run_files import read_run

    with working("report") as stage:
        write_report(run_dirs, index, target, say=say, stage=stage)
    run_dir = run_dirs[0]
    several = len(run_dirs) > 1
    evaluation = None if several else read_run(run_dir).evaluation
    if evaluation is not None:
        print_suite(evaluation)
    say(f"{target}: {target.stat().st_size / 1e6:.1f} MB, open it in a browser")
    if not several and not (run_dir / "backbone").exists():
        say_next(["export", run_dir, "--out", run_dir / "backbone"])
