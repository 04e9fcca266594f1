"""Bars on a terminal, a line now and then elsewhere."""

import io
import json
import re
import shlex
from types import SimpleNamespace

import pytest
from rich.console import Console

from sslpipe.cli import terminal
from sslpipe.cli.suite_output import against_table
from tests.evaluation.test_verdict import compared


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


def test_a_log_has_a_line_each_ten_seconds_with_the_time_to_go_and_the_end(shown, monkeypatch):
    text, clock = shown(False), iter(range(0, 1000, 6))
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with terminal.progress("embed", 6) as advance:
        for _ in range(6):
            advance(1)
    lines = ["embed: 2/6, 0:36 left", "embed: 4/6, 0:18 left", "embed: 6/6"]
    assert text.getvalue().splitlines() == lines


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


def columns_of(text):
    """What stands in each column of a table of a terminal, without spaces and line ends."""
    lines = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    lines += [line.split("┃")[1:-1] for line in text.splitlines() if line.startswith("┃")]
    return ["".join("".join(cells).split()) for cells in zip(*lines, strict=True)]


HEADS = ["features", "MAP@R, classes that chose", "MAP@R, other classes", "difference", "ms"]
WIDE = [["tf_efficientnet_lite0@96", "64.7%", "66.5%", "+14.0 (+3.6 to +24.5) *", "10.3"]] * 2
COMPARED = compared(
    against="tf_efficientnet_lite0_of_somebody", whitened=True, against_whitened=True, power=0.25
)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("of", ["choose", "against"])
def test_a_table_on_a_narrow_terminal_wraps_its_cells_and_cuts_none(of, width):
    wide = terminal.text_table(HEADS, WIDE) if of == "choose" else against_table([COMPARED] * 2)
    texts = []
    for columns in (width, 400):
        console = Console(file=io.StringIO(), width=columns, record=True)
        console.print(wide)
        texts.append(console.export_text())
    assert max(map(len, texts[0].splitlines())) <= width
    assert columns_of(texts[0]) == columns_of(texts[1])
    assert "…" not in texts[0]


@pytest.mark.parametrize(("columns", "rules"), [(80, 1), (200, 0)])
def test_rows_of_several_lines_are_parted_by_rules(columns, rules, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    terminal.print_table(terminal.text_table(HEADS, WIDE))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("├") for line in lines) == rules


def test_a_log_gets_all_columns_of_a_wide_table_on_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal.print_table(terminal.text_table(HEADS, WIDE))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if all(head in line for head in HEADS)]
    assert len([line for line in lines if all(cell in line for cell in WIDE[0])]) == len(WIDE)


def test_json_keeps_every_script_and_gives_the_terminal_no_command(capsys):
    tree = [
        {"name": "\u041f\u0442\u0438\u0446\u044b/\u9ce5 1.png"},
        {"name": "\x1b[2J\u202e\x9b\udcff\t"},
    ]
    terminal.show_json(tree)
    said = capsys.readouterr().out
    assert json.loads(said) == tree
    assert tree[0]["name"] in said
    assert not re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", said)
