"""SIGKILL at random times and places: the resumed run ends with the same weights."""

import os
import random
import signal
import threading
from collections import Counter

import pytest

from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.record import record
from tests.helpers.runs import final_weights, train_in_rank, train_over, write_recipe
from tests.test_resume import assert_bitwise

KILLS = int(os.environ.get("KILLS", "6"))
WORLD = 2
SETTINGS = ("steps=60", "run.save_steps=4", "run.monitor_steps=9", "run.keep_checkpoints=3")
POINTS = (
    "checkpoint.model",
    "checkpoint.before_manifest",
    "checkpoint.before_rename",
    "checkpoint.before_prune",
    "train.step",
    "train.monitor",
    "storage.read_range",
)


def killed_in_rank(process, how, *arguments):
    """how: (rank, a fault point, or seconds until SIGKILL)."""
    rank, where = how
    if process.rank == rank:
        if isinstance(where, str):
            os.environ["SSLPIPE_FAULT"] = where
        else:
            timer = threading.Timer(where, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
    return train_in_rank(process, *arguments)[0]


def a_kill(rng: random.Random) -> tuple[int, str | float]:
    """A named place with its visit (a save is rank 0's), or any time within a second of work."""
    if rng.random() < 0.4:
        return rng.randrange(WORLD), rng.uniform(0.05, 1.5)
    point = rng.choice(POINTS)
    most = {"train.step": 16, "storage.read_range": 12}.get(point, 3)
    visit = rng.randrange(most) + 1
    return 0 if "checkpoint" in point else rng.randrange(WORLD), f"{point}:{visit}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_again_and_again_ends_with_bitwise_the_same_weights(tmp_path):
    """KILLS kills over as many runs as they need; each run's end is compared."""
    data = write_dataset(tmp_path / "data", (40, 3, 60, 25))
    recipe = write_recipe(tmp_path)
    train_over(WORLD, recipe, data, tmp_path / "straight", *SETTINGS)
    expected = final_weights(tmp_path / "straight")
    numbers = {m["step"]: m["loss"] for m in read_metrics(tmp_path / "straight")}
    rng, kills, runs = random.Random("kills"), 0, 0
    places: Counter[str] = Counter()
    while kills < KILLS:
        run_dir, runs, done = tmp_path / f"run-{runs}", runs + 1, []
        while not done:
            how = a_kill(rng) if kills < KILLS else (WORLD, 0.0)
            arguments = (str(recipe), str(data), str(run_dir), *SETTINGS)
            try:
                done = run_processes(killed_in_rank, WORLD, how, *arguments)
            except AssertionError as error:
                text = str(error)
                assert "ended without a word" in text, text
                kills += 1
                places["at any time" if isinstance(how[1], float) else how[1].split(":")[0]] += 1
                assert not (run_dir / "DONE").exists()
        assert done == [60] * WORLD
        assert_bitwise(expected, final_weights(run_dir))
        assert {m["step"]: m["loss"] for m in read_metrics(run_dir)} == numbers
    record("kills", {"kills": kills, "survived": kills, "runs": runs, "places": dict(places)})
