"""Small files of a run are read as they were written, or named as damaged."""

import pytest

from sslpipe.errors import UserError
from sslpipe.files import Tree, append_lines, open_log, read_json, read_lines
from sslpipe.run import description
from sslpipe.run.description import read_description, write_description
from sslpipe.run.log import SkippedLine

TREES = {
    "recipe.json": {"name": "x", "steps": 8},
    "data.json": {"mean": [0.5, 0.25, 0.125]},
    "run.json": {"world": 1},
}


def flips(raw: bytes):
    for place in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        yield bytes(flipped)


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"step": %b}' % value for value in (b"NaN", b"Infinity", b"1e400", b"1.5", b"true")),
        *(b'{"step": %b}' % value for value in (b'"1"', b"[1]", b"null", b"\xff", b"9" * 5000)),
        *(b"{}", b"[1]", b"1", b"null", b'{"step": 1', b'{"step": 1}}', b'{"st\xfftep": 1}'),
        *(b"\0\0\0", b'{"step": ' + b"9" * 400 + b"}", b'{"a": ' * 100_000, b"[" * 100_000),
    ],
    ids=range(21),
)
def test_a_line_that_is_none_is_skipped_and_counted(line, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": 1}\n' + line + b"\n\n" + b'{"step": 2}')
    assert read_lines(log, SkippedLine) == ([SkippedLine(step=1), SkippedLine(step=2)], 1)


def test_what_a_kill_cut_off_takes_no_later_line_with_it(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": 1}\n{"ste')
    append_lines(log, [{"step": 2}])
    with open_log(log) as file:
        file.write(b'{"step": 3}\n')
    assert read_lines(log, SkippedLine) == ([SkippedLine(step=n) for n in (1, 2, 3)], 1)


@pytest.mark.parametrize("name", [*TREES, "MANIFEST.json"])
def test_no_flipped_bit_of_a_description_changes_what_is_read(name, tmp_path):
    write_description(tmp_path, TREES)
    raw = (tmp_path / name).read_bytes()
    refused = 0
    for flipped in flips(raw):
        (tmp_path / name).write_bytes(flipped)
        for each, tree in TREES.items():
            try:
                actual = read_description(tmp_path, each, Tree)
            except UserError as error:
                refused += name in str(error)
            else:
                assert actual == tree
    assert refused > 7 * len(raw)  # all but spaces


def test_a_kill_between_two_files_leaves_a_description_that_is_read(tmp_path, monkeypatch):
    write_description(tmp_path, TREES)
    changed = {**TREES, "run.json": {"world": 2}, "recipe.json": {"name": "y", "steps": 8}}
    write = description.write_atomically
    for killed_at in range(5):
        left = killed_at

        def killed(path, text):
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            write(path, text)

        with monkeypatch.context() as patch:
            patch.setattr(description, "write_atomically", killed)
            try:
                write_description(tmp_path, changed)
            except KeyboardInterrupt:
                assert killed_at < 4
        for name in TREES:
            assert read_description(tmp_path, name, Tree) in (TREES[name], changed[name])
    assert read_description(tmp_path, "run.json", Tree) == {"world": 2}


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"\0", b"NaN", b'{"a": NaN}', b"[" * 10**5])
def test_what_is_no_object_is_one_line_with_the_file_and_the_remedy(raw, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=rf"^{path} is damaged \(.*\); pray$") as error:
        read_json(path, Tree, remedy="pray")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=rf"^cannot read {tmp_path}: Is a directory; pray$"):
        read_json(tmp_path, Tree, remedy="pray")
