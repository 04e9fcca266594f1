"""`python -m tools.embed` is `sslpipe embed`, run from a clone."""

from sslpipe.cli.embed import app, run

if __name__ == "__main__":
    run(app)
