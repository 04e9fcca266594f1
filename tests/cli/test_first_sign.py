"""What takes long before its first line says that it is at work; nothing else does."""

import sys
import threading

import pytest

from sslpipe.cli import app
from sslpipe.cli import terminal as first_sign

LINE = "sslpipe embed: loading libraries and data ...\n"


@pytest.fixture
def said(monkeypatch):
    """Lines that the watching thread printed, after a run of `sslpipe embed` that does `work`."""

    def run(work, silent_s=0.01):
        lines: list[str] = []
        monkeypatch.setattr(first_sign, "say_last", lambda text: lines.append(text + "\n"))
        monkeypatch.setattr(first_sign, "SILENT_S", silent_s)
        monkeypatch.setattr(sys, "argv", ["sslpipe", "embed", "MODEL"])
        monkeypatch.setattr(app, "_run", lambda words: work(lines))
        with pytest.raises(SystemExit):
            app.run()
        return lines

    return run


def watcher():
    """The thread of this run: one of an earlier test may not have ended yet."""
    return [t for t in threading.enumerate() if t.name == "sslpipe-first-sign"][-1]


def test_a_command_that_is_silent_says_once_that_it_is_at_work(said):
    assert said(lambda lines: watcher().join(60)) == [LINE]


def test_one_that_has_printed_something_does_not(said, capsys):
    def work(lines):
        thread = watcher()
        print("a line")
        thread.join(60)

    assert said(work) == []
    assert capsys.readouterr().out == "a line\n"


def test_one_that_ends_sooner_does_not(said):
    ended = []
    assert said(lambda lines: ended.append(watcher()), silent_s=600.0) == []
    ended[0].join(60)


@pytest.mark.parametrize(("name", "value"), [("SSLPIPE_NEXT", "0"), ("RANK", "1")])
def test_neither_scripts_nor_further_processes_get_the_line(said, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    names = []
    assert said(lambda lines: names.extend(t.name for t in threading.enumerate())) == []
    assert "sslpipe-first-sign" not in names
