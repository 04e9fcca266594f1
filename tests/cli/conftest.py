"""What tests of several commands share."""

import pytest

from sslpipe.cli.app import run


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command line in this process: its exit status, and what it printed on each stream."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["sslpipe", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            run()
        shown = capsys.readouterr()
        return end.value.code or 0, shown.out, shown.err

    return call
