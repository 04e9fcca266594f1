"""`python -m tools.evaluate` is `sslpipe evaluate`."""

from sslpipe.cli.app import run

if __name__ == "__main__":
    run("evaluate")
