"""Files are written whole or not at all; of strangers only regular files are read."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from sslpipe.portable import (
    open_regular,
    process_start,
    read_regular,
    replacing,
    write_atomically,
)
from sslpipe.sharding import columns
from tests.helpers.columns import add_columns, table_of
from tests.helpers.dataset import write_dataset


def test_files_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path):
    path = tmp_path / "train.values.npy"
    with replacing(path) as temporary, replacing(path) as another:
        assert another != temporary
        assert temporary.read_bytes() == b""
        writer, token, _ = temporary.name.removeprefix(f".{path.name}.").split(".")
        host, pid, start = writer.split("-")
        assert (int(pid), start) == (os.getpid(), process_start())
        gone = [
            f".{path.name}.{host}-{2**22 + 1}-{start}.{token}.tmp",  # no such process
            f".{path.name}.{host}-{pid}-1.{token}.tmp",  # another process had that number
        ]
        kept = [
            f".{path.name}.00000000-{2**22 + 1}-{start}.{token}.tmp",  # of another machine
            f".{path.name}.mine.tmp",
            f".other.{host}-{2**22 + 1}-{start}.{token}.tmp",
        ]
        for name in (*gone, *kept):
            (tmp_path / name).touch()
        write_atomically(path, "x")
        left = set(os.listdir(tmp_path))
        assert left == {path.name, temporary.name, another.name, *kept}


def test_several_writers_of_one_file_leave_one_whole_content(tmp_path):
    texts = [str(number) * 5000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(tmp_path / "x", text), texts * 20))
    assert (tmp_path / "x").read_text() in texts
    assert os.listdir(tmp_path) == ["x"]


def test_only_regular_files_are_read_and_only_up_to_a_size(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "to-device").symlink_to("/dev/zero")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match=r"5 bytes, and at most 4"):
        open_regular(tmp_path / "file", 4)
    for name, kind in (("fifo", "FIFO"), ("to-fifo", "FIFO"), ("to-device", "device")):
        with pytest.raises(OSError, match=f"a {kind}"):
            read_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_files_have_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "x") as temporary:
            save_file({"a": torch.zeros(2)}, temporary)  # its own file is its owner's alone
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_what_a_killed_run_left_of_a_column_goes_with_the_next_whatever_its_name(tmp_path):
    manifest = write_dataset(tmp_path / "data")
    add_columns(manifest, vendor=[*"ab"] * 64)
    folder = manifest.parent
    with replacing(folder / "train.metadata-0123456789abcdef.parquet") as temporary:
        left = temporary.with_name(temporary.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"))
        left.touch()
        columns.replace_columns(folder, {"train": table_of(vendor=[*"abcd"] * 32)})
        assert temporary.exists()
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
