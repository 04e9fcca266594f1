"""Small JSON files: what is written is read; whatever else a file holds is one line."""

import math

import pytest
from pydantic import Field

from sslpipe.errors import CheckpointError, DataError
from sslpipe.files import Finite, Int64, Stored, json_text, parse_object, read_json, write_json


class Part(Stored):
    values: tuple[Finite, ...]


class Example(Stored):
    name: str
    count: Int64 = 0
    parts: dict[str, Part] = Field(default_factory=dict)


WHOLE = Example(name="тест \u2028", count=3, parts={"a": Part(values=(0.1, 1e300, -0.0))})


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    write_json(tmp_path / "x.json", WHOLE)
    assert read_json(tmp_path / "x.json", Example) == WHOLE


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"name": "a"} x', "not JSON"),
        ('{"name": "\\ud800"}', "not JSON"),
        ('{"name": "a", "other": NaN}', "not JSON"),
        ('{"name": "a", "other": -Infinity}', "not JSON"),
        ('{"other": ' * 10**5, "not JSON"),
        ("[" * 10**5, "not JSON"),
        ('{"count": ' + "9" * 5000 + "}", "not JSON"),
        ('{"name": "a", "count": ' + "9" * 400 + "}", "count = an integer of 1329 bits"),
        ('{"name": "a", "count": "1"}', "count = '1'"),
        ('{"name": "a", "count": 1.5}', "count = 1.5"),
        ('{"name": "a", "count": true}', "count = True"),
        ('{"name": "a", "parts": {"b": {"values": [1, 1e999]}}}', "parts.b.values.1 = inf"),
        ('{"name": "a", "parts": {"b": {"values": [1, "2"]}}}', "parts.b.values.1 = '2'"),
        ('{"name": "a", "parts": {"b": {}}}', "parts.b.values is missing"),
        ('{"name": ["' + "x" * 10**6 + '"]}', "name = ['xxx"),
        ("{}", "name is missing"),
        ("[1]", "the content = [1]"),
        ("null", "the content = None"),
    ],
)
def test_whatever_else_a_file_holds_is_one_line_with_file_key_and_remedy(tmp_path, text, key):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(path, Example, remedy="pray", error=CheckpointError)
    line = str(caught.value)
    assert key in line
    assert line.startswith(f"{path} is damaged (")
    assert line.endswith("; pray")
    assert "\n" not in line
    assert len(line) < 1000


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b'{"name": "\xff"}')
    reasons = {"none.json": "No such file", ".": "Is a directory", "bytes.json": "UTF-8"}
    for name, reason in reasons.items():
        with pytest.raises(DataError, match=reason) as caught:
            read_json(tmp_path / name, Example)
        assert str(tmp_path / name) in str(caught.value)


def test_values_that_json_has_no_word_for_are_written_so_that_they_are_read():
    text = json_text({"a": [math.nan, {"b": -math.inf}], "c": "\udcff.png", "d": (1, None)})
    assert parse_object(text) == {"a": [None, {"b": None}], "c": "?.png", "d": [1, None]}
