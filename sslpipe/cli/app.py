"""The program `sslpipe`: its table of commands, and what every command does with a mistake."""

import os
import re
import sys
import traceback
from copy import copy
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer

from sslpipe.cli.next_step import DAY, add_next
from sslpipe.cli.options import option
from sslpipe.cli.terminal import LazyGroup, new_app, say
from sslpipe.errors import UserError, naming_options, shown
from sslpipe.portable import explain_file_error, explain_lack_of_memory, file_error
from sslpipe.run.console import GONE, lasting_streams
from sslpipe.satellites import gather

# name -> (module of cli with `app`, first line of its help). The line stands here, too, so that
# `sslpipe --help` imports none of the modules. Each has a row in `next_step`, too: what is typed
# after it. Satellites add theirs.
_CORE = {
    "shards": ("shards", "Convert images to webdataset shards with an index."),
    "check": ("train", "Validate a recipe; estimate time and memory of its training."),
    "preview": ("train", "Draw images beside the views that training makes of them."),
    "train": ("train", "Pretrain or fine-tune, as the recipe says; or resume."),
    "status": ("train", "Show the state of a run, from its directory alone."),
    "runs": ("train", "List the runs under a folder: recipe, steps, numbers, disk."),
    "slurm": ("train", "Print the SLURM batch script of a training, or submit it."),
    "embed": ("embed", "Write the features, labels and ids of every sample of a split."),
    "whiten": ("export", "Flatten the features of an export by the PCA of TRAIN."),
    "evaluate": ("evaluate", "Measure frozen features: kNN, linear probes, retrieval and more."),
    "report": ("report", "Show a run, or several side by side, in one HTML file."),
    "export": ("export", "Export the backbone; each format is verified in a clean process."),
}
COMMANDS: dict[str, tuple[str, str]] = gather(
    "commands",
    "COMMANDS",
    {name: (f"sslpipe.cli.{module}", text) for name, (module, text) in _CORE.items()},
)


def load_command(name: str) -> Any:
    """Return the command of this name; imports its module."""
    module = import_module(COMMANDS[name][0])
    command: Any = typer.main.get_command(module.app)
    # a module of several top-level commands holds them in a group that is no command itself
    command = getattr(command, "commands", {}).get(name, command)
    for inner, each in getattr(command, "commands", {}).items():
        complete_help(f"{name} {inner}", each)
    return complete_help(name, command)


def complete_help(name: str, command: Any) -> Any:
    """Add to a command's help the next command and `--plugin`, which is taken before any parsing.

    Args:
        name: "train", or "shards build" of a sub-command.
        command: The click command, which is changed, and returned.
    """
    add_next(name, command)
    if not any(param.name == "plugin" for param in command.params):
        program: Any = typer.main.get_command(app)
        plugin = next(copy(param) for param in program.params if param.name == "plugin")
        plugin.expose_value = False
        command.params.append(plugin)
    return command


class Program(LazyGroup):
    """All commands."""

    SUMMARIES: ClassVar = {name: text for name, (_, text) in COMMANDS.items()}
    load = staticmethod(load_command)


app = new_app(
    cls=Program,
    invoke_without_command=True,
    add_completion=True,
    epilog="From images to numbers: sslpipe shards build, check, train, evaluate suite, report. "
    "For examples: sslpipe COMMAND --help.",
)


@app.callback()
def _program(
    context: typer.Context,
    plugin: Annotated[
        list[str] | None,
        option(
            "Import your own losses, backbones and so on: a module or a .py file. Repeatable.",
            metavar="MODULE",
        ),
    ] = None,
    version: Annotated[
        bool, option("Show the versions of sslpipe, Python and torch.", "--version")
    ] = False,
) -> None:
    """Self-supervised contrastive pretraining on webdataset shards, and what comes after it."""
    if version:  # what an issue report has to say, without importing torch
        from importlib import metadata

        import sslpipe

        python = ".".join(map(str, sys.version_info[:3]))
        torch = metadata.version("torch")
        typer.echo(f"sslpipe {sslpipe.__version__}, Python {python}, torch {torch}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(DAY)


def run(*words: str) -> None:
    """Run `sslpipe WORDS...` followed by this process's own arguments.

    A user's mistake is one line on stderr and exit status 2. A command whose output is no
    longer read does its work all the same.
    """
    with lasting_streams() as streams:
        with naming_options():
            status = _run([*words, *sys.argv[1:]])
        for stream in streams:
            stream.flush()
        lost = streams[0].error if streams else None  # of standard output
        if not status and lost is not None and lost.errno not in GONE:
            status = _refuse(f"the output could not be written: {lost}")
    sys.exit(status)


def _at_home(match: re.Match[str]) -> str:
    """Replace the ~ of --run-dir=~/runs, which a shell leaves as it is, by the user's folder."""
    return (match[1] or "") + os.path.expanduser("~")


def _run(words: list[str]) -> Any:
    """Run the command that the words name; the exit status."""
    trace = os.environ.get("SSLPIPE_TRACE") == "1"
    words = [re.sub(r"^([\w.-]+=)?~(?=/)", _at_home, word) for word in words]
    try:
        if any(word.partition("=")[0] == "--plugin" for word in words):
            from sslpipe.registry.plugins import take_from

            words = take_from(words)
        status: int | None = app(words, prog_name="sslpipe", standalone_mode=False)
        return status
    except typer.TyperException as error:
        return _explain_words(error, words)
    except SystemExit as ended:
        return ended.code
    except KeyboardInterrupt:
        return 130  # the shell's status for Ctrl-C
    except UserError as error:
        if trace:
            traceback.print_exc()
        return _refuse(str(error))
    except Exception as error:
        message = None if trace else _not_the_programs_fault(error)
        if message is None:
            raise
        return _refuse(message)


def _not_the_programs_fault(error: Exception) -> str | None:
    """Explain an error of a file system, of memory or of a lost process; None: it is another."""
    if (failed := file_error(error)) is not None:
        return explain_file_error(failed)
    message = explain_lack_of_memory(error)
    if message is None and os.environ.get("WORLD_SIZE", "1") != "1":
        from sslpipe.distributed import explain_lost_process

        message = explain_lost_process(error)
    return message


def _explain_words(error: Any, words: list[str]) -> int:
    """Print why the words are no command line; a group without a command prints its help."""
    text = error.format_message()
    if "\n" in text:
        typer.echo(text, err=True)
        return 2
    reason: Any = error.__cause__
    if hasattr(reason, "errors"):  # pydantic's; typer does not quote the value
        value = shown(reason.errors()[0]["input"])
        text = text.replace("Invalid value", f"Invalid value {value}", 1)
    return _refuse(f"{text.rstrip('.')}{_setting_hint(error)} ({_command_path(words)} --help)")


def _setting_hint(error: Any) -> str:
    """Return how a setting of a recipe is written, where an unknown option has the name of one."""
    context = error.ctx
    if context is None or not hasattr(error, "possibilities"):
        return ""
    if not any(parameter.name == "overrides" for parameter in context.command.params):
        return ""
    from sslpipe.cli.explain import setting_keys

    name = error.option_name.lstrip("-").replace("-", "_")
    keys = [key for key in setting_keys() if name in (key, key.rpartition(".")[2])]
    return f"; a setting has no dashes: {keys[0]}=VALUE" if keys else ""


def _command_path(words: list[str]) -> str:
    """Return the command that the words name, such as "sslpipe shards build"."""
    path = ["sslpipe"]
    if words and words[0] in COMMANDS:
        path.append(words[0])
        inner = getattr(load_command(words[0]), "commands", {})
        path += [word for word in words[1:2] if word in inner]
    return " ".join(path)


def _refuse(text: str) -> int:
    """Print one line about a user's mistake; its exit status."""
    say(f"error: {text}", "red")
    return 2
