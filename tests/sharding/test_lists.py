"""Lists of images as people have them: ids, other separators, a path a line, one parquet."""

import re
import shlex
import subprocess
import sys
import tracemalloc
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import csv, parquet

import sslpipe
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding.build_report import FILE, Report
from sslpipe.sharding.sources import read_class_names
from tests.helpers.dataset import picture, png
from tests.helpers.shards import error_of, grey, report_of, run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    for number in range(6):
        folder = tmp_path / "photos" / ("deep" if number > 3 else "")
        (folder / f"id{number}.PNG").write_bytes(png(picture(number)))
    return tmp_path / "photos"


def built(tmp_path: Path, *words: object) -> dict[str, list[str]]:
    """Paths of each split after a build."""
    assert run("build", tmp_path / "out", *words) == 0
    index = load_index(tmp_path / "out")
    return {name: sorted(index.split(name).names_of(range(len(index.split(name))))) for name in
            index.manifest.splits}  # fmt: skip


def test_ids_without_a_suffix_are_their_files(tmp_path, photos):
    (tmp_path / "labels.csv").write_text("id,breed\nid0,a\nid1,b\nid2,a\n")
    words = ["--csv", tmp_path / "labels.csv", "--image-column", "id", "--label-column", "breed"]
    found = built(tmp_path, "--source", "csv", "--root", photos, *words)
    assert found == {"train": ["id0.PNG", "id1.PNG", "id2.PNG"]}


@pytest.mark.promise(17)
@pytest.mark.parametrize("name", ["list.csv", "list.txt"])
def test_images_below_a_named_root_that_no_row_lists_are_counted(tmp_path, photos, name):
    """Of six images in two folders; what is hidden, no image or listed otherwise is not counted."""
    (photos / "notes.txt").write_text("none")
    (photos / "deep" / "._id4.PNG").write_bytes(b"of a Mac")
    (photos / ".trash").mkdir()
    (photos / ".trash" / "id9.PNG").write_bytes(png(picture(9)))
    (photos / name).write_text(
        "path\n" * name.endswith("csv") + "id0.PNG\n./id1.PNG\ndeep\\id4.PNG\n"
    )
    words = ["--source", "csv", "--csv", photos / name, "--no-labels"]
    for more, expected in ((["--root", photos], (3, "deep/id5.PNG")), ([], None)):
        assert run("build", tmp_path / "out", *words, *more, "--overwrite") == 0
        report = Report.model_validate_json((tmp_path / "out" / FILE).read_text())
        found = [each for each in report.left_out if "no row lists" in each.what]
        assert [(each.count, each.example) for each in found] == ([expected] if expected else [])


@pytest.mark.promise(17)
def test_images_that_no_row_lists_are_counted_here_and_behind_links(tmp_path, photos, monkeypatch):
    """`--root .` is a named root; a linked folder counts, once, and not where a row lists it."""
    (tmp_path / "elsewhere").mkdir()
    for number in range(7, 11):
        (tmp_path / "elsewhere" / f"id{number}.PNG").write_bytes(png(picture(number)))
    for name in ("linked", "linked_too"):
        (photos / name).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (photos / "same.PNG").symlink_to(photos / "id0.PNG")  # an image that a row lists
    (photos / "linked" / "up").symlink_to(photos, target_is_directory=True)  # a circle
    paths = ["id0.PNG", "id1.PNG", "linked_too/id7.PNG", "linked/id8.PNG"]
    frame = pa.table({"path": paths, "label": ["a", "b", "a", "b"]})
    csv.write_csv(frame, photos / "list.csv")
    monkeypatch.chdir(photos)
    left = (6, "deep/id4.PNG")  # id2, id3, id4, id5; id9, id10
    asked = {"labels": False, "overwrite": True}
    for source, root, expected in (
        ("csv", Path(), [left]),
        (frame, Path(), [left]),
        (frame, None, []),
    ):
        where = {"csv": "list.csv"} if source == "csv" else {}
        built = sslpipe.build_dataset("out", source, root=root, **where, **asked)
        found = [each for each in built.report.left_out if "no row lists" in each.what]
        assert [(each.count, each.example) for each in found] == expected


def test_an_id_of_two_files_is_refused_by_their_names(tmp_path, photos, capsys):
    (photos / "id0.jpg").write_bytes(png(picture(9)))
    (tmp_path / "labels.csv").write_text("path,label\nid0,a\nid1,b\n")
    words = ["--csv", tmp_path / "labels.csv", "--root", photos]
    for skip in ((), ("--skip-missing",)):  # neither is missing
        build = ["build", tmp_path / "out", "--source", "csv", *words, *skip]
        message = error_of(capsys, *build)
        assert "id0.PNG" in message
        assert "id0.jpg" in message
        assert "No such file" not in message


def test_a_class_whose_images_are_all_skipped_is_reported(tmp_path, photos):
    """One that cannot be decoded, one that is not there; the third class has images."""
    (photos / "id1.PNG").write_bytes(b"no picture")
    rows = "path,label\nid0.PNG,a\nid1.PNG,broken\nid2.PNG,a\ngone.PNG,gone\nid3.PNG,a\n"
    (tmp_path / "list.csv").write_text(rows)
    words = ["--csv", tmp_path / "list.csv", "--root", photos, "--skip-bad", "--skip-missing"]
    built(tmp_path, "--source", "csv", *words)
    report = Report.model_validate_json((tmp_path / "out" / FILE).read_bytes())
    (doubt,) = report.doubts
    assert doubt.startswith("2 classes")
    assert doubt.endswith(": broken, gone")


def test_a_split_by_the_label_says_which_option_reads_it(tmp_path, photos, capsys):
    (tmp_path / "list.csv").write_text("path,label,age\nid0.PNG,a,1\nid1.PNG,b,2\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.csv", "--root", photos]
    words += ["--test-fraction", "0.5", "--split-by", "label", "--columns"]
    message = error_of(capsys, "build", tmp_path / "out", *words, "age")
    assert "--columns" in message
    built(tmp_path, *words, "age,label")


def test_separators_of_windows_are_read(tmp_path, photos, capsys):
    (tmp_path / "list.csv").write_text("path,label\ndeep\\id4.PNG,a\ndeep\\id5,b\n")
    words = ["--csv", tmp_path / "list.csv", "--root", photos]
    found = built(tmp_path, "--source", "csv", *words)
    assert found == {"train": ["deep/id4.PNG", "deep/id5.PNG"]}
    (tmp_path / "list.csv").write_text("path,label\ndeep\\id4.png,a\n")
    message = error_of(capsys, "build", tmp_path / "other", "--source", "csv", *words)
    assert "id4.PNG is there: case counts" in message
    (tmp_path / "list.csv").write_text("path,label\nid0.PNG,a\ndeep\\id4.png,a\n")
    message = error_of(capsys, "build", tmp_path / "other", "--source", "csv", *words)
    assert "--skip-missing" in message
    assert "1 of 2 listed files" in message
    assert "id4.PNG is there: case counts" in message


@pytest.mark.parametrize(("other", "is_doubted"), [("1", True), ("2", False)])
def test_a_minus_one_beside_a_one_may_be_a_class(tmp_path, photos, other, is_doubted):
    """As CelebA writes its attributes; beside more classes it is the usual sign of none."""
    rows = f"path,label\nid0.PNG,-1\nid1.PNG,1\nid2.PNG,{other}\n"
    (tmp_path / "list.csv").write_text(rows)
    built(tmp_path, "--source", "csv", "--csv", tmp_path / "list.csv", "--root", photos)
    doubts = Report.model_validate_json((tmp_path / "out" / FILE).read_text()).doubts
    assert any("-1 is no label" in doubt for doubt in doubts) == is_doubted


def test_lists_of_editors_on_windows_are_read(tmp_path, photos):
    listed = tmp_path / "list.txt"
    listed.write_text("id0.PNG\nid1.PNG\n", encoding="utf-8-sig", newline="\r\n")
    found = built(tmp_path, "--source", "csv", "--csv", listed, "--root", photos)
    assert found == {"train": ["id0.PNG", "id1.PNG"]}
    listed.write_text("b\u00e4r\nowl\n", encoding="utf-8-sig", newline="\r\n")
    assert read_class_names(listed) == ("b\u00e4r", "owl")
    listed.write_text("b\u00e4r\n", encoding="cp1252")
    with pytest.raises(DataError, match=r"list\.txt is not a text.*save it in UTF-8"):
        read_class_names(listed)


@pytest.mark.parametrize("given", [(), ("--split", "train"), ("--test-fraction", "0.5")])
def test_a_list_is_a_path_a_line(tmp_path, photos, given):
    (tmp_path / "list.txt").write_text("id0.PNG\n\nid1.PNG\ndeep/id4.PNG\nid3.PNG\n")
    words = ["--csv", tmp_path / "list.txt", "--root", photos, *given]
    found = built(tmp_path, "--source", "csv", *words)
    everything = sorted(name for names in found.values() for name in names)
    assert everything == ["deep/id4.PNG", "id0.PNG", "id1.PNG", "id3.PNG"]
    assert set(found) == ({"train", "test"} if "--test-fraction" in given else {"train"})


def test_a_list_may_name_a_class_behind_each_path(tmp_path, photos):
    (tmp_path / "list.txt").write_text("id0.PNG 3\nid1.PNG\tgreat dane\ndeep/id4.PNG  3\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.txt", "--root", photos]
    assert built(tmp_path, *words) == {"train": ["deep/id4.PNG", "id0.PNG", "id1.PNG"]}
    index = load_index(tmp_path / "out")
    assert index.manifest.classes == ("3", "great dane")  # which a tab ends, not a blank
    assert sorted(index.split("train").labels.tolist()) == [0, 0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "1 id0.PNG\n2 id1.PNG\n",  # CUB's images.txt
        "id path\n1 id0.PNG\n",  # a header, as of Stanford's products
        "id0.PNG 1 0\nid1.PNG 0 1\n",  # a column a class
        "id0.PNG\ta\ttrain\n",
    ],
)
def test_a_line_of_more_than_a_path_and_a_class_is_refused_with_what_to_write(
    tmp_path, photos, capsys, text
):
    (tmp_path / "list.txt").write_text(text)
    words = ["--source", "csv", "--csv", tmp_path / "list.txt", "--root", photos]
    message = error_of(capsys, "build", tmp_path / "out", *words)
    assert "neither a path nor a path and its class" in message
    assert "names of the columns above" in message


def test_a_path_with_its_class_is_not_what_is_wrong_with_a_list(tmp_path, photos, capsys):
    """As in CelebA's lists, of which the first line is the count."""
    (tmp_path / "list.txt").write_text("2\nid0.PNG 1\nid1.PNG 1\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.txt", "--root", photos]
    message = error_of(capsys, "build", tmp_path / "out", *words)
    assert "neither a path" not in message
    assert "photos/2: No such file" in message
    (tmp_path / "list.txt").write_text("id0.PNG\nholiday id1.PNG\n")  # of which one is lost
    assert built(tmp_path, *words, "--skip-missing") == {"train": ["id0.PNG"]}


def test_blanks_around_paths_are_nearly_as_written(tmp_path, photos):
    (tmp_path / "list.csv").write_text("path,label\nid0.PNG , a\n id1.PNG,b\n deep / id4.PNG,b\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.csv", "--root", photos]
    assert built(tmp_path, *words) == {"train": ["deep/id4.PNG", "id0.PNG", "id1.PNG"]}
    assert load_index(tmp_path / "out").manifest.classes == ("a", "b")


def test_names_with_blanks_in_a_list_are_no_classes(tmp_path, photos):
    (photos / "my id 1.PNG").write_bytes(png(picture(7)))
    (tmp_path / "list.txt").write_text("id0.PNG\nmy id 1.PNG\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.txt", "--root", photos]
    assert built(tmp_path, *words) == {"train": ["id0.PNG", "my id 1.PNG"]}
    assert load_index(tmp_path / "out").manifest.classes == ()


@pytest.mark.parametrize("listed", ["NFC", "NFD"])
def test_files_are_found_whatever_the_unicode_form_of_their_accents(tmp_path, photos, listed):
    """A Mac's files have accents apart, and spreadsheets write them composed."""
    stored = {"NFC": "NFD", "NFD": "NFC"}[listed]
    names = ["deep/caf\u00e9.PNG", "r\u00eave.PNG"]
    for place, name in zip(("deep/id4.PNG", "id0.PNG"), names, strict=True):
        (photos / place).rename(photos / unicodedata.normalize(stored, name))
    rows = [f"{unicodedata.normalize(listed, name)},a\n" for name in names]
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(rows))
    words = ["--source", "csv", "--csv", tmp_path / "list.csv", "--root", photos]
    (own,) = built(tmp_path, *words).values()
    assert [unicodedata.normalize("NFC", name) for name in own] == names


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("list.json", "pandas.read_json(FILE)"),
        ("metadata.jsonl", "lines=True"),
        ("LIST.XLSX", "pandas.read_excel(FILE)"),
        ("list.csv.gz", "pandas.read_csv(FILE)"),
        ("train.parquet", "--source=parquet"),
    ],
)
def test_a_table_of_another_kind_is_refused_with_what_reads_it(tmp_path, capsys, name, reads):
    (tmp_path / name).write_bytes(b'{"file_name": "id0.PNG", "label": "\xe4"}\n')
    error = error_of(capsys, "build", tmp_path / "o", "--source", "csv", "--csv", tmp_path / name)
    assert name in error
    assert reads in error


def test_tasks_of_label_studio_are_not_called_coco(tmp_path, capsys):
    file = tmp_path / "project-1.json"
    file.write_text('\n[{"id": 1, "annotations": [{"result": []}], "data": {"image": "/a.png"}}]')
    error = error_of(capsys, "build", tmp_path / "o", "--source", "csv", "--csv", file)
    assert "Label Studio" in error
    assert "CSV" in error
    assert "COCO" not in error


def test_tables_that_begin_with_their_number_of_rows_are_read_as_celebas(tmp_path, photos, capsys):
    """torchvision reads these three by code of their own; a row of the first has 41 cells."""
    attributes = tmp_path / "list_attr_celeba.txt"
    attributes.write_text("4\nBald  Smiling \n" + "".join(
        f"id{k}.PNG {'-1' if k % 2 else ' 1'}  {k}\n" for k in range(4)))  # fmt: skip
    words = ["--source", "csv", "--csv", attributes, "--root", photos]
    error = error_of(capsys, "build", tmp_path / "none", *words)
    assert "no column 'label'; it has: path, Bald, Smiling; name one with --label-column" in error
    words += ["--label-column", "Bald", "--columns", "Smiling:integer"]
    assert built(tmp_path, *words) == {"train": [f"id{k}.PNG" for k in range(4)]}
    split = load_index(tmp_path / "out").split("train")
    cells = split.column("Smiling").cells.to_pylist()
    read = zip(split.names_of(range(4)), split.labels.tolist(), cells, strict=True)
    assert sorted(read) == [(f"id{k}.PNG", -(k % 2), k) for k in range(4)]
    (doubt,) = report_of(tmp_path / "out").doubts
    assert "-1 is no label" in doubt
    boxes = tmp_path / "list_bbox_celeba.txt"
    boxes.write_text("2\nimage_id x_1 width\nid1.PNG   95  71\nid0.PNG   72 221\n")
    words = ["--source", "csv", "--csv", boxes, "--root", photos, "--image-column", "image_id"]
    words = [*words, "--no-labels", "--columns", "x_1:integer", "--overwrite"]
    assert built(tmp_path, *words) == {"train": ["id0.PNG", "id1.PNG"]}
    boxes.write_text("202599\nimage_id x_1 width\nid1.PNG   95  71\n")  # the head of the list
    assert built(tmp_path, *words) == {"train": ["id1.PNG"]}
    people = tmp_path / "identity_CelebA.txt"
    people.write_text("id0.PNG 2880\nid1.PNG 2937\n")
    words = ["--source", "csv", "--csv", people, "--root", photos, "--overwrite"]
    assert built(tmp_path, *words) == {"train": ["id0.PNG", "id1.PNG"]}
    assert load_index(tmp_path / "out").manifest.classes == ("2880", "2937")


def test_a_list_of_numbers_may_begin_as_celebas_do(tmp_path):
    """VOC lists names of images so; here the first is the number of the others but one."""
    names = [f"{k:06d}" for k in range(3, 8)]
    for name in names:
        grey(tmp_path / f"{name}.png", int(name))
    (tmp_path / "list.txt").write_text("".join(f"{name}\n" for name in names))
    words = ["--source", "csv", "--csv", tmp_path / "list.txt", "--root", tmp_path, "--no-labels"]
    assert built(tmp_path, *words) == {"train": [f"{name}.png" for name in names]}


@pytest.mark.parametrize("place", [10, *range(2**20 - 16, 2**20 + 1, 4), 2**25])
def test_lists_of_coco_are_known_in_the_memory_of_a_part(tmp_path, place):
    """They are refused with the page that joins them: pandas reads no lists of other lengths."""
    file = tmp_path / "instances_train.json"
    text = b'{"images": [' + b" " * (place - 12) + b'"annotations": []}' + b" " * 2**25
    file.write_bytes(text)
    del text
    tracemalloc.start()
    with pytest.raises(DataError, match=r"docs/your-data\.md"):
        sslpipe.build_dataset(tmp_path / "out", "csv", csv=file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_a_spreadsheet_is_known_by_its_first_bytes(tmp_path):
    file = tmp_path / "list.xls"
    file.write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(2**25))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"pandas\.read_excel"):
        sslpipe.build_dataset(tmp_path / "out", "csv", csv=file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_a_table_with_tabs_is_read_though_it_is_named_as_a_spreadsheet(tmp_path, photos):
    (tmp_path / "list.xls").write_text("path\tlabel\nid0.PNG\ta\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.xls", "--root", photos]
    assert [*built(tmp_path, *words)] == ["train"]


def test_gaps_and_lists_of_labels_that_became_classes_are_doubted(tmp_path, photos):
    labels = ["nan", "7", "owl", "owl|dove", "['dove', 'owl']", "16 7"]
    labels += ["Peugeot 206", "Peugeot 206 2001"]
    for number in (6, 7):
        grey(photos / f"id{number}.PNG", number)
    rows = [f'id{number}.PNG,"{label}"\n' for number, label in enumerate(labels)]
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(rows))
    for number in (4, 5):
        (photos / f"deep/id{number}.PNG").rename(photos / f"id{number}.PNG")
    built(tmp_path, "--source", "csv", "--csv", tmp_path / "list.csv", "--root", photos)
    doubts = Report.model_validate_json((tmp_path / "out" / FILE).read_text()).doubts
    assert any("nan" in doubt and "gap" in doubt for doubt in doubts)
    (several,) = (doubt for doubt in doubts if "lists of labels" in doubt)
    assert several.startswith("3 classes")
    assert "owl|dove" in several


def test_a_table_beside_images_without_classes_is_named(tmp_path, photos):
    """As Hugging Face's imagefolder has it."""
    (photos / "metadata.csv").write_text("file_name,label\nid0.PNG,a\n")
    for number in (4, 5):
        (photos / "deep" / f"id{number}.PNG").rename(photos / f"id{number}.PNG")
    assert run("build", tmp_path / "out", "--root", photos) == 0
    report = Report.model_validate_json((tmp_path / "out" / FILE).read_text())
    named = f"1 table may name them: --source=csv --csv='{photos / 'metadata.csv'}'"
    assert any(named in doubt for doubt in report.doubts)
    (photos / "train.csv").write_text("file_name,label\nid0.PNG,a\n")  # and Kaggle's
    (photos / "a_submission.csv").write_text("file_name,label\nid9.PNG,a\n")
    assert run("build", tmp_path / "kaggle", "--root", photos) == 0
    report = Report.model_validate_json((tmp_path / "kaggle" / FILE).read_text())
    named = f"3 tables may name them: --source=csv --csv='{photos / 'train.csv'}'"
    assert any(named in doubt for doubt in report.doubts)
    for number in range(6):
        (photos / f"id{number}.PNG").rename(photos / "deep" / f"id{number}.PNG")
    assert run("build", tmp_path / "labelled", "--root", photos) == 0
    report = Report.model_validate_json((tmp_path / "labelled" / FILE).read_text())
    assert report.splits["train"].classes == 1
    assert not any("metadata.csv" in doubt for doubt in report.doubts)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("ID0.png", "id0.PNG is there: case counts, write it so"),
        ("id4", "--root='{photos}/deep'"),
        ("id4.PNG", "--root='{photos}/deep'"),
        ("deep\\id4.PNG", "--root='{photos}'"),
        ("C:\\me\\deep\\id4.PNG", "relative to --root"),
        ("/home/me/id4.PNG", "relative to --root"),
        ("id9.PNG", "{photos}/images.zip is there: unpack it"),  # as Kaggle has it
    ],
)
def test_where_the_files_of_a_list_lie_is_said(tmp_path, photos, capsys, name, remedy):
    (photos / "images.zip").touch()
    (tmp_path / "list.csv").write_text(f"path,label\n{name},a\n")
    root = tmp_path if remedy.endswith("photos}'") else photos
    words = ["--source", "csv", "--csv", tmp_path / "list.csv", "--root", root]
    error = error_of(capsys, "build", tmp_path / "out", *words)
    assert error.endswith(remedy.format(photos=photos))


@pytest.mark.parametrize("own", ["cat", "dog"])  # whichever of them the disk lists first
def test_of_files_of_one_name_that_in_the_folder_of_the_list_is_named(
    tmp_path, photos, capsys, own
):
    for folder in ("cat", "dog", f"deep/{own}"):
        (photos / folder).mkdir(parents=True, exist_ok=True)
        (photos / folder / "1.PNG").write_bytes(png(picture(1)))
    (tmp_path / "list.csv").write_text(f"path,label\nC:\\me\\{own}\\1.PNG,a\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.csv", "--root", photos]
    assert f"{photos / own / '1.PNG'} is there" in error_of(capsys, "build", tmp_path / "o", *words)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("list.txt", "--source=csv --csv='{file}'"),
        ("a.parquet", "--source=parquet --root='{file}'"),
        ("a.tar", "shards index"),
        ("a.tgz", "unpack"),
    ],
)
def test_a_file_as_root_is_refused_with_what_to_give(tmp_path, capsys, name, remedy):
    (tmp_path / name).write_bytes(b"")
    error = error_of(capsys, "build", tmp_path / "out", "--root", tmp_path / name)
    assert remedy.format(file=tmp_path / name) in error


def test_the_command_that_a_zip_is_refused_with_makes_the_root_that_it_names(tmp_path, capsys):
    file = tmp_path / "my photos.ZIP"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("owl/1.png", png(picture(1)))
    error = error_of(capsys, "build", tmp_path / "out", "--root", file)
    (command,) = re.findall("`(python .*?)`", error)
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    (root,) = shlex.split(error.split("--root=")[-1])
    assert built(tmp_path, "--root", root) == {"train": ["owl/1.png"]}


def test_a_text_file_with_a_header_is_a_table(tmp_path, photos):
    (tmp_path / "list.txt").write_text("path\tlabel\nid0.PNG\ta\nid1.PNG\tb\n")
    words = ["--csv", tmp_path / "list.txt", "--root", photos]
    assert built(tmp_path, "--source", "csv", *words) == {"train": ["id0.PNG", "id1.PNG"]}
    assert load_index(tmp_path / "out").manifest.classes == ("a", "b")


@pytest.mark.parametrize("as_folder", [True, False])
@pytest.mark.parametrize("split", [(), ("--split", "train")])
def test_one_parquet_of_any_name_can_be_cut(tmp_path, as_folder, split):
    rows = [{"image": png(picture(number)), "label": number % 2} for number in range(20)]
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "everything.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file)
    words = ["--root", file.parent if as_folder else file, "--test-fraction", "0.3", *split]
    assert run("build", tmp_path / "out", "--source", "parquet", *words) == 0
    index = load_index(tmp_path / "out")
    assert {name: len(index.split(name)) for name in index.manifest.splits} == {
        "train": 14,
        "test": 6,
    }


@pytest.mark.parametrize("embedded", [True, False])
def test_images_of_a_parquet_file_are_known_by_the_paths_beside_them(tmp_path, embedded):
    """A hit of a search says which file it was, as one of a folder does."""
    names = [f"photos/{number}.png" for number in range(6)]
    (tmp_path / "photos").mkdir()
    images = []
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(png(picture(number)))
        content = (tmp_path / name).read_bytes()
        images.append({"bytes": content, "path": name} if embedded else name)
    file = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"image": images}), file)
    sslpipe.build_dataset(tmp_path / "set", "parquet", root=file, labels=False)
    split = sslpipe.load_index(tmp_path / "set").split("train")
    stored = sslpipe.ImageDataset(tmp_path / "set", "train")
    found = dict(zip(split.names_of(range(6)), stored, strict=True))
    assert sorted(found) == names
    for number, name in enumerate(names):
        pixels = np.asarray(Image.open(tmp_path / name).convert("RGB")).transpose(2, 0, 1)
        np.testing.assert_array_equal(found[name][0].numpy(), pixels, err_msg=str(number))


def test_paths_of_a_parquet_file_that_lead_nowhere_name_the_folder_they_begin_at(tmp_path):
    file = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"image": ["a/1.png", "a/2.png"]}), file)
    with pytest.raises(DataError, match=re.escape(f"relative to {tmp_path}: move the table")):
        sslpipe.build_dataset(tmp_path / "set", "parquet", root=file, labels=False)


@pytest.mark.parametrize("name", ["train-00000-of-00001.parquet", "train.tar"])
def test_a_pointer_in_place_of_a_file_says_what_fetches_it(tmp_path, capsys, name):
    """As `git clone` without git-lfs leaves a repository of the hub."""
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    source = "tars" if name.endswith("tar") else "parquet"
    words = ["build", tmp_path / "out", "--source", source, "--root", tmp_path]
    assert "git lfs pull" in error_of(capsys, *words)
    (tmp_path / name).write_text("version 2 of nothing\n")
    assert "git lfs pull" not in error_of(capsys, *words)
