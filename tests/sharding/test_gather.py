"""Columns on their way into a data set: from every source, through stops and parts."""

import datetime as dt
import json
import math
import re
import tarfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sslpipe.data.columns import kind_of, numbers
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding.build import read_samples, write_shards
from sslpipe.sharding.build_report import FILE
from sslpipe.sharding.columns import parse_columns
from sslpipe.sharding.gather import RawColumn, match_names, parse_pattern
from sslpipe.sharding.index_tars import index_tars
from sslpipe.sharding.record import save_manifest
from sslpipe.sharding.samples import Cut
from sslpipe.sharding.sources import ColumnSpec, SourceOptions
from sslpipe.sharding.verify import verify_columns
from sslpipe.sharding.writer import MOST_TOGETHER, Layout
from tests.helpers.dataset import picture, png
from tests.helpers.shards import error_of, grey, report_of, run, tree, write_tar

LAYOUT = Layout(samples_per_shard=7, max_shard_bytes=10**9)
PATIENTS = ["p1", "p2", "", "p/3\n", "p1", "ü", "", "p2"] * 4
SHOT_AT = ["2024-05-01T12:00:00+02:00", "", "2024-05-02T00:00:00Z", "1969-12-31T00:00:00Z"] * 8


def write_csv(folder: Path, *, bad: int | None = None) -> SourceOptions:
    """32 images with a patient, an age and a time; red of the first pixel is the row."""
    folder.mkdir(exist_ok=True)
    lines = ["path,label,patient,age,shot at"]
    for row, (patient, shot_at) in enumerate(zip(PATIENTS, SHOT_AT, strict=True)):
        raw = b"no image" if row == bad else png(picture(row, 8))
        (folder / f"{row}.png").write_bytes(raw)
        lines.append(f'{row}.png,{row % 3},"{patient}",{row if row % 5 else ""},{shot_at}')
    (folder / "table.csv").write_bytes("\n".join(lines).encode())
    columns = parse_columns("patient,age,shot_at=shot at")
    return SourceOptions(csv=folder / "table.csv", columns=columns)


def rows_of(folder: Path, split: str) -> list[int]:
    """The row of the table that each sample was made of, by id: from its file's name."""
    rows = []
    for shard in load_index(folder).manifest.splits[split]:
        with tarfile.open(folder / shard.file) as tar:
            names = [name for name in tar.getnames() if name.endswith(".png")]
        rows += [int(re.fullmatch(r"\d+-(\d+)\.png", name)[1]) for name in names]
    return rows


def check_values(folder: Path) -> None:
    """Every sample's values are those of its row in the table."""
    index = load_index(folder)
    for split in index.manifest.splits:
        rows, part = rows_of(folder, split), index.split(split)
        assert len(part) == len(rows)
        ids = range(len(rows))
        assert part.column("patient").show(ids) == [PATIENTS[row] or None for row in rows]
        assert part.column("age").show(ids) == [str(r) if r % 5 else None for r in rows]
        moments = [SHOT_AT[row].replace("12:00:00+02:00", "10:00:00Z") or None for row in rows]
        assert part.column("shot_at").show(ids) == moments
        assert verify_columns(index, split) == []


def test_a_table_fills_columns(tmp_path):
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    built = write_shards(out, read_samples("csv", options), LAYOUT, cut=Cut(test_fraction=0.25))
    assert built.notes == (
        "column patient: text, missing in 8 of 32 samples",
        "column age: integer, missing in 7 of 32 samples",
        "column shot_at: time, missing in 8 of 32 samples",
    )
    assert {name: own.samples for name, own in built.report.splits.items()} == {
        "train": 24,
        "test": 8,
    }
    check_values(out)
    assert json.loads((out / "dataset.json").read_bytes())["schema_version"] == 2


@pytest.mark.promise(17)
def test_values_that_mean_none_is_known_are_said_as_they_would_be_one_group(tmp_path):
    """20 patients whom a table calls "unknown" would be one, and each other's positives."""
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    table = (tmp_path / "in" / "table.csv").read_text()
    (tmp_path / "in" / "table.csv").write_text(table.replace('"p1"', "Unknown"))
    built = write_shards(out, read_samples("csv", options), LAYOUT, cut=Cut(test_fraction=0.25))
    said = "text, missing in 8 of 32 samples; 'Unknown' in 8 is a value like others, not a gap"
    assert built.notes[0] == f"column patient: {said}"


def test_bad_and_missing_images_take_their_values_along(tmp_path):
    options, out = write_csv(tmp_path / "in", bad=11), tmp_path / "out"
    (tmp_path / "in/5.png").unlink()
    with pytest.raises(DataError, match="listed files are missing"):
        write_shards(out, read_samples("csv", options), LAYOUT, skip_bad=True)
    write_shards(
        out, read_samples("csv", replace(options, skip_missing=True)), LAYOUT, skip_bad=True
    )
    assert sorted(rows_of(out, "train")) == [k for k in range(32) if k not in (5, 11)]
    check_values(out)


def test_a_half_done_build_with_other_columns_is_not_resumed(tmp_path):
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    write_shards(out, read_samples("csv", options), LAYOUT)
    (out / "dataset.json").unlink()  # as if it had been stopped before its end
    fewer = replace(options, columns=options.columns[:1])
    write_shards(out, read_samples("csv", fewer), LAYOUT)
    write_shards(tmp_path / "new", read_samples("csv", fewer), LAYOUT)
    hashes = [load_index(folder).manifest.splits for folder in (out, tmp_path / "new")]
    assert hashes[0] == hashes[1]


def test_shards_that_are_indexed_again_have_the_same_values(tmp_path):
    out = tmp_path / "out"
    write_shards(out, read_samples("csv", write_csv(tmp_path / "in")), LAYOUT)
    # the same files; without a word about columns it is refused, as it loses them
    before = tree(out)
    with pytest.raises(DataError, match="columns='age:integer,patient:text,shot_at:time'"):
        index_tars(out)
    index_tars(out, columns="patient,age,shot_at")
    written = {"dataset.json": "", FILE: ""}  # what the index writes anew
    assert {**tree(out), **written} == {**before, **written}
    index_tars(out, columns="")
    assert [*load_index(out).manifest.columns] == ["path"]  # which only the build knows
    assert parquet.read_table(*out.glob("*.parquet")).column_names == ["path"]


def test_splits_written_anew_replace_their_columns(tmp_path):
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    write_shards(out, read_samples("csv", options), LAYOUT, cut=Cut(test_fraction=0.25))
    write_shards(
        out,
        read_samples("csv", replace(options, columns=options.columns[:1])),
        LAYOUT,
        overwrite=True,
    )
    manifest = load_index(out).manifest
    assert set(manifest.columns["patient"].splits) == {"train", "test"}
    assert set(manifest.columns["age"].splits) == {"test"}
    assert sorted(path.name for path in out.glob("*.parquet")) == sorted(
        file.file for file in manifest.metadata.values()
    )
    check = load_index(out).split("test")
    rows = rows_of(out, "test")
    assert check.column("patient").show(range(len(rows))) == [PATIENTS[r] or None for r in rows]


def foreign_tar(folder: Path, trees: list[object]) -> Path:
    members = []
    for k, own in enumerate(trees):
        raw = own if isinstance(own, bytes) else json.dumps(own).encode()
        members += [(f"v{k % 2}/s{k}.png", png(picture(k, 8))), (f"v{k % 2}/s{k}.json", raw)]
    write_tar(folder / "train-0.tar", *members)
    return folder


def index_foreign(folder: Path, fields: str, pattern: str = "") -> None:
    index_tars(folder, columns=fields, name_pattern=pattern or None)


def test_json_and_names_of_foreign_tars(tmp_path):
    folder = foreign_tar(tmp_path / "t", [{"sku": "a", "w": 3}, {"sku": None}, {"w": 2.5, "x": []}])
    index_foreign(folder, "sku,width=w", r"(?P<vendor>v\d)/s(?P<number>\d+)\.png")
    split = load_index(folder).split("train")
    assert split.column("sku").show(range(3)) == ["a", None, None]
    assert split.column("width").show(range(3)) == ["3.0", None, "2.5"]
    assert split.column("vendor").show(range(3)) == ["v0", "v1", "v0"]
    assert split.column("number").values_of(range(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("trees", "words"),
    [
        ([{"sku": "a"}, {"sku": 7}], r"v0/s0.png holds 'a', .*v1/s1.png holds 7"),
        ([{"sku": ["a"]}], "s0.png: sku = .* no value of a column"),
        ([[1]], r"s0.json: .* = \[1\]: input should be an object"),
        ([b"{"], "s0.json: it is not JSON"),
        ([b"[" * 100_000], "s0.json: it is not JSON"),
        ([b"\xff\xfe"], "s0.json: it is not JSON"),
        ([{"skuu": "a"}], "'sku': no sample has it; did you mean 'skuu'"),
    ],
)
def test_a_wrong_json_is_named(tmp_path, trees, words):
    with pytest.raises(DataError, match=words):
        index_foreign(foreign_tar(tmp_path / "t", trees), "sku")


def write_icons(folder: Path, themes: int = 3, icons: int = 10) -> Path:
    for k in range(themes * icons):
        path = folder / f"theme{k % themes}" / "24" / f"icon-{k // themes}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(picture(k, 8)))
    return folder


PATTERN = parse_pattern(r"(?P<theme>[^/]+)/(?P<size>\d+)/.+\.png")


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({"name_pattern": parse_pattern(r"(?P<a>x)")}, {}, r"does not match 30 of 30 names, such"),
        ({"columns": parse_columns("colour")}, {}, "'colour': the source has no such"),
        (
            {"columns": parse_columns("them")},
            {},
            "no such column; did you mean 'theme'",
        ),
        ({}, {"group_by": "them"}, "group_by='them' is no column that is read; did you mean"),
        ({}, {"split_by": "them"}, "split_by='them' is no column that is read; did you mean"),
        ({}, {"split_by": "size"}, "leaves a split empty; groups of size stay whole"),
    ],
)
def test_a_column_that_is_not_there_or_cannot_group_is_one_line(tmp_path, options, change, words):
    options = {"root": write_icons(tmp_path / "in"), "name_pattern": PATTERN, **options}
    layout = LAYOUT._replace(group_by=change.get("group_by"))
    cut = Cut(test_fraction=0.2, split_by=change.get("split_by"))
    with pytest.raises(DataError, match=words):
        write_shards(
            tmp_path / "out", read_samples("folder", SourceOptions(**options)), layout, cut=cut
        )


@pytest.mark.parametrize("text", ["(", "(?P<a b>x)", "no group", "(?P<_a>x)"])
def test_a_wrong_pattern_is_one_line(text):
    with pytest.raises(DataError, match=r"name_pattern|a name is a letter"):
        parse_pattern(text)


def test_groups_lie_side_by_side_and_in_an_order_of_their_own(tmp_path):
    root = write_icons(tmp_path / "in", themes=4, icons=40)
    pattern = parse_pattern(r"(?P<theme>[^/]+)/24/(?P<icon>.+)\.png")
    options = SourceOptions(root=root, name_pattern=pattern)
    layout = LAYOUT._replace(samples_per_shard=30, group_by="icon")
    write_shards(tmp_path / "icons", read_samples("folder", options), layout)
    index = load_index(tmp_path / "icons")
    split = index.split("train")
    icons = split.column("icon").show(range(len(split)))
    assert len(split) == 160
    runs = [icons[k] for k in range(160) if k == 0 or icons[k] != icons[k - 1]]
    assert len(runs) == 40  # every icon is one run
    for begin in split.starts[1:-1].tolist():
        assert icons[begin] != icons[begin - 1]  # and in one shard
    numbers = [int(run.removeprefix("icon-")) for run in runs]
    assert abs(np.corrcoef(numbers, range(40))[0, 1]) < 0.4  # shuffled
    # a large group is in pieces
    layout = LAYOUT._replace(samples_per_shard=100, group_by="theme")
    write_shards(tmp_path / "themes", read_samples("folder", options), layout)
    split = load_index(tmp_path / "themes").split("train")
    themes = split.column("theme").show(range(len(split)))
    change = np.flatnonzero([a != b for a, b in pairwise(themes)])
    assert np.diff(change).max() <= 3 * MOST_TOGETHER
    assert sorted(split.column("icon").show(range(160))) == sorted(icons)


def test_damaged_column_files_are_faults(tmp_path):
    write_shards(tmp_path / "out", read_samples("csv", write_csv(tmp_path / "in")), LAYOUT)
    index = load_index(tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.parquet")
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    reasons = [fault.reason for fault in verify_columns(index, "train")]
    assert len(reasons) == 4
    assert all(f"{path.name}: its sha256 is not the one" in reason for reason in reasons)
    path.unlink()
    assert "is missing" in verify_columns(load_index(tmp_path / "out"), "train")[0].reason


def test_values_that_are_not_those_of_the_shards_are_faults(tmp_path):
    """A table that was written anew, with its sha256 in dataset.json."""
    write_shards(tmp_path / "out", read_samples("csv", write_csv(tmp_path / "in")), LAYOUT)
    manifest = load_index(tmp_path / "out").manifest
    entry = manifest.columns["age"]
    other = entry.model_copy(update={"splits": {"train": "0" * 64}})
    changed = manifest.model_copy(update={"columns": {**manifest.columns, "age": other}})
    save_manifest(tmp_path / "out", changed)
    (fault,) = verify_columns(load_index(tmp_path / "out"), "train")
    assert fault.shard == "column age of train"


@pytest.mark.parametrize(
    ("other", "is_doubted"), [("p1 ", True), ("P1", True), ("p2", False), ("p01", False)]
)
def test_groups_that_a_cut_takes_for_two_by_case_or_blanks_are_said(
    tmp_path, capsys, other, is_doubted
):
    rows = [f"{k}.png,{'p1' if k % 2 else other}\n" for k in range(8)]
    for k in range(8):
        grey(tmp_path / f"{k}.png", k)
    (tmp_path / "t.csv").write_text("path,patient\n" + "".join(rows))
    words = ["--source", "csv", "--csv", tmp_path / "t.csv", "--no-labels", "--columns", "patient"]
    words += ["--split-by", "patient", "--test-fraction", "0.5"]
    assert run("build", tmp_path / "out", *words) == 0
    said = capsys.readouterr()
    assert ("values of patient that differ by case" in said.out + said.err) == is_doubted


def test_the_command_line_reads_groups_cuts_and_shows_columns(tmp_path, capsys):
    write_icons(tmp_path / "in", themes=3, icons=20)
    out, pattern = tmp_path / "out", r"(?P<theme>[^/]+)/24/icon-(?P<icon>.+)\.png"
    build = ("build", out, "--root", tmp_path / "in", "--name-pattern", pattern)
    cut = ("--columns", "icon:text", "--split-by", "icon", "--test-fraction", "0.2")
    assert run(*build, *cut, "--group-by", "icon") == 0
    assert "split test: 4 groups of icon" in capsys.readouterr().out
    assert report_of(out).splits["test"].samples == 12
    splits = (load_index(out).split(name) for name in ("train", "test"))
    train, test = ({*split.column("icon").show(range(len(split)))} for split in splits)
    assert not train & test
    assert run("stats", out) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "column icon text; 0 missing; 16 distinct; samples a value 3 / 3 / 3" in text
    assert run("verify", out) == 0
    assert run("index", out, "--columns", "") == 0
    assert [*load_index(out).manifest.columns] == ["path"]


def test_a_split_by_class_gives_test_classes_of_its_own(tmp_path, capsys):
    for number in range(8):  # a class of six images, seven of three
        for image in range(6 if number == 0 else 3):
            path = tmp_path / f"in/class-{number}/{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(picture(10 * number + image, 8)))
    build = ("build", tmp_path / "out", "--root", tmp_path / "in", "--split-by", "class")
    assert run(*build, "--test-fraction", "0.4") == 0
    splits = (load_index(tmp_path / "out").split(name) for name in ("train", "test"))
    train, test = (split.labels.tolist() for split in splits)
    assert len(train) + len(test) == 27
    assert not {*train} & {*test}
    assert 8 <= len(test) <= 14  # 40 % are 10.8, to half of the largest class
    without = (*build[:2], *build[2:], "--no-labels", "--test-fraction", "0.4", "--overwrite")
    assert "no image has a class" in error_of(capsys, *without)


@pytest.mark.parametrize(
    ("group", "options"),
    [("label", ()), ("kind", ("--label-column", "kind")), ("kind", ())],
    ids=["the class by its usual name", "the class by name", "another column"],
)
def test_no_class_in_two_splits_is_a_slip_unless_the_split_is_by_the_class(
    tmp_path, group, options
):
    for number in range(8):
        grey(tmp_path / f"in/class{number % 4}/{number}.png", number)
    pattern = f"(?P<{group}>.+)/.*"
    build = ("build", tmp_path / "out", "--root", tmp_path / "in", "--name-pattern", pattern)
    cut = ("--split-by", group, "--test-fraction", "0.5")
    assert run(*build, *options, *cut) == 0
    doubts = report_of(tmp_path / "out").doubts
    is_column = group == "kind" and not options
    assert ("no class is in two splits: 2 in train, 2 in test" in doubts) == is_column
    # that the pattern made the classes is said where nobody asked for it
    named = [doubt for doubt in doubts if "classes are the group (?P<label>...)" in doubt]
    assert len(named) == (group == "label")


def test_names_in_one_folder_have_no_classes_but_those_of_the_pattern(tmp_path):
    for number in range(4):
        grey(tmp_path / f"in/cat{number % 2}_{number}.png", number)
    pattern = "(?P<label>.+)_.*"
    assert run("build", tmp_path / "out", "--root", tmp_path / "in", "--name-pattern", pattern) == 0
    assert not [each for each in report_of(tmp_path / "out").doubts if "are the group" in each]


def test_a_name_that_is_no_text_or_lacks_a_group_is_matched():
    names = ["ab", "a\udcffb\n", ""]
    assert match_names(names, parse_pattern("(?P<all>.*)")) == {"all": names}
    assert match_names(["b"], parse_pattern("(?P<a>a)?b")) == {"a": [None]}


# --- kinds of cells, found or named

MICRO = 10**6
NOON = 1_714_564_800 * MICRO  # 2024-05-01 12:00 UTC


def read(cells, kind=None, origin="table"):
    """(kind, values as Python has them, None where missing) of a column made of one chunk."""
    spec = ColumnSpec("age", "age", kind)
    names = [f"row {k}" for k in range(len(cells))]
    values = RawColumn(spec, origin, cells, names).read()
    kind = kind_of(values)
    if kind == "text":
        return kind, values.to_pylist()
    gone = values.is_null().to_pylist()
    plain = numbers(values).tolist()
    return kind, [None if none else value for none, value in zip(gone, plain, strict=True)]


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["3", "", "-7", " ", "+0"], "integer", [3, None, -7, None, 0]),
        (["3", "nan", "1e3", ".5"], "float", [3.0, None, 1000.0, 0.5]),
        (["3", "nan"], "float", [3.0, None]),
        (["007", "12"], "text", ["007", "12"]),  # digits that are no number: a postcode
        # nor these, of hexadecimal digits: as floats they would be two of four
        (["12e3", "1E5", "12000", "100000"], "text", ["12e3", "1E5", "12000", "100000"]),
        (["1e-05", "1E+05", "3"], "float", [1e-5, 1e5, 3.0]),
        (["a", "null", "NaN", "a"], "text", ["a", "null", "NaN", "a"]),  # somebody's name
        (["a/b\n", "ü", "a\0"], "text", ["a/b\n", "ü", "a\0"]),
        (["", "", ""], "text", [None] * 3),
        (["2024-05-01T12:00:00Z", "2024-05-01 14:00+02:00"], "time", [NOON, NOON]),
        (["2024:05:01 12:00:00", "2024-05-01"], "time", [NOON, NOON - 43200 * MICRO]),
        (["9223372036854775807"], "integer", [2**63 - 1]),
        # floats would make one of these two
        (
            ["98765432109876543210", "98765432109876543211", "7"],
            "text",
            ["98765432109876543210", "98765432109876543211", "7"],
        ),
        ([str(2**63), "0.5"], "text", [str(2**63), "0.5"]),
        ([str(2**53 + 1), "0.5"], "text", [str(2**53 + 1), "0.5"]),
        ([str(2**53), "0.5"], "float", [2.0**53, 0.5]),
        (["0x10", "true", "1 000"], "text", ["0x10", "true", "1 000"]),
        (["1970-01-01T00:00:00.0000015Z"], "time", [1]),
    ],
)
def test_a_table_has_the_kind_of_all_its_cells(cells, kind, values):
    assert read(cells) == (kind, values)


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        ([3, None, 2**63 - 1], "integer", [3, None, 2**63 - 1]),
        ([3, 0.5, math.nan], "float", [3.0, 0.5, None]),
        ([np.int64(3), np.float32(0.5)], "float", [3.0, 0.5]),
        (["12", "", "x"], "text", ["12", None, "x"]),  # a text in JSON is a text
        ([True, None, False], "text", ["true", None, "false"]),
        ([b"caf\xc3\xa9"], "text", ["café"]),
        ([dt.datetime(2024, 5, 1, 12), None], "time", [NOON, None]),
        ([dt.date(2024, 5, 1)], "time", [NOON - 43200 * MICRO]),
        (["2024-05-01T12:00:00Z"], "time", [NOON]),
        ([None, None], "text", [None, None]),
    ],
)
def test_typed_cells_keep_their_types(cells, kind, values):
    assert read(cells, origin="typed") == (kind, values)


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["12", 12, 0.5, True], "text", ["12", "12", "0.5", "true"]),
        ([{"a": [1]}, None], "text", ['{"a": [1]}', None]),
        (pa.chunked_array([[[0.5, 1], []]]), "text", ["[0.5, 1.0]", "[]"]),
        (["12", 3, 5], "integer", [12, 3, 5]),
        (["12.0", "-3.00", ""], "integer", [12, -3, None]),  # as pandas has them beside a gap
        (["12", 3, "nan"], "float", [12.0, 3.0, None]),
        ([1_714_564_800, "1714564800.25", 0.5], "time", [NOON, NOON + 250_000, 500_000]),
        (["-0.5", -0.5], "time", [-500_000, -500_000]),
        # dates of ISO 8601's basic form, not seconds since 1970
        (["20240501", "2024-05-01", None], "time", [NOON - 43200 * MICRO] * 2 + [None]),
        ([20240501, "20240501"], "time", [NOON - 43200 * MICRO] * 2),
        (pa.chunked_array([[20240501, None]]), "time", [NOON - 43200 * MICRO, None]),
        # as pandas has and writes them where one is missing
        (
            ["20240501.0", "", "20240501"],
            "time",
            [NOON - 43200 * MICRO, None, NOON - 43200 * MICRO],
        ),
        (pa.chunked_array([[20240501.0, None]]), "time", [NOON - 43200 * MICRO, None]),
        (pa.chunked_array([[1_714_564_800.0, 2.5e11, -1e-6]]), "time", [NOON, 2.5e17, -1]),
        (pa.chunked_array([[1_714_564_800, -1]]), "time", [NOON, -MICRO]),
    ],
)
def test_a_named_kind_converts(cells, kind, values):
    assert read(cells, kind, "typed") == (kind, values)


@pytest.mark.parametrize(
    ("cells", "kind", "words"),
    [
        (["3", "n/a"], None, r"row 0 holds '3', row 1 holds 'n/a'; .* age:text"),
        ([None, 3, "4"], None, r"row 1 holds 3, row 2 holds '4'; .* age:text"),
        (["2024-05-01", "soon"], None, r"row 0 holds '2024-05-01', row 1 holds 'soon'"),
        (["2024-05-01", "9" * 20], None, r"row 0 holds '2024-05-01', row 1 holds '9{20}'"),
        (["2024-05-01T12:00", "2024-05-01T12:00Z"], None, "row 1: .* offset of all"),
        (["2024-05-01T12:00", "2024-05-01T12:00Z"], "time", "row 1: .* offset of all"),
        (["3", "", "n/a"], "integer", "row 2: age = 'n/a' is not an integer .*; mend it"),
        ([2**63], None, "row 0: age = 9223372036854775808 is too large"),
        ([-(2**63)], None, "row 0: .* of 64 bits"),
        (pa.chunked_array([pa.array([0, 2**63], pa.uint64())]), None, "row 1: .* of 64 bits"),
        ([10**5000], None, "row 0: .* an integer of 16610 bits"),
        (["9" * 5000], "integer", "of 64 bits"),
        (["0x10"], "integer", "row 0: age = '0x10'"),
        ([10**400], "float", "is not a finite number"),
        ([1, 0.5], "integer", "row 1: age = 0.5 is not an integer"),
        (["1_000"], "float", "is not a finite number"),
        (["inf"], "float", "is not a finite number"),
        (["1e999"], None, "is not a finite number"),
        ([1.0, math.inf], None, "row 1: age = inf is not a finite number"),
        (["1714564800000"], "time", "row 0: .* is no time of the years 1 to 9999"),
        (["2024-05-01", "2024-13-01"], "time", "row 1: .* is no time"),
        (["20240501", "20240231"], "time", "row 1: .* is no time"),
        (["20240501", "1714564800"], "time", "row 1: age = .1714564800"),  # seconds, or what?
        ([b"a", b"\xff"], None, r"row 1: age = b'\\xff' is no text in UTF-8"),
        ([None, [1, 2]], None, "row 1: .* no value of a column"),
        ([2**53 + 1, 0.5], None, r"row 0 holds 9007199254740993, row 1 holds 0.5"),
    ],
)
def test_a_cell_of_another_kind_is_named(cells, kind, words):
    with pytest.raises(DataError, match=words):
        read(cells, kind, "typed" if any(not isinstance(c, str) for c in cells) else "table")


def test_parts_of_names_are_texts_where_one_is():
    assert read(["3", "n/a", "2024-05-01"], origin="name")[0] == "text"
    assert read(["3", "4"], origin="name")[0] == "integer"
    assert read(["9" * 20, "0.5"], origin="name") == ("text", ["9" * 20, "0.5"])


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("patient, age:integer", [("patient", "patient", None), ("age", "age", "integer")]),
        ("sku=Product id:text", [("sku", "Product id", "text")]),
        ("model=exif:Model", [("model", "exif:Model", None)]),
    ],
)
def test_columns_are_named_renamed_and_given_kinds(text, specs):
    assert [tuple(spec) for spec in parse_columns(text)] == specs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age:integr", "'integr' is no kind; did you mean 'integer'"),
        ("age,age", "names 'age' twice"),
        ("a=x,b=x", "twice"),
        ("", "no list of names"),
        ("Patient ID", "to rename it write NAME=Patient ID"),
        ("../x", "a name is a letter"),
        ("age,Age", "differ in case only"),
    ],
)
def test_a_wrong_list_of_columns_is_one_line(text, words):
    with pytest.raises(DataError, match=words):
        parse_columns(text)
