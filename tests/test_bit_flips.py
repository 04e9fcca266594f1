"""One flipped bit, or a torn end, in a file of a run or export: right results, or one line.

Logs, the lock's holder and heartbeats carry no checksum: of these only the end is torn, as by a
kill.

A small run is killed in its last step but one; its copies are damaged, one file at one place each,
and used as a user would. A use is right where its result is that of the undamaged run, or that of
the run without the damaged lines of a log, with the file named.
"""

import io
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

import sslpipe
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import EmbedOptions, embed
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.table import run_suite
from sslpipe.export.load import load_backbone
from sslpipe.export.write import export_backbone
from sslpipe.files import append_lines
from sslpipe.report.run_files import read_run
from sslpipe.report.run_page import build_page
from sslpipe.run.status import render, status
from tests.helpers import finetunes, runs
from tests.helpers.dataset import write_dataset
from tests.helpers.exports import trained
from tests.helpers.record import record
from tests.helpers.runs import command_line

PLACES = max(2, min(20, int(os.environ.get("FUZZ", "1000")) // 250))  # of each file
LOGS = ("metrics.jsonl", "quarantine.jsonl", "bad_steps.0.jsonl")
NOT_TRAINED_FROM = ("features", "eval.json", "views.png")  # training opens none of them
IMAGES = torch.randint(0, 256, (3, 3, 20, 24), generator=torch.Generator().manual_seed(0)).byte()


class Run:
    """A "pretrain" or "finetune" that was killed after 5 of 6 steps and has all a run can have."""

    def __init__(self, kind: str, folder: Path) -> None:
        broken = {5: b"junk"}
        self.data = write_dataset(folder / "data", (40, 60, 72), classes=8, broken=broken)
        write_dataset(folder / "data", (24,), split="test", classes=4)
        helper = runs if kind == "pretrain" else finetunes
        self.recipe = helper.write_recipe(folder)
        self.overrides = ["steps=6", "run.save_steps=2", "run.num_workers=0", "run.monitor_steps=2"]
        self.overrides += ["optim.precision=fp32"]
        self.path = folder / "run"
        killed = command_line(
            "train", str(self.recipe), *self.overrides, "--data", str(self.data), "--run-dir",
            str(self.path), SSLPIPE_FAULT="train.step:5",
        )  # fmt: skip
        assert killed.returncode == 9, killed.stderr
        assert (self.path / "lock").exists()
        append_lines(self.path / "bad_steps.0.jsonl", [{"step": 1, "ids": [3, 4]}] * 2)
        self._evaluate()
        Image.new("RGB", (40, 30), "red").save(self.path / "views.png")

    def _evaluate(self) -> None:
        model, index = load_backbone(self.path), sslpipe.load_index(self.data)
        sets = []
        for name in ("train", "test"):
            split = index.split(name)
            rows = embed(model.backbone, model.view, split, EmbedOptions(on_bad=lambda bad: None))
            facts = {"backbone_sha256": model.config.weights_sha256, **data_metadata(split)}
            for suffix in ("safetensors", "npz"):
                save_embeddings(self.path / "features" / f"{name}.{suffix}", rows, facts)
            sets.append(rows)
        report = run_suite({"ssl": (sets[0], sets[1])}, {**facts, "train_split": "train"})
        (self.path / "eval.json").write_text(json.dumps(report))

    def train(self, run_dir: Path) -> dict[str, bytes]:
        """Resume to the end: the last checkpoint's files."""
        AcceleratorState._reset_state(reset_partial_state=True)
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            done = sslpipe.train(self.recipe, self.data, run_dir, overrides=self.overrides)
        assert done == 6
        (last,) = (run_dir / "checkpoints").glob("step-00000006")
        return {path.name: path.read_bytes() for path in last.iterdir()}


def state_of(run_dir: Path) -> dict[str, Any]:
    """What `status` says, without what passes with time; it can be shown."""
    summary = status(run_dir)
    render(summary)
    if summary["checkpoint"]:
        del summary["checkpoint"]["age_s"], summary["checkpoint"]["bytes"]  # a torn file is shorter
    del summary["run"]
    return summary


def reported(run_dir: Path) -> dict[str, Any]:
    """What a report is made of; the page can be made."""
    facts = read_run(run_dir)
    build_page(facts, None, None, None)
    return facts._asdict()


def loaded(folder: Path) -> list[Any]:
    """The backbone's features of fixed images, and all that is said of it."""
    model = load_backbone(folder)
    return [model.encode(IMAGES).tolist(), model.config.model_dump(mode="json")]


def features_in(run_dir: Path) -> list[Any]:
    """Rows and facts of all feature files of a run."""
    files = [load_embeddings(path) for path in sorted((run_dir / "features").iterdir())]
    return [[column.tolist() for column in rows] + [facts] for rows, facts in files]


def damage(path: Path, rng: random.Random, tear: bool) -> None:
    """Flip a bit of the file, or cut off its end."""
    raw = bytearray(path.read_bytes())
    if tear:
        del raw[rng.randrange(len(raw)) :]
    else:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def without_damaged_lines(path: Path, original: bytes) -> None:
    """The oracle of a log: only lines that are to the letter in the original."""
    good = {line for line in original.split(b"\n") if line}
    kept = [line for line in path.read_bytes().split(b"\n") if line in good]
    path.write_bytes(b"".join(line + b"\n" for line in kept))


def outcome(use: Callable[[Path], Any], folder: Path) -> Any:
    """What a use gives: its result, or the one line of its error."""
    try:
        return use(folder)
    except UserError as error:
        text = str(error)
        assert text, use
        assert "\n" not in text, text
        return error


def files_of(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path.relative_to(folder) for path in files)


def damaged_run(run: Run, places: int, scratch: Path) -> Counter[str]:
    """Damage each file of a run at `places` places; count what came of the uses."""
    whole = shutil.copytree(run.path, scratch / "whole")
    features = features_in(whole)
    expected = {use: use(whole) for use in (state_of, reported, loaded)}
    weights = run.train(whole)
    counts: Counter[str] = Counter()
    for name in files_of(run.path):
        for place in range(places):
            where = f"{name}, place {place}"
            copy = shutil.copytree(run.path, scratch / "copy")
            unsealed = name.name in (*LOGS, "lock.json") or name.parts[0] == "heartbeat"
            damage(copy / name, random.Random(where), tear=unsealed or place % 4 == 3)
            results = expected
            if name.name in LOGS:
                oracle = shutil.copytree(copy, scratch / "oracle")
                without_damaged_lines(oracle / name, (run.path / name).read_bytes())
                results = {use: use(oracle) for use in expected}
                shutil.rmtree(oracle)
            for use, right in results.items():
                actual = outcome(use, copy)
                if isinstance(actual, UserError):
                    known = name.name in str(actual) or name.parts[-2] in str(actual)
                    assert known, (where, actual)
                else:
                    _agree(actual, right, name, f"{use.__name__}: {where}")
                counts["refused" if isinstance(actual, UserError) else "right"] += 1
            if name.parts[0] == "features":
                actual = outcome(features_in, copy)
                assert isinstance(actual, UserError) or actual == features, where
            if name.parts[0] not in NOT_TRAINED_FROM:
                actual = outcome(run.train, copy)
                assert actual == weights, f"train: {where}: {actual!r:.300}"
                counts["resumed"] += 1
            shutil.rmtree(copy)
    return counts


def _agree(actual: Any, right: Any, name: Path, where: str) -> None:
    """The same, but for naming the damaged file, and for a heartbeat that was skipped."""
    if isinstance(actual, dict) and "damaged" in actual:
        assert set(actual["damaged"]) <= {str(name)}, where
        actual, right = {**actual, "damaged": 0}, {**right, "damaged": 0}
        if name.parts[0] == "heartbeat" and actual.get("ranks") == []:
            right = {**right, "ranks": []}
    assert actual == right, where


def damaged_export(run: Run, places: int, scratch: Path) -> Counter[str]:
    """Damage each file of an export, and of its folder for the Hub, at `places` places."""
    whole = scratch / "export"
    export_backbone(run.path, whole, ["safetensors"])
    vit = trained("timm/vit_tiny_patch16_224", depth=1, embed_dim=16, num_heads=2)
    export_backbone(vit, scratch / "hub", ["hf"])
    (scratch / "hub" / "hf").rename(whole / "hf")
    counts: Counter[str] = Counter()
    right = {part: loaded(whole / part) for part in (".", "hf")}
    for name in files_of(whole):
        for place in range(places):
            where = f"{name}, place {place}"
            copy = shutil.copytree(whole, scratch / "copy")
            damage(copy / name, random.Random(where), tear=place % 4 == 3)
            for part, expected in right.items():
                actual = outcome(loaded, copy / part)
                if isinstance(actual, UserError):
                    assert name.name in str(actual), (where, actual)
                else:
                    assert actual == expected, where
                counts["refused" if isinstance(actual, UserError) else "right"] += 1
            shutil.rmtree(copy)
    return counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["pretrain", "finetune"])
def test_a_damaged_file_is_seen_or_changes_nothing(kind, tmp_path):
    run = Run(kind, tmp_path / "made")
    for name, check in (("run", damaged_run), ("export", damaged_export)):
        (tmp_path / name).mkdir()
        counts = check(run, PLACES, tmp_path / name)
        assert min(counts.values()) >= PLACES  # neither harmless nor hopeless
        record(f"bit_flips_{kind}_{name}", dict(counts))
