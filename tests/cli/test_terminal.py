"""Bars on a terminal, a line now and then elsewhere; a first line of what is silent for long."""

import io
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from sslpipe.cli import app, terminal

LINE = "sslpipe embed: loading libraries and data ...\n"


@pytest.fixture
def shown(monkeypatch):
    """Replace the console by one that is a terminal, or none; returns what it was given."""

    def replace(is_terminal):
        text = io.StringIO()
        console = Console(file=text, force_terminal=is_terminal, width=100)
        monkeypatch.setattr(terminal, "console", console)
        return text

    return replace


def test_a_terminal_has_a_bar_with_the_time_to_go_and_messages_above_it(shown):
    text = shown(True)
    with terminal.progress("embed", 8) as advance:
        advance(4)
        terminal.console.print("skipped: one")
        advance(4)
    assert "8/8" in text.getvalue()
    assert "0:00:00" in text.getvalue()
    assert "skipped: one\n" in text.getvalue()


def test_a_log_has_a_line_each_ten_seconds_and_the_end(shown, monkeypatch):
    text, clock = shown(False), iter(range(0, 1000, 6))
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with terminal.progress("embed", 6) as advance:
        for _ in range(6):
            advance(1)
    assert text.getvalue() == "embed: 2/6\nembed: 4/6\nembed: 6/6\n"


def test_what_takes_no_time_is_no_line_of_a_log(shown):
    text = shown(False)
    with terminal.progress("embed", 2) as advance:
        advance(1)
        advance(1)
    with terminal.working("report") as say:
        say("views")
    assert text.getvalue() == ""


def test_a_task_of_unknown_length_shows_its_stage_and_is_gone_at_the_end(shown, monkeypatch):
    text = shown(True)
    with terminal.working("report") as say:
        say("views")
    assert "report: views" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")  # the line is erased
    monkeypatch.setenv("RANK", "1")
    text = shown(True)
    with terminal.working("knn"):
        pass
    assert text.getvalue() == ""


@pytest.fixture
def said(monkeypatch):
    """Lines that the watching thread printed, after a run of `sslpipe embed` that does `work`."""

    def run(work, silent_s=0.01):
        lines: list[str] = []
        monkeypatch.setattr(terminal, "say_last", lambda text: lines.append(text + "\n"))
        monkeypatch.setattr(terminal, "SILENT_S", silent_s)
        monkeypatch.setattr(sys, "argv", ["sslpipe", "embed", "MODEL"])
        monkeypatch.setattr(app, "_run", lambda words: work(lines))
        with pytest.raises(SystemExit):
            app.run()
        return lines

    return run


def watcher():
    """The thread of this run: one of an earlier test may not have ended yet."""
    return [t for t in threading.enumerate() if t.name == "sslpipe-first-sign"][-1]


def test_only_a_command_that_is_silent_says_once_that_it_is_at_work(said, capsys):
    assert said(lambda lines: watcher().join(60)) == [LINE]

    def prints(lines):
        thread = watcher()
        print("a line")
        thread.join(60)

    assert said(prints) == []
    assert capsys.readouterr().out == "a line\n"
    ended = []  # sooner
    assert said(lambda lines: ended.append(watcher()), silent_s=600.0) == []
    ended[0].join(60)


@pytest.mark.parametrize(("name", "value"), [("SSLPIPE_NEXT", "0"), ("RANK", "1")])
def test_neither_scripts_nor_further_processes_get_the_line(said, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    names = []
    assert said(lambda lines: names.extend(t.name for t in threading.enumerate())) == []
    assert "sslpipe-first-sign" not in names
