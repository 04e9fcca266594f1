"""Read the files of a run directory for a report, without secrets and absolute folders."""

import io
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from PIL import Image
from pydantic import Field

from sslpipe.errors import UserError
from sslpipe.evaluation.suite_file import read_suite
from sslpipe.files import Finite, Tree, read_lines
from sslpipe.run.checkpoint_files import BestEntry
from sslpipe.run.description import read_description
from sslpipe.run.log import NumbersLine, QuarantineLine, read_metrics, unreadable_lines
from sslpipe.run.status import newest_best, saved_step
from sslpipe.run.trackers import without_secrets

PNG_END = b"IEND\xaeB`\x82"  # the last chunk, with its checksum

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # user:password of a URL
_QUERY = re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\",]*")  # where signed URLs carry their key
# folders of an absolute path, of this system or of Windows, but not the part after :// of a URL
_FOLDERS = re.compile(
    r"(?<![\w.:/~…-])(?:~?/|[A-Za-z]:[\\/])(?:[^\s/\\'\",;:<>]+[/\\])+(?=[^\s/\\])"
)


class _TrainLine(NumbersLine):
    """A line of training with what the page computes with."""

    epoch: Finite
    images_per_s: Annotated[float, Field(gt=0)]
    data_wait_percent: Finite
    loss: Finite | None
    skipped_steps: Finite | None


class Speed(NamedTuple):
    """How fast a run trained, over all its steps; evaluation and saving are not counted."""

    seconds: float
    images_per_s: float
    data_wait_percent: float


class RunFiles(NamedTuple):
    """A run as a report shows it: without secrets and folders."""

    recipe: Tree
    data: Tree  # data.json
    environment: Tree  # run.json
    train: list[Tree]  # lines of metrics.jsonl by step: what training logged
    evals: list[Tree]  # what evaluations during training logged
    alarms: list[Tree]  # alarms raised and over
    quarantine: list[Tree]  # lines of quarantine.jsonl
    evaluation: Tree | None  # eval.json, while there is one
    views_png: bytes | None
    classes: list[str]  # names by label, as they stand, of the data set that was evaluated
    damaged: dict[str, int]  # name of a log -> how many of its lines were skipped as damaged
    saved_step: int = 0  # of the newest checkpoint
    best: BestEntry | None = None  # the best checkpoint, where one is kept

    @property
    def metadata(self) -> Tree:
        """Metadata of eval.json; {} while there is none."""
        facts: Tree = self.evaluation["facts"] if self.evaluation else {}
        return facts

    @property
    def steps(self) -> int:
        """Steps of training: to the last save, or to the last line where that came later."""
        evaluated = self.metadata.get("step")
        logged = [int(line["step"]) for line in (*self.train[-1:], *self.evals[-1:])]
        if isinstance(evaluated, int):
            logged.append(evaluated)
        return max([self.saved_step, *logged])

    @property
    def epochs(self) -> float:
        """How often all images were seen."""
        last = self.train[-1] if self.train else {}
        return last["epoch"] / last["step"] * self.steps if last.get("step") else 0.0

    @property
    def batch_images(self) -> int:
        """Images of a global step: the recipe's number, or a fine-tuning's PK batch."""
        if (sampler := self.recipe.get("sampler")) is None:
            return int(self.recipe["data"]["batch_size"])
        grouped = sampler["classes_per_batch"] * sampler["images_per_class"]
        return int(grouped + sampler["random_images"])

    @property
    def speed(self) -> Speed | None:
        """Sum over metrics.jsonl: steps between two lines, at the speed that the later one says."""
        before = 0
        seconds = 0.0
        waited_s = 0.0
        for line in self.train:
            passed_s = (line["step"] - before) * self.batch_images / line["images_per_s"]
            seconds += passed_s
            waited_s += passed_s * line["data_wait_percent"] / 100
            before = line["step"]
        if not seconds:
            return None
        return Speed(seconds, before * self.batch_images / seconds, 100 * waited_s / seconds)

    @property
    def standing(self) -> str:
        """Names of the alarms that were raised and are not over."""
        standing: dict[str, None] = {}
        for line in self.alarms:
            standing |= dict.fromkeys(line["raised"])
            standing = {name: None for name in standing if name not in line["over"]}
        return ", ".join(standing).replace("_", " ")


def read_run(run_dir: Path) -> RunFiles:
    """Read what a report needs. Raises: UserError: it is no run, or a file is not readable."""
    recipe = read_description(run_dir, "recipe.json", Tree)
    data = read_description(run_dir, "data.json", Tree)
    environment = read_description(run_dir, "run.json", Tree)
    eval_json = run_dir / "eval.json"
    evaluation = read_suite(eval_json) if eval_json.exists() else None
    classes = evaluation["facts"].get("classes") if evaluation else None
    bad_samples, _ = read_lines(run_dir / "quarantine.jsonl", QuarantineLine)
    return RunFiles(
        recipe=cleaned(recipe),
        data=cleaned(data),
        environment=cleaned(environment),
        train=read_metrics(run_dir, "train", _TrainLine),
        evals=read_metrics(run_dir, "eval"),
        alarms=read_metrics(run_dir, "alarm"),
        quarantine=without_places([line.model_dump() for line in bad_samples]),
        evaluation=cleaned(evaluation) if evaluation else None,
        views_png=_read_png(run_dir / "views.png"),
        classes=list(classes or data["classes"]),
        damaged=unreadable_lines(run_dir),
        saved_step=saved_step(run_dir),
        best=newest_best(run_dir),
    )


def cleaned(tree: Tree) -> Tree:
    """Return the tree with secrets blanked and no absolute folder in any text."""
    result: Tree = without_places(without_secrets(tree))
    return result


def without_places(value: Any) -> Any:
    """Replace absolute paths by names, and strip user, password and signature from URLs.

    "no such file /home/ann/data/a.tar" -> "no such file …/a.tar", in every text of a tree.
    """
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    return _FOLDERS.sub("…/", _QUERY.sub(r"\1", _CREDENTIALS.sub("", value)))


def _read_png(path: Path) -> bytes | None:
    """Read a PNG, whose parts have checksums; None where there is none. Raises: UserError."""
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
