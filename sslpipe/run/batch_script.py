"""Complete batch scripts for SLURM, from the templates in sslpipe/run/batch."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from sslpipe.errors import UserError

# Options that every script has, unless given; sbatch's long names.
DEFAULTS = {
    **{"job-name": "sslpipe", "nodes": "1", "ntasks-per-node": "1", "signal": "B:USR1@120"},
    **{"requeue": "", "open-mode": "append", "output": "%x-%j.out"},
}
_ABOUT = """\
# Written by `sslpipe slurm`: give it to sbatch. It is saved and requeued at the time limit and on
# preemption, and ends with the training."""

# What an option's value may be; all else could end the line and begin another.
OPTIONS = {
    "job-name": r"[A-Za-z0-9._-]{1,100}",
    "nodes": r"[1-9][0-9]{0,5}",
    "gpus-per-node": r"([A-Za-z0-9._-]+:)?[0-9]{1,3}",
    "cpus-per-task": r"[1-9][0-9]{0,4}",
    "mem": r"[0-9]+[KMGT]?",
    "time": r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}",
    "partition": r"[A-Za-z0-9._,-]+",
    "account": r"[A-Za-z0-9._-]+",
    "qos": r"[A-Za-z0-9._-]+",
    "signal": r"B:USR1@[1-9][0-9]{0,5}",
    "output": r"[A-Za-z0-9._%/-]+",
}


def batch_script(
    options: Mapping[str, str], arguments: Sequence[str], site: Path | None = None
) -> str:
    """Return a script for sbatch that needs no arguments and no other file.

    Args:
        options: Of sbatch, by the long names in OPTIONS.
        arguments: Of `sslpipe train`.
        site: A shell file to include before the defaults: modules, network, containers.

    Raises:
        UserError: For an unknown option, a value that it cannot have, or an unreadable file.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            raise UserError(
                f"unknown option --{name}; known: {', '.join(sorted(OPTIONS))}; save the script, "
                f"and give others to sbatch: sbatch --{name}=... SCRIPT"
            )
        if not re.fullmatch(OPTIONS[name], value):
            raise UserError(f"--{name} {value!r} is not of the form {OPTIONS[name]}")
    lines = {**DEFAULTS, **options}
    parts = {
        "OPTIONS": "\n".join(f"#SBATCH --{k}{v and f'={v}'}" for k, v in lines.items()),
        "ABOUT": _ABOUT,
        "ARGUMENTS": shlex.join(arguments),
        "BIN": shlex.quote(str(Path(sys.prefix) / "bin")),
        "SITE": ("" if site is None else _read(site)) + template("site.sh"),
        "BODY": template("train.sh").rstrip(),
    }
    return _AtTemplate(template("job.sbatch")).substitute(parts)


def template(name: str) -> str:
    """Return the text of a file in sslpipe/run/batch."""
    return (files("sslpipe.run") / "batch" / name).read_text(encoding="utf-8")


class _AtTemplate(Template):
    """Placeholders are @NAME: the text itself is full of $."""

    delimiter = "@"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip() + "\n\n"
    except OSError as error:
        raise UserError(f"--site={path}: {error.strerror}") from error
