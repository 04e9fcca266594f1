"""Bars on a terminal, a line now and then elsewhere."""

import io
import re
import shlex
from types import SimpleNamespace

import pytest
from rich.console import Console

from sslpipe.cli import terminal


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


def test_a_table_wraps_a_long_name_and_cuts_none():
    name = "tf_efficientnet_lite0@224"
    table = terminal.text_table(["features", name[::-1]], [[name, "1"]])
    printed = io.StringIO()
    Console(file=printed, width=30).print(table)
    kept = [
        [cell.strip() for cell in re.split("[│┃]", line)]
        for line in printed.getvalue().splitlines()
    ]
    columns = [
        "".join(cells) for cells in zip(*(row[1:3] for row in kept if len(row) > 2), strict=True)
    ]
    assert columns == [f"features{name}", f"{name[::-1]}1"]


@pytest.mark.parametrize("indent", [0, 2])
@pytest.mark.parametrize(
    "command",
    [
        "sslpipe status RUN",
        "sslpipe search a.safetensors Q --where 'vendor = A or vendor = B' --out found.html --k 5",
        "sslpipe build out --name-pattern '(?P<vendor>[^/]+)/(?P<thing>.+)[.]png' --group-by thing",
        "accelerate launch --multi_gpu -m sslpipe train " + "recipe.toml " * 9 + "--data d.json",
    ],
)
def test_a_broken_command_line_is_the_same_to_a_shell(command, indent):
    broken = terminal.break_command(command, indent=indent)
    lines = broken.splitlines()
    assert shlex.split(broken.replace("\\\n", "")) == shlex.split(command)
    assert max(map(len, lines)) <= 78
    assert not any(line.endswith(" --where \\") for line in lines)
