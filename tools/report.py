"""`python -m tools.report` is `sslpipe report`, run from a clone."""

from sslpipe.cli.embed import run
from sslpipe.cli.report import app

if __name__ == "__main__":
    run(app)
