"""`python -m tools.embed` is `sslpipe embed`."""

from sslpipe.cli.app import run

if __name__ == "__main__":
    run("embed")
