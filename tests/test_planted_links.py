"""Links and FIFOs in a folder that somebody else filled: no write leaves it, no read hangs."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sslpipe.data.index import load_index
from sslpipe.data.storage import DiskCache
from sslpipe.portable import (
    make_folder,
    open_regular,
    open_to_append,
    process_start,
    read_regular,
    replacing,
    write_atomically,
)
from sslpipe.sharding import columns
from tests.helpers.columns import add_columns, column_of
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import command_line, write_recipe

SECRET = b"of somebody else\n"
# names that were, or could be, guessed: "{}" is what a file of the run or data set is called
GUESSED = (".{}.tmp", ".{}", "{}.tmp", ".{}.partial")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def plant(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def unharmed(victim: Path) -> bool:
    """Whether the victim and its folder are as they were."""
    return victim.read_bytes() == SECRET and [*victim.parent.iterdir()] == [victim]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path, victim, dangling):
    path = tmp_path / "dataset.json"
    for name in (path.name, *(each.format(path.name) for each in GUESSED)):
        (tmp_path / name).symlink_to(victim.with_name("none") if dangling else victim)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert unharmed(victim)


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
            f".{path.name}.tmp",  # of an earlier version
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


def test_folders_inside_may_not_be_links_and_the_outermost_may(tmp_path, victim):
    real = tmp_path / "scratch"
    real.mkdir()
    (tmp_path / "run").symlink_to(real)
    assert make_folder(tmp_path / "run", "a", "b").is_dir()
    (real / "checkpoints").symlink_to(victim.parent)
    (real / "file").touch()
    for names in (("checkpoints",), ("checkpoints", "deeper"), ("file",)):
        with pytest.raises(OSError, match=r"link|no folder") as raised:
            make_folder(tmp_path / "run", *names)
        assert raised.value.filename == tmp_path / "run" / names[0]
    assert unharmed(victim)


def test_only_regular_files_are_read_or_appended_to_and_only_up_to_a_size(tmp_path, victim):
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(OSError, match="link"):
        open_to_append(tmp_path / "log")
    assert unharmed(victim)
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
        with pytest.raises(OSError):  # noqa: PT011  a FIFO without a reader has words of its own
            open_to_append(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def ended(done: CompletedProcess[str]) -> bool:
    """Whether a command did its work; else it has said why not."""
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    return not done.returncode


TRAIN = ("steps=2", "run.save_steps=1", "run.monitor_steps=1")


# names that a run writes, or that were guessed: each is replaced
REPLACED = (
    *("recipe.json", "data.json", "run.json", "MANIFEST.json", "lock", "DONE", "PREEMPTED"),
    *("FAILED", "quarantine.jsonl", "bad_steps.0.jsonl", "checkpoints/latest"),
    *("heartbeat/rank-0.json", "heartbeat/rank-0.stacks.txt", "heartbeat/.rank-0.json.tmp"),
    *(".recipe.json.tmp", ".run.json.tmp", ".DONE.tmp", ".init.tmp", "checkpoints/.latest.tmp"),
)


FOLDERS = ("run.json", "metrics.jsonl", "checkpoints", "checkpoints/step-00000001", "heartbeat")


@pytest.mark.parametrize(
    ("planted", "is_folder"),
    [
        *((planted, False) for planted in (REPLACED, ("metrics.jsonl",), ("checkpoints",))),
        *(((name,), True) for name in (*FOLDERS, "init", "lock")),
    ],
)
def test_training_in_a_planted_folder_writes_nowhere_else(
    tmp_path, data, victim, planted, is_folder
):
    run_dir = tmp_path / "run"
    for name in planted:
        plant(run_dir / name, victim.parent if is_folder else victim)
    where = ("--data", str(data), "--run-dir", str(run_dir))
    done = command_line("train", str(write_recipe(tmp_path)), *where, *TRAIN)
    assert unharmed(victim)
    if ended(done):
        assert (run_dir / "DONE").read_text().strip() == "step 2"
    else:
        assert planted != REPLACED
        assert planted[0].split("/")[0] in done.stderr or "checkpoint" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "lock", "DONE", "recipe.json"])
def test_a_fifo_in_a_run_hangs_nothing(tmp_path, data, name):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.mkfifo(run_dir / name)
    where = ("--data", str(data), "--run-dir", str(run_dir))
    for words in (("status", str(run_dir)), ("train", str(write_recipe(tmp_path)), *where, *TRAIN)):
        ended(command_line(*words))


@pytest.mark.parametrize(
    "planted",
    [
        *("dataset.json", "train-000000.tar", "train-000000.offsets.npy", ".build"),
        ".dataset.json.tmp .train-000000.tar.tmp .train-000000.offsets.npy.tmp",
    ],
)
def test_a_build_in_a_planted_folder_writes_nowhere_else(tmp_path, victim, planted):
    for name in ("a/1.png", "a/2.png", "b/3.png", "b/4.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (int(name[2]) * 40, 0, 0)).save(tmp_path / "images" / name)
    out = tmp_path / "data"
    for name in planted.split():
        plant(out / name, victim.parent if name == ".build" else victim)
    done = command_line("shards", "build", str(out), "--root", str(tmp_path / "images"))
    assert unharmed(victim)
    if ended(done):
        command_line("shards", "verify", str(out), status=0)


@pytest.mark.parametrize("planted", ["columns", "columns/vendor", "columns/vendor/x.npy"])
def test_columns_in_a_planted_folder_are_written_nowhere_else(tmp_path, victim, planted):
    manifest, is_file = write_dataset(tmp_path / "data"), planted.endswith(".npy")
    plant(manifest.parent / planted, victim if is_file else victim.parent)
    with nullcontext() if is_file else pytest.raises(OSError, match="link"):
        add_columns(manifest, vendor=[*"ab"] * 64)
    assert unharmed(victim)


def test_a_picture_replaces_a_planted_link(tmp_path, data, victim):
    out, recipe = tmp_path / "views.png", str(write_recipe(tmp_path))
    for name in (out.name, f".{out.name}.tmp"):
        plant(tmp_path / name, victim)
    command_line("preview", recipe, "--data", str(data), "--out", str(out), status=0)
    assert unharmed(victim)
    assert not out.is_symlink()


def test_files_have_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "x") as temporary:
            save_file({"a": torch.zeros(2)}, temporary)  # its own file is its owner's alone
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_a_cache_does_not_write_through_a_linked_folder(tmp_path, victim):
    cache = DiskCache(tmp_path / "cache", 10**6)
    cache._path("a", 0).parent.symlink_to(victim.parent)
    assert cache.read("a", 10, 0, 10, lambda begin, end: b"0123456789"[begin:end]) == b"0123456789"
    assert unharmed(victim)


@pytest.mark.parametrize("linked", ["columns", "columns/vendor"])
def test_nothing_is_removed_through_a_linked_folder_of_columns(tmp_path, linked):
    manifest = write_dataset(tmp_path / "data")
    elsewhere = tmp_path / "elsewhere"
    file = elsewhere / ("vendor" if linked == "columns" else "") / "train.values.npy"
    file.parent.mkdir(parents=True)
    file.touch()
    plant(manifest.parent / linked, elsewhere)
    columns.remove_unnamed(manifest.parent, load_index(manifest).manifest)
    assert file.exists()


def test_what_a_killed_run_left_of_a_column_goes_with_the_next_whatever_its_name(tmp_path):
    manifest = write_dataset(tmp_path / "data")
    add_columns(manifest, vendor=[*"ab"] * 64)
    folder = manifest.parent / "columns" / "vendor"
    with replacing(folder / "train-0a1b.values.npy") as temporary:
        left = temporary.with_name(temporary.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"))
        left.touch()
        replaced = {"train": {"vendor": column_of([*"abcd"] * 32)}}
        columns.add_columns(manifest.parent, replaced)
        assert temporary.exists()
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
