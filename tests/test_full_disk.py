"""A disk without room for what a command writes: one line names the file, and no part is left."""

import errno
import os

import numpy as np
import pytest
from PIL import Image

from sslpipe.distributed import explain_lost_process
from sslpipe.errors import UserError
from sslpipe.models.limits import TooLarge, within_memory
from sslpipe.portable import disk_error, explain_lack_of_memory, replacing
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import command_line, python, write_recipe

# what it says comes when the limit is off again: a helper's streams are files, too
LIMITED = """
import contextlib, io, resource, sys
from sslpipe.__main__ import main
limit, said = int(sys.argv.pop(1)), io.StringIO()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
try:
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main()
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sys.stderr.write(said.getvalue())
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data, run = write_dataset(folder / "data"), folder / "run"
    words = ("train", str(write_recipe(folder)), "--data", str(data), "--run-dir", str(run))
    command_line(*words, "steps=1", status=0)
    return data, run


@pytest.mark.parametrize(
    ("command", "limit_bytes"), [("export", 500), ("export", 8000), ("embed", 500)]
)
def test_one_line_names_the_file_and_its_parts_are_gone(trained, tmp_path, command, limit_bytes):
    data, run = trained
    out = tmp_path / ("backbone" if command == "export" else "features.safetensors")
    words = [command, str(run), "--out", str(out)]
    words += ["--data", str(data), "--split", "train"] if command == "embed" else []
    done = python("-c", LIMITED, str(limit_bytes), *words, status=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert str(out) in line
    assert list(tmp_path.iterdir()) == []


FAILING = """
import errno, os, sys
from sslpipe.__main__ import main
number, replace = getattr(errno, sys.argv.pop(1)), os.replace
def fails(source, target, **named):
    if str(target).startswith(os.environ["TARGET"]):
        raise OSError(number, os.strerror(number), str(source), None, str(target))
    return replace(source, target, **named)
os.replace = fails
main()
"""
ROOM = ("ENOSPC", "EDQUOT")


@pytest.mark.parametrize("name", ["EIO", "ESTALE", *ROOM, "EACCES"])
@pytest.mark.parametrize("command", ["export", "embed", "train", "report", "build"])
def test_a_rename_that_fails_is_one_line_with_the_systems_reason(
    trained, tmp_path, monkeypatch, command, name
):
    """Only of a full disk or quota it says to free some space."""
    data, run = trained
    out = tmp_path / "out"
    monkeypatch.setenv("TARGET", str(out))
    on = ["--data", str(data)]
    words = {
        "export": ["export", str(run), "--out", str(out)],
        "embed": ["embed", str(run), *on, "--split", "train", "--out", f"{out}.safetensors"],
        "train": ["train", str(write_recipe(tmp_path)), *on, "--run-dir", str(out), "steps=1"],
        "report": ["report", str(run), "--out", f"{out}.html"],
        "build": ["shards", "build", str(out), "--root", str(tmp_path / "images")],
    }[command]
    if command == "build":
        for number in range(4):
            path = tmp_path / f"images/{number % 2}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((24, 24, 3), number, np.uint8)).save(path)
    done = python("-c", FAILING, name, *words, status=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert str(out) in line
    assert os.strerror(getattr(errno, name)) in line
    assert ("free some space" in line) == (name in ROOM)


def test_too_little_memory_is_said_and_the_backbone_is_not_blamed():
    """The words of Python, of torch and of C++."""
    texts = (
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4194304 bytes. Error code 12",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4194304 bytes.",
        "std::bad_alloc",
    )
    for error in (MemoryError(), *map(RuntimeError, texts)):
        with pytest.raises(type(error)), within_memory("[backbone]"):
            raise error
        assert "--batch-size" in explain_lack_of_memory(error)
    huge = RuntimeError("can't allocate memory: you tried to allocate 4000000000000000 bytes.")
    with pytest.raises(TooLarge, match="backbone"), within_memory("[backbone]"):
        raise huge
    assert explain_lack_of_memory(RuntimeError("shapes differ")) is None


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by "
        "peer. This is typically caused by a remote worker",
        "Connection closed by peer [127.0.0.1]:1\nException raised from x\nframe #0: y",
    ],
)
def test_a_lost_process_is_one_line(text):
    said = explain_lost_process(RuntimeError(text))
    assert "another process of this run has ended" in said
    assert "127.0.0.1" in said
    assert "frame" not in said
    assert "\n" not in said
    assert explain_lost_process(RuntimeError("shapes differ")) is None


def test_a_full_disk_is_known_in_the_words_of_others(tmp_path):
    rust = RuntimeError("I/O error: No space left on device (os error 28)")
    assert disk_error(rust).errno == 28
    assert disk_error(UserError("no such key")) is None
    for error in (rust, OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(OSError, match="No space left") as raised, replacing(tmp_path / "a"):
            raise error
        assert raised.value.filename == str(tmp_path / "a")
        assert list(tmp_path.iterdir()) == []
