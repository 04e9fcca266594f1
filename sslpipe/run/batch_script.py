"""The text of a finished batch script: slurm/pretrain.sbatch with its options and arguments."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from sslpipe.errors import UserError

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
    scripts: Path,
    options: Mapping[str, str],
    arguments: Sequence[str],
    settings: Mapping[str, str],
) -> str:
    """A script for sbatch that needs no arguments and no site.sh.

    scripts: the folder with pretrain.sbatch and site.sh. options: of sbatch, by the long names in
    OPTIONS. arguments: of `sslpipe train`. settings: variables that site.sh would else default.
    Raises: UserError for an option that is not in OPTIONS, or a value that it cannot have.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            raise UserError(f"unknown option --{name}; known: {', '.join(sorted(OPTIONS))}")
        if not re.fullmatch(OPTIONS[name], value):
            raise UserError(f"--{name} {value!r} is not of the form {OPTIONS[name]}")
    for name in ("pretrain.sbatch", "site.sh"):
        if not (scripts / name).is_file():
            raise UserError(
                f"no {name} in {scripts}; the scripts are in the clone's slurm/, not in the wheel: "
                "run this in the clone, or give --scripts"
            )
    lines, wanted = [], dict(options)
    body = (scripts / "pretrain.sbatch").read_text().splitlines()
    for line in body:
        option = re.match(r"#SBATCH --([a-z-]+)", line)
        if option and option[1] in wanted:
            line = f"#SBATCH --{option[1]}={wanted.pop(option[1])}"
        lines.append(line)
    first = lines.index("set -euo pipefail")
    given = [f"#SBATCH --{name}={value}" for name, value in wanted.items()]
    last_option = max(k for k, line in enumerate(lines[:first]) if line.startswith("#SBATCH"))
    variables = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    site = next(k for k, line in enumerate(lines) if line.endswith('/slurm/site.sh"'))
    return "\n".join(
        [
            *lines[: last_option + 1],
            *given,
            "set -euo pipefail",
            f"set -- {shlex.join(arguments)}",
            *variables,
            *(scripts / "site.sh").read_text().splitlines(),
            *lines[site + 1 :],
            "",
        ]
    )
