"""`python -m sslpipe` and the program `sslpipe`; the commands are in sslpipe/cli."""

from sslpipe.cli.app import app, run

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line on this process's arguments."""
    run()


if __name__ == "__main__":
    main()
