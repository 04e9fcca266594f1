"""`python -m sslpipe` and the program `sslpipe`; the commands are in sslpipe/cli."""

import os
import sys


def main() -> None:
    """Run the command line on this process's arguments."""
    try:
        # first of all: from here on this process ends with its launcher, also during imports
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from sslpipe.run.launcher import watch_launcher

            watch_launcher()
        from sslpipe.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's status for Ctrl-C
    run()


if __name__ == "__main__":
    main()
