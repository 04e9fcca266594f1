"""Conditions on columns against Python's own comparisons; hostile texts and missing values."""

import operator
from pathlib import Path

import pytest

from sslpipe.data.index import Split
from sslpipe.errors import DataError
from sslpipe.search.selection import parse_conditions, select
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset

THEME = ["papirus", "oxygen icons", None, "papirus", "a,b", "it's", "and"]
AGE = [7, 0, -5, None, 2**63 - 1, 7, 3]
DOSE = [0.5, None, 1e-300, 2.0, 2.0, -0.0, 3.5]
SHOT = [0, 1_714_564_800_000_000, None, -1, 1, 2, 3]  # microseconds


PYTHONS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    folder: Path = tmp_path_factory.mktemp("data")
    columns = {"theme": THEME, "age": AGE, "dose": DOSE, "shot_at": SHOT}
    return add_columns(write_dataset(folder, (3, 4)), times=("shot_at",), **columns).split("train")


def chosen(split: Split, text: str) -> list[int]:
    return [i for i, kept in enumerate(select(parse_conditions(text), split, range(7))) if kept]


@pytest.mark.parametrize("sign", PYTHONS)
@pytest.mark.parametrize(("name", "values", "bound"), [("age", AGE, 7), ("dose", DOSE, 2.0)])
def test_comparisons_are_pythons_and_a_missing_value_fits_none(split, sign, name, values, bound):
    compare = PYTHONS[sign]
    expected = [i for i, value in enumerate(values) if value is not None and compare(value, bound)]
    assert chosen(split, f"{name} {sign} {bound}") == expected
    assert chosen(split, f"{name}{sign}{bound}") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("theme = papirus", [0, 3]),
        ("theme != papirus", [1, 4, 5, 6]),
        ("theme = 'oxygen icons'", [1]),
        ('theme in papirus, "a,b", "it\'s"', [0, 3, 4, 5]),
        ("theme = and and age = 3", [6]),
        ("age in -5,9223372036854775807", [2, 4]),
        ("shot_at >= 1970-01-01T00:00:00.000002Z", [1, 5, 6]),
        ("shot_at < 1970-01-01", [3]),
        ('shot_at = "2024-05-01 14:00:00+02:00"', [1]),
        ("theme != papirus and age >= 0 and dose <= 2", [4, 5]),
    ],
)
def test_conditions_choose_samples(split, text, expected):
    assert chosen(split, text) == expected


@pytest.mark.parametrize(
    "text", ["it's 5\"", "''", '"', "'", "\"a\" and 'b'", "", "x'' = 'y", "'a"]
)
@pytest.mark.parametrize("quote", "'\"")
def test_any_text_can_be_a_value_its_own_quotes_twice(text, quote):
    word = quote + text.replace(quote, 2 * quote) + quote
    for sign, more in (("=", ""), ("in", f",{word} , b")):
        (first, second) = parse_conditions(f"{word}{sign}{word}{more} and age = 1")
        assert (first.column, first.values[0]) == (text, text)
        assert first.values[1:] == ((text, "b") if more else ())
        assert second == ("age", "=", ("1",))


def test_a_class_is_chosen_by_its_name_and_a_column_of_that_name_comes_first(split, tmp_path):
    labels = split.labels.tolist()
    names = [split.class_name(label) for label in labels]
    first = names[0]
    of_first = [place for place in range(7) if names[place] == first]
    assert chosen(split, f"class = '{first}'") == of_first
    assert chosen(split, f"class != '{first}'") == [i for i in range(7) if i not in of_first]
    both = [i for i in range(7) if names[i] in (first, names[-1]) and THEME[i] == "papirus"]
    assert chosen(split, f"class in '{first}','{names[-1]}' and theme = papirus") == both
    with pytest.raises(DataError, match=f"no sample has class = '{first}x'; did you mean"):
        chosen(split, f"class = '{first}x'")
    with pytest.raises(DataError, match="use =, != or in"):
        chosen(split, f"class > '{first}'")
    columns = {"class": [str(place % 2) for place in range(7)]}
    own = add_columns(write_dataset(tmp_path, (3, 4)), **columns).split("train")
    assert chosen(own, "class = 1") == [1, 3, 5]


def test_ids_come_in_any_order(split):
    kept = select(parse_conditions("theme = papirus"), split, [3, 3, 1, 0])
    assert kept.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read ''; write COLUMN = VALUE"),
        ("theme", "cannot read 'theme'"),
        ("theme =", "cannot read 'theme ='"),
        (
            "theme == papirus",
            "'==' is no operator .*; for equality write a single =; known: = != <",
        ),
        ("theme like pap", "cannot read 'theme like pap'"),
        ("theme = a, b", "'=' is no operator for 2 values"),
        ("theme = oxygen icons", "cannot read .* a value with spaces or signs stands in quotes"),
        ("theme = papirus or age = 3", "cannot read .* joined by `and`"),
        ("theme = papirus and", "cannot read 'theme = papirus and'"),
        ("theme in papirus,", "cannot read 'theme in papirus,'"),
        ("theme = , a", "cannot read"),
        ("theme = brand age = 3", "cannot read"),
        ("themein papirus", "cannot read"),
        ("theme = 'papirus", "cannot read"),
        ("theme < papirus", "'theme' holds texts, which have no order"),
        ("thme = papirus", "no column 'thme'; did you mean 'theme'"),
        ("theme = papyrus", "no sample has theme = 'papyrus'; did you mean 'papirus'"),
        ("age = old", "column 'age' is of kind integer, and 'old' is not an integer"),
        ("age = __import__('os')", "cannot read"),
        ("age > 99999999999999999999", "not an integer of 64 bits"),
        ("shot_at = yesterday", "'yesterday' is no time"),
    ],
)
def test_what_is_no_condition_is_told_in_a_line(split, text, message):
    with pytest.raises(DataError, match=message) as caught:
        chosen(split, text)
    assert "\n" not in str(caught.value)
