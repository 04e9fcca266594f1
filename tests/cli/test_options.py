"""How commands declare their options, and how their help shows them."""

import contextlib
import re
from dataclasses import dataclass
from typing import Annotated

import pytest
from typer.testing import CliRunner

from sslpipe.cli.app import load_command
from sslpipe.cli.options import argument, command, option
from sslpipe.cli.terminal import new_app
from tests.cli.test_app import programs

WIDTH = 80


@dataclass(frozen=True)
class Where:
    place: Annotated[str, argument("A place.")]
    depth: Annotated[int, option("How deep.", min=0)] = 3


@dataclass(frozen=True)
class Light:
    lamp: Annotated[str, option("Which lamp.")]
    bright: Annotated[bool, option("Shine.")] = True


@pytest.fixture
def dig():
    """Runs `dig WORDS`; what the function was given, and the result."""
    app = new_app()
    given = []

    @command(app, examples=["dig here", "dig there  # twice"])
    def dig(where: Where, times: Annotated[int, option("How often.")] = 1, *, light: Light) -> None:
        """Dig a hole."""
        given.append((where, times, light))

    def run(*words):
        given.clear()
        return given, CliRunner().invoke(app, words, terminal_width=WIDTH)

    return run


def test_a_dataclass_stands_for_the_options_of_its_fields(dig):
    given, done = dig("here", "--lamp", "x")
    assert done.exit_code == 0, done.output
    assert given == [(Where("here", 3), 1, Light("x", True))]
    given, _ = dig("--no-bright", "--lamp", "y", "--depth", "4", "--times", "2", "there")
    assert given == [(Where("there", 4), 2, Light("y", False))]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["here"], "--lamp"),
        (["--lamp", "x"], "place"),
        (["here", "--lamp=x", "--depth=-1"], "--depth"),
    ],
)
def test_a_field_is_required_and_limited_as_a_parameter_is(dig, words, named):
    given, done = dig(*words)
    assert not given
    assert done.exit_code == 2
    assert named in done.output


def test_the_help_has_the_text_of_each_field_and_the_examples_line_by_line(dig):
    _, done = dig("--help")
    for text in ("A place.", "How deep.", "How often.", "Which lamp.", "Shine."):
        assert text in done.output
    assert "Examples:\n    dig here\n    dig there  # twice\n" in done.output


@pytest.mark.parametrize("words", [words for words, _ in programs()], ids=" ".join)
def test_at_80_columns_the_texts_get_the_width(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    own = load_command(words[0])
    for inner in words[1:]:
        own = own.load(inner) if hasattr(own, "load") else own.commands[inner]
    with contextlib.suppress(SystemExit):
        own.main(["--help"], prog_name=" ".join(("sslpipe", *words)))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= WIDTH
    # where the texts begin
    _, _, listed = shown.partition("Options:\n")
    starts = [len(m[1]) for m in re.finditer(r"^(  --\S[^\n]*?  +)\w", listed, re.MULTILINE)]
    assert starts
    assert max(starts) <= 34
    assert "..." not in shown.partition("Commands:")[2], "a first line is cut"


@pytest.mark.parametrize(("name", "inner"), [("search", None), ("evaluate", "suite")])
def test_the_largest_everyday_commands_have_at_most_25_options(name, inner):
    own = load_command(name)
    own = own if inner is None else own.commands[inner]
    assert sum(param.param_type_name == "option" for param in own.params) <= 25


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("embed x --dta 3", "--dta", "--data"),
        ("embd", "'embd'", "'embed'"),
        ("embed x", "'--data'", "sslpipe embed --help"),
        ("shards build", "'out'", "sslpipe shards build --help"),
        ("gallery ad", "'ad'", "'add'"),
        ("slurm r --data d --run-dir e --nodes 0", "--nodes", "sslpipe slurm --help"),
    ],
)
def test_words_that_are_no_command_line_are_one_line(call, words, named, remedy):
    out, said = call(*words.split(), status=2)
    assert not out
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    assert named in said
    assert remedy in said
