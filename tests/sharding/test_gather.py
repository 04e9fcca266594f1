"""Columns on their way into a data set: from every source, through stops and parts."""

import json
import re
import signal
import tarfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding import gather
from sslpipe.sharding.build import build_dataset
from sslpipe.sharding.cells import parse_columns
from sslpipe.sharding.gather import match_names, parse_pattern
from sslpipe.sharding.index import check_columns, find_tars, index_folder, verify_columns
from sslpipe.sharding.record import Part
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import MOST_TOGETHER, Layout
from tests.helpers.dataset import picture, png
from tests.helpers.shards import run, tree, write_tar

LAYOUT = Layout(0, 7, 10**9, False)
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
    columns = parse_columns("patient,age,shot_at=shot at", "--columns")
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
    built = build_dataset(out, "csv", options, LAYOUT, test_fraction=0.25)
    assert built.notes == (
        "column patient: text, missing in 8 of 32 samples",
        "column age: integer, missing in 7 of 32 samples",
        "column shot_at: time, missing in 8 of 32 samples",
        "split train: 24 samples (75.0%), 3 of 3 classes",
        "split test: 8 samples (25.0%), 3 of 3 classes",
    )
    check_values(out)
    assert json.loads((out / "dataset.json").read_bytes())["schema_version"] == 2


def test_bad_and_missing_images_take_their_values_along(tmp_path):
    options, out = write_csv(tmp_path / "in", bad=11), tmp_path / "out"
    (tmp_path / "in/5.png").unlink()
    with pytest.raises(DataError, match="listed files are missing"):
        build_dataset(out, "csv", options, LAYOUT, skip_bad=True)
    build_dataset(out, "csv", replace(options, skip_missing=True), LAYOUT, skip_bad=True)
    assert sorted(rows_of(out, "train")) == [k for k in range(32) if k not in (5, 11)]
    check_values(out)


def test_a_half_done_build_with_other_columns_is_not_resumed(tmp_path):
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    build_dataset(out, "csv", options, LAYOUT, part=Part(1, 2))
    fewer = replace(options, columns=options.columns[:1])
    with pytest.raises(DataError, match="shards of other images or options"):
        build_dataset(out, "csv", fewer, LAYOUT, part=Part(1, 2))


def test_shards_that_are_indexed_again_have_the_same_values(tmp_path):
    out = tmp_path / "out"
    build_dataset(out, "csv", write_csv(tmp_path / "in"), LAYOUT)
    fields = SourceOptions(columns=parse_columns("patient,age,shot_at", "--json-fields"))
    # the same files; without a word about columns it is refused, as it loses them
    before, groups = tree(out), find_tars(out, None)
    with pytest.raises(DataError, match="--json-fields age:integer,patient:text,shot_at:time"):
        check_columns(out, groups, SourceOptions())
    index_folder(out, groups, (), columns=fields)
    assert {**tree(out), "dataset.json": ""} == {**before, "dataset.json": ""}
    index_folder(out, groups, ())
    assert not (out / "columns").exists()
    assert json.loads((out / "dataset.json").read_bytes())["schema_version"] == 1


def test_splits_written_anew_replace_their_columns(tmp_path):
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    build_dataset(out, "csv", options, LAYOUT, test_fraction=0.25)
    build_dataset(out, "csv", replace(options, columns=options.columns[:1]), LAYOUT, overwrite=True)
    manifest = load_index(out).manifest
    assert set(manifest.columns["patient"].splits) == {"train", "test"}
    assert set(manifest.columns["age"].splits) == {"test"}
    assert not (out / "columns/age/train.values.npy").exists()
    assert len(list((out / "columns/patient").glob("strings-*.npy"))) == 1
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
    columns = SourceOptions(
        columns=parse_columns(fields, "--json-fields"),
        name_pattern=parse_pattern(pattern) if pattern else None,
    )
    index_folder(folder, find_tars(folder, None), (), columns=columns)


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
        ([{"sku": "a"}, {"sku": 7}], r"v1/s1.png holds 7 \(integer\), .*s0.png holds 'a'"),
        ([{"sku": ["a"]}], "s0.png: sku = .* is a list"),
        ([[1]], r"s0.json is \[1\], not an object"),
        ([b"{"], "s0.json is no JSON"),
        ([b"[" * 100_000], "s0.json is no JSON"),
        ([b"\xff\xfe"], "s0.json is no JSON"),
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
        ({"columns": parse_columns("colour", "--columns")}, {}, "'colour': the source has no such"),
        (
            {"columns": parse_columns("them", "--columns")},
            {},
            "no such column; did you mean 'theme'",
        ),
        ({}, {"group_by": "them"}, "--group-by 'them' is no column that is read; did you mean"),
        ({}, {"split_by": "them"}, "--split-by 'them' is no column that is read; did you mean"),
        ({}, {"split_by": "size"}, "leaves a split empty; groups of size stay whole"),
    ],
)
def test_a_column_that_is_not_there_or_cannot_group_is_one_line(tmp_path, options, change, words):
    options = {"root": write_icons(tmp_path / "in"), "name_pattern": PATTERN, **options}
    layout = LAYOUT._replace(group_by=change.get("group_by"))
    cut = {"test_fraction": 0.2, "split_by": change.get("split_by")}
    with pytest.raises(DataError, match=words):
        build_dataset(tmp_path / "out", "folder", SourceOptions(**options), layout, **cut)


@pytest.mark.parametrize("text", ["(", "(?P<a b>x)", "no group", "(?P<_a>x)"])
def test_a_wrong_pattern_is_one_line(text):
    with pytest.raises(DataError, match=r"--name-pattern|a name is a letter"):
        parse_pattern(text)


def test_groups_lie_side_by_side_and_in_an_order_of_their_own(tmp_path):
    root = write_icons(tmp_path / "in", themes=4, icons=40)
    pattern = parse_pattern(r"(?P<theme>[^/]+)/24/(?P<icon>.+)\.png")
    options = SourceOptions(root=root, name_pattern=pattern)
    layout = LAYOUT._replace(samples_per_shard=30, group_by="icon")
    build_dataset(tmp_path / "icons", "folder", options, layout)
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
    build_dataset(tmp_path / "themes", "folder", options, layout)
    split = load_index(tmp_path / "themes").split("train")
    themes = split.column("theme").show(range(len(split)))
    change = np.flatnonzero([a != b for a, b in pairwise(themes)])
    assert np.diff(change).max() <= 3 * MOST_TOGETHER
    assert sorted(split.column("icon").show(range(160))) == sorted(icons)


def test_a_cut_by_groups_is_said_and_kept(tmp_path):
    options, out = write_csv(tmp_path / "in"), tmp_path / "out"
    cut = {"test_fraction": 0.3, "split_by": "patient"}
    built = build_dataset(out, "csv", options, LAYOUT, **cut)
    seen = []
    for name in ("train", "test"):
        split = load_index(out).split(name)
        seen.append(set(split.column("patient").show(range(len(split)))) - {None})
    assert not seen[0] & seen[1]
    assert any(re.match(r"split test: \d+ samples \(.*%\), .*, \d+ groups", n) for n in built.notes)
    check_values(out)


def test_damaged_column_files_are_faults(tmp_path):
    build_dataset(tmp_path / "out", "csv", write_csv(tmp_path / "in"), LAYOUT)
    index = load_index(tmp_path / "out")
    path = tmp_path / "out/columns/patient/train.members.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    (tmp_path / "out/columns/age/train.values.npy").unlink()
    faults = verify_columns(index, "train")
    assert len(faults) == 2
    assert re.search(r"age/train.values.npy is missing", faults[0].reason)
    assert re.search(r"train.members.npy: its sha256 is not the one", faults[1].reason)


def test_the_command_line_reads_groups_cuts_and_shows_columns(tmp_path, capsys):
    write_icons(tmp_path / "in", themes=3, icons=20)
    out, pattern = tmp_path / "out", r"(?P<theme>[^/]+)/24/icon-(?P<icon>.+)\.png"
    build = ("build", out, "--root", tmp_path / "in", "--name-pattern", pattern)
    cut = ("--columns", "icon:text", "--split-by", "icon", "--test-fraction", "0.2")
    assert run(*build, *cut, "--group-by", "icon") == 0
    said = "split test: 12 samples (20.0%), 3 of 3 classes, 4 groups of icon"
    assert said in capsys.readouterr().out
    assert run("stats", out) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "column icon text; 0 missing; 16 distinct; samples a value 3 / 3 / 3" in text
    assert run("verify", out) == 0
    assert run("index", out, "--no-columns") == 0
    assert load_index(out).manifest.columns == {}


def test_a_name_that_is_no_text_or_lacks_a_group_is_matched():
    names = ["ab", "a\udcffb\n", ""]
    assert match_names(names, parse_pattern("(?P<all>.*)")) == {"all": names}
    assert match_names(["b"], parse_pattern("(?P<a>a)?b")) == {"a": [None]}


def test_a_name_pattern_that_backtracks_for_ever_is_stopped(monkeypatch):
    monkeypatch.setattr(gather, "PATTERN_S", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    begin = time.process_time()
    with pytest.raises(DataError, match=r"(?s)too long: stopped at 'aaa.*with 1 of 2 names"):
        match_names(["ab", "a" * 200 + "c"], parse_pattern(r"(?P<word>(a+)+)b"))
    assert time.process_time() - begin < 10
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
