"""Launched processes end with their launcher, at whatever point of their start it dies."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from sslpipe.portable import command_of, process_start
from sslpipe.run.launcher import adopts
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT, write_recipe

# starts rank 1 of 2 and dies, killed so, after some seconds; rank 0 never comes
LAUNCHER = """
import os, subprocess, sys, time
seconds, *words = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-m", "sslpipe", *words])
print(child.pid, flush=True)
time.sleep(float(seconds))
os.kill(os.getpid(), 9)
"""
WITHIN_S = 10.0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="an orphan keeps its parent's number there")
def test_a_process_whose_launcher_is_killed_ends_in_imports_and_in_a_rendezvous(tmp_path):
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",  # nobody listens there
        "TORCHELASTIC_RUN_ID": "none",
    }
    words = ["train", str(recipe), "--data", str(data), "--run-dir", str(tmp_path / "run")]
    delays_s = (0.3, 1.5, 8.0)
    if adopts(1, command_of(1)):
        delays_s = (0.0, *delays_s)  # dead before the process has begun
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", LAUNCHER, str(delay_s), *words],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for delay_s in delays_s
        ]
        for launcher, delay_s in zip(launchers, delays_s, strict=True):
            pid = int(launcher.stdout.readline())
            assert launcher.wait(30) == -9
            deadline = time.monotonic() + WITHIN_S
            while process_start(pid) is not None and time.monotonic() < deadline:
                time.sleep(0.1)
            assert process_start(pid) is None, f"{delay_s}: {command_of(pid)}"
            said = launcher.stderr.read()
            assert said == "rank 1: LauncherLost: the process that started it is gone\n"
    assert not (tmp_path / "run").exists()


def test_what_adopts_orphans_is_no_launcher_and_a_launcher_may_be_process_1():
    assert adopts(1, "/sbin/init splash")
    assert adopts(900, "/usr/lib/systemd/systemd --user")
    assert not adopts(1, "/usr/bin/python3 /usr/local/bin/torchrun -m sslpipe train")
    assert not adopts(900, "slurmstepd: [77.0]")
    assert not adopts(1, None)
