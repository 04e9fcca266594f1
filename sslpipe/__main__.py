"""`python -m sslpipe` and the program `sslpipe`; the commands are in sslpipe/cli."""

import os
import signal
import sys

INTERRUPTED = 130  # the shell's status for Ctrl-C


def main() -> None:
    """Run the command line on this process's arguments."""
    try:
        # first of all: from here on this process ends with its launcher, also during imports
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from sslpipe.run.launcher import watch_launcher

            watch_launcher()
        from sslpipe.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # a SIGTERM that is sent twice must not change the status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


if __name__ == "__main__":
    main()
