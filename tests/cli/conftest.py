"""What tests of several commands share."""

import pytest

from sslpipe.cli.app import run


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command line in this process, which ends with a status: what it printed on each stream.

    A mistake, of status 2, leaves no trace.
    """

    def call(*words, status=0):
        monkeypatch.setattr("sys.argv", ["sslpipe", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            run()
        shown = capsys.readouterr()
        assert (end.value.code or 0) == status, shown.err
        assert "Traceback" not in shown.err
        return shown.out, shown.err

    return call
