"""Names that people give to splits, and names that are not splits."""

from pathlib import Path

import pytest

from sslpipe.errors import DataError
from sslpipe.sharding.split_names import missing_shards, names_like_splits, read_splits, split_of

SAME = {
    "train": "train Train TRAIN training Training train_set trainset TrainSet train-images "
    "images_train train2017 train_data TRAINING_SET trn",
    "val": "val VAL Valid validation Validation val_set val2017 valset dev",
    "test": "test TEST Testing test_set testset Test-Images test2017",
    "unlabeled": "unlabeled Unlabelled unlabeled_images",
}
OTHERS = "trainer contest latest devil valley steam_train test_tube seg_train protest 0 café"


@pytest.mark.promise(17)
@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for split, names in SAME.items() for name in names.split()]
)
def test_a_split_is_known_by_its_usual_names(name, split):
    assert split_of(name) == split
    assert read_splits([name], "here") == {name: split}


@pytest.mark.parametrize("name", OTHERS.split())
def test_other_words_are_no_splits(name):
    assert split_of(name) is None
    assert read_splits([name, "dog"], "here") == {}


def test_names_that_share_their_other_words_are_splits_together():
    assert read_splits(["seg_train", "seg_test"], "here") == {
        "seg_train": "train",
        "seg_test": "test",
    }
    assert read_splits(["steam_train", "test_tube"], "here") == {}  # two classes


@pytest.mark.parametrize(
    ("names", "suspected"),
    [
        ("steam_train bullet-train test_tube latest", ""),
        ("gnome-dev-printer-new krb-no-valid-ticket gnome-dev-harddisk", ""),  # of icon themes
        ("Train dog", "Train"),
        ("testset dog steam_train", "testset"),
        ("train_cats val_cats train_dogs dog", "train_cats val_cats"),
        ("catsTrain cats-test dog", "catsTrain cats-test"),
        ("gallery query dog", ""),
    ],
)
def test_a_class_is_named_like_a_split_where_the_word_is_all_or_tells_two_apart(names, suspected):
    assert names_like_splits(names.split()) == suspected.split()


def test_a_gallery_is_a_split_beside_splits_only():
    assert set(read_splits(["train", "query", "gallery"], "here").values()) == {
        "train",
        "query",
        "gallery",
    }
    assert read_splits(["gallery", "museum"], "here") == {}


@pytest.mark.parametrize("names", [("Train", "bus"), ("seg_train", "seg_test", "seg_pred")])
def test_splits_among_classes_are_refused_unless_one_is_asked_for(names):
    with pytest.raises(DataError, match="split="):
        read_splits(names, "here")
    assert read_splits(names, "here", only="train") == {names[0]: "train"}


@pytest.mark.parametrize("names", [("train", "TRAIN"), ("val", "valid"), ("test", "test_set")])
def test_two_names_of_one_split_are_refused(names):
    with pytest.raises(DataError, match="rename"):
        read_splits([*names, "unlabeled"], "here")


@pytest.mark.promise(17)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("train-00000-of-00003 train-00002-of-00003", ["2 of 3"]),
        ("data-00000-of-00002-0a1b", ["1 of 2"]),
        ("00000 00001 00003 test_1 test_2 test_4", ["3 of 4", "3 of 4"]),
        ("train-00000-of-00002 train-00001-of-00002 test-00000-of-00001", []),
        ("00007 00008 00009 all part-00000-5f-c000", []),
        (
            "y2015 y2017 2015 2016 2018 2012 2024 n01440764 n01443537 0100 0200",
            [],
        ),  # years, classes, places of first rows
        ("train train2 x-3", []),
    ],
)
def test_gaps_in_the_numbers_of_shards_are_doubts(names, said):
    doubts = missing_shards(Path("data") / f"{name}.tar" for name in names.split())
    assert [doubt.split(" files ")[0] for doubt in doubts] == said
