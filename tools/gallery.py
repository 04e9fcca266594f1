"""`python -m tools.gallery` is `sslpipe gallery`, run from a clone."""

from sslpipe.cli.embed import run
from sslpipe.cli.gallery import app

if __name__ == "__main__":
    run(app)
