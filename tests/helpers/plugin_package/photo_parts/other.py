"""What decides no weight: a source, an evaluation, a tracker."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from sslpipe.evaluation.result import Result, accuracy
from sslpipe.sharding.sources import Images, SourceOptions


def read_stripes(options: SourceOptions) -> dict[str, Images]:
    """Draw stripes: upright ones are of class 0, level ones of class 1."""
    return {"train": _stripes(96, 0), "test": _stripes(16, 1000)}


def _stripes(count: int, seed: int) -> Images:
    labels = np.arange(count) % 2
    names = [f"stripes-{seed + k}" for k in range(count)]

    def read(k: int) -> bytes:
        colours = np.random.default_rng(seed + k).integers(0, 256, (1, 16, 3), np.uint8)
        pixels = colours.repeat(16, 0)
        file = io.BytesIO()
        Image.fromarray(pixels.swapaxes(0, 1) if labels[k] else pixels).save(file, "PNG")
        return file.getvalue()

    return Images(names, labels, np.full(count, 500), ("upright", "level"), read)


def nearest(bank, queries, *, power: float = 2.0) -> list[Result]:
    """Score the class of the nearest training sample.

    Args:
        power: Of the distance.
    """
    order = (queries.features[:, None] - bank.features[None]).abs().pow(power).sum(2).argmin(1)
    predicted, labels = bank.labels[order].cpu().numpy(), queries.labels.cpu().numpy()
    return [accuracy(f"nearest p={power:g}", predicted, labels, bank=len(bank.labels))]


class Lines:
    """A tracker that appends to RUN/lines.txt."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.path = run_dir / "lines.txt"

    def start(self) -> None:
        self.path.touch()

    def store_init_configuration(self, values: dict) -> None:
        self._append({"loss": values["loss.kind"]})

    def log(self, values: dict, step: int) -> None:
        self._append({"step": step, **values})

    def finish(self) -> None:
        self._append({"finished": True})

    def _append(self, record: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
