"""A disk without room for what a command writes: one line names the file, and no part is left."""

import errno

import pytest

from sslpipe.errors import UserError
from sslpipe.portable import full_disk, replacing
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


def test_a_full_disk_is_known_in_the_words_of_others(tmp_path):
    rust = RuntimeError("I/O error: No space left on device (os error 28)")
    assert full_disk(rust).errno == 28
    assert full_disk(UserError("no such key")) is None
    for error in (rust, OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(OSError, match="No space left") as raised, replacing(tmp_path / "a"):
            raise error
        assert raised.value.filename == str(tmp_path / "a")
        assert list(tmp_path.iterdir()) == []
