"""`python -m tools.shards` is `sslpipe shards`, run from a clone."""

from sslpipe.cli.embed import run
from sslpipe.cli.shards import app

if __name__ == "__main__":
    run(app)
