"""`python -m tools.whiten` is `sslpipe whiten`, run from a clone."""

from sslpipe.cli.embed import run
from sslpipe.cli.whiten import app

if __name__ == "__main__":
    run(app)
