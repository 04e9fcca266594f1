"""An index that grows and shrinks: its answers, two writers at once, kills, and damage."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.search_index import (
    add_to_index,
    open_index,
    read_index,
    remove_from_index,
)
from tests.evaluation.test_search import by_loops, write_part

QUERY = torch.tensor([[-0.5, 2.0, 0.1, 1.0, -1.0, 0.3]])


@pytest.fixture
def parts(tmp_path):
    return [write_part(tmp_path / name, seed) for seed, name in enumerate("abc")]


def found(index, top=30):
    search, _ = open_index(index)
    (hits,) = search.find(QUERY, top)
    return [hit[1:3] for hit in hits]


def expected(parts, removed=()):
    near = by_loops(parts, QUERY[0].double(), 30)
    return [hit[1:3] for hit in near if hit[1:3] not in removed]


def test_what_is_added_is_found_and_what_is_removed_is_not(parts, tmp_path):
    index = tmp_path / "deep" / "index.json"
    assert add_to_index(index, *parts[0][:2]) == 7
    assert found(index) == expected(parts[:1])
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


def test_it_can_be_moved_with_its_files(parts, tmp_path):
    add_to_index(tmp_path / "index.json", *parts[0][:2])
    before = found(tmp_path / "index.json")
    folder = tmp_path.with_name(f"{tmp_path.name}-moved")
    shutil.move(tmp_path, folder)
    assert found(folder / "index.json") == before


REMOVE = """
import sys
from pathlib import Path
from sslpipe.evaluation import search_index
print("ready", flush=True)
sys.stdin.readline()
for number in map(int, sys.argv[3:]):
    search_index.remove_from_index(Path(sys.argv[1]), Path(sys.argv[2]), [number])
"""


def test_of_two_writers_at_once_neither_is_lost(parts, tmp_path):
    index = tmp_path / "index.json"
    add_to_index(index, *parts[0][:2])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", REMOVE, index, parts[0][0], *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for numbers in (["0", "1", "2"], ["4", "5", "6"])
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    assert found(index) == [(0, 3)]


def test_a_kill_while_it_is_written_leaves_the_old_one(parts, tmp_path):
    index = tmp_path / "index.json"
    add_to_index(index, *parts[0][:2])
    kill = """
import os, sys
from pathlib import Path
replace = os.replace
os.replace = Path.replace = lambda *arguments: os.kill(os.getpid(), 9)
"""
    words = [sys.executable, "-c", kill + REMOVE, index, parts[0][0], "3"]
    done = subprocess.run(words, input="\n", text=True, timeout=120)
    assert done.returncode == -9
    assert found(index) == expected(parts[:1])
    remove_from_index(index, parts[0][0], [3])  # and nothing of it is in the way
    assert found(index) == expected(parts[:1], {(0, 3)})
    assert [path.name for path in tmp_path.glob("*index*")] == ["index.json"]


def test_mistakes_are_named(parts, tmp_path):
    index, (features, data, _) = tmp_path / "index.json", parts[0]
    add_to_index(index, features, data)
    with pytest.raises(DataError, match=r"is in .*index\.json already"):
        add_to_index(index, features, data)
    with pytest.raises(DataError, match=r"is not in .*; known: .*features"):
        remove_from_index(index, parts[1][0], [0])
    with pytest.raises(DataError, match="has no image 7"):
        remove_from_index(index, features, [7, 0])
    remove_from_index(index, features, [0])
    with pytest.raises(DataError, match="no image 0, or it was removed before"):
        remove_from_index(index, features, [0])
    with pytest.raises(UserError, match="no image would be left"):
        remove_from_index(index, features, [1, 2, 3, 4, 5, 6])
    other = write_part(tmp_path / "other", 5, backbone_sha256="1" * 64)
    with pytest.raises(DataError, match="differ in backbone_sha256"):
        add_to_index(index, *other[:2])
    assert len(read_index(index)) == 1
    with pytest.raises(DataError, match="cannot read"):
        read_index(tmp_path / "none.json")

    # torn and strange files
    raw = index.read_text()
    part = json.loads(raw)["parts"][0]
    for text in (raw[: len(raw) // 2], "[]", "{}", '{"sslpipe_index": 2, "parts": [{}]}', "\x00"):
        index.write_text(text)
        with pytest.raises(DataError, match="is damaged, or no index of this version"):
            open_index(index)
    for change in ({"removed": ["1"]}, {"removed": None}, {"data": 3}, {"data_sha256": None}):
        index.write_text(json.dumps({"sslpipe_index": 1, "parts": [{**part, **change}]}))
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
