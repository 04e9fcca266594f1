"""The command line as a user meets it: help with examples, one line for a mistake."""

import contextlib
import errno
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

import sslpipe.cli.app as program
from sslpipe.__main__ import main
from sslpipe.cli.app import COMMANDS, load_command
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT, command_line, parsed, write_recipe


def programs():
    """Every command and sub-command: ("evaluate", "knn"), its click command."""
    for name in COMMANDS:
        command = load_command(name)
        yield (name,), command
        for inner, subcommand in getattr(command, "commands", {}).items():
            yield (name, inner), command.load(inner) if hasattr(command, "load") else subcommand


def unbroken(text):
    """Join command lines that are broken by a backslash, as a shell does."""
    return re.sub(r" \\\n +", " ", text)


NEXT = "\n\n\b\nNext: "
EXAMPLES = [
    example.split("  # ")[0]
    for _, command in programs()
    for example in re.findall(r"^  ([^#\s].*)$", unbroken(command.epilog.partition(NEXT)[0]), re.M)
]


def test_every_command_ends_with_an_example_of_its_own_and_the_next_command():
    for words, command in programs():
        examples, _, following = command.epilog.partition(NEXT)
        assert examples.startswith(("\b\nExample:\n  ", "\b\nExamples:\n  "))  # no line is broken
        assert re.search(rf"sslpipe {words[0]} ", examples), words
        assert named_commands(following), words
        assert load_command(words[0]).epilog.count("Next: ") == 1  # however often it is loaded


def test_every_command_shows_the_option_for_parts_of_ones_own(capsys):
    for words, command in programs():
        assert [parameter.name for parameter in command.params].count("plugin") == 1, words
    with contextlib.suppress(SystemExit):
        load_command("train").main(["--help"], prog_name="sslpipe train")
    shown = " ".join(re.sub(r"[^\w.,: -]", " ", capsys.readouterr().out).split())
    assert "plugin MODULE Import your own losses, backbones and so on" in shown


def named_commands(text):
    """The commands that a line names; raises on one that does not exist."""
    named = re.findall(r"sslpipe ([a-z]+) ?([\w-]*)", text)
    for name, inner in named:
        assert inner in getattr(load_command(name), "commands", [inner]), (name, inner)
    return named


def test_alone_it_shows_the_commands_of_a_normal_day():
    result = command_line()
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^  sslpipe (.*)$", result.stdout, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        test_the_examples_of_the_help_are_command_lines_of_the_program(f"sslpipe {line}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_are_command_lines_of_the_program(example):
    words = shlex.split(example)
    words = words[words.index("sslpipe") + 1 :]
    with contextlib.suppress(typer.Exit):  # of --explain, which needs nothing else
        parsed(*words)  # raises on what it does not know or misses
    assert "launch/" not in example, "the reader has no clone"


def test_no_markup_takes_letters_out_of_the_help(capsys, monkeypatch):
    """Neither HTML of Markdown, as in (?P<name>...), nor rich's brackets."""
    monkeypatch.setenv("COLUMNS", "1000")
    seen = set()
    for words, command in programs():
        helps = [parameter.help for parameter in command.params if getattr(parameter, "help", "")]
        angles = {tag for text in helps for tag in re.findall(r"<\w+>|\[\^?[\w/]+\]", text)}
        if angles:
            with contextlib.suppress(SystemExit):
                command.main(["--help"], prog_name=" ".join(words))
            shown = capsys.readouterr().out
            assert not {tag for tag in angles if tag not in shown}, words
            seen |= angles
    assert "<theme>" in seen


def test_help_needs_neither_torch_nor_numpy():
    """And the list of commands needs no pydantic, which typer imports for options."""
    inner = ["evaluate suite", "shards build", "gallery enrol"]
    code = f"""
import sys
sys.modules.update(torch=None, numpy=None, pydantic=None)
from sslpipe.__main__ import main
for line in {["", *COMMANDS, *inner]}:
    sys.argv = ["sslpipe", *line.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    sys.modules.pop("pydantic", None)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_version_is_shown_without_an_import_of_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["sslpipe", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    python = ".".join(map(str, sys.version_info[:3]))
    shown = f"sslpipe {version('sslpipe')}, Python {python}, torch {version('torch')}\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name):
    own = " ".join((load_command(name).help or "").split())
    assert own.startswith(COMMANDS[name][1].removesuffix("."))
    assert len(COMMANDS[name][1]) <= 68, "at 80 columns it would end in ..."


@pytest.mark.parametrize("name", ["embed", "evaluate", "gallery", "report", "shards", "whiten"])
def test_python_m_tools_x_is_sslpipe_x(name, monkeypatch, capsys):
    assert (ROOT / "tools" / f"{name}.py").is_file()
    monkeypatch.setattr(sys, "argv", ["tools", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"tools.{name}", run_name="__main__")
    shown = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sslpipe", name, "--help"])
    with pytest.raises(SystemExit) as twin_ended:
        main()
    assert (ended.value.code, shown) == (twin_ended.value.code, capsys.readouterr().out)
    assert f"Usage: sslpipe {name} " in shown


@pytest.mark.parametrize(
    ("number", "file", "remedy"),
    [
        (errno.ENOSPC, None, "free some space"),
        (errno.EROFS, "out/x.csv", "name another place"),
    ],
)
def test_a_full_or_locked_disk_is_one_line(monkeypatch, capsys, number, file, remedy):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr(program, "app", refuse)
    monkeypatch.setattr(sys, "argv", ["sslpipe", "status", "x"])
    with pytest.raises(SystemExit) as ended:
        program.run()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for part in (file or "a file", os.strerror(number), remedy):
        assert part in said
    number = errno.ECHILD  # no disk says so, and no file is named: a fault of the program
    file = None
    with pytest.raises(ChildProcessError):
        program.run()


def test_completion_scripts_ask_the_program(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = command_line("--show-completion", "bash", status=0)
    assert "_SSLPIPE_COMPLETE" in result.stdout
    monkeypatch.setenv("_SSLPIPE_COMPLETE", "complete_bash")
    for words, place, completed in (("sh", "1", "shards"), ("status --j", "2", "--json")):
        monkeypatch.setenv("COMP_WORDS", f"sslpipe {words}")
        monkeypatch.setenv("COMP_CWORD", place)
        assert command_line().stdout.split() == [completed]


def test_a_mistake_in_the_settings_of_a_part_is_one_line_before_the_first_step(
    data, tmp_path, call
):
    words = ["train", write_recipe(tmp_path), "--data", data, "--run-dir", tmp_path / "run"]
    _, said = call(*words, "loss.temprature=0.1", status=2)
    assert said.startswith("error: ")
    assert "loss.temprature" in said
    assert "did you mean 'temperature'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_wandb_a_training_that_names_it_goes_through(data, tmp_path, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # any import of it now fails
    words = ["train", write_recipe(tmp_path), "--data", data, "--run-dir", tmp_path / "run"]
    _, said = call(*words, "steps=4", "run.monitor_steps=4", 'run.trackers=["wandb"]')
    assert "tracker 'wandb' did not start" in said
    assert read_metrics(tmp_path / "run", "eval")[-1]["holdout_knn"] >= 0


def test_names_of_a_data_set_give_the_terminal_no_commands_and_a_suite_is_tracked(tmp_path, call):
    """Of classes, the data set and the run; the suite's numbers are in the run's TensorBoard."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    data = write_dataset(tmp_path / "data")
    tree = json.loads(data.read_text())
    tree["splits"]["test"] = [tree["splits"]["train"].pop() for _ in range(3)]
    tree |= {"name": evil, "license": evil, "classes": [evil + each for each in tree["classes"]]}
    data.write_text(json.dumps(tree))
    recipe, run, on = write_recipe(tmp_path), tmp_path / "run", ["--data", data]
    tracked = 'run.trackers=["tensorboard"]'
    fast = ["--no-baselines", "--no-leakage", "--num-workers", "0", "--device", "cpu"]
    said = ""
    for words in (
        ["check", recipe, *on, "steps=2"],
        ["train", recipe, *on, "--run-dir", run, "steps=2", tracked],
        ["embed", run, *on, "--split", "test", "--out", tmp_path / "test.safetensors"],
        ["evaluate", "suite", run, *on, *fast, "--out", run / "eval.json"],
        ["status", run],
        ["runs", tmp_path],
        ["report", run, *on],
        ["export", run, "--out", tmp_path / "backbone"],
        ["shards", "stats", data.parent],
    ):
        said += "".join(call(*words))
    assert "owned" in said
    assert not set("\x1b\x07\u202e") & set(said)
    shown = EventMultiplexer().AddRunsFromDirectory(str(run / "tensorboard")).Reload()
    assert list(shown.Runs()) == ["tiny"]
    measured = [each for each in shown.Runs()["tiny"]["scalars"] if each.startswith("test/ssl")]
    assert "test/ssl/kNN" in measured


def test_the_help_of_an_evaluation_has_no_name_of_the_code():
    evaluate = load_command("evaluate")
    commands = {name: evaluate.load(name) for name in evaluate.commands}
    texts = [p.help or "" for command in commands.values() for p in command.params]
    assert not [text for text in texts if "see `" in text]
    summaries = [command.help for command in commands.values()]
    assert not [text for text in summaries if re.search(r"ollective|bit for bit", text)]
    assert all(re.match(r"[A-Z].*\.", text) for text in summaries)
