"""Trackers of experiments: copies of a run's numbers, which can never stop it.

A run directory is one run of each tracker, however often it is started, resumed or evaluated:
RUN/tracker_id holds the id under which wandb continues it, also where the directory was moved or
copied: only the same training resumes there.
"""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sslpipe.portable import read_regular, write_atomically
from sslpipe.recipe.sections import leaves
from sslpipe.registry import Table
from sslpipe.run.description import Outline, read_description
from sslpipe.run.lock import holder_of

ID_FILE = "tracker_id"

_ID = re.compile(r"[a-z0-9]{8}")
_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


def run_id(run_dir: Path) -> str:
    """Return the id of a run directory in trackers; it is made, and kept, at the first call."""
    path = run_dir / ID_FILE
    try:
        kept = read_regular(path, 64).decode().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        kept = ""
    if not _ID.fullmatch(kept):
        kept = secrets.token_hex(4)
        write_atomically(path, kept + "\n")
    return kept


def run_name(run_dir: Path) -> str:
    """Return the name of a run directory in trackers, by which people tell it from others."""
    return f"{run_dir.resolve().name}-{run_id(run_dir)}"


class _TensorBoard:
    """One folder of TensorBoard's: settings and numbers of one start are in one file of events."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self._folder = run_dir / "tensorboard" / name

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self._folder))
        self._has_trained = False

    def store_init_configuration(self, settings: dict[str, Any]) -> None:
        # SummaryWriter.add_hparams makes a folder of its own, named by the time, at each start
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(settings, {}):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if not self._has_trained and any(key.startswith("train/") for key in values):
            self._has_trained = True
            self._restart(step)
        for key, value in values.items():
            self._writer.add_scalar(key, value, global_step=step)
        self._writer.flush()

    def _restart(self, step: int) -> None:
        """Have TensorBoard drop what it knows from a step on: a resumed run does it again."""
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
            Event,
            SessionLog,
        )

        log = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(session_log=log), step)

    def log_images(self, values: Mapping[str, Sequence[Image.Image]], step: int) -> None:
        for key, images in values.items():
            for image in images:
                pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(key, pixels, global_step=step, dataformats="HWC")
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _WandB:
    """One run of wandb's, under the id of the run directory, in the project of the recipe's name.

    Numbers carry their optimizer step, by which charts are drawn: by its own counter wandb drops
    what comes late, as the evaluation of an earlier checkpoint, or steps repeated after a kill.
    """

    def __init__(self, name: str, run_dir: Path) -> None:
        self._project = os.environ.get("WANDB_PROJECT", name)
        self._run_dir = run_dir

    def start(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=self._project,
            name=run_name(self._run_dir),
            id=run_id(self._run_dir),
            dir=str(self._run_dir),
            resume="allow",
            settings=wandb.Settings(init_timeout=60),
        )
        self._run.define_metric("*", step_metric="step")

    def store_init_configuration(self, settings: dict[str, Any]) -> None:
        self._run.config.update(settings, allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def log_images(self, values: Mapping[str, Sequence[Image.Image]], step: int) -> None:
        pictures = {k: [self._wandb.Image(each) for each in v] for k, v in values.items()}
        self._run.log({**pictures, "step": step})

    def finish(self) -> None:
        self._run.finish()


# (run's name, run directory) -> what has start(), store_init_configuration(settings),
# log(values, step=) and finish(), as accelerate.tracking.GeneralTracker; and, where it shows
# pictures, log_images({name: [PIL image]}, step=)
TRACKERS = Table[Callable[[str, Path], Any]](
    "tracker",
    {"wandb": _WandB, "tensorboard": _TensorBoard},
    "sslpipe.trackers",
)


class Trackers:
    """Those of a run that start; one that does not, or that fails, is named and skipped.

    Args:
        names: Of TRACKERS.
        run_dir: The run directory.
        name: The run's.
        config: The resolved recipe, secrets blanked; None: they have it from an earlier start.
        warn: Shows a message to the user.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        run_dir: Path,
        *,
        name: str,
        config: Mapping[str, Any] | None,
        warn: Callable[[str], None],
    ) -> None:
        self.started: dict[str, Any] = {}
        self._warn = warn
        if not names:
            return
        from accelerate import PartialState

        PartialState()  # accelerate's trackers need one; in a run it is there already
        os.environ.setdefault("WANDB_MODE", "offline")
        for kind in names:
            try:
                tracker = TRACKERS[kind](name, run_dir)
                tracker.start()
                if config is not None:
                    tracker.store_init_configuration(_plain(config))
            except Exception as error:  # a tracker may fail in any way
                warn(f"tracker {kind!r} did not start and is skipped: {error}")
            else:
                self.started[kind] = tracker

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Copy numbers, as KIND/NAME, after so many steps."""
        named = {f"{kind}/{key}": value for key, value in values.items()}
        self._each(lambda tracker: tracker.log(named, step=step), "failed and is now switched off")

    @property
    def take_pictures(self) -> bool:
        """Whether any of them shows pictures."""
        return any(hasattr(tracker, "log_images") for tracker in self.started.values())

    def log_image(self, name: str, image: Image.Image, step: int) -> None:
        """Show a picture, after so many steps, in those that show some."""
        values = {name: [image]}

        def show(tracker: Any) -> None:
            if hasattr(tracker, "log_images"):
                tracker.log_images(values, step=step)

        self._each(show, "failed and is now switched off")

    def close(self) -> None:
        """End all of them."""
        self._each(lambda tracker: tracker.finish(), "did not finish")

    def _each(self, call: Callable[[Any], object], problem: str) -> None:
        for kind, tracker in list(self.started.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker may fail in any way
                self._warn(f"{kind} {problem}: {error}")
                del self.started[kind]


def log_evaluation(
    run_dir: Path, values: Mapping[str, float], step: int, warn: Callable[[str], None]
) -> None:
    """Copy an evaluation's numbers, as test/NAME, to the trackers that the run itself names.

    A run that is being trained writes there itself: then nothing is copied, which is said.

    Args:
        run_dir: The run directory.
        values: Name -> number.
        step: Optimizer steps of the weights that were measured.
        warn: Shows a message to the user.
    """
    recipe = read_description(run_dir, "recipe.json", Outline)
    names = recipe.run.trackers
    holder = holder_of(run_dir) if names else None
    if holder is not None:
        warn(f"{', '.join(names)}: not written, the run is in use by {holder}; evaluate it later")
        return
    trackers = Trackers(names, run_dir, name=recipe.name or run_dir.name, config=None, warn=warn)
    trackers.log("test", values, step)
    trackers.close()


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tree with the value of every key that names a secret blanked."""
    copy = {}
    for key, value in tree.items():
        copy[key] = "***" if _SECRET.search(key) else value
        if isinstance(value, dict):
            copy[key] = without_secrets(value)
    return copy


def _plain(config: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Return the leaves of a recipe, secrets blanked; trackers take no lists."""
    settings = dict(leaves(without_secrets(config)))
    return {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}
