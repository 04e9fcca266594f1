"""`python -m tools.evaluate` is `sslpipe evaluate`, run from a clone."""

from sslpipe.cli.embed import run
from sslpipe.cli.evaluate import app

if __name__ == "__main__":
    run(app)
