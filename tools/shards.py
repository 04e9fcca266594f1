"""`python -m tools.shards` is `sslpipe shards`."""

from sslpipe.cli.app import run

if __name__ == "__main__":
    run("shards")
