"""One job in a run directory at a time; a dead one's lock is nobody's."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from socket import gethostname

import pytest

from sslpipe.distributed import Rank
from sslpipe.errors import UserError
from sslpipe.run.lock import RunLock, holder_of, take_lock

HOLD = """
import sys, time
from pathlib import Path
from sslpipe.run.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_and_told_who_holds_the_directory(tmp_path):
    lock = RunLock(tmp_path)
    who = f"process {os.getpid()} on {gethostname()}"
    assert holder_of(tmp_path) == who
    with pytest.raises(UserError, match=f"in use by {who}"):
        RunLock(tmp_path)
    (tmp_path / "lock.json").write_text("{")  # the lock counts, not the file that names its holder
    with pytest.raises(UserError, match="in use by another process"):
        RunLock(tmp_path)
    lock.release()
    assert holder_of(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    RunLock(tmp_path).release()


def test_the_lock_of_a_killed_process_is_nobodys(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "held\n"
        assert holder_of(tmp_path) == f"process {process.pid} on {gethostname()}"
        with pytest.raises(UserError, match=f"process {process.pid}"):
            RunLock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert (tmp_path / "lock").exists()
    assert holder_of(tmp_path) is None
    RunLock(tmp_path).release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_one_error(number, tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"/lock: .*; its file system has no locks; mount it"):
        take_lock(tmp_path, Rank()).__enter__()
