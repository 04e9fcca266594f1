"""Files are written whole; without what only Linux has, a process and its memory are known."""

import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from sslpipe import portable, precision
from sslpipe.data.loader import free_bytes
from sslpipe.evaluation.embed import Embeddings
from sslpipe.portable import keep_freed_memory
from sslpipe.run.stop import StopRequest
from tests.helpers.runs import ROOT


@pytest.fixture(params=["linux", "elsewhere"])
def platform(request, monkeypatch):
    """This machine as it is, and without what macOS lacks."""
    if request.param == "elsewhere":
        monkeypatch.delattr(signal, "SIGPWR", raising=False)
        monkeypatch.setattr(portable, "PROC", Path("/no/proc"))
    return request.param


def test_a_process_is_told_from_a_later_one_with_its_number(platform):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    assert portable.process_start(ended.pid) is not None
    ended.wait(60)
    assert portable.process_start(ended.pid) is None
    assert portable.process_start() == portable.process_start(os.getpid())


def test_free_memory_is_that_of_the_machine(platform):
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


def test_a_stop_is_asked_for_by_the_signals_that_there_are(platform):
    timer = {"SIGALRM"}  # a time limit of the tests may hold it
    hang_up = signal.signal(1, signal.SIG_DFL)  # SIGHUP; the tests may run under nohup
    stop = StopRequest(None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    finally:
        stop.restore_handlers()
    names = {number.name for number in portable.stop_signals()} - timer
    signal.signal(1, hang_up)
    first = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT"}
    power = {"SIGPWR"} if platform == "linux" else set()
    assert names == first | {"SIGUSR2", "SIGVTALRM", "SIGXCPU"} | power


def test_a_process_under_nohup_is_not_stopped_by_the_end_of_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in portable.stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in portable.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_glibc_the_allocator_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, fsync):
    path = tmp_path / "file.json"
    portable.write_atomically(path, "é\n", fsync=fsync)
    assert path.read_bytes() == "é\n".encode()

    def fail_half_way():
        with portable.replacing(path, fsync=fsync) as temporary:
            temporary.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert path.read_bytes() == "é\n".encode()
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_one_at_a_time_is_inside_and_who_waits_says_so(tmp_path, capsys):
    inside, most = [], []

    def enter(number):
        with portable.one_at_a_time(tmp_path):
            inside.append(number)
            time.sleep(0.05)
            most.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:  # each opens the folder, as processes do
        list(pool.map(enter, range(8)))
    assert most == [1] * 8
    assert f"another process writes in {tmp_path}: waiting for it\n" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_that_cannot_sync_folders_keeps_files(number, tmp_path, monkeypatch):
    """As SMB, 9p and FUSE; PostgreSQL, too, passes over it. A failing disk is an error."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    is_fatal = number == errno.EIO
    with pytest.raises(OSError, match="error") if is_fatal else nullcontext():
        portable.write_atomically(tmp_path / "file", "text", fsync=True)
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(("name", "stays"), [("new", False), ("written", True), (".", True)])
def test_of_what_is_refused_no_new_folder_stays(name, stays, tmp_path):
    folder = tmp_path / name

    def refused():
        with portable.one_at_a_time(folder):
            if name == "written":
                (folder / "file").touch()
            raise ValueError(folder.is_dir())

    with pytest.raises(ValueError, match="True"):
        refused()
    assert folder.exists() == stays


def test_who_waits_for_a_folder_that_goes_makes_it_again(tmp_path):
    folder = tmp_path / "new"
    inside = threading.Event()

    def refused():
        with portable.one_at_a_time(folder):
            inside.set()
            time.sleep(0.1)
            raise ValueError

    def second():
        inside.wait()
        with portable.one_at_a_time(folder):
            (folder / "file").touch()

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.submit(refused), pool.submit(second)
        assert isinstance(first.exception(), ValueError)
        other.result()
    assert (folder / "file").exists()


def test_apples_gpus_have_no_float64_and_are_given_none():
    assert precision.wide_dtype("mps") == torch.float32
    assert {precision.wide_dtype(name) for name in ("cpu", "cuda", "cuda:1")} == {torch.float64}
    rows = Embeddings(torch.ones(2, 3), torch.zeros(2), torch.arange(2))
    assert {tensor.device.type for tensor in rows.to("mps")} == {"cpu"}
    assert precision.to_float64(torch.ones(2)).dtype == torch.float64


@pytest.mark.parametrize(
    ("python", "environment"),
    [
        (None, ".venv"),
        ("/opt/bin/python3.12", ".venv-python3.12"),
    ],
)
def test_make_keeps_an_environment_for_each_python(python, environment):
    """So that `make test PYTHON=python3.13` does not run the default's."""
    outer = ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")  # of the make that runs the suite
    kept = {key: value for key, value in os.environ.items() if key not in outer}
    words = ["make", "--dry-run", "test", *([f"PYTHON={python}"] if python else [])]
    done = subprocess.run(words, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
    assert f" {environment}/bin/python -m pytest" in done.stdout


# -- how float32 matrices are multiplied -----------------------------------------------------------

WIDER = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
OWN = (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def _settings() -> list[str]:
    """What each is set to itself; torch gives what decides, so the wider ones are lifted first."""
    values = []
    for key in WIDER:
        values.append(torch._C._get_fp32_precision_getter(*key))
        torch._C._set_fp32_precision_setter(*key, "none")
    values += [torch._C._get_fp32_precision_getter(*key) for key in OWN]
    for key, value in zip(WIDER, values, strict=False):
        torch._C._set_fp32_precision_setter(*key, value)
    return values


CHOICES = {
    "nothing": lambda: None,
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "all of cuda": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    "matmul": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "matmul of the cpu": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@pytest.fixture(params=CHOICES)
def choice(request):
    """Set as a user would, and back."""
    before = _settings()
    yield CHOICES[request.param]
    for key, value in zip((*WIDER, *OWN), before, strict=True):
        torch._C._set_fp32_precision_setter(*key, value)


def test_full_float32_holds_inside_and_leaves_every_setting_as_it_was(choice):
    choice()
    before = _settings()
    with precision.full_float32():
        inside = _settings()
        assert (inside[3], inside[5]) == ("ieee", "ieee")
        with precision.float32_products("cuda", "tf32"), precision.full_float32():
            assert _settings() == inside
        assert _settings() == inside
    assert _settings() == before
