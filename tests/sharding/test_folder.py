"""Folders as people have them: which become splits and classes, what is left out and said so."""

import hashlib
import json
import os
import re
import time
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

import sslpipe
from sslpipe.cli.terminal import progress, say, show, text_table
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index, manifest_text
from sslpipe.errors import DataError
from sslpipe.sharding.build_report import class_doubts
from sslpipe.sharding.folder_doubts import folder_doubts
from sslpipe.sharding.readers import SOURCES
from sslpipe.sharding.sources import Images, SourceOptions
from tests.helpers.shards import error_of, grey, read_all, report_of, run


def read(root: Path, **options: object) -> dict[str, Images]:
    return SOURCES["folder"](SourceOptions(root=root, **options))


def found(root: Path, **options: object) -> dict[str, list[str | None]]:
    """The classes of the images of each split, in the order of their names."""
    splits = read(root, **options)
    return {
        split: [None if label < 0 else own.classes[label] for label in own.labels]
        for split, own in splits.items()
    }


def left_out(root: Path, **options: object) -> dict[tuple[str, str], str]:
    """(kind or reason, example) -> count."""
    (first, *_) = read(root, **options).values()
    return {group.kind or group.what: group.count for group in first.left_out}


def photos(root: Path, *names: str) -> Path:
    for level, name in enumerate(names):
        grey(root / name, level)
    return root


# --- splits

PETS = {"train": ["cat", "dog"], "test": ["cat", "dog"]}


@pytest.mark.promise(17)
@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Train", "Test"),
        ("Training", "Testing"),
        ("train_set", "test_set"),
        ("TRAIN", "TEST"),
        ("images/train", "images/test"),
        ("archive/My Data/train", "archive/My Data/Test Images"),
        ("seg_train", "seg_test"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("train/images", "test/images"),
        ("data/train2017", "data/test2017"),
    ],
)
def test_splits_are_found_by_usual_names_at_usual_depths(tmp_path, train, test):
    names = [f"{split}/{name}/{name}.png" for split in (train, test) for name in ("cat", "dog")]
    assert found(photos(tmp_path, *names)) == PETS
    assert found(tmp_path, split="test") == {"test": PETS["test"]}


def test_splits_may_lie_below_the_classes(tmp_path):
    names = [f"{name}/{split}/1.png" for split in PETS for name in ("cat", "dog")]
    assert found(photos(tmp_path, *names)) == PETS
    grey(tmp_path / "dog" / "train" / "good" / "1.png", 1)
    with pytest.raises(DataError, match="above the splits and below them"):
        read(tmp_path)
    assert {split: len(own) for split, own in found(tmp_path, labels=False).items()} == {
        "train": 3,
        "test": 2,
    }


def test_tiny_imagenet_has_classes_in_train_and_none_in_val(tmp_path):
    photos(tmp_path, "train/n01/images/1.png", "train/n02/images/2.png", "val/images/3.png")
    assert found(tmp_path) == {"train": ["n01", "n02"], "val": [None]}


def test_a_class_may_be_named_as_a_split_inside_of_one(tmp_path):
    names = [f"{split}/{name}/1.png" for split in PETS for name in ("bus", "test", "train")]
    assert found(photos(tmp_path, *names)) == {split: ["bus", "test", "train"] for split in PETS}


@pytest.mark.promise(17)
def test_a_split_among_classes_is_refused_unless_it_alone_is_asked_for(tmp_path):
    photos(tmp_path, "train/cat/1.png", "train/dog/1.png", "bird/1.png")
    with pytest.raises(DataError, match=r"both splits and 'bird'.*split='train'"):
        read(tmp_path)
    assert found(tmp_path, split="train") == {"train": ["cat", "dog"]}


def test_a_split_without_an_image_is_refused(tmp_path):
    photos(tmp_path, "train/cat/1.png")
    (tmp_path / "Val").mkdir()
    with pytest.raises(DataError, match="Val has no images"):
        read(tmp_path)


def test_folders_of_masks_and_images_are_doubted_as_classes(tmp_path):
    photos(tmp_path, *(f"{part}/{s}/1.png" for part in ("images", "masks") for s in PETS))
    assert any("'images'" in doubt for own in read(tmp_path).values() for doubt in own.doubts)
    assert found(tmp_path / "images") == {split: [None] for split in PETS}


@pytest.mark.parametrize(
    ("names", "doubted"),
    [
        (["2024-05-01", "20240502 Rome", "2024_12_31"], True),
        (["100APPLE", "101CANON", "102_FUJI"], True),
        (["2024-05-01", "Rome"], False),
        (["20241301", "20245001"], False),  # numbers of products
        (["100", "101"], False),
        (["cam01", "cam02"], True),  # of re-identification: a person in several
        (["Camera 1", "Camera_2"], True),
        (["cam01", "person07"], False),
        (["Photos from 2019", "Photos from 2020"], True),  # of Google Takeout
    ],
)
def test_folders_of_days_and_of_cameras_are_doubted_as_classes(tmp_path, names, doubted):
    photos(tmp_path, *(f"{name}/{number}.png" for name in names for number in (1, 2)))
    (own,) = read(tmp_path).values()
    assert len(own.classes) == len(names)
    assert any("--no-labels" in doubt for doubt in own.doubts) == doubted


def test_classes_may_stand_in_the_names_of_files(tmp_path):
    """As in the Oxford pets' images/ and Kaggle's train/cat.7.jpg."""
    photos(tmp_path, "images/Great_Dane_1.png", "images/pug_2.png", "images/pug_10.jpg")
    pattern = re.compile(r"(.*/)?(?P<label>.+)_\d+[.]\w+")
    expected = {"train": ["Great_Dane", "pug", "pug"]}
    assert found(tmp_path, name_pattern=pattern) == expected
    named = re.compile(pattern.pattern.replace("label", "breed"))
    assert found(tmp_path, name_pattern=named, label_column="breed") == expected
    assert found(tmp_path, name_pattern=named) == {"train": [None] * 3}  # a column alone
    assert found(tmp_path, name_pattern=pattern, labels=False) == {"train": [None] * 3}
    photos(tmp_path / "split", "train/cat.0.png", "train/dog.1.png", "test/dog.9.png")
    kaggle = re.compile(r".*/(?P<label>\w+)[.]\d+[.]png")
    classes = {"test": ["dog"], "train": ["cat", "dog"]}
    assert found(tmp_path / "split", name_pattern=kaggle) == classes
    photos(tmp_path / "split", "train/owl.png")
    with pytest.raises(DataError, match="does not match 1 of 3 names"):
        found(tmp_path / "split", name_pattern=kaggle)


@pytest.mark.parametrize(
    ("names", "doubted"),
    [
        (["fold1/train", "fold2/train", "fold1/test", "fold2/test"], True),  # alike, and so in both
        (["batch_1", "batch_2"], True),
        (["set", "setter"], False),
        (["fold1"], False),
    ],
)
def test_parts_of_a_data_set_are_doubted_as_classes(tmp_path, names, doubted):
    photos(tmp_path, *(f"{name}/{number}.png" for name in names for number in (1, 2)))
    said = [doubt for own in read(tmp_path).values() for doubt in own.doubts]
    assert any("parts of a data set became classes" in doubt for doubt in said) == doubted


def test_masks_in_folders_of_their_own_in_the_classes_are_doubted(tmp_path):
    """As of the COVID-19 Radiography Database: half of what would be the images."""
    names = [f"{c}/{part}/1.png" for c in ("covid", "normal") for part in ("images", "masks")]
    (own,) = read(photos(tmp_path / "a", *names)).values()
    assert [doubt for doubt in own.doubts if ": 2, such as 'covid/masks/1.png'" in doubt]
    names = [f"{s}/{c}/1.png" for s in PETS for c in ("mask", "no mask")]  # these are the classes
    doubts = [d for own in read(photos(tmp_path / "b", *names)).values() for d in own.doubts]
    assert not any("folders of masks" in doubt for doubt in doubts)


@pytest.mark.parametrize(
    ("names", "doubted"),
    [
        (["animal/cat", "animal/dog", "plant/oak"], True),  # as fastai and imagefolder label them
        (["train/animal/cat", "train/animal/dog", "train/plant/oak"], True),
        (["animal/cat", "animal/dog", "plant"], False),
        (["ill/patient1", "ill/patient2", "well/patient3"], False),
        (["ill/scans", "well/more scans"], False),  # no more than classes
    ],
)
def test_folders_with_names_of_their_own_in_all_classes_may_be_the_classes(
    tmp_path, names, doubted
):
    photos(tmp_path, *(f"{name}/{number}.png" for name in names for number in (1, 2)))
    (own,) = read(tmp_path).values()
    assert any("--name-pattern" in doubt for doubt in own.doubts) == doubted
    if doubted:
        pattern = re.compile("(.*/)?(?P<label>[^/]+)/[^/]+")
        (own,) = read(tmp_path, name_pattern=pattern).values()
        assert own.classes == ("cat", "dog", "oak")
        assert not any("inside of" in doubt for doubt in own.doubts)


def test_a_folder_of_images_without_labels_beside_classes_is_doubted(tmp_path):
    (own,) = read(photos(tmp_path, "cat/1.png", "dog/1.png", "unlabeled/1.png")).values()
    assert own.classes == ("cat", "dog", "unlabeled")
    assert ["classes, such as 'unlabeled'" in doubt for doubt in own.doubts] == [True]


def test_images_of_one_name_in_several_formats_are_doubted(tmp_path):
    """As phones and sites have them: one in train and the other in test is a leak."""
    names = ["1.jpg", "1.k.jpg", "1.k.png", "1.png", "2.png", "3.PNG", "3.png"]
    (own,) = read(photos(tmp_path, "dove/2.png", *(f"owl/{name}" for name in names))).values()
    assert [": 4, such as 'owl/1.jpg' and '1.png'" in doubt for doubt in own.doubts] == [True]


def test_a_split_in_a_folder_of_its_name_is_no_class(tmp_path):
    names = [f"{s}/{s}/{c}/1.png" for s in ("train", "test_set") for c in ("cat", "dog")]
    assert found(photos(tmp_path, *names)) == PETS
    assert not any(own.doubts for own in read(tmp_path).values())


def test_folders_of_img2dataset_are_doubted_as_classes(tmp_path):
    photos(tmp_path, "00000/000000000.png", "00001/000010000.png")
    (own,) = read(tmp_path).values()
    assert not any("--no-labels" in doubt for doubt in own.doubts)
    (tmp_path / "00000_stats.json").write_text("{}")
    (own,) = read(tmp_path).values()
    assert any("'00000'; --no-labels" in doubt for doubt in own.doubts)


def test_the_one_class_of_a_folder_too_many_is_doubted(tmp_path):
    photos(tmp_path, "pets/cat/1.png", "pets/dog/2.png")
    (own,) = read(tmp_path).values()
    assert own.classes == ("pets",)
    assert any("--root" in doubt for doubt in own.doubts)
    (own,) = read(tmp_path / "pets").values()
    assert not own.doubts
    photos(tmp_path, "pets/cat/train/3.png")  # not all, and no other split: a class has it
    (own,) = read(tmp_path / "pets").values()
    assert own.classes == ("cat", "dog")
    assert any("'cat/train'" in doubt for doubt in own.doubts)


@pytest.mark.parametrize(
    ("above", "below", "doubted"),
    [
        # PlantVillage
        (["color", "grayscale", "segmented"], ["apple", "corn", "grape", "peach"], True),
        (["amazon/images", "dslr/images"], ["bike", "mug", "pen"], True),  # Office-31
        (["fold1", "fold2", "fold3"], ["cat", "dog"], True),
        (["Fold_1", "Fold_2", "Fold_3"], ["cat", "dog"], True),
        (["person1", "person2", "person3"], ["front", "side"], False),  # of each class
        (["001", "002", "003"], ["left", "right"], False),
        (["ant", "bee", "cat", "dog"], ["front", "back"], False),  # of each class
        (["cat", "dog"], ["indoor", "outdoor"], False),  # as many: neither is likelier
        (["ant", "bee"], ["train", "test"], False),  # splits
    ],
)
@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_of_the_same_names_in_all_classes_may_be_the_classes(
    tmp_path, above, below, doubted, split
):
    names = [f"{split}{one}/{other}/1.png" for one in above for other in below]
    photos(tmp_path, *names, f"{split}{above[0]}/rare/1.png")
    if below == ["train", "test"]:
        (tmp_path / f"{split}{above[0]}/rare/1.png").unlink()
    if split and below == ["train", "test"]:
        photos(tmp_path, "test/ant/1.png", "test/bee/1.png")
    doubts = next(iter(read(tmp_path).values())).doubts
    assert any("of the same" in doubt and "--root" in doubt for doubt in doubts) == doubted


def test_a_csv_names_splits_as_folders_do_and_minus_one_is_no_label(tmp_path):
    photos(tmp_path, "1.png", "2.png", "3.png")
    rows = "path,label,part\n1.png,7,Training\n2.png,-1,Training\n3.png, 7 ,TEST\n"
    (tmp_path / "list.csv").write_text(rows)
    options = SourceOptions(csv=tmp_path / "list.csv", split_column="part")
    splits = SOURCES["csv"](options)
    assert {split: own.labels.tolist() for split, own in splits.items()} == {
        "train": [0, -1],
        "test": [0],
    }
    assert splits["train"].classes == ("7",)
    (tmp_path / "list.csv").write_text(rows.replace("-1,Training", "-1, training "))
    assert len(SOURCES["csv"](options)["train"]) == 2  # one name, but for blanks and case
    (tmp_path / "list.csv").write_text(rows.replace("-1,Training", "7,train"))
    with pytest.raises(DataError, match="both mean the split train"):
        SOURCES["csv"](options)


@pytest.mark.parametrize(
    ("names", "doubted"),
    [
        (("0", "1"), True),  # is_train
        (("False", "True"), True),  # fastai's is_valid
        (("train", "extra"), False),
        (("query", "gallery"), False),
        (("1", "1"), False),
    ],
)
def test_a_column_of_splits_of_which_none_is_known_is_doubted(tmp_path, names, doubted):
    photos(tmp_path, "1.png", "2.png")
    (tmp_path / "list.csv").write_text(f"path,part\n1.png,{names[0]}\n2.png,{names[1]}\n")
    words = ["--source", "csv", "--csv", tmp_path / "list.csv", "--split-column", "part"]
    assert run("build", tmp_path / "out", *words, "--no-labels") == 0
    doubts = report_of(tmp_path / "out").doubts
    assert any("read train and test" in each for each in doubts) == doubted


# --- classes


def test_forms_of_an_accent_and_blanks_are_one_class_and_said(tmp_path):
    composed = unicodedata.normalize("NFC", "café")
    apart = unicodedata.normalize("NFD", "café")
    photos(tmp_path, f"train/{composed}/1.png", f"test/{apart}/2.png", "train/dog/1.png")
    photos(tmp_path, "test/dog /2.png")
    splits = read(tmp_path)
    assert splits["train"].classes == (composed, "dog")
    assert splits["test"].labels.tolist() == [0, 1]
    assert any(composed in doubt for own in splits.values() for doubt in own.doubts)


@pytest.mark.promise(17)
def test_a_class_that_differs_by_case_between_splits_is_refused(tmp_path, capsys):
    root = photos(tmp_path / "in", "train/Cat/1.png", "train/dog/1.png")
    photos(root, "test/cat/2.png", "test/dog/2.png")
    message = error_of(capsys, "build", tmp_path / "out", "--root", root)
    assert "'Cat' of train and 'cat' of test" in message
    assert not (tmp_path / "out").exists()
    assert run("build", tmp_path / "out", "--root", root, "--no-labels") == 0


def test_slips_in_names_of_classes_are_named(tmp_path, capsys):
    root = photos(tmp_path / "in", "train/Persian/1.png", "train/A/1.png", "train/a/1.png")
    photos(root, "test/persain/2.png", "test/A/2.png", "test/a/2.png", "train/1001/1.png")
    photos(root, "test/1002/1.png", "train/testing/1.png", "test/testing/1.png")
    photos(root, "train/A/3.png")
    assert run("build", tmp_path / "out", "--root", root) == 0
    said = "\n".join(report_of(tmp_path / "out").doubts)
    assert "near: Persian and persain" in said
    assert "1002 and" not in said  # numbers are near each other by nature
    assert "differ by case, blanks or zeros: A, a" in said
    assert "like a split: testing" in said
    assert "split test lacks 2 of 7 classes: 1001, Persian" in said
    assert "4 classes of one image: 1001, 1002, Persian and 1 more" in said
    assert said in "\n".join(capsys.readouterr().out.replace("look at this: ", "").splitlines())


@pytest.mark.parametrize(
    ("other", "doubted"),
    [
        ("1 (2)_mask.png", True),  # as of BUSI
        ("1 (2)_mask_1.png", True),
        ("1 (2)-150x150.jpg", True),
        ("1 (2)-edited.jpg", True),  # of Google Takeout
        ("1 (2)@2x.png", True),
        ("1 (2) - Copy.png", True),  # of Windows
        ("1 (2) copy 2.png", True),
        ("1 (2) GT.png", False),  # Ford Mustang GT
        ("1 (2) 2x4.png", False),
        ("1 (3)_mask.png", False),  # no image beside it
        ("1 (2)_masked owl.png", False),
        ("1 (2)_2.png", False),
    ],
)
def test_masks_and_versions_beside_images_are_doubted(tmp_path, other, doubted):
    photos(tmp_path, "owl/1 (2).png", f"owl/{other}", "dove/2.png")
    (own,) = read(tmp_path).values()
    assert [other in doubt for doubt in own.doubts if "others beside" in doubt] == [True] * doubted


def test_doubts_of_names_with_many_dashes_take_no_time(tmp_path):
    images = [tmp_path / "owl" / f"{number}{'-' * 200}x.png" for number in range(2_000)]
    began = time.process_time()
    assert folder_doubts(tmp_path, {"train": [(path, "owl") for path in images]}, -1, []) == []
    assert time.process_time() - began < 5  # seconds; 0.1 here, where to go back in names took 18


def test_numbers_that_zeros_alone_tell_apart_are_doubted_as_classes():
    """As where one table of two has a gap, which makes pandas write 1.0, or lost its zeros."""
    counts = {name: 2 for name in ("1", "01", "1.0", "10", "2", "v1", "v01", "0", "00")}
    (doubt,) = class_doubts({"train": counts})
    assert "2 groups of classes that differ by case, blanks or zeros: 0, 00; 01, 1, 1.0" in doubt


@pytest.mark.promise(17)
@pytest.mark.parametrize("splits", [("",), ("train/", "test/")])
def test_a_folder_without_an_image_beside_the_classes_is_named(tmp_path, splits):
    """It costs nothing that was there: what was copied into it before must not be missed."""
    for split in splits:
        photos(tmp_path, f"{split}cat/1.png", f"{split}dog/left/2.png")
        (tmp_path / f"{split}cat/thumbnails").mkdir()  # inside a class: no class is missing
    (tmp_path / splits[0] / "bee").mkdir()
    assert {*found(tmp_path)[splits[0].strip("/") or "train"]} == {"cat", "dog"}
    (doubt,) = next(iter(read(tmp_path).values())).doubts
    assert f"'{splits[0]}bee'" in doubt


# --- files


@pytest.mark.promise(17)
def test_a_link_to_a_folder_above_doubles_nothing(tmp_path):
    names = [f"in/{name}/{k}.png" for name in ("cat", "dog") for k in range(3)]
    root = photos(tmp_path, *names) / "in"
    for link, target in (
        ("cat/up", ".."),
        ("dog/up", ".."),
        ("dog/out", "../.."),
        ("dog/a", "../cat"),
    ):
        (root / link).symlink_to(target)
    assert found(root) == {"train": ["cat"] * 3 + ["dog"] * 3}
    assert left_out(root) == {"links to folders that are read already, or hold this one": 4}


def test_linked_folders_and_files_elsewhere_are_read_once(tmp_path):
    photos(tmp_path / "pool", "cat/1.png", "x.png")
    root = photos(tmp_path / "in", "dog/2.png")
    (root / "cat").symlink_to(tmp_path / "pool" / "cat")
    (root / "dog" / "x.png").symlink_to(tmp_path / "pool" / "x.png")
    (root / "dog" / "again.png").symlink_to("2.png")
    assert found(root) == {"train": ["cat", "dog", "dog"]}
    assert left_out(root) == {"links to images that are read already": 1}


@pytest.mark.promise(17)
@pytest.mark.parametrize("kind", ["annex", "lfs", "dvc", "pointer"])
def test_images_whose_content_was_not_fetched_are_an_error_or_counted(tmp_path, capsys, kind):
    root = photos(tmp_path / "in", *(f"{name}/{k}.png" for name in ("cat", "dog") for k in "123"))
    path = root / "cat" / "2.png"
    path.unlink()
    if kind == "annex":
        path.symlink_to("../.git/annex/objects/absent")
    elif kind == "dvc":
        path.with_name("2.png.dvc").write_text("outs:\n- md5: 0\n")
    elif kind == "lfs":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    else:
        path.write_text("/annex/objects/MD5E-s9--0.png\n")
    words = ["build", tmp_path / "out", "--root", root]
    message = error_of(capsys, *words)
    assert "cat/2.png" in message
    assert "--skip-missing" in message
    assert not (tmp_path / "out").exists()
    assert run(*words, "--skip-missing") == 0
    assert len(load_index(tmp_path / "out").split("train")) == 5
    assert [group.example for group in report_of(tmp_path / "out").left_out] == ["cat/2.png"]
    assert (tmp_path / "out" / "missing.txt").read_text() == "train\tcat/2.png\n"


def test_what_is_absent_elsewhere_or_is_no_image_does_not_stop_a_build(tmp_path):
    root = photos(tmp_path, "Train/cat/1.png", "Train/dog/2.png", "Validation/cat/3.png")
    (root / "Validation" / "cat" / "gone.png").symlink_to("nowhere")
    (root / "Train" / "cat" / "model.pkl.dvc").write_text("outs:")
    with pytest.raises(DataError, match="skip_missing=True"):
        read(root)
    for name in ("train", "Train", "training"):
        assert found(root, split=name) == {"train": ["cat", "dog"]}
    (root / "Train" / "eel.dvc").write_text("outs:")  # a folder of images, as it seems
    with pytest.raises(DataError, match=r"Train/eel.*dvc pull"):
        read(root, split="train")


def test_folders_and_files_without_permission_are_an_error_or_counted(tmp_path, monkeypatch):
    root = photos(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "eel/1.png")
    scandir, access = os.scandir, os.access

    def closed(folder: Path) -> object:
        if folder == root / "eel":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", closed)  # the tests may run as root
    monkeypatch.setattr(os, "access", lambda p, mode: p != root / "cat/2.png" and access(p, mode))
    with pytest.raises(DataError, match=r"cat/2.png.*Permission denied.*eel.*skip_missing=True"):
        read(root)
    assert found(root, skip_missing=True) == {"train": ["cat", "dog"]}
    assert sum(left_out(root, skip_missing=True).values()) == 2


@pytest.mark.promise(17)
def test_what_a_nas_and_systems_leave_is_no_image_and_counted(tmp_path):
    root = photos(tmp_path, "cat/1.png", "dog/1.png", "cat/@eaDir/1.png/SYNOPHOTO_THUMB_M.png")
    photos(root, "@eaDir/x.png", "cat/.@__thumb/1.png", "__MACOSX/cat/._1.png", "#recycle/9.png")
    photos(root, "$RECYCLE.BIN/8.png", "lost+found/7.png", "cat/Thumbs.db", "cat/.DS_Store")
    photos(root, ".thumbnails/6.png", "cat/._1.png", ".git/5.png")
    assert found(root) == {"train": ["cat", "dog"]}
    counts = left_out(root)
    assert counts.pop("hidden files and folders") == 1
    assert sum(counts.values()) == 11
    assert counts["@eaDir"] == 2


def test_kinds_that_are_not_read_are_counted_and_a_jfif_is_a_jpeg(tmp_path):
    others = ("jxl", "psd", "svg", "mp4", "dcm", "nii.gz", "txt")
    root = photos(tmp_path, "cat/1.jfif", "dog/1.JPE", *(f"cat/2.{suffix}" for suffix in others))
    (root / "dog" / "LICENSE").write_text("")
    assert found(root) == {"train": ["cat", "dog"]}
    assert left_out(root) == {**{f".{suffix}": 1 for suffix in others}, "no extension": 1}
    said = "; ".join(next(iter(read(root).values())).doubts)
    assert all(word in said for word in ("1 .jxl, 1 .svg, 1 .psd", "JPEG", "1 .mp4", "ffmpeg"))
    assert "1 .dcm, 1 .nii.gz; `sslpipe sensors build`" in said


def test_the_data_set_may_lie_inside_of_the_folder_it_is_built_of(tmp_path, capsys):
    photos(tmp_path, "cat/1.png", "dog/1.png", "later/cat/2.png")
    for out in (tmp_path / "out", tmp_path):
        words = ["build", out, "--root", tmp_path, "--name-pattern", "(?P<kind>[^/]+)/.*"]
        assert run(*words) == 0
        before = load_index(out).manifest
        assert run(*words) == 0  # which finds the shards of the first
        assert load_index(out).manifest == before
        assert before.classes == ("cat", "dog", "later")


def test_a_build_that_was_begun_inside_of_the_folder_is_no_class(tmp_path, capsys):
    photos(tmp_path, *(f"{name}/{k}.png" for name in ("cat", "dog") for k in "123"))
    bad = tmp_path / "cat" / "bad.png"
    bad.write_text("nonsense")
    error_of(capsys, "build", tmp_path / "first", "--root", tmp_path, "--samples-per-shard", "1")
    bad.unlink()
    assert run("build", tmp_path / "second", "--root", tmp_path) == 0
    assert load_index(tmp_path / "second").manifest.classes == ("cat", "dog")


def test_a_folder_that_is_mended_is_built_without_overwrite(tmp_path, capsys):
    root = photos(tmp_path / "in", *(f"{name}/{k}.png" for name in ("cat", "dog") for k in "123"))
    bad = root / "cat" / "bad.png"
    bad.write_text("nonsense")
    words = ["build", tmp_path / "out", "--root", root, "--samples-per-shard", "1"]
    error_of(capsys, *words, "--num-workers", "1")
    assert list((tmp_path / "out").glob("*.tar")), "some shards were written before"
    bad.unlink()
    assert run(*words) == 0
    assert "begun anew" in capsys.readouterr().out
    assert len(load_index(tmp_path / "out").split("train")) == 6
    assert len(list((tmp_path / "out").glob("*.tar"))) == 6  # none of the first is left
    grey(bad, 3)
    assert "--overwrite" in error_of(capsys, *words)  # now there is a data set to lose


def test_names_that_are_no_utf8_are_read_and_said(tmp_path, capsys):
    root = os.fsencode(photos(tmp_path / "in", "dog/1.png"))
    os.mkdir(root + b"/caf\xe9")
    for name in (b"/caf\xe9/1.png", b"/dog/\xff.png"):
        with open(root + name, "wb") as file:
            file.write((tmp_path / "in" / "dog" / "1.png").read_bytes())
    with open(root + b"/dog/\xfe.png", "wb") as file:
        file.write(b"broken")
    words = ["build", tmp_path / "out", "--root", tmp_path / "in", "--skip-bad"]
    assert run(*words, "--name-pattern", "(?P<file>.*)") == 0
    assert load_index(tmp_path / "out").manifest.classes == (r"caf\xe9", "dog")
    assert r"dog/\xfe.png" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "build-report.json").read_text())
    assert "UTF-8" in report["doubts"][0]


SCRIPTS = ("земля/ä.png", "日本/b c.png", "a/deep/er/1.png", "a/-.png", "a/x\ty.png")


def paths_by_level(folder: Path) -> dict[int, str]:
    """The path of each image by its grey level, which says from which file it comes."""
    split = load_index(folder).split("train")
    names = split.names_of(range(len(split)))
    assert names is not None
    levels = [int(decode(raw, 8)[0, 0, 0]) for _, raw, _ in read_all(folder, "train")]
    return dict(zip(levels, names, strict=True))


def test_the_path_of_each_image_is_a_column_that_changes_nothing_else(tmp_path, capsys):
    root = photos(tmp_path / "in", *SCRIPTS)
    (root / "a" / "0 bad.png").write_text("broken")  # which shifts no other's path
    words = ["--root", root, "--skip-bad", "--samples-per-shard", "2"]
    assert run("build", tmp_path / "out", *words) == 0
    paths = dict(enumerate(SCRIPTS))
    assert paths_by_level(tmp_path / "out") == paths
    # where the tars are indexed again
    assert run("index", tmp_path / "out") == 0
    assert paths_by_level(tmp_path / "out") == paths
    assert run("verify", tmp_path / "out") == 0
    # what identifies data is the same as without
    index = load_index(tmp_path / "out")
    plain = index.manifest.model_copy(update={"columns": {}, "metadata": {}})
    assert index.sha256 == hashlib.sha256(manifest_text(plain).encode()).hexdigest()
    capsys.readouterr()
    assert run("show", tmp_path / "out", "--out", tmp_path / "a.png", "--ids", "0,1,2,3,4") == 0
    said = capsys.readouterr().out
    assert all(path.replace("\t", r"\t") in said for path in SCRIPTS)


def test_a_column_of_the_users_own_is_not_replaced_by_the_path(tmp_path):
    root = photos(tmp_path / "in", "a/1.png", "b/2.png")
    for name in ("path", "Path"):
        words = ["--root", root, "--name-pattern", f"(?P<{name}>.)/.*"]
        assert run("build", tmp_path / name, *words) == 0
        assert list(load_index(tmp_path / name).manifest.columns) == [name]
        assert load_index(tmp_path / name).split("train").column(name).show([0, 1]) in (
            ["a", "b"],
            ["b", "a"],
        )


def test_every_printer_keeps_commands_from_the_terminal(capsys):
    evil = "a\x1b[2J\x07\x9b31m\u202eb\rc"
    show(evil)
    show(text_table([evil], [[evil]], title=evil))
    say(evil)
    with progress(evil, 1) as advance:
        advance(1)
    said = "".join(capsys.readouterr())
    assert said.count(r"a\x1b[2J") == 5
    assert not set("\x1b\x07\x9b\u202e\r") & set(said)


def test_nothing_of_a_name_reaches_the_terminal_as_a_command(tmp_path, capsys):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    root = photos(tmp_path / "in", f"{evil}c/1.png", "dog/1.png", f"dog/{evil}.heic")
    (root / "dog" / f"{evil}.png").write_text("broken")
    assert run("build", tmp_path / "out", "--root", root, "--skip-bad") == 0
    for command in ("stats", "verify"):
        assert run(command, tmp_path / "out") == 0
    assert run("show", tmp_path / "out", "--out", tmp_path / "a.png", "--ids", "0,1") == 0
    said = "".join(capsys.readouterr())
    assert "owned" in said
    assert not set("\x1b\x07\u202e") & set(said)


def test_splits_without_a_common_class_are_one_line():
    doubts = class_doubts({"train": {"a": 3, "b": 3, "c": 3}, "test": {"d": 3, "e": 3}})
    assert [text for text in doubts if "split" in text] == [
        "no class is in two splits: 3 in train, 2 in test"
    ]
    (one,) = class_doubts({"train": {"a": 3, "bird": 3}, "test": {"a": 3}})
    assert "test lacks 1 of 2 classes: bird" in one


def test_what_is_wrong_with_a_folder_is_said_at_once(tmp_path):
    """A dead link, loose images, an empty class: in one error, and what is mended is not named."""
    photos = tmp_path / "photos"
    for name in ("cat", "dog"):
        (photos / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (9, 9)).save(photos / name / f"{number}.png")
    (photos / "cat" / "dead.png").symlink_to("/nowhere.png")
    for number in range(3):
        Image.new("RGB", (9, 9)).save(photos / f"loose {number}.png")
    with pytest.raises(DataError) as caught:
        sslpipe.build_dataset(tmp_path / "out", root=photos)
    for named in ("dead.png", "skip_missing=True", "loose 0.png and 2 more", "labels=False"):
        assert named in str(caught.value)
    (photos / "cat" / "dead.png").unlink()
    with pytest.raises(DataError) as caught:
        sslpipe.build_dataset(tmp_path / "out", root=photos)
    assert "dead.png" not in str(caught.value)
    assert "loose 0.png" in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_images_that_cannot_be_decoded_are_named_and_counted_together(tmp_path, count):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(6):
        Image.new("RGB", (9, 9)).save(photos / f"{number}.png")
    for number in range(count):
        (photos / f"dead {number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="skip_bad=True") as caught:
        sslpipe.build_dataset(tmp_path / "out", root=photos)
    text = str(caught.value)
    assert sum(f"dead {number}.png" in text for number in range(count)) == min(count, 5)
    assert (f"{count} images cannot be read" in text) == (count > 1)
    assert ("and 3 more" in text) == (count == 8)
    built = sslpipe.build_dataset(tmp_path / "out", root=photos, skip_bad=True)
    assert len(built.skipped) >= 1
