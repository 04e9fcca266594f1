"""sharding.tables, CSV: delimiters, rows that lack something, files that are not there."""

import os
from pathlib import Path

import pytest

from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding import SOURCES
from sslpipe.sharding.sources import SourceOptions
from tests.sharding.test_shards import error_of, run
from tests.sharding.test_sources import png

BIRDS = "file,species,fold\n0.png,8,a\n1.png,9,b\n2.png,10,a\n3.png,11,b\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six images of two classes, one cell with a comma and a semicolon in it."""
    for i in range(6):
        png(tmp_path / f"{i}.png", 10 * i)
    lines = ["path;label;note", *(f'{i}.png;{"ab"[i % 2]};"x, y; z"' for i in range(6))]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "list.csv"


@pytest.mark.parametrize(("delimiter", "argument"), [(";", ";"), ("\t", "tab"), ("|", "|")])
def test_another_delimiter_is_asked_for_and_works(table, tmp_path, capsys, delimiter, argument):
    table.write_text(table.read_text().replace(";", delimiter))
    words = ["build", tmp_path / "out", "--source", "csv", "--csv", table]
    message = error_of(capsys, *words)
    assert f"{table} has no column 'path'; it has: path" in message
    assert "--delimiter" in message
    assert run(*words, "--delimiter", argument) == 0
    assert load_index(tmp_path / "out").manifest.classes == ("a", "b")


def test_a_tsv_has_tabs_and_a_delimiter_is_one_character(table: Path) -> None:
    tsv = table.with_suffix(".tsv")
    tsv.write_text(table.read_text().replace(";", "\t"))
    assert len(SOURCES["csv"](SourceOptions(csv=tsv))["train"]) == 6
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(DataError, match="is not one character"):
            SOURCES["csv"](SourceOptions(csv=table, delimiter=wrong))


def test_the_output_of_a_command_is_a_table_too(table: Path, tmp_path: Path) -> None:
    """What a shell makes of `--csv <(command)`."""
    given, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(table.read_bytes())
    path = Path(f"/dev/fd/{given}")
    if not path.exists():
        pytest.skip("this platform has no /dev/fd")
    options = SourceOptions(csv=path, delimiter=";", root=tmp_path)
    assert len(SOURCES["csv"](options)["train"]) == 6
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="FIFO"):  # which nobody may ever write to
        SOURCES["csv"](SourceOptions(csv=tmp_path / "fifo"))
    os.close(given)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("path,label\n", {}, "has no rows"),
        ("", {}, "has no column 'path'; it has: none"),
        ("path,label\n0.png,a\n,b\n", {}, r"list\.csv, line 3: no value of 'path'"),
        ("label,path\na\n", {}, r"list\.csv, line 2: no value of 'path'"),
        ("path,class\n0.png,a\n", {}, "name one with --label-column.*or give --no-labels"),
        ("path,label\n\0.png,a\n", {}, "cannot read"),
        ("path,label\n.,a\n", {}, "it is not a file"),
        # of two columns of one name nobody knows which is meant
        ("path,label,label\n0.png,a,b\n", {}, "has 2 columns 'label', and --label-column reads"),
        ("path,label,path\n0.png,a,1.png\n", {}, "has 2 columns 'path', and --image-column reads"),
        (BIRDS, {"image_column": "fle"}, "no column 'fle'; did you mean 'file'"),
        (BIRDS, {"label_column": "class"}, "no column 'class'.*it has: file, species, fold"),
        (BIRDS, {"split_column": "sp", "split": "x"}, "no column 'sp'"),
        (
            BIRDS,
            {"split_column": "fold", "split": "x"},
            "column 'fold' of .* has no split 'x'; it has: a, b",
        ),
        (BIRDS.replace("2.png", "9.png"), {}, r"cannot read .*9\.png: No such file"),
        ("path,label\n0.png,größe\n".encode("latin-1"), {}, "save it as UTF-8"),
    ],
)
def test_a_row_or_column_that_lacks_something_is_named(table, text, options, message):
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    columns = {"image_column": "file", "label_column": "species"} if "species" in str(text) else {}
    with pytest.raises(DataError, match=message):
        SOURCES["csv"](SourceOptions(csv=table, **{**columns, **options}))
    with pytest.raises(DataError, match=r"cannot read .*no\.csv"):
        SOURCES["csv"](SourceOptions(csv=table.with_name("no.csv")))


def test_numbers_sort_by_value_and_splits_share_their_classes(table):
    table.write_text("\ufeff" + BIRDS, encoding="utf-8")
    options = {"csv": table, "image_column": "file", "label_column": "species"}
    images = SOURCES["csv"](SourceOptions(**options))["train"]
    assert images.classes == ("8", "9", "10", "11")
    assert images.labels.tolist() == [0, 1, 2, 3]
    assert [decode(images.read(i), 8)[0, 0, 0] for i in range(4)] == [0, 10, 20, 30]
    splits = SOURCES["csv"](SourceOptions(**options, split_column="fold"))
    assert {k: v.labels.tolist() for k, v in splits.items()} == {"a": [0, 2], "b": [1, 3]}
    assert splits["a"].classes == splits["b"].classes == ("8", "9", "10", "11")


def test_labels_need_no_column_where_they_are_not_wanted(table: Path) -> None:
    table.write_text("path\n0.png\n1.png\n")
    images = SOURCES["csv"](SourceOptions(csv=table, labels=False))["train"]
    assert images.labels.tolist() == [-1, -1]


@pytest.mark.parametrize("split", ["../x", "a/b", "", ".x", "a b"])
def test_a_split_cannot_lead_out_of_the_folder(table, tmp_path, capsys, split):
    table.write_text(f"path,label,fold\n0.png,a,{split}\n")
    out = tmp_path / "deep" / "out"
    words = ["build", out, "--source", "csv", "--csv", table, "--split-column", "fold"]
    message = error_of(capsys, *words)
    assert "no value of 'fold'" in message if not split else f"split {split!r}" in message
    assert not out.exists()


# --- files that are not there


def test_missing_files_end_the_build_with_a_count_or_are_skipped_and_listed(
    table, tmp_path, capsys
):
    for name in ("1.png", "4.png"):
        (tmp_path / name).unlink()
    out = tmp_path / "out"
    words = ["build", out, "--source", "csv", "--csv", table, "--delimiter", ";"]
    message = error_of(capsys, *words)
    assert f"cannot read {tmp_path / '1.png'}: No such file" in message
    assert "2 of 6 listed files are missing" in message
    assert "--skip-missing" in message
    assert not out.exists()
    assert run(*words, "--skip-missing") == 0
    assert f"skipped: 2 missing files, listed in {out / 'missing.txt'}" in capsys.readouterr().err
    assert (out / "missing.txt").read_text() == "train\t1.png\ntrain\t4.png\n"
    index = load_index(out)
    assert sorted(index.split("train").labels.tolist()) == [0, 0, 1, 1]
    # when they are there again, nothing is missing
    for name in ("1.png", "4.png"):
        png(tmp_path / name, 7)
    assert run(*words, "--skip-missing", "--overwrite") == 0
    assert not (out / "missing.txt").exists()
    assert len(load_index(out).split("train")) == 6


def test_a_list_of_which_no_file_is_there_is_refused_all_the_same(table: Path) -> None:
    options = SourceOptions(csv=table, delimiter=";", skip_missing=True, root=table / "elsewhere")
    with pytest.raises(DataError, match="6 of 6 listed files are missing: mend the list or --root"):
        SOURCES["csv"](options)
