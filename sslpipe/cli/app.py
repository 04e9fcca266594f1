"""The program `sslpipe`: its table of commands, and what every command does with a mistake."""

import errno
import os
import sys
import traceback
from copy import copy
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from sslpipe.cli.first_sign import first_sign
from sslpipe.cli.guide import add_next, day
from sslpipe.errors import UserError
from sslpipe.portable import FULL
from sslpipe.run.console import GONE, lasting_streams

# name -> (module with `app`, first line of its help). The line stands here, too, so that
# `sslpipe --help` imports none of the modules.
COMMANDS = {
    "shards": ("shards", "Images -> webdataset shards with an index (dataset.json and offsets)."),
    "check": ("train", "Validate a recipe without training; print its settings and sizes."),
    "preview": ("train", "Draw images beside the views that training makes of them."),
    "train": ("train", "Pretrain or, with a recipe of fine-tuning, fine-tune; or resume."),
    "status": ("status", "Print where a run stands, from its directory alone."),
    "slurm": ("slurm", "Print the batch script of a training for SLURM, or submit it."),
    "embed": ("embed", "Write the features, labels and ids of every sample of a split."),
    "curate": (
        "curate",
        "Look into a data set: which images are one picture, which resemble no other.",
    ),
    "whiten": ("whiten", "Store a PCA whitening, and the crops of TRAIN, in an export."),
    "evaluate": ("evaluate", "Measure frozen features: kNN, linear probes, retrieval and more."),
    "report": ("report", "Write one HTML file that shows a run, or compares several."),
    "export": ("export", "Write the backbone, each format proved in a clean process."),
    "gallery": ("gallery", "Enrol, identify and verify: who is in this picture?"),
}


# full, read-only, not allowed, no such name: no fault of the program
_OF_THE_DISK = {
    *(*FULL, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
}


def load_command(name: str) -> Any:
    """Return the command of this name; imports its module."""
    module = COMMANDS[name][0]
    command: Any = typer.main.get_command(import_module(f"sslpipe.cli.{module}").app)
    # a module of several top-level commands holds them in a group that is no command itself
    command = command if module == name and module != "train" else command.commands[name]
    add_next(name, command)
    for each in (command, *getattr(command, "commands", {}).values()):
        if not any(param.name == "plugin" for param in each.params):
            each.params.append(_plugin_option())
    return command


def _plugin_option() -> Any:
    """Return `--plugin` for the help of a command: `take_from` takes it before any is parsed."""
    program: Any = typer.main.get_command(app)
    option = next(copy(param) for param in program.params if param.name == "plugin")
    option.expose_value = False
    return option


class LazyGroup(TyperGroup):
    """A group that lists its commands from COMMANDS and imports the one that is called."""

    def __init__(self, *, commands: Any = None, **attrs: Any) -> None:
        rows = {name: TyperCommand(name=name, help=text) for name, (_, text) in COMMANDS.items()}
        super().__init__(commands={**rows, **(commands or {})}, **attrs)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest


app = typer.Typer(
    cls=LazyGroup,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="From images to numbers: sslpipe shards build, check, train, evaluate suite, report. "
    "sslpipe COMMAND --help shows examples.",
)


@app.callback()
def _program(
    context: typer.Context,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Import parts of your own: a module, or a .py file; anywhere in the command.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version, and what it runs on.")
    ] = False,
) -> None:
    """Self-supervised contrastive pretraining on webdataset shards, and what comes after it."""
    if version:
        typer.echo(_versions())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(day())


def _versions() -> str:
    """Say what an issue report has to: the version, Python's, and torch's without importing it."""
    from importlib.metadata import version

    import sslpipe

    python = ".".join(map(str, sys.version_info[:3]))
    return f"sslpipe {sslpipe.__version__}, Python {python}, torch {version('torch')}"


def run(*words: str) -> None:
    """Run `sslpipe WORDS...` followed by this process's own arguments.

    A user's mistake is one line on stderr and exit status 2. A command whose output nobody reads
    any more does its work all the same.
    """
    with lasting_streams() as streams:
        given = [*words, *sys.argv[1:]]
        command = next((word for word in given if word in COMMANDS), "")
        with first_sign("" if "--help" in given else command, streams):
            status = _run(given)
        for stream in streams:
            stream.flush()
        lost = streams[0].error if streams else None  # of standard output
        if not status and lost is not None and lost.errno not in GONE:
            status = _refuse(f"the output could not be written: {lost}")
    sys.exit(status)


def _run(words: list[str]) -> Any:
    """Run the command that the words name; the exit status."""
    # --init has had this name; a parameter's second name could not be hidden from --help
    words = [
        word.replace("--backbone", "--init", 1) if word.partition("=")[0] == "--backbone" else word
        for word in words
    ]
    try:
        if any(word.partition("=")[0] == "--plugin" for word in words):
            from sslpipe.registry.plugins import take_from

            words = take_from(words)
        if words[:1] == ["evaluate"] and words[1:]:
            from sslpipe.cli.inputs import check_evaluate

            check_evaluate(words[1:])
        app(words, prog_name="sslpipe")
    except SystemExit as ended:
        plugins = sys.modules.get("sslpipe.registry.plugins")
        if plugins is not None and plugins.plugin_frames(ended):  # it must not end the command
            return _refuse_plugin(ended)
        return ended.code
    except KeyboardInterrupt:
        return 130  # the shell's status for Ctrl-C
    except UserError as error:
        if os.environ.get("SSLPIPE_TRACE") == "1":
            traceback.print_exc()
        return _refuse(str(error))
    except OSError as error:
        if error.errno not in _OF_THE_DISK or os.environ.get("SSLPIPE_TRACE") == "1":
            return _refuse_plugin(error)
        return _refuse(f"cannot write {error.filename or 'a file'}: {error.strerror}")
    except Exception as error:
        return _refuse_plugin(error)
    return 0


def _refuse_plugin(error: BaseException) -> int:
    """Show the lines of a plug-in that an error came from; raise one that came from none."""
    plugins = sys.modules.get("sslpipe.registry.plugins")  # else none is loaded
    frames = plugins.plugin_frames(error) if plugins is not None else []
    if not frames or os.environ.get("SSLPIPE_TRACE") == "1":
        raise error
    text = f"in your plug-in: {plugins.describe_error(error)}"  # type: ignore[union-attr]
    status = _refuse(f"{text}; the whole stack trace: put SSLPIPE_TRACE=1 before the command")
    lines = "".join(traceback.format_list(frames)).rstrip()
    Console(stderr=True).print(lines, highlight=False, markup=False, soft_wrap=True)
    return status


def _refuse(text: str) -> int:
    """Print one line about a user's mistake; its exit status."""
    Console(stderr=True).print(
        f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True
    )
    return 2
