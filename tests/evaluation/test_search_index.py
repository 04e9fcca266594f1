"""An index that grows and shrinks: its answers, two writers at once, kills, and damage."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch

from sslpipe.errors import DataError, UserError
from sslpipe.evaluation import search
from sslpipe.evaluation.embed import read_embeddings, save_embeddings
from sslpipe.evaluation.search_index import (
    add_to_index,
    build_index,
    check_index,
    open_index,
    read_index,
    remove_from_index,
)
from tests.evaluation.test_search import THEMES, by_loops, write_part
from tests.helpers.processes import run_processes

QUERY = torch.tensor([[-0.5, 2.0, 0.1, 1.0, -1.0, 0.3]])


@pytest.fixture
def parts(tmp_path):
    return [write_part(tmp_path / name, seed) for seed, name in enumerate("abc")]


def found(index, top=30, where="", **options):
    opened, _ = open_index(index, **options)
    (hits,) = opened.find(QUERY, top, where=where)
    return [hit[1:3] for hit in hits]


def expected(parts, removed=()):
    near = by_loops(parts, QUERY[0].double(), 30)
    return [hit[1:3] for hit in near if hit[1:3] not in removed]


def test_what_is_added_is_found_and_what_is_removed_is_not(parts, tmp_path):
    index = tmp_path / "deep" / "index.json"
    assert add_to_index(index, *parts[0][:2]) == 7
    assert add_to_index(index, *parts[1][:2]) == 14
    assert found(index) == expected(parts[:2])
    assert remove_from_index(index, parts[0][0], [5, 2, 5]) == 12
    assert found(index) == expected(parts[:2], {(0, 5), (0, 2)})
    assert remove_from_index(index, parts[1][0], [0, 1, 2, 3, 4, 5, 6]) == 5  # a whole file
    assert add_to_index(index, *parts[2][:2]) == 12
    gone = {(0, 5), (0, 2), *((1, number) for number in range(7))}
    assert found(index) == expected(parts, gone)
    assert [part["removed"] for part in read_index(index)] == [[2, 5], [*range(7)], []]
    assert os.listdir(index.parent) == ["index.json"]


def remove_in_rank(process, index, features):
    for number in ((0, 1, 2), (4, 5, 6))[process.rank]:
        remove_from_index(index, features, [number])


def test_of_two_writers_at_once_neither_is_lost(parts, tmp_path):
    index = tmp_path / "index.json"
    add_to_index(index, *parts[0][:2])
    run_processes(remove_in_rank, 2, index, parts[0][0])
    assert found(index) == [(0, 3)]


def test_mistakes_are_named(parts, tmp_path):
    index, (features, data, _) = tmp_path / "index.json", parts[0]
    add_to_index(index, features, data)
    with pytest.raises(DataError, match=r"is in .*index\.json already"):
        add_to_index(index, features, data)
    remove_from_index(index, features, [0])
    for file, ids, message in (
        (parts[1][0], [0], r"is not in .*; known: .*features"),
        (features, [7, 1], "has no image 7"),
        (features, [0], "no image 0, or it was removed before"),
        (features, [1, 2, 3, 4, 5, 6], "no image would be left"),
    ):
        with pytest.raises(UserError, match=message):
            remove_from_index(index, file, ids)
    other = write_part(tmp_path / "other", 5, backbone_sha256="1" * 64)
    with pytest.raises(DataError, match="differ in backbone_sha256"):
        add_to_index(index, *other[:2])
    assert len(read_index(index)) == 1
    with pytest.raises(DataError, match="cannot read"):
        read_index(tmp_path / "none.json")

    # torn and strange files
    raw = index.read_text()
    part = json.loads(raw)["parts"][0]
    changes = [{"removed": ["1"]}, {"removed": None}, {"data": 3}, {"data_sha256": None}]
    changes += [{"rows": "../index.json"}, {"flattening": "x"}, {"near": {"file": "a"}}]
    trees = [{"sslpipe_index": 1, "parts": [{**part, **change}]} for change in changes]
    trees.append({"sslpipe_index": 2, "parts": [part]})
    for text in (raw[: len(raw) // 2], "[]", "{}", "\x00", *map(json.dumps, trees)):
        index.write_text(text)
        with pytest.raises(DataError, match="is damaged, or no index of this version"):
            open_index(index)
    index.write_text(json.dumps({"sslpipe_index": 1, "parts": [{**part, "data_sha256": "0"}]}))
    with pytest.raises(DataError, match="was replaced by features of other images"):
        open_index(index)
    index.write_text(raw)
    torn = features.read_bytes()
    features.write_bytes(torn[:-8] + bytes(8))
    with pytest.raises(DataError, match="is damaged: its sha256"):
        open_index(index)


# Forks a process for each kill, so that nothing is imported again: op, place, seconds until it.
STORM = """
import json, mmap, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import sslpipe
from sslpipe.evaluation import choose, search_index
choose.LEAST_FLATTENED = 13
features, data = Path(sys.argv[1]), sys.argv[2]
acts = {
    "add": lambda index: search_index.add_to_index(index, features, data),
    "remove": lambda index: search_index.remove_from_index(index, Path(sys.argv[3]), [5]),
    "build": lambda index: search_index.build_index(index),
}
programs = (sys.prefix, sys.base_prefix, str(Path(sslpipe.__file__).parent), "/proc", "/sys")
files = ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.listdir", "os.scandir")

def watch(seen, last):
    def count(event, args):
        if event in files and not str(args[0]).startswith(programs):
            number = int.from_bytes(seen[:4], "big") + 1
            seen[:4] = number.to_bytes(4, "big")
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

for line in sys.stdin:
    act, index, last = json.loads(line)
    seen = mmap.mmap(-1, 4)
    child = os.fork()
    if not child:
        watch(seen, last)
        try:
            acts[act](Path(index))
        finally:
            os._exit(0)
    print(json.dumps([os.waitpid(child, 0)[1], int.from_bytes(seen[:4], "big")]), flush=True)
"""
KILLS = int(os.environ.get("INDEX_KILLS", "12"))


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_index(
    parts, tmp_path, monkeypatch
):
    """Killed before a file operation that is drawn among all: no test of speed."""
    monkeypatch.setattr("sslpipe.evaluation.choose.LEAST_FLATTENED", 13)
    index = tmp_path / "index" / "index.json"
    for part in parts[:2]:
        add_to_index(index, *part[:2])
    build_index(index, flatten=False)
    draws, killed = random.Random(0), Counter()
    words = [sys.executable, "-c", STORM, *parts[2][:2], parts[0][0]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:

        def change(act, last):
            shutil.copytree(index.parent, tmp_path / f"{act}-{last}")
            copy = tmp_path / f"{act}-{last}" / index.name
            process.stdin.write(json.dumps([act, str(copy), last]) + "\n")
            process.stdin.flush()
            status, operations = json.loads(process.stdout.readline())
            return copy, status, operations

        old = found(index)
        for act in ("add", "remove", "build"):
            copy, status, operations = change(act, None)
            new = found(copy)
            assert status == 0
            assert old != new
            least, most = len(list(index.parent.rglob("*"))), len(list(copy.parent.rglob("*")))
            for last in draws.sample(range(1, operations + 1), min(KILLS // 3, operations)):
                copy, status, _ = change(act, last)
                now = found(copy)
                assert now in (old, new), (act, last)
                assert status == 9
                killed[act, now == new] += 1
                # the next writer works, and nothing of the killed one is left
                removed = remove_from_index(copy, parts[1][0], [0])
                assert removed == len(now) - 1
                assert found(copy) == [hit for hit in now if hit != (1, 0)]
                assert len(list(copy.parent.rglob("*"))) in (least, most)
                shutil.rmtree(copy.parent)
        process.stdin.close()
    assert killed["build", False] > 0, killed


@pytest.fixture
def built(parts, tmp_path, monkeypatch):
    """An index of two files, flattened, one image removed before it was built; its folder."""
    monkeypatch.setattr("sslpipe.evaluation.choose.LEAST_FLATTENED", 13)
    index = tmp_path / "index.json"
    for part in parts[:2]:
        add_to_index(index, *part[:2])
    remove_from_index(index, parts[0][0], [3])
    before = found(index)
    assert build_index(index).form.startswith("flattened, fitted on 13 images")
    return index, before, tmp_path / "index.json.rows"


def no_features(path):
    raise AssertionError(f"{path} was read")


def test_a_built_index_answers_as_before_and_reads_no_features(parts, built, monkeypatch):
    index, before, folder = built
    as_they_are = expected(parts[:2], {(0, 3)})
    assert before != as_they_are
    names = {path.name for path in folder.iterdir()}
    assert [name.partition(".")[2] for name in sorted(names, key=len)] == [
        "flattening", "rows.safetensors", "rows.safetensors",
    ]  # fmt: skip
    for where, wanted in (("theme = a", "a"), ("theme in a, b", "ab"), ("", None)):
        shown = [hit for hit in before if wanted is None or (THEMES[hit[1]] or "-") in wanted]
        with monkeypatch.context() as patch:
            patch.setattr(search, "load_embeddings", no_features)
            assert found(index, where=where) == shown
    assert found(index, flatten=False) == as_they_are  # of the features themselves
    assert found(index, flatten=True) == before
    assert check_index(index) == 13

    # what is removed and added afterwards; the spectrum stays
    with monkeypatch.context() as patch:
        patch.setattr(search, "load_embeddings", no_features)
        remove_from_index(index, parts[1][0], [6, 0])
        gone = {(1, 6), (1, 0)}
        assert found(index) == [hit for hit in before if hit not in gone]
        assert found(index, 2) == [hit for hit in before if hit not in gone][:2]
        remove_from_index(index, parts[1][0], [1, 2, 3, 4])
        gone |= {(1, number) for number in (1, 2, 3, 4)}
        assert found(index) == [hit for hit in before if hit not in gone]
    assert add_to_index(index, *parts[2][:2]) == 14
    with monkeypatch.context() as patch:
        patch.setattr(search, "load_embeddings", no_features)
        after = found(index)
        assert [hit for hit in after if hit[0] < 2] == [hit for hit in before if hit not in gone]
        assert len(after) == 14
    assert names < {path.name for path in folder.iterdir()}

    # built again, as they are: what was there before is gone
    assert build_index(index, flatten=False).flattening is None
    assert found(index) == expected(parts, {(0, 3), *gone})
    assert not names & {path.name for path in folder.iterdir()}
    assert len(list(folder.iterdir())) == 3


def test_an_index_can_be_moved_with_its_files(parts, built, tmp_path):
    add_to_index(tmp_path / "plain.json", *parts[0][:2])
    plain = found(tmp_path / "plain.json")
    folder = tmp_path.with_name(f"{tmp_path.name}-moved")
    shutil.move(tmp_path, folder)
    assert found(folder / "index.json") == built[1]
    assert found(folder / "plain.json") == plain


def test_damage_of_what_was_built_is_named(parts, built):
    index, _, folder = built
    tree = json.loads(index.read_text())
    rows, flattening = (folder / tree["parts"][1][key] for key in ("rows", "flattening"))
    whole = {path: path.read_bytes() for path in (rows, flattening, parts[1][0])}

    def refused(reason, act=open_index):
        with pytest.raises(DataError, match=reason):
            act(index)
        for path, content in whole.items():
            path.unlink(missing_ok=True)
            path.write_bytes(content)

    rows.write_bytes(whole[rows][:-8])
    refused("cannot read embeddings from .*rows.safetensors.*index build")
    rows.unlink()
    refused("cannot read embeddings from .*rows.safetensors.*index build")
    rows.unlink()
    os.mkfifo(rows)
    refused("a FIFO, not a regular file")
    rows.write_bytes(whole[parts[1][0]])
    refused("is none of an index's files")
    flattening.write_bytes(whole[flattening][:-1] + b"x")
    refused("flattening is missing or damaged .*sha256")
    flattening.unlink()
    refused("flattening is missing or damaged .*No such file")
    units, facts = read_embeddings(parts[1][0])
    save_embeddings(parts[1][0], units._replace(features=units.features + 1), facts)
    refused("features.safetensors is another file now")
    # a changed number is met by the search where it is none, else by `verify`
    units, facts = read_embeddings(rows)
    for number in (torch.nan, -torch.nan, torch.inf):
        broken = units.features.clone()
        broken[2] = number
        save_embeddings(rows, units._replace(features=broken), facts)
        with pytest.raises(DataError, match="index is damaged: rows are not of length 1"):
            open_index(index)[0].find(QUERY.abs(), 1)
    rows.write_bytes(whole[rows][:-20] + bytes([whole[rows][-20] ^ 1]) + whole[rows][-19:])
    refused("rows.safetensors is damaged: its sha256", check_index)
