"""`sslpipe status`: where a run stands, from its directory alone."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.cli.inputs import check_run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(epilog="Examples: sslpipe status runs/photos | sslpipe status runs/photos --json")
def main(
    run: Annotated[Path, typer.Argument(help="A run directory, of either kind.")],
    as_json: Annotated[bool, typer.Option("--json", help="For other programs.")] = False,
) -> None:
    """Print where a run stands, from its directory alone.

    Progress, speed, time left, health, bad samples, last checkpoint, and each process.
    """
    check_run(run)

    from sslpipe.run.status import render
    from sslpipe.run.status import status as read_status

    summary = read_status(run)
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    else:
        Console().print(render(summary), highlight=False, markup=False)
