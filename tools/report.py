"""`python -m tools.report` is `sslpipe report`."""

from sslpipe.cli.app import run

if __name__ == "__main__":
    run("report")
