"""Read the files of a run directory for a report, without secrets and absolute folders."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from sslpipe.errors import UserError
from sslpipe.evaluation.suite import SCHEMA_VERSION
from sslpipe.run.log import read_metrics, without_secrets

Tree = dict[str, Any]

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # user:password of a URL
_QUERY = re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\",]*")  # where signed URLs carry their key
# folders of an absolute path, of this system or of Windows, but not the part after :// of a URL
_FOLDERS = re.compile(
    r"(?<![\w.:/~…-])(?:~?/|[A-Za-z]:[\\/])(?:[^\s/\\'\",;:<>]+[/\\])+(?=[^\s/\\])"
)


class RunFiles(NamedTuple):
    """A run as a report shows it.

    Args:
        given_recipe: recipe.json as it stands.
        recipe: recipe.json, cleaned to be shown.
        data: data.json, cleaned.
        environment: run.json, cleaned.
        train: Lines of metrics.jsonl with what training logged, by step.
        evals: Lines of metrics.jsonl with what evaluations during training logged, by step.
        alarms: Lines of metrics.jsonl with alarms raised and over, by step.
        quarantine: Lines of quarantine.jsonl, cleaned.
        evaluation: eval.json, cleaned; None while there is none.
        views_png: views.png; None while there is none.
        classes: Names by label, not cleaned, of the data set that was evaluated; empty: none.
    """

    given_recipe: Tree
    recipe: Tree
    data: Tree
    environment: Tree
    train: list[Tree]
    evals: list[Tree]
    alarms: list[Tree]
    quarantine: list[Tree]
    evaluation: Tree | None
    views_png: bytes | None
    classes: list[str]


def read_run(run_dir: Path) -> RunFiles:
    """Read everything that a report needs of a run.

    Raises:
        UserError: The directory is no run, or a file is not readable.
    """
    # the evaluation, if there is one that this program can read
    if not (run_dir / "recipe.json").is_file():
        raise UserError(
            f"{run_dir} holds no run: it has no recipe.json; name the --run-dir of `sslpipe train`"
        )
    eval_json, views_png = run_dir / "eval.json", run_dir / "views.png"
    evaluation = _read_json(eval_json) if eval_json.is_file() else None
    version = evaluation.get("schema_version") if evaluation else None
    if evaluation and version != SCHEMA_VERSION:
        raise UserError(
            f"{eval_json}: schema_version = {version!r}, this program reads {SCHEMA_VERSION}; "
            "write it again with `sslpipe evaluate suite`"
        )
    # what every run has
    recipe, data = _read_json(run_dir / "recipe.json"), _read_json(run_dir / "data.json")
    classes = evaluation["facts"].get("classes") if evaluation else None
    return RunFiles(
        given_recipe=recipe,
        recipe=cleaned(recipe),
        data=cleaned(data),
        environment=cleaned(_read_json(run_dir / "run.json")),
        train=read_metrics(run_dir, "train"),
        evals=read_metrics(run_dir, "eval"),
        alarms=read_metrics(run_dir, "alarm"),
        quarantine=[
            _without_places(line) for line in _read_quarantine(run_dir / "quarantine.jsonl")
        ],
        evaluation=cleaned(evaluation) if evaluation else None,
        views_png=views_png.read_bytes() if views_png.is_file() else None,
        classes=list(classes or data["classes"]),
    )


def cleaned(tree: Tree) -> Tree:
    """Return the tree with secrets blanked and no absolute folder in any text."""
    result: Tree = _without_places(without_secrets(tree))
    return result


def without_places(text: str) -> str:
    """Replace absolute paths by names, and strip user, password and signature from URLs.

    "no such file /home/ann/data/a.tar" -> "no such file …/a.tar"
    """
    text = _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))
    return _FOLDERS.sub("…/", text)


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    return without_places(value) if isinstance(value, str) else value


def _read_json(path: Path) -> Tree:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; is the run complete?") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no table; was it written by this program?")
    return tree


def _read_quarantine(path: Path) -> list[Tree]:
    """Read one line a bad sample; a line that a kill cut off is skipped, as in `read_metrics`."""
    lines: list[Tree] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
