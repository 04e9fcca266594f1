"""`python -m tools.whiten` is `sslpipe whiten`."""

from sslpipe.cli.app import run

if __name__ == "__main__":
    run("whiten")
