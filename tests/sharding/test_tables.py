"""Tables that list images: CSV with its delimiters, parquet with its types; files not there."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyarrow import csv as pa_csv
from pyarrow import parquet

from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding.columns import parse_columns
from sslpipe.sharding.dataset import build_dataset
from sslpipe.sharding.gather import columns_of_images
from sslpipe.sharding.readers import SOURCES
from sslpipe.sharding.sources import Images, SourceOptions
from tests.helpers.shards import error_of, grey, grey_png, run, write_tar

BIRDS = "file,species,fold\n0.png,8,a\n1.png,9,b\n2.png,10,a\n3.png,11,b\n"


def read_csv(path: Path, **options: Any) -> dict[str, Images]:
    return SOURCES["csv"](SourceOptions(csv=path, **options))


@pytest.fixture
def table(tmp_path):
    """Six images of two classes, one cell with a comma and a semicolon in it."""
    for i in range(6):
        grey(tmp_path / f"{i}.png", 10 * i)
    lines = ["path;label;note", *(f'{i}.png;{"ab"[i % 2]};"x, y; z"' for i in range(6))]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "list.csv"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_the_one_by_which_the_first_line_names_the_images(table, delimiter):
    lines = table.read_text().splitlines()
    if delimiter != ";":  # in whose place stand all others, quoted where they are no delimiter
        lines = [line.replace(";", delimiter, 2) for line in lines]
    rows = [f"{line}{delimiter}" for line in lines[1:]]
    table.write_text("\n".join([lines[0] + delimiter + '"a;b,c|d\te"', *rows]) + "\n")
    images = read_csv(table)["train"]
    assert len(images) == 6
    assert images.class_names() == {"a", "b"}


@pytest.mark.parametrize("first", ["sep=;", "\ufeffsep=;", '"sep=;"'])
def test_the_line_that_names_the_delimiter_to_excel_is_no_header(table, first):
    text = table.read_text()
    table.write_text(f"{first}\r\n{text}")
    assert len(read_csv(table)["train"]) == 6


def test_a_table_without_the_column_of_images_is_refused_with_the_columns_that_it_has(table):
    table.write_text(table.read_text().replace("path;", "pth;"))
    with pytest.raises(DataError, match=r"no column 'path'; did you mean 'pth'.*pth, label, note"):
        read_csv(table)
    _, *rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows))  # whose first image would be the name of a column
    with pytest.raises(DataError, match="an image, and its first line names the columns"):
        read_csv(table)


def test_a_quote_of_the_first_line_that_nothing_closes_takes_no_rows_into_the_message(table):
    table.write_text('path,"label\n' + "0.png,a\n" * 100)
    with pytest.raises(DataError, match=r"it has: .*label; name one with image_column$"):
        read_csv(table)


@pytest.mark.promise(17)
@pytest.mark.parametrize("source", ["csv", "parquet"])
@pytest.mark.parametrize("name", ["row", "shelf"])
def test_images_of_a_row_are_cut_together_whatever_the_table_names_row(tmp_path, source, name):
    frame = {"sku": range(20), "label": ["ab"[k % 2] for k in range(20)], name: ["x", "y"] * 10}
    sides = {"front": range(20), "back": range(100, 120)}
    if source == "csv":
        for level in (*sides["front"], *sides["back"]):
            grey(tmp_path / f"{level}.png", level)
        cells = {side: [f"{level}.png" for level in levels] for side, levels in sides.items()}
        pa_csv.write_csv(pa.table({**frame, **cells}), tmp_path / "a.csv")
        where = {"csv": tmp_path / "a.csv"}
    else:
        cells = {side: [grey_png(level) for level in levels] for side, levels in sides.items()}
        parquet.write_table(pa.table({**frame, **cells}), tmp_path / "a.parquet")
        where = {"root": tmp_path / "a.parquet"}
    out = tmp_path / "out"
    build_dataset(out, source, **where, image_column="front,back", columns="sku", test_fraction=0.3)
    index = load_index(out)
    skus = [index.split(split).column("sku").cells.to_pylist() for split in ("train", "test")]
    assert sorted(skus[0] + skus[1]) == sorted([*range(20)] * 2)
    assert not {*skus[0]} & {*skus[1]}


OURS = ("image", "label", "split", "id", "row", "name", "class", "__key__", "__url__")


def write_table(folder: Path, source: str, cells: dict[str, list[Any]]) -> dict[str, Any]:
    """Write columns as a table of a source, with images by its column "file"; how to build it."""
    for number in range(6):
        grey(folder / f"{number}.png", number)
    table = pa.table({"file": [f"{number}.png" for number in range(6)], **cells})
    if source == "csv":
        pa_csv.write_csv(table, folder / "a.csv")
        return {"csv": folder / "a.csv"}
    parquet.write_table(table, folder / "train.parquet")
    return {"root": folder}


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_columns_that_are_named_as_ours_keep_their_values(tmp_path, source):
    cells = {name: [f"{name} {number}" for number in range(6)] for name in OURS}
    options = write_table(tmp_path, source, {**cells, "species": ["a", "b"] * 3})
    asked = {name: name.strip("_") + "_" * (name[0] == "_") for name in OURS}  # key_=__key__
    out = tmp_path / "out"
    build_dataset(
        out,
        source,
        image_column="file",
        label_column="species",
        columns=[f"{ours}={theirs}" for theirs, ours in asked.items()],
        **options,
    )
    for again in range(2):
        split = load_index(out).split("train")
        rows = [int(name[0]) for name in split.column("path").show(range(6))]
        for theirs, ours in asked.items():
            assert split.column(ours).show(range(6)) == [cells[theirs][row] for row in rows]
        assert split.labels.tolist() == [row % 2 for row in rows]
        if not again:
            assert run("index", out, "--columns", ",".join(asked.values())) == 0


def test_columns_of_a_table_in_memory_that_no_text_holds_may_be_there_and_not_asked_for(tmp_path):
    for k in range(2):
        grey(tmp_path / f"{k}.png", k)
    frame = pa.table(
        {
            "path": ["0.png", "1.png"],
            "label": ["a", "b"],
            "vector": [[0.5, 1.0]] * 2,
            "raw": [b"\xff"] * 2,
            "place": [{"x": 1}] * 2,
        }
    )
    built = build_dataset(tmp_path / "out", frame, root=tmp_path)
    assert sum(group.count for group in built.report.left_out) == 3
    assert built.manifest.source == "a DataFrame"  # its images are files
    for asked in ({"columns": "vector"}, {"label_column": "place"}, {"image_column": "raw"}):
        (name,) = asked.values()
        with pytest.raises(DataError, match=f"column '{name}' holds "):
            build_dataset(tmp_path / "other", frame, root=tmp_path, **asked)


@pytest.mark.promise(17)
@pytest.mark.parametrize("source", ["csv", "a table in memory", "parquet", "tars"])
@pytest.mark.parametrize(
    ("asked", "count", "example"),
    [({}, 2, "price"), ({"columns": "price"}, 1, "vendor"), ({"columns": "price,vendor"}, 0, "")],
)
def test_columns_that_no_option_names_are_one_line(tmp_path, source, asked, count, example):
    texts = {"label": ["ant", "bee"], "price": ["3", "5"], "vendor": ["x", "y"]}
    for k in range(2):
        grey(tmp_path / "in" / f"{k}.png", k)
    data = tmp_path / "data"
    data.mkdir()
    where = {"source": source, "root": data}
    if source in ("csv", "a table in memory"):
        frame = pa.table({"path": ["0.png", "1.png"], **texts})
        where = {"source": frame, "root": tmp_path / "in"}
        if source == "csv":
            pa_csv.write_csv(frame, tmp_path / "in" / "a.csv")
            where = {"source": "csv", "csv": tmp_path / "in" / "a.csv"}
    elif source == "parquet":
        images = [(tmp_path / "in" / f"{k}.png").read_bytes() for k in range(2)]
        for split in ("train", "test"):
            parquet.write_table(pa.table({"image": images, **texts}), data / f"{split}.parquet")
    else:
        rows = pa.table(texts).to_pylist()
        members = [
            member
            for k, row in enumerate(rows)
            for member in ((f"{k}.png", grey_png(k)), (f"{k}.json", json.dumps(row).encode()))
        ]
        write_tar(data / "0.tar", *members)
    built = build_dataset(tmp_path / "out", **where, **asked)
    assert sum(group.count for group in built.report.left_out) == count
    lines = [line for line in built.report.lines() if line.startswith("skipped: columns")]
    assert len(lines) == (count > 0)
    assert all(example in line for line in lines)


@pytest.mark.promise(17)
@pytest.mark.parametrize("source", ["csv", "list", "parquet", "datasets", "a table in memory"])
def test_a_file_that_is_listed_again_is_said_and_cut_as_one(table, tmp_path, source):
    rows = [(f"{'./' * (k > 5)}{k % 6}.png", "ab"[k % 2]) for k in range(12)]  # each twice
    if source == "list":
        (tmp_path / "list.txt").write_text("".join(f"{path} {label}\n" for path, label in rows))
        where = {"source": "csv", "csv": tmp_path / "list.txt"}
    else:
        paths, labels = zip(*rows, strict=True)
        frame = pa.table({"path": paths, "label": labels})
        where = {"source": frame, "root": tmp_path}
        if source == "csv":
            pa_csv.write_csv(frame, table)
            where = {"source": "csv", "csv": table}
        elif source in ("parquet", "datasets"):
            rows = [path.removeprefix("./") for path in paths]
            if source == "datasets":  # its Image feature, of files
                rows = [{"bytes": None, "path": path} for path in rows]
            parquet.write_table(frame.set_column(0, "image", [rows]), tmp_path / "train.parquet")
            where = {"source": "parquet", "root": tmp_path / "train.parquet"}
    built = build_dataset(tmp_path / "out", **where, test_fraction=0.3)
    index = load_index(tmp_path / "out")
    train, test = (index.split(name).column("path").cells.to_pylist() for name in ("train", "test"))
    assert len(train) + len(test) == 12
    assert not {*train} & {*test}
    (said,) = (doubt for doubt in built.report.doubts if "listed" in doubt)
    assert "several times" in said
    assert ": 6, such as '0.png'" in said


def test_names_beside_images_in_a_table_may_be_those_of_others(tmp_path):
    """Each split of `datasets` has its own 0.png, and they are no file."""
    for split, start in (("train", 0), ("test", 2)):
        cells = [{"bytes": grey_png(start + k), "path": f"{k}.png"} for k in (0, 1)]
        parquet.write_table(
            pa.table({"image": cells, "label": [0, 1]}), tmp_path / f"{split}.parquet"
        )
    assert not any(own.doubts for own in SOURCES["parquet"](SourceOptions(root=tmp_path)).values())


@pytest.mark.promise(17)
def test_an_image_of_several_splits_or_classes_is_said_once(table, tmp_path):
    def doubts_of(out, rows, **options):
        table.write_text("path,label,split\n" + "".join(rows))
        built = build_dataset(tmp_path / out, "csv", csv=table, **options)
        return [doubt for doubt in built.report.doubts if "listed" in doubt or "byte for" in doubt]

    cells = [(0, "a", "train"), (0, "a", "test"), (1, "b", "test"), (2, "a", "train"), (2, "b", "")]
    rows = [f"{k}.png,{label},{split or 'train'}\n" for k, label, split in cells]
    again, splits, classes = doubts_of("all", rows, split_column="split")
    assert again.endswith("drop the other rows: 2, such as '0.png'")
    assert splits.startswith("1 of 2 images of test are in train, too")
    assert "such as '0.png' ('0.png' in train)" in splits
    assert classes.startswith("1 image in two classes, byte for byte, such as '2.png' of 'a' and")
    assert not doubts_of("once", rows[1:4], split_column="split")
    (again,) = doubts_of("unlabelled", ["0.png,a,\n", "1.png,b,\n", "0.png,,\n"])  # no other class
    assert again.startswith("images that are listed several times")


@pytest.mark.parametrize("source", ["csv", "parquet"])
@pytest.mark.parametrize("begin", ["", "data:image/png;base64,"])
def test_a_cell_that_holds_the_image_as_a_text_is_one_short_error(tmp_path, source, begin):
    frame = pa.table({"image": [f"{begin}{'iVBORw0K' * 9000}"] * 2, "label": ["a", "b"]})
    if source == "csv":
        pa_csv.write_csv(frame, tmp_path / "a.csv")
        options = SourceOptions(csv=tmp_path / "a.csv", image_column="image")
    else:
        parquet.write_table(frame, tmp_path / "train.parquet")
        options = SourceOptions(root=tmp_path)
    with pytest.raises(DataError, match=r"cannot read .*iVBORw0K") as caught:
        SOURCES[source](options)
    assert len(str(caught.value)) < 1500


def test_a_table_in_memory_of_objects_is_one_error_with_the_remedy(tmp_path):
    class Frame:  # as pandas answers for a column of Paths
        def __arrow_c_stream__(self, requested_schema=None):
            raise pa.ArrowInvalid("Could not convert PosixPath('0.png')", "column path")

    with pytest.raises(DataError, match=r"PosixPath\('0.png'\).*astype\(str\)"):
        build_dataset(tmp_path / "out", Frame(), root=tmp_path)


def test_the_output_of_a_command_is_a_table_too(table, tmp_path):
    """What a shell makes of `--csv <(command)`."""
    given, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(table.read_bytes())
    if not (path := Path(f"/dev/fd/{given}")).exists():
        pytest.skip("this platform has no /dev/fd")
    assert len(read_csv(path, root=tmp_path)["train"]) == 6
    os.close(given)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="FIFO"):  # which nobody may ever write to
        read_csv(tmp_path / "fifo")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("path,label\n", {}, "has no rows"),
        ("", {}, "has no column 'path'; it has: none"),
        ("path,label\n0.png,a\n,b\n", {}, r"list\.csv, row 3: no value of 'path'"),
        ("label,path\na\n", {}, r"cannot read .*list\.csv: .*Row #2: Expected 2 columns, got 1"),
        ("path,class\n0.png,a\n", {}, "name one with label_column.*or give labels=False"),
        ("path,label\n\0.png,a\n", {}, "cannot read"),
        ("path,label\n.,a\n", {}, "it is not a file"),
        # of two columns of one name nobody knows which is meant
        ("path,label,label\n0.png,a,b\n", {}, "has 2 columns 'label', and label_column reads"),
        ("path,label,path\n0.png,a,1.png\n", {}, "has 2 columns 'path', and image_column reads"),
        (BIRDS, {"image_column": "fle"}, "no column 'fle'; did you mean 'file'"),
        (BIRDS, {"label_column": "class"}, "no column 'class'.*it has: file, species, fold"),
        (BIRDS, {"split_column": "sp", "split": "x"}, "no column 'sp'"),
        (
            BIRDS,
            {"split_column": "fold", "split": "x"},
            "column 'fold' of .* has no split 'x'; it has: a, b",
        ),
        (BIRDS.replace("2.png", "9.png"), {}, r"cannot read .*9\.png: No such file"),
        ("path,label\n0.png,größe\n".encode("latin-1"), {}, "save it as UTF-8: iconv -f cp1252"),
        # Excel's "Unicode text"
        ("path\tlabel\n0.png\ta\n".encode("utf-16"), {}, "save it as UTF-8: iconv -f utf-16"),
    ],
)
def test_a_row_or_column_that_lacks_something_is_named(table, text, options, message):
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    columns = {"image_column": "file", "label_column": "species"} if "species" in str(text) else {}
    with pytest.raises(DataError, match=message):
        read_csv(table, **{**columns, **options})
    with pytest.raises(DataError, match=r"cannot read .*no\.csv"):
        read_csv(table.with_name("no.csv"))


def test_numbers_sort_by_value_and_splits_share_their_classes(table):
    table.write_text("\ufeff" + BIRDS, encoding="utf-8")
    options = {"image_column": "file", "label_column": "species"}
    images = read_csv(table, **options)["train"]
    assert images.classes == ("8", "9", "10", "11")
    assert images.labels.tolist() == [0, 1, 2, 3]
    assert [decode(images.read(i), 8)[0, 0, 0] for i in range(4)] == [0, 10, 20, 30]
    splits = read_csv(table, **options, split_column="fold")
    assert {k: v.labels.tolist() for k, v in splits.items()} == {"a": [0, 2], "b": [1, 3]}
    assert splits["a"].classes == splits["b"].classes == ("8", "9", "10", "11")


def test_labels_need_no_column_where_they_are_not_wanted(table):
    table.write_text("path\n0.png\n1.png\n")
    assert read_csv(table, labels=False)["train"].labels.tolist() == [-1, -1]


@pytest.mark.parametrize("split", ["../x", "a/b", "", ".x", "a b"])
def test_a_split_cannot_lead_out_of_the_folder(table, tmp_path, capsys, split):
    table.write_text(f"path,label,fold\n0.png,a,{split}\n")
    out = tmp_path / "deep" / "out"
    words = ["build", out, "--source", "csv", "--csv", table, "--split-column", "fold"]
    message = error_of(capsys, *words)
    assert "no value of 'fold'" in message if not split else f"split {split!r}" in message
    assert not out.exists()


def test_missing_files_end_the_build_with_a_count_or_are_skipped_and_listed(
    table, tmp_path, capsys
):
    for name in ("1.png", "4.png"):
        (tmp_path / name).unlink()
    out = tmp_path / "out"
    words = ["build", out, "--source", "csv", "--csv", table]
    message = error_of(capsys, *words)
    assert f"cannot read {tmp_path / '1.png'}: No such file" in message
    assert "2 of 6 listed files are missing" in message
    assert "--skip-missing" in message
    assert not out.exists()
    assert run(*words, "--skip-missing") == 0
    assert f"skipped: missing files: 2, listed in {out / 'missing.txt'}" in capsys.readouterr().err
    assert (out / "missing.txt").read_text() == "train\t1.png\ntrain\t4.png\n"
    assert sorted(load_index(out).split("train").labels.tolist()) == [0, 0, 1, 1]
    # when they are there again, nothing is missing
    for name in ("1.png", "4.png"):
        grey(tmp_path / name, 7)
    assert run(*words, "--skip-missing", "--overwrite") == 0
    assert not (out / "missing.txt").exists()
    assert len(load_index(out).split("train")) == 6
    # of a list of which no file is there nothing is built
    for skip_missing in (True, False):
        with pytest.raises(DataError, match="6 of 6 listed files are missing: mend ") as caught:
            read_csv(table, skip_missing=skip_missing, root=table / "elsewhere")
        assert "list or root" in str(caught.value)
        assert "skip_missing" not in str(caught.value)  # it would end here, too


# --- parquet

WORDS = ["cat", "dog", "ape", "dog"]
HAS_VIEWS = int(pa.__version__.partition(".")[0]) >= 21  # pyarrow writes string_view


def write(path: Path, labels: Any, images: Any = None, names: list[str] = (), **columns) -> None:
    """A parquet file; `names` of the classes go into the metadata, as `datasets` writes them."""
    if images is None:
        images = [{"bytes": grey_png(i), "path": None} for i in range(len(labels))]
    table = pa.table({"image": images, "label": labels, **columns})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, path)


def read(root: Path, **options: Any) -> dict[str, Images]:
    return SOURCES["parquet"](SourceOptions(root=root, **options))


@pytest.mark.parametrize(
    "labels",
    [
        pa.array(WORDS, pa.string()),
        pa.array(WORDS, pa.large_string()),
        *([pa.array(WORDS, pa.string_view())] if HAS_VIEWS else []),
        pa.array(WORDS).dictionary_encode(),
        pa.array(WORDS, pa.large_string()).dictionary_encode(),
        pa.chunked_array([pa.array(WORDS[:1]), pa.array(WORDS[1:])]),
    ],
    ids=lambda labels: str(labels.type),
)
def test_texts_are_classes_as_a_csv_takes_them(tmp_path, labels):
    write(tmp_path / "train.parquet", labels)
    lines = [f"{i}.png,{word}" for i, word in enumerate(WORDS)]
    (tmp_path / "list.csv").write_text("path,label\n" + "\n".join(lines))
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(grey_png(i))
    (expected,) = read_csv(tmp_path / "list.csv").values()
    (images,) = read(tmp_path).values()
    assert images.classes == expected.classes == ("ape", "cat", "dog")
    assert images.labels.tolist() == expected.labels.tolist() == [1, 2, 0, 2]
    assert [images.read(i) for i in range(4)] == [expected.read(i) for i in range(4)]


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (pa.array(["b", None, "", "a"]), [1, -1, -1, 0], ("a", "b")),
        (pa.array(["10", "9", "9", "10"]), [1, 0, 0, 1], ("9", "10")),
        (pa.array([2, None, 0, 2], pa.int32()), [2, -1, 0, 2], ("0", "1", "2")),
        (pa.array([2.0, float("nan"), 0.0, None]), [2, -1, 0, -1], ("0", "1", "2")),
        (pa.array([1, 0, 1, 1], pa.uint8()), [1, 0, 1, 1], ("0", "1")),
        (pa.array([True, False, None, True]), [1, 0, -1, 1], ("False", "True")),
        (pa.array([5, 5, 7, 5]).dictionary_encode(), [5, 5, 7, 5], tuple("01234567")),
        (pa.nulls(4), [-1] * 4, ()),
    ],
    ids=str,
)
def test_gaps_are_no_label_and_whole_numbers_stay(tmp_path, labels, numbers, classes):
    write(tmp_path / "train.parquet", labels)
    (images,) = read(tmp_path).values()
    assert images.labels.tolist() == numbers
    assert images.classes == classes


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (pa.array([0.5, 1.0]), "holds double, neither integers nor texts; name another"),
        (pa.array([b"a", b"b"]), "holds binary"),
        (pa.array([[1], [2]]), "holds list"),
        (pa.array([3, 10**12]), "label 1000000000000 of 2 images is not the number of a class"),
        (pa.array([-1, -5, 0]), "label -5 .*labels=False"),
        (pa.array([0, 2**63, 1], pa.uint64()), "9223372036854775808.*labels=False"),
        (pa.array([0.0, -2.0, 1.0]), "label -2 .*labels=False"),
    ],
    ids=str,
)
def test_other_labels_are_refused_with_what_they_are_and_the_remedy(tmp_path, labels, message):
    write(tmp_path / "train.parquet", labels)
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    assert read(tmp_path, labels=False)["train"].labels.tolist() == [-1] * len(labels)


def test_the_splits_share_their_classes_also_when_one_is_read(tmp_path):
    write(tmp_path / "train-0.parquet", pa.array(["b", "c"]))
    write(tmp_path / "train-1.parquet", pa.array(["d"], pa.large_string()))
    write(tmp_path / "test.parquet", pa.array(["a", "c"]).dictionary_encode())
    parquet.write_table(pa.table({"image": [grey_png(0)]}), tmp_path / "unlabelled.parquet")
    for split, numbers in (("train", [1, 2, 3]), ("test", [0, 2])):
        images = read(tmp_path, split=split)[split]
        assert (images.labels.tolist(), images.classes) == (numbers, ("a", "b", "c", "d"))


def test_images_are_bytes_structs_or_paths(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(grey_png(i))
    for cells in (
        pa.array([grey_png(0), grey_png(1)]),
        pa.array([grey_png(0), grey_png(1)], pa.large_binary()),
        pa.array(["0.png", "1.png"]),
        pa.array([{"bytes": grey_png(0), "path": None}, {"bytes": None, "path": "1.png"}]),
    ):
        write(tmp_path / "train.parquet", ["x", "y"], cells)
        (images,) = read(tmp_path).values()
        assert [int(decode(images.read(i), 8)[0, 0, 0]) for i in range(2)] == [0, 1]


def test_images_that_are_not_there_are_counted_or_skipped_and_listed(tmp_path, capsys):
    cells = [{"bytes": grey_png(i), "path": "x"} for i in range(4)]
    cells[1] = {"bytes": None, "path": "gone/1.png"}  # type: ignore[dict-item]
    write(tmp_path / "in.parquet", WORDS, pa.array([*cells[:3], None]))
    words = ["build", tmp_path / "out", "--source", "huggingface", "--root", tmp_path]
    words += ["--split", "in"]
    message = error_of(capsys, *words)
    assert "cannot read gone/1.png: No such file or directory; 2 of 4 listed files" in message
    assert run(*words, "--skip-missing") == 0
    assert (tmp_path / "out" / "missing.txt").read_text() == "in\tgone/1.png\nin\tin[3]\n"
    index = load_index(tmp_path / "out")
    assert sorted(index.split("in").labels.tolist()) == [0, 1]
    assert index.manifest.classes == ("ape", "cat", "dog")  # as the list says
    # as img2dataset writes what it could not download
    write(tmp_path / "in.parquet", WORDS, pa.array([grey_png(1), None, grey_png(2), None]))
    message = error_of(capsys, *words, "--overwrite")
    assert "2 of 4 rows have no image in column 'image', such as in[1]" in message
    assert "--skip-missing" in message
    assert run(*words, "--overwrite", "--skip-missing") == 0
    assert len(load_index(tmp_path / "out").split("in")) == 2


def test_files_of_a_split_give_class_names(tmp_path):
    names = ["cat", "dog"]
    write(tmp_path / "train-00000-of-00002-ab.parquet", [1, 0], names=names)
    write(tmp_path / "train-00001-of-00002-cd.parquet", [1], names=names)
    write(tmp_path / "test.parquet", [0], names=names)
    found = {split: images.labels.tolist() for split, images in read(tmp_path).items()}
    assert found == {"test": [0], "train": [1, 0, 1]}
    assert {images.classes for images in read(tmp_path).values()} == {("cat", "dog")}


def test_a_wrong_column_split_or_file_names_what_there_is(tmp_path):
    def refused(words, **options):
        with pytest.raises(DataError, match=words):
            read(tmp_path, **options)

    refused(r"has no \.parquet or \.arrow file")
    write(tmp_path / "train-0.parquet", WORDS)
    refused(r"no column 'lable'.*label", label_column="lable")
    refused("no split 'trian'; did you mean 'train'", split="trian")
    parquet.write_table(pa.table({"label": ["a"]}), tmp_path / "train-1.parquet")
    refused(r"train-1\.parquet has no column 'image'; it has: label")
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 but not really")
    refused(r"cannot read .*train-0\.parquet")


def test_what_people_type_for_the_hub_is_accepted_and_explained(tmp_path, capsys):
    assert SOURCES["huggingface"] is SOURCES["parquet"]
    words = ["build", tmp_path / "o", "--source", "huggingface", "--name", "user/beans"]
    message = error_of(capsys, *words)
    assert "hf download USER/NAME --repo-type dataset --local-dir DIR" in message


def test_columns_keep_their_types_gaps_and_time_zones(tmp_path):
    noon = datetime(2024, 5, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    columns = {
        "patient": pa.array(["p", None, "12"]).dictionary_encode(),
        "age": pa.array([2**62 + 1, None, 3], pa.int64()),
        "dose": pa.array([0.5, float("nan"), None], pa.float32()),
        "shot at": pa.array([noon, None, noon], pa.timestamp("ns", "Europe/Berlin")),
        "day": pa.array([noon.date()] * 3, pa.date32()),
        "raw": pa.array([b"a", b"", None], pa.binary()),
    }
    write(tmp_path / "train.parquet", [0, 1, 0], **columns)
    words = ["build", tmp_path / "out", "--source", "parquet", "--root", tmp_path, "--columns"]
    assert run(*words, "patient,age,dose,shot_at=shot at,day,raw") == 0
    split = load_index(tmp_path / "out").split("train")
    labelled = sorted(range(3), key=lambda i: split.column("age").show([i])[0] or "")
    shown = {name: split.column(name).show(labelled) for name in split.columns}
    assert shown == {
        "age": [None, "3", str(2**62 + 1)],
        "patient": [None, "12", "p"],
        "dose": [None, None, "0.5"],
        "shot_at": [None, "2024-05-01T10:00:00Z", "2024-05-01T10:00:00Z"],
        "day": ["2024-05-01T00:00:00Z"] * 3,
        "raw": [None, None, "a"],
    }
    assert split.column("age").kind == "integer"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (2**60, pa.timestamp("ms")),
        (-(2**62), pa.timestamp("ms", "UTC")),
        (2**62, pa.timestamp("us")),
        (253_402_300_800, pa.timestamp("s", "Pacific/Kiritimati")),
        (2**31 - 1, pa.date32()),
        (-(2**62), pa.date64()),
        (2**62, pa.duration("s")),
        (1, pa.time64("ns")),
    ],
)
def test_times_beyond_pythons_are_refused_by_column(tmp_path, number, kind):
    column = pa.array([0, number, None], pa.int32() if kind.bit_width == 32 else pa.int64())
    write(tmp_path / "train.parquet", [0, 1, 0], shot_at=column.view(kind))
    options = SourceOptions(root=tmp_path, columns=parse_columns("shot_at"))
    with pytest.raises(DataError, match=r"train\[[01]\]: shot_at = .* is no time"):
        columns_of_images(read(tmp_path, columns=options.columns), options)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_the_first_and_last_times_are_read(tmp_path, unit):
    times = [datetime(1, 1, 3), datetime(9999, 12, 30), None]
    write(tmp_path / "train.parquet", [0, 1, 0], t=pa.array(times, pa.timestamp(unit)))
    options = SourceOptions(root=tmp_path, columns=parse_columns("t"))
    columns = columns_of_images(read(tmp_path, columns=options.columns), options)["train"]
    assert [t and t.replace(tzinfo=None) for t in columns["t"].to_pylist()] == times


# --- splits of parquet files, and labels that are no classes


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("default/train/0000", "default/train/0001", "default/test/0000"), "train train test"),
        (("data/train-00000-of-00002-4bd1f6", "data/validation-00000-of-00001"), "train val"),
        (("train/part-0", "train/part-1", "test/part-0"), "train train test"),
        (("en/partial-train/0000", "en/test/0000"), "partial-train test"),
        (("0000", "0001"), "train train"),
        (("birds-0", "birds-1"), "train train"),
        ((".cache/train/0000", "images_train/0000"), "- train"),
    ],
)
def test_a_parquet_file_is_of_the_split_that_its_name_or_folder_means(tmp_path, files, splits):
    expected: dict[str, list[bytes]] = {}
    for level, (name, split) in enumerate(zip(files, splits.split(), strict=True)):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [0], [grey_png(level)])
        if split != "-":
            expected.setdefault(split, []).append(grey_png(level))
    found = read(tmp_path)
    assert {
        split: [images.read(i) for i in range(len(images))] for split, images in found.items()
    } == expected


@pytest.mark.parametrize(
    "files",
    [
        ("en/train/0000", "de/train/0000"),
        ("en/train-0", "de/train-0"),
        ("en/train", "de/test"),
        ("train", "de/train/0"),
    ],
)
def test_two_configurations_of_the_hub_are_not_merged(tmp_path, files):
    for level, name in enumerate(files):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [0], [grey_png(level)])
    with pytest.raises(DataError, match=rf"{tmp_path / 'de'}.* as root"):
        read(tmp_path)
    (images,) = read(tmp_path / "de").values()
    assert images.read(0) == grey_png(1)


_NAMES = {"names": {"10": "c", "2": "b", "0": "a"}}


@pytest.mark.parametrize(
    ("metadata", "classes"),
    [
        ({"info": {"features": [{"name": "label", "dtype": {"class_label": _NAMES}}]}}, "abc"),
        ({"info": {"features": [{"name": "label"}]}}, "012"),
        ({"info": {"features": {"label": "ClassLabel"}}}, "012"),
        ({"info": {"features": [{"name": ["label"]}, "label", None]}}, "012"),
        ({"info": {"features": {"label": {"names": {"9" * 5000: "a"}}}}}, "012"),
        ({"info": []}, "012"),
        ([1], "012"),
        ("[" * 10**5, "012"),
        ("no JSON", "012"),
    ],
)
def test_names_of_classes_come_from_any_form_of_features(tmp_path, metadata, classes):
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    table = pa.table({"image": [grey_png(0)] * 3, "label": [0, 1, 2]})
    table = table.replace_schema_metadata({b"huggingface": text.encode()})
    parquet.write_table(table, tmp_path / "train.parquet")
    assert "".join(read(tmp_path)["train"].classes) == classes
    assert read(tmp_path, labels=False)["train"].classes == ()


def test_a_list_of_paths_may_hold_any_bytes(tmp_path):
    name = os.fsdecode(b'gr\xf6\xdfe "1".png')
    try:
        grey(tmp_path / name, 7)
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    (tmp_path / "list.txt").write_bytes(os.fsencode(name) + b"\n")
    images = read_csv(tmp_path / "list.txt", labels=False)["train"]
    assert images.names == [r'gr\xf6\xdfe "1".png']
