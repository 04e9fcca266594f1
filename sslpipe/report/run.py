"""Read the files of a run directory for a report, without secrets and absolute folders."""

import io
import re
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from PIL import Image

from sslpipe.errors import UserError
from sslpipe.recipe import is_finetune
from sslpipe.run.checkpoint_files import BestOf
from sslpipe.run.evaluated import read_suite
from sslpipe.run.log import QUARANTINED, read_metrics, unreadable_lines, without_secrets
from sslpipe.run.records import is_number, read_description, read_records
from sslpipe.run.status import newest_best, saved_step

Tree = dict[str, Any]

PNG_END = b"IEND\xaeB`\x82"  # the last chunk, with its checksum

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
        damaged: Name of a log -> how many of its lines were skipped as damaged.
        saved_step: Of the newest checkpoint; 0 without one.
        best: The best checkpoint; None: none is kept.
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
    damaged: dict[str, int]
    saved_step: int = 0
    best: BestOf | None = None


def read_run(run_dir: Path) -> RunFiles:
    """Read everything that a report needs of a run.

    Raises:
        UserError: The directory is no run, or a file is not readable.
    """
    if not (run_dir / "recipe.json").exists():
        raise UserError(
            f"{run_dir} holds no run: it has no recipe.json; name the --run-dir of `sslpipe train`"
        )
    # what every run has
    recipe, data, environment = _read_recipe(run_dir), _read_data(run_dir), _read_run(run_dir)
    # what it may have
    eval_json = run_dir / "eval.json"
    evaluation = read_suite(eval_json) if eval_json.exists() else None
    classes = evaluation["facts"].get("classes") if evaluation else None
    bad_samples, _ = read_records(run_dir / "quarantine.jsonl", QUARANTINED)
    train = [line for line in read_metrics(run_dir, "train") if _is_complete(line)]
    return RunFiles(
        given_recipe=recipe,
        recipe=cleaned(recipe),
        data=cleaned(data),
        environment=cleaned(environment),
        train=train,
        evals=read_metrics(run_dir, "eval"),
        alarms=[line for line in read_metrics(run_dir, "alarm") if _is_alarm(line)],
        quarantine=[_without_places(line) for line in bad_samples],
        evaluation=cleaned(evaluation) if evaluation else None,
        views_png=_read_png(run_dir / "views.png"),
        classes=list(classes or data["classes"]),
        damaged=unreadable_lines(run_dir),
        saved_step=saved_step(run_dir),
        best=newest_best(run_dir),
    )


def trained_steps(run: RunFiles) -> int:
    """Count the steps of training: to the last save, or to the last line where that came later."""
    evaluated: Any = run.evaluation["facts"].get("step") if run.evaluation else 0
    logged = [line["step"] for line in (*run.train[-1:], *run.evals[-1:])]
    done: int = max(run.saved_step, evaluated if isinstance(evaluated, int) else 0, *logged)
    return done


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


def _read_data(run_dir: Path) -> Tree:
    data = read_description(run_dir, "data.json")
    kinds = {"name": str, "license": str, "classes": list, "samples": dict, "index_sha256": str}
    return _checked(data, kinds, run_dir / "data.json")


def _read_recipe(run_dir: Path) -> Tree:
    """Read recipe.json, with what the sections compute with in its own type."""
    path = run_dir / "recipe.json"
    tree = read_description(run_dir, "recipe.json")
    kinds: dict[str, dict[str, type]] = {
        "data": {"split": str, "holdout": int},
        **{section: {"kind": str} for section in ("augment", "backbone", "loss")},
    }
    if is_finetune(tree):
        counts = ("classes_per_batch", "images_per_class", "random_images")
        kinds["sampler"] = dict.fromkeys(counts, int)
    else:
        kinds["data"]["batch_size"] = int
    _checked(tree, {"name": str, **dict.fromkeys(kinds, dict)}, path)
    for section, entries in kinds.items():
        _checked({"holdout": 0, **tree[section]}, entries, path)
    return tree


def _read_run(run_dir: Path) -> Tree:
    path = run_dir / "run.json"
    tree = read_description(run_dir, "run.json")
    _checked(tree, {"precision": str, "world": int, "environment": dict}, path)
    _checked(tree["environment"], {"cuda_device": (str, NoneType), "machine": str}, path)
    return tree


def _checked(tree: Tree, kinds: dict[str, Any], path: Path) -> Tree:
    for key, kind in kinds.items():
        if key not in tree or not isinstance(tree[key], kind):
            raise UserError(f"{path} is damaged: {key} = {tree.get(key)!r:.40}; restore a copy")
    return tree


def _is_complete(line: Tree) -> bool:
    """Whether a line of training has what the report computes with."""
    return (
        is_number(line.get("epoch"))
        and is_number(line.get("images_per_s"))
        and line["images_per_s"] > 0
        and is_number(line.get("data_wait_percent"))
        and {"loss", "skipped_steps"} <= set(line)
    )


def _is_alarm(line: Tree) -> bool:
    names = [line.get("raised"), line.get("over")]
    tables = [line.get("value"), line.get("threshold")]
    if not all(isinstance(each, list) for each in names):
        return False
    numbers = [(t, name) for t in tables for each in names for name in each]  # type: ignore[union-attr]
    return all(isinstance(t, dict) and is_number(t.get(str(name))) for t, name in numbers)


def _read_png(path: Path) -> bytes | None:
    """Read a PNG, whose parts have checksums; None where there is none.

    Raises:
        UserError: It is damaged.
    """
    if not path.exists():
        return None
    try:
        raw = path.read_bytes()
        with Image.open(io.BytesIO(raw), formats=("PNG",)) as image:
            image.verify()
        if not raw.endswith(PNG_END):
            raise ValueError("its end is missing")
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(
            f"{path} is damaged ({error}); write it again with `sslpipe preview`, or remove it"
        ) from error
    return raw
