"""`sslpipe.build_dataset` of images that a program holds, against the pixels and classes given."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageFile
from torch.utils.data import Dataset, Subset

import sslpipe
from sslpipe.errors import DataError
from tests.helpers.runs import write_recipe
from tests.helpers.shards import tree

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 7, 3), np.uint8)
CLASSES = ["owl", "ape", "bee"]
LABELS = np.arange(12) % 3


class Labelled(Dataset):
    """Images and numbers, with names of the classes, as torchvision's datasets are."""

    classes = CLASSES

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return Image.fromarray(PIXELS[number]), int(LABELS[number])


def contents(folder, split="train"):
    """By the pixels of each image: its class."""
    images = sslpipe.ImageDataset(folder, split)
    names = [*images.classes, None]
    pairs = [images[number] for number in range(len(images))]
    return {image.numpy().tobytes(): names[label] for image, label in pairs}


def expected(names, numbers=range(12)):
    return {PIXELS[k].transpose(2, 0, 1).tobytes(): names[k] for k in numbers}


OF_LABELS = [CLASSES[k] for k in LABELS]
NONE = [None] * 12
FORMS = {
    "array": (PIXELS, NONE),
    "tensor": (torch.tensor(PIXELS).permute(0, 3, 1, 2), NONE),
    "arrays": (list(PIXELS), NONE),
    "PIL images": ([Image.fromarray(each) for each in PIXELS], NONE),
    "pairs with names": (list(zip(PIXELS, OF_LABELS, strict=True)), OF_LABELS),
    "pairs with numbers": (list(zip(PIXELS, LABELS, strict=True)), [str(k) for k in LABELS]),
    "TensorDataset": (
        torch.utils.data.TensorDataset(
            torch.tensor(PIXELS).permute(0, 3, 1, 2), torch.tensor(LABELS)
        ),
        [str(k) for k in LABELS],
    ),
    "Dataset with classes": (Labelled(), OF_LABELS),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_stored_with_its_pixels_and_classes(tmp_path, form):
    source, names = FORMS[form]
    built = sslpipe.build_dataset(tmp_path / "set", source)
    assert contents(tmp_path / "set") == expected(names)
    assert built.manifest.source == "images in memory"
    known = [each for each in names if each is not None]
    order = CLASSES if form == "Dataset with classes" else sorted(set(known))
    assert sslpipe.load_index(tmp_path / "set").manifest.classes == tuple(order)


def test_an_image_folder_of_torchvision_is_what_its_files_are(tmp_path):
    photos = tmp_path / "photos"
    for number, pixels in enumerate(PIXELS):
        path = photos / OF_LABELS[number] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    sslpipe.build_dataset(tmp_path / "theirs", torchvision.datasets.ImageFolder(str(photos)))
    sslpipe.build_dataset(tmp_path / "ours", root=photos)
    assert contents(tmp_path / "theirs") == expected(OF_LABELS)
    assert contents(tmp_path / "ours") == expected(OF_LABELS)


def test_paths_and_bytes_stay_files_as_they_are(tmp_path):
    files = []
    for number, pixels in enumerate(PIXELS[:3]):
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg", quality=60)
        files.append(tmp_path / f"{number}.jpg")
    raw = [file.read_bytes() for file in files]
    sslpipe.build_dataset(tmp_path / "a", [str(files[0]), files[1], raw[2]])
    (tar,) = (tmp_path / "a").glob("*.tar")
    assert all(each in tar.read_bytes() for each in raw)


def test_splits_are_named_and_test_can_be_cut(tmp_path):
    pairs = list(zip(PIXELS, OF_LABELS, strict=True))
    sslpipe.build_dataset(tmp_path / "two", {"train": pairs[:8], "test": pairs[8:]})
    assert contents(tmp_path / "two", "test") == expected(OF_LABELS, range(8, 12))
    sslpipe.build_dataset(tmp_path / "cut", pairs, test_fraction=0.25)
    cut = contents(tmp_path / "cut", "test")
    assert sorted(cut.values()) == sorted(CLASSES)
    assert {**cut, **contents(tmp_path / "cut")} == expected(OF_LABELS)


def test_parts_of_data_sets_have_their_classes_and_different_ones_are_refused(tmp_path):
    """Number 0 of one ImageFolder is another class than number 0 of the next."""
    parts = torch.utils.data.random_split(Labelled(), [8, 4])
    for number, part in enumerate([*parts, parts[0] + parts[1]]):
        sslpipe.build_dataset(tmp_path / str(number), part)
    assert contents(tmp_path / "0") | contents(tmp_path / "1") == expected(OF_LABELS)
    assert contents(tmp_path / "2") == expected(OF_LABELS)
    other = Labelled()
    other.classes = CLASSES[::-1]
    with pytest.raises(DataError, match=r"source\['train'\] .* 'bee' and 'owl'.*\(image, name\)"):
        sslpipe.build_dataset(tmp_path / "both", other + Labelled())
    sslpipe.build_dataset(tmp_path / "without", other + Labelled(), labels=False)


def test_a_part_without_names_leaves_numbers(tmp_path):
    numbered = list(zip(map(Image.fromarray, PIXELS), LABELS, strict=True))
    rows = torch.utils.data.ConcatDataset([Labelled(), numbered])
    sslpipe.build_dataset(tmp_path / "set", rows)
    assert {*contents(tmp_path / "set").values()} == {*map(str, LABELS)}


@pytest.mark.promise(17)
def test_numbered_classes_of_one_name_stay_two(tmp_path):
    """As ImageNet's two of "crane", of which one is a bird; as names of memory, of a file."""
    cranes = Labelled()
    cranes.classes = ["crane", "ox", "crane"]
    sslpipe.build_dataset(tmp_path / "set", cranes)
    wanted = [("crane (0)", "ox", "crane (2)")[k] for k in LABELS]
    assert contents(tmp_path / "set") == expected(wanted)
    (tmp_path / "set" / "dataset.json").unlink()
    (tmp_path / "names.txt").write_text("crane\nox\ncrane\n")
    indexed = sslpipe.index_tars(tmp_path / "set", classes=tmp_path / "names.txt")
    assert contents(tmp_path / "set") == expected(wanted)
    assert indexed.report.splits["train"].unlabelled == 0


class Named(Labelled):
    """Its rows name classes, one of which `classes` lacks."""

    classes = CLASSES[:2]

    def __getitem__(self, number):
        return Image.fromarray(PIXELS[number]), CLASSES[LABELS[number]]


@pytest.mark.parametrize("source", [Named(), Subset(Named(), range(12)), Named() + Named()])
def test_texts_of_the_rows_name_the_classes_whatever_the_data_set_lists(tmp_path, source):
    """As superclasses that a target_transform makes."""
    sslpipe.build_dataset(tmp_path / "set", source)
    assert {*contents(tmp_path / "set").values()} == {*CLASSES}
    assert contents(tmp_path / "set").items() >= expected(OF_LABELS).items()


def test_splits_may_have_classes_that_others_lack(tmp_path):
    """Identities that training never sees: neither split has the classes of the other."""
    pairs = list(zip(PIXELS, OF_LABELS, strict=True))
    owned = {"train": ("ape", "owl"), "test": ("ape", "bee")}
    splits = {split: [pair for pair in pairs if pair[1] in own] for split, own in owned.items()}
    sslpipe.build_dataset(tmp_path / "set", splits)
    for split, own in owned.items():
        numbers = [number for number in range(12) if OF_LABELS[number] in own]
        assert contents(tmp_path / "set", split) == expected(OF_LABELS, numbers)


def test_the_same_call_is_the_same_data_set_and_other_images_are_refused(tmp_path):
    sslpipe.build_dataset(tmp_path / "set", PIXELS)
    before = tree(tmp_path / "set")
    sslpipe.build_dataset(tmp_path / "set", PIXELS)
    assert tree(tmp_path / "set") == before
    other = PIXELS.copy()
    other[5, 0, 0, 0] ^= 1
    with pytest.raises(DataError, match="shards of other images"):
        sslpipe.build_dataset(tmp_path / "set", other)
    sslpipe.build_dataset(tmp_path / "set", other, overwrite=True)
    assert tree(tmp_path / "set") != before


def test_transparency_is_reported_and_put_on_a_background(tmp_path):
    clear = Image.fromarray(np.dstack([PIXELS[0], np.zeros((9, 7), np.uint8)]))
    built = sslpipe.build_dataset(tmp_path / "black", [clear])
    assert any("transparent" in line for line in built.report.lines())
    sslpipe.build_dataset(tmp_path / "white", [clear], background="white")
    assert bool((sslpipe.ImageDataset(tmp_path / "white", "train")[0][0] == 255).all())


def test_a_bad_image_is_named_or_skipped(tmp_path):
    file = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(file, "PNG")
    half = Image.open(io.BytesIO(file.getvalue()[:150]))  # read when it is used
    images = [*PIXELS[:3], half, b"text"]
    with pytest.raises(DataError, match=r"train\[[34]\]"):
        sslpipe.build_dataset(tmp_path / "set", images)
    built = sslpipe.build_dataset(tmp_path / "set", images, skip_bad=True)
    assert sorted(line.partition(":")[0] for line in built.skipped) == ["train[3]", "train[4]"]
    assert contents(tmp_path / "set") == expected(NONE, range(3))


def test_truncated_images_that_pillow_is_set_to_fill_are_said(tmp_path, monkeypatch, capsys):
    """As programs for training set it; a later command, without it, takes them for damaged."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "JPEG")
    images = [*([image, "a"] for image in PIXELS[:8]), [file.getvalue()[:2000], "a"]]
    with pytest.raises(DataError, match="truncated"):
        sslpipe.build_dataset(tmp_path / "refused", images)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    built = sslpipe.build_dataset(tmp_path / "set", images)
    assert any("LOAD_TRUNCATED_IMAGES is set" in doubt for doubt in built.report.doubts)
    settings = ["steps=1", "data.batch_size=8", "data.holdout=0"]
    sslpipe.train(write_recipe(tmp_path), tmp_path / "set", tmp_path / "run", overrides=settings)
    assert "LOAD_TRUNCATED_IMAGES is set" in "".join(capsys.readouterr())


class Keyed:
    """A table whose columns have names, as pandas has."""

    def __init__(self, rows):
        self._rows = {"image": rows}

    def __len__(self):
        return len(self._rows["image"])

    def __getitem__(self, name):
        return self._rows[name]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "no image of split 'train'"),
        ({"train": PIXELS, "test": []}, "no image of split 'test'"),
        ({"train": 3}, r"source\['train'\] is a int"),
        (PIXELS / 255, r"train\[0\] is a ndarray of float64 \(9, 7, 3\); .*uint8.*ToTensor"),
        ([torch.zeros(7, 9, 3, dtype=torch.uint8)], r"train\[0\] is a Tensor.*\(3, H, W\)"),
        ([PIXELS[0], None], r"train\[1\] is a NoneType; give"),
        ([(PIXELS[0], 0.5)], r"train\[0\] has the class 0.5; give a text"),
        ([{"image": 1}], "dictionary of image.*save_to_disk.*parquet"),
        (["nowhere.png"], "nowhere.png"),
        (3, "source = 3 is not one of folder"),
        ((each for each in PIXELS), "source = .*; give a list"),
        ([(PIXELS[0], 1, "a name")], r"train\[0\] is 3 things; give"),
        ({"train": Keyed(PIXELS)}, r"train\[0\]: a Keyed has no such row; give"),
        (PIXELS[0], r"source is one image, \(9, 7, 3\); give .*\[source\]"),
        (torch.tensor(PIXELS[0]).permute(2, 0, 1), r"source is one image, \(3, 9, 7\)"),
        ({0: PIXELS}, "split 0; give a text"),
        ({"cat": PIXELS, "dog": PIXELS}, r"names no split: 'cat', 'dog'; .*\(image, class\)"),
        ({}, "names no split: it is empty; name one 'train'"),
    ],
)
def test_what_is_no_image_is_one_line(tmp_path, source, words):
    with pytest.raises(DataError, match=words) as refused:
        sslpipe.build_dataset(tmp_path / "set", source)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "set" / "dataset.json").exists()


def test_arguments_of_files_are_refused(tmp_path):
    for given in ({"root": Path("photos")}, {"columns": "kind"}, {"skip_missing": True}):
        with pytest.raises(DataError, match=f"{next(iter(given))} = .* leave it out"):
            sslpipe.build_dataset(tmp_path / "set", PIXELS, **given)


def test_a_dataset_whose_images_are_others_at_each_read_is_refused(tmp_path):
    class Cropped(Labelled):
        reads = 0

        def __getitem__(self, number):
            self.reads += 1
            return Image.fromarray(PIXELS[number][self.reads % 2 :]), int(LABELS[number])

    with pytest.raises(DataError, match=r"train\[\d+\] .*; leave random transforms out"):
        sslpipe.build_dataset(tmp_path / "data", Cropped())
    assert not (tmp_path / "data" / "dataset.json").exists()
