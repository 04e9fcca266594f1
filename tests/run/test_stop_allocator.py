import os
import platform
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest

from sslpipe.run.stop import StopRequest

ASKING = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGXCPU")


@pytest.mark.parametrize("number", [getattr(signal, name) for name in ASKING])
def test_a_signal_asks_for_a_stop_and_the_second_sigterm_means_no_more(number):
    outer = signal.getsignal(number)  # of the tests: nohup, a time limit
    if number not in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    stop = StopRequest(None)
    assert not stop()
    os.kill(os.getpid(), number)
    assert stop()
    keyboard = number in (signal.SIGINT, signal.SIGQUIT)  # Slurm and the launcher both send others
    with pytest.raises(KeyboardInterrupt) if keyboard else nullcontext():
        os.kill(os.getpid(), number)
    assert stop()
    stop.restore_handlers()
    assert stop.signal == number
    assert signal.getsignal(number) == before
    signal.signal(number, outer)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGALRM])
def test_a_signal_that_the_program_uses_itself_stays_its_own(number):
    def own(number, frame):
        pass

    before = signal.signal(number, own)
    try:
        stop = StopRequest(None)
        assert signal.getsignal(number) is own
        stop.restore_handlers()
    finally:
        signal.signal(number, before)


def faults_of_a_batch(*lines: str, **environment: str) -> int:
    """Pages that are mapped for 64 MB, made where as much was freed before."""
    code = [
        "import resource, numpy as np",
        "from sslpipe.portable import keep_freed_memory",
        *lines,
        "for _ in range(2):",
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt",
        "    np.ones(2**26, np.uint8)",
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)",
    ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
def test_freed_memory_is_used_again_unless_the_user_says_otherwise():
    assert faults_of_a_batch() > 20  # huge pages: one for 2 MB
    assert faults_of_a_batch("assert keep_freed_memory()") < 10
    assert faults_of_a_batch("assert not keep_freed_memory()", MALLOC_ARENA_MAX="2") > 20


def test_a_stop_file_is_seen_during_the_run(tmp_path):
    stop = StopRequest(str(tmp_path / "STOP"))
    assert not stop()
    (tmp_path / "STOP").touch()
    stop._looked_s -= 1.0
    assert stop()
    stop.restore_handlers()


def test_in_another_thread_no_handler_is_set_and_the_stop_file_still_asks(tmp_path):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    file = tmp_path / "STOP"
    file.touch()
    said = []

    def work():
        stop = StopRequest(str(file))
        said.append((stop.handles_signals, stop(), stop.signal))
        stop.restore_handlers()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [(False, True, signal.SIGTERM)]
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
