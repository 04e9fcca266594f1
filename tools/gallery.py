"""`python -m tools.gallery` is `sslpipe gallery`."""

from sslpipe.cli.app import run

if __name__ == "__main__":
    run("gallery")
