"""Storms of signals at random times and places: the end is bitwise that of an unkilled run."""

import hashlib
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from sslpipe.run.log import read_metrics
from tests.helpers import storm
from tests.helpers.dataset import write_dataset
from tests.helpers.record import record
from tests.helpers.runs import assert_same_weights, write_recipe

KILLS = int(os.environ.get("KILLS", "6"))
SETTINGS = ("steps=60", "run.save_steps=4", "run.monitor_steps=9", "run.keep_checkpoints=3")
# named place -> most visits, and whether any rank comes there
POINTS = {
    "checkpoint.model": (3, False),
    "checkpoint.before_manifest": (3, False),
    "checkpoint.before_rename": (3, False),
    "checkpoint.before_prune": (3, False),
    "train.step": (16, True),
    "train.monitor": (3, True),
    "storage.read_range": (12, True),
}
IN_A_RUN = {
    "DONE", "MANIFEST.json", "backbone", "checkpoints", "data.json", "features", "heartbeat",
    "metrics.jsonl", "recipe.json", "run.json",
}  # fmt: skip


class Stage:
    """One command of the way from images to an export; `begun` changes once its work has begun."""

    def __init__(self, name: str, words: list[str], launcher: tuple[str, ...], begun: Path) -> None:
        self.name, self.words, self.launcher, self.begun = name, [name, *words], launcher, begun
        self.points = POINTS if name == "train" else {}

    def works(self, since: float) -> bool:
        """Whether the work has begun since a time of the file system."""
        return self.begun.exists() and self.begun.stat().st_mtime > since


def stages(recipe: Path, data: Path, run_dir: Path, number: int) -> list[Stage]:
    """The commands of a run; runs take turns with the launchers."""
    launcher = storm.LAUNCHERS[number % len(storm.LAUNCHERS)]
    features = run_dir / "features" / "train.safetensors"
    train = [str(recipe), "--data", str(data), "--run-dir", str(run_dir), *SETTINGS]
    embed = [str(run_dir), "--data", str(data), "--split", "train", "--out", str(features)]
    export = [str(run_dir), "--out", str(run_dir / "backbone"), "--overwrite"]
    return [
        Stage("train", train, launcher, run_dir / "metrics.jsonl"),
        Stage("embed", embed, launcher, features.with_name(f".{features.name}.parts")),
        Stage("export", export, (), run_dir),
    ]


def outcome(run_dir: Path) -> dict[str, str]:
    """The sha256 of what the commands after the training wrote, by its path."""
    paths = [run_dir / "features" / "train.safetensors", *(run_dir / "backbone").iterdir()]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths)}


def straight(way: list[Stage], scratch: Path) -> dict[str, tuple[float, float]]:
    """Run all commands; seconds of start-up and of work of each."""
    times = {}
    for stage in way:
        since = time.time() - 0.05
        command = storm.Command(stage.words, stage.launcher, scratch)
        while not stage.works(since) and command.process.poll() is None:
            time.sleep(0.02)
        start_s = time.monotonic() - command.begin_s
        assert command.wait() == 0, command.said()
        times[stage.name] = start_s, time.monotonic() - command.begin_s - start_s
    return times


# what torchrun, wandb where a launcher imports it, and torch's compiler (a cache for all runs of a
# user) put into TMPDIR, and a kill leaves there
OF_OTHERS = re.compile("torchelastic|torchinductor_|wandb-(media|artifacts)$")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
@pytest.mark.promise(2)
def test_a_run_killed_again_and_again_ends_with_bitwise_the_same_weights(tmp_path):
    """KILLS kills over as many runs as they need; after each, nothing is left in 15 seconds."""
    data, recipe = write_dataset(tmp_path / "data", (40, 3, 60, 25)), write_recipe(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    good = tmp_path / "straight"
    times = straight(stages(recipe, data, good, 0), scratch)
    files = outcome(good)
    losses = {m["step"]: m["loss"] for m in read_metrics(good)}
    assert {path.name for path in good.iterdir()} == IN_A_RUN
    memory = storm.shared_memory()

    rng, kills, runs = random.Random(os.environ.get("KILLS_SEED", "kills")), 0, 0
    places: Counter[str] = Counter()
    while kills < KILLS:
        run_dir, runs = tmp_path / f"run-{runs}", runs + 1
        for stage in stages(recipe, data, run_dir, runs):
            finished = False
            while not finished:
                # perhaps a kill, perhaps none
                kill = None
                if kills < KILLS and (stage.name == "train" or rng.random() < 0.7):
                    kill = storm.choose(rng, stage.points, *times[stage.name])
                    if not stage.launcher and kill.target.startswith("rank"):
                        kill = kill._replace(target="launcher")
                # the command, its end, and how it came
                since = time.time()
                fault = kill.fault if kill else ""
                command = storm.Command(stage.words, stage.launcher, scratch, fault)
                struck = False
                if kill is not None and not kill.fault:
                    struck = command.strike(kill, lambda s=stage, t=since: s.works(t))
                try:
                    status = command.wait(storm.GONE_WITHIN_S if struck else storm.PATIENCE_S)
                except AssertionError as error:
                    raise AssertionError(f"{stage.name}, {kill}: {error}") from None
                said = f"{stage.name}, {kill}: {command.said()}"
                finished = (run_dir / "DONE").exists() if stage.name == "train" else status == 0
                if kill is None:
                    assert finished, said
                    assert status == 0, said
                elif struck or status:
                    kills += 1
                    what = kill.fault.split(":")[0] or ("at work" if kill.working else "start-up")
                    places[f"{stage.name}, {what}"] += 1
                # nothing is left behind that the next start does not remove
                assert storm.unexpected_files(run_dir) == [], said
                assert storm.shared_memory() <= memory, said
                assert not [p for p in scratch.iterdir() if not OF_OTHERS.search(p.name)], said
        # as if nothing had happened
        assert_same_weights(good, run_dir)
        assert {m["step"]: m["loss"] for m in read_metrics(run_dir)} == losses
        assert outcome(run_dir) == files
        assert {path.name for path in run_dir.iterdir()} == IN_A_RUN
        assert [path for path in run_dir.rglob(".*")] == []
        assert len(list((run_dir / "checkpoints").iterdir())) == 4  # three, and `latest`
    record("kills", {"kills": kills, "survived": kills, "runs": runs, "places": dict(places)})
