"""A rank that stands still ends its job in the set time, with its stacks, saying where it stood."""

import os
import re
import time

from sslpipe.distributed import Rank
from sslpipe.files import read_json
from sslpipe.run.watchdog import Heartbeat, Watchdog, read_heartbeats
from tests.helpers.runs import command_line, kill_over, python, train_words, write_recipe

TIMEOUT_S = 3


def test_a_rank_that_hangs_ends_all_in_time_and_every_ranks_place_is_reported(data, tmp_path):
    """Rank 1 never comes to the collective that rank 0 waits in."""
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    begin_s = time.monotonic()
    kill_over(2, "train.step:3@1=hang", recipe, data, run_dir, f"run.timeout_s={TIMEOUT_S}")
    assert TIMEOUT_S < time.monotonic() - begin_s < 60  # not the collective's 60 s: set-up is in it
    text = (run_dir / "FAILED").read_text()
    assert re.match(r"rank [01]: Hang: no progress for 3 s \(run\.timeout_s = 3\) at step", text)
    assert re.search(r"at step 2, training; rank [01] at step 2, training; its stacks are in", text)
    stacks = (run_dir / "heartbeat" / "rank-1.stacks.txt").read_text()
    assert "in fault" in stacks
    assert "in pretrain\n" in stacks
    assert not (run_dir / "DONE").exists()


def test_a_loader_that_hangs_ends_the_job_with_the_stack_of_its_thread(data, tmp_path):
    command, run_dir = train_words(tmp_path, data), tmp_path / "run"
    result = command_line(
        *command, f"run.timeout_s={TIMEOUT_S}", SSLPIPE_FAULT="storage.read_range:9=hang"
    )
    assert result.returncode == 70
    assert "waiting for data" in (run_dir / "FAILED").read_text()
    for text in (result.stderr, (run_dir / "heartbeat/rank-0.stacks.txt").read_text()):
        assert "in read_range" in text  # of the reading thread
        assert "in pretrain\n" in text  # of the one that waits for it
    again = command_line(*command, f"run.timeout_s={TIMEOUT_S}")
    assert again.returncode == 0, again.stderr
    assert not (run_dir / "FAILED").exists()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from sslpipe.distributed import Rank
from sslpipe.run.watchdog import Watchdog
if os.fork() == 0:
    with Watchdog(Path(sys.argv[1]), Rank(1, 2), 600.0) as beat:
        beat(5, "training")
        time.sleep(60)
time.sleep(1)
os._exit(9)
"""


def test_a_rank_whose_launcher_was_killed_ends_too(tmp_path):
    python("-c", LAUNCHER, str(tmp_path), status=9)
    deadline = time.monotonic() + 10
    while not (tmp_path / "FAILED").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "FAILED").read_text().startswith("rank 1: LauncherLost: ")
    pid = read_heartbeats(tmp_path)[1].pid
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


SUSPENDED = """
import os, signal, sys, time
from pathlib import Path
from sslpipe.distributed import Rank
from sslpipe.run.watchdog import Watchdog
with Watchdog(Path(sys.argv[1]), Rank(0, 1), 1.0) as beat:
    beat(5, "training")
    time.sleep(0.3)  # it has been looked at
    if os.fork() == 0:
        time.sleep(2.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.4)
    beat(6, "training")
    time.sleep(0.4)
"""


def test_a_process_that_was_suspended_is_no_hang(tmp_path):
    """By `kill -STOP`, Ctrl-Z and fg, `scontrol suspend` or `docker pause`."""
    python("-c", SUSPENDED, str(tmp_path), status=0)
    assert not (tmp_path / "FAILED").exists()


def test_slow_but_steady_progress_is_left_alone_and_seen(tmp_path):
    with Watchdog(tmp_path, Rank(0, 1), 0.4) as beat:
        for step in range(8):
            beat(step, "training")
            time.sleep(0.1)
    (beats,) = read_heartbeats(tmp_path).values()  # where it ended
    assert (beats.rank, beats.pid) == (0, os.getpid())
    assert (beats.step, beats.phase) == (7, "training")
    assert not (tmp_path / "FAILED").exists()
    (tmp_path / "heartbeat" / "rank-3.json").write_text('{"rank": 3, "st')
    assert list(read_heartbeats(tmp_path)) == [0]  # one that was cut off is no sign of life
    assert read_json(tmp_path / "heartbeat" / "rank-0.json", Heartbeat) == beats
