"""`sslpipe status`: the state of a run, from its directory alone."""

import json
import sys
from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_run
from sslpipe.cli.options import argument, option
from sslpipe.cli.terminal import new_app, show

app = new_app()


@app.command(epilog="Examples: sslpipe status runs/photos | sslpipe status runs/photos --json")
def main(
    run: Annotated[Path, argument("A run directory, of pretraining or fine-tuning.")],
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
) -> None:
    """Show the state of a run, from its directory alone.

    Progress, speed, time left, health, bad samples, last checkpoint, and each process.
    """
    check_run(run)

    from sslpipe.run.status import render
    from sslpipe.run.status import status as read_status

    summary = read_status(run)
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    else:
        show(render(summary))
