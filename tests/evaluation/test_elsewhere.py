"""Features that another program wrote: .npy, .npz and safetensors without our metadata."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sslpipe
from sslpipe.cli import app
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.neighbours import fixed_point_units
from sslpipe.evaluation.vectors import alike, open_features
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.exports import trained

ROWS = np.random.default_rng(0).normal(size=(12, 5))


def test_a_npy_file_is_rows_without_labels(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.astype(np.float16))
    rows, metadata = load_embeddings(tmp_path / "rows.npy")
    np.testing.assert_array_equal(rows.features.numpy(), ROWS.astype(np.float16))
    assert rows.features.dtype == torch.float32
    assert rows.labels.tolist() == [-1] * 12
    assert rows.ids.tolist() == list(range(12))
    assert metadata == {}


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_numbers_of_another_machines_order_of_bytes_are_read(tmp_path, suffix):
    """As HDF5 and FITS have them."""
    file = tmp_path / f"rows{suffix}"
    if suffix == ".npy":
        np.save(file, ROWS.astype(">f4"))
    else:
        np.savez(file, features=ROWS.astype(">f4"), labels=np.arange(12).astype(">i2"))
    rows, _ = load_embeddings(file)
    np.testing.assert_array_equal(rows.features.numpy(), ROWS.astype("f4"))
    if suffix == ".npz":
        assert rows.labels.tolist() == list(range(12))
    queries = torch.eye(5)
    expected = sslpipe.ImageSearch(file).find(queries, top=3)
    assert sslpipe.ImageSearch(file).find(queries.numpy().astype(">f4"), top=3) == expected
    gallery = sslpipe.Gallery(5)
    gallery.add("Ada", ROWS[:2].astype(">f4"))
    assert torch.equal(gallery.embeddings("Ada"), fixed_point_units(rows.features[:2]))


def test_one_id_for_images_of_two_classes_hides_no_image_silently(tmp_path, call):
    """Names of files without their folders: of each class there is a 0.jpg."""
    rows = np.random.default_rng(0).normal(size=(40, 5))
    labels = np.array(["ape", "owl"] * 20)
    names = np.array([f"{place // 2}.jpg" for place in range(40)])
    paths = np.array([f"{a}/{b}" for a, b in zip(labels, names, strict=True)])
    file = tmp_path / "rows.npz"
    for command in ("retrieval", "knn"):
        words = ["evaluate", command, file, file, "--exclude-same-id"]
        np.savez(file, features=rows, labels=labels, ids=names)
        _, errors = call(*words)  # crops of one image may be of two classes
        assert errors.count("'0.jpg' for rows of the classes ape and owl") == 1
        np.savez(file, features=rows, labels=labels, ids=paths)
        assert "for rows of the classes" not in call(*words)[1]
        # several rows of an image, as crops, may have its id
        np.savez(file, features=rows, labels=np.sort(labels), ids=np.arange(40) // 2)
        call(*words)


def test_rows_of_zeros_are_said(tmp_path, call):
    """What stands for images that could not be read: each row of the bank is as near."""
    labels = np.arange(12) % 3
    for name, rows in (("train", ROWS), ("test", np.where(labels[:, None] == 1, 0, ROWS + 1))):
        np.savez(tmp_path / f"{name}.npz", features=rows, labels=labels)
    files = [tmp_path / f"{name}.npz" for name in ("train", "test")]
    _, errors = call("evaluate", "knn", *files, "--k", 3)
    assert f"{files[1]}: 4 of 12 rows are all zeros" in errors
    assert f"{files[0]}:" not in errors


def test_queries_that_cannot_be_right_are_counted(tmp_path, call):
    """A table of products has grown: of twelve queries three are of a class that the bank lacks."""
    labels = np.arange(12) % 4
    known = labels < 3
    np.savez(tmp_path / "bank.npz", features=np.eye(4)[labels[known]], labels=labels[known])
    np.savez(tmp_path / "new.npz", features=np.eye(4)[labels] + 0.1, labels=labels)
    files = [tmp_path / "bank.npz", tmp_path / "new.npz"]
    for command, *more in (["knn", "--k", 1], ["few-shot", "--labels-per-class", 2, "--k", 1]):
        out, errors = call("evaluate", command, *files, *more)
        assert "75.0 [" in out
        assert (
            f"3 of 12 queries are of classes that {files[0]} lacks: they count as wrong" in errors
        )
    assert "lacks" not in call("evaluate", "retrieval", *files)[1]  # it skips them


@pytest.mark.parametrize("kind", [np.int16, np.uint8, np.int64])
def test_labels_and_ids_beside_the_features_are_kept(tmp_path, kind):
    labels = np.arange(12).astype(kind) % 3
    ids = np.arange(12)[::-1] + 7
    np.savez(tmp_path / "rows.npz", features=ROWS, labels=labels, ids=ids, split="test")
    rows, metadata = load_embeddings(tmp_path / "rows.npz")
    assert rows.labels.tolist() == labels.tolist()
    assert rows.ids.tolist() == ids.tolist()
    assert metadata == {"split": "test"}
    tensors = {"features": torch.tensor(ROWS), "labels": torch.tensor(labels.astype(np.int64))}
    save_file(tensors, tmp_path / "rows.safetensors")
    again, _ = load_embeddings(tmp_path / "rows.safetensors")
    torch.testing.assert_close(again.features, rows.features)


def test_knn_of_two_files_of_another_program(tmp_path, capsys, monkeypatch):
    labels = np.arange(12) % 3
    for name, more in (("train", 0.0), ("test", 0.1)):  # a test row is no row of train
        np.savez(tmp_path / f"{name}.npz", features=np.eye(3)[labels] + more, labels=labels)
    files = [str(tmp_path / f"{name}.npz") for name in ("train", "test")]
    monkeypatch.setattr(sys, "argv", ["sslpipe", "evaluate", "knn", *files, "--k", "3"])
    with pytest.raises(SystemExit) as stopped:
        app.run()
    assert stopped.value.code in (None, 0)
    assert "100.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"vectors": ROWS}, "features"),
        ({"features": ROWS[0]}, "features"),
        ({"features": ROWS.astype(int)}, "features"),
        ({"features": ROWS, "labels": np.zeros(11, int)}, "labels"),
        ({"features": ROWS, "labels": np.zeros(12)}, "labels"),
        ({"features": ROWS, "labels": np.array([*"abcabcabcab"])}, "labels"),
        ({"features": ROWS, "ids": np.array([*"abcdefghijk"])}, "ids"),
        ({"features": ROWS, "labels": np.array([*"abcabcabcabc"], object)}, "dtype=str"),
        ({"features": ROWS[:, :, None, None]}, r"features\.mean\(\(2, 3\)\)"),
        ({"features": ROWS[None]}, r"one row an image, as in features\[:, 0\]"),
        ({"features": ROWS, "labels": np.zeros(12)}, r"labels\.astype\('int64'\)"),
        ({"features": ROWS, "labels": np.zeros((12, 1), int)}, r"labels\[:, 0\]"),
        ({"features": ROWS, "labels": np.ones((12, 3), int)}, r"labels\[:, 0\]"),  # attributes
        ({"features": ROWS, "labels": np.eye(12, dtype=int)}, r"labels\.argmax\(1\)"),
        ({"features": ROWS * np.nan}, r"features\[0\] is not finite, as are 12 of 12"),
        ({"features": np.array([{}])}, "rows.npz"),
    ],
)
def test_other_arrays_are_one_clear_error(tmp_path, arrays, named):
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(DataError, match=named):
        load_embeddings(tmp_path / "rows.npz")


def test_labels_and_ids_that_are_texts_are_numbered_and_named(tmp_path):
    labels = np.array(["owl", "", "ape", "owl", *["Äffin"] * 8])
    ids = np.array([f"{place}.jpg" for place in range(12)][::-1])
    np.savez(tmp_path / "rows.npz", features=ROWS, labels=labels, ids=ids)
    opened = open_features(tmp_path / "rows.npz")
    named = [opened.class_name(label) or "" for label in opened.rows.labels.tolist()]
    assert named == labels.tolist()
    assert opened.rows.labels[1] == -1
    assert [opened.sample_name(each) for each in opened.rows.ids.tolist()] == ids.tolist()


def test_texts_are_numbered_alike_in_all_files(tmp_path):
    """Each file has classes and samples that the other has not."""
    first, second = np.array(["c", "a", "", "c"]), np.array(["b", "c", "b"])
    np.savez(tmp_path / "1.npz", features=ROWS[:4], labels=first, ids=np.array([*"wxyz"]))
    np.savez(tmp_path / "2.npz", features=ROWS[:3], labels=second, ids=np.array([*"zav"]))
    files = [tmp_path / "1.npz", tmp_path / "2.npz"]
    one, other = alike([open_features(file) for file in files], ["1", "2"])
    assert one.rows.labels.tolist() == [2, 0, -1, 2]
    assert other.rows.labels.tolist() == [1, 2, 1]
    assert one.rows.ids[3] == other.rows.ids[0]
    assert len({*one.rows.ids.tolist(), *other.rows.ids.tolist()}) == 6
    np.savez(tmp_path / "3.npz", features=ROWS[:3], labels=[0, 1, 2])
    with pytest.raises(DataError, match="labels of 1 have names"):
        alike([open_features(files[0]), open_features(tmp_path / "3.npz")], ["1", "3"])


@pytest.mark.parametrize("command", ["knn", "linear", "retrieval"])
def test_the_terminal_scores_texts_as_python_does(tmp_path, call, command):
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 4, 120)
    features = 2 * np.eye(4)[numbers] + rng.normal(size=(120, 4))
    texts = np.array(["zebra", "ape", "owl", "cat"])[numbers]
    for name, rows in (("train", slice(0, 80)), ("test", slice(80, 120))):
        np.savez(tmp_path / f"{name}.npz", features=features[rows], labels=texts[rows])
    out = tmp_path / "results.json"
    call("evaluate", command, tmp_path / "train.npz", tmp_path / "test.npz", "--out", out)
    sides = (features[:80], texts[:80], features[80:], texts[80:])
    if command == "retrieval":
        expected = {name: one.value for name, one in sslpipe.retrieval(*sides).items()}
    else:
        one = {"knn": sslpipe.knn, "linear": sslpipe.linear_probe}[command](*sides)
        expected = {one.protocol: one.value}
    written = json.loads(out.read_text())
    key = "metric" if command == "retrieval" else "protocol"
    values = {each[key]: each["value"] for each in written}
    assert {name: values.get(name) for name in expected} == expected
    assert all(each["classes"] == ["ape", "cat", "owl", "zebra"] for each in written)


def test_classes_of_two_data_sets_are_compared_by_name(tmp_path, call):
    """Not by their places in two lists of classes, of which one has ant, too."""
    model = trained()
    named = [(picture(number), ("cat", "dog")[number % 2]) for number in range(8)]
    ants = [(picture(number), "ant") for number in (20, 21)]
    for split, images in (("train", named), ("test", [*ants, *named])):
        sslpipe.build_dataset(tmp_path / split, images, split=split)
        sslpipe.embed(model, tmp_path / split, split, out=tmp_path / f"{split}.npz")
    out = tmp_path / "knn.json"
    files = [tmp_path / "train.npz", tmp_path / "test.npz"]
    call("evaluate", "knn", *files, "--k", 1, "--out", out)
    (written,) = json.loads(out.read_text())
    assert written["value"] == 8 / 10, "each cat and dog is its own nearest image"
    assert written["classes"] == ["ant", "cat", "dog"]
    one = open_features(tmp_path / "train.npz")
    assert one.class_name(int(one.rows.labels[0])) in ("cat", "dog")


def test_numbers_of_a_data_set_are_compared_with_its_names(tmp_path, call):
    """A file of an earlier version has no names; one of other numbers is refused, as texts are."""
    model = trained()
    named = [(picture(number), ("dog", "cat", "bee")[number % 3]) for number in range(9)]
    data = tmp_path / "data"
    sslpipe.build_dataset(data, named, split="train")
    rows = sslpipe.embed(model, data, "train", out=tmp_path / "named.npz")
    facts = {key: value for key, value in rows.facts.items() if key != "classes"}
    save_embeddings(tmp_path / "numbers.npz", rows, facts)
    other = {**facts, "data_sha256": "0" * 64}
    save_embeddings(tmp_path / "other.npz", rows._replace(features=2 * rows.features), other)
    more = Embeddings(rows.features, rows.labels + 1, rows.ids)
    save_embeddings(tmp_path / "more.npz", more, other)
    for pair in (["named", "numbers"], ["numbers", "named"], ["named", "other"]):
        files = [tmp_path / f"{name}.npz" for name in pair]
        opened = alike([open_features(file) for file in files], pair)
        assert [each.rows.labels.tolist() for each in opened] == 2 * [rows.labels.tolist()]
    out = tmp_path / "knn.json"
    call("evaluate", "knn", *files, "--k", 1, "--out", out)
    assert json.loads(out.read_text())[0]["value"] == 1
    with pytest.raises(DataError, match="labels of 1 have names and those of 2 are numbers"):
        alike([open_features(tmp_path / f"{name}.npz") for name in ("named", "more")], ["1", "2"])
    search = sslpipe.ImageSearch((tmp_path / "numbers.npz", data), tmp_path / "named.npz")
    hits = search.find(rows.features[:1], top=2)[0]
    assert {hit.part for hit in hits} == {0, 1}
    first = open_features(tmp_path / "named.npz").class_name(int(rows.labels[0]))
    assert {search.class_name(hit) for hit in hits} == {first}


def test_two_classes_of_one_name_stay_two(tmp_path):
    """ImageNet has two of "crane" and two of "maillot"."""
    model = trained()
    data = write_dataset(tmp_path / "data", (12,), classes=3)
    tree = json.loads(data.read_text())
    data.write_text(json.dumps({**tree, "classes": ["crane", "ant", "crane"]}))
    rows = sslpipe.embed(model, data, "train", out=tmp_path / "rows.npz")
    assert {*rows.labels.tolist()} == {0, 1, 2}
    file = tmp_path / "rows.npz"
    for opened in (*alike([open_features(file)] * 2, ["1", "2"]), open_features(file, data)):
        assert opened.rows.labels.tolist() == rows.labels.tolist()


def test_a_data_set_numbers_the_classes_that_a_file_names(tmp_path):
    data = write_dataset(tmp_path / "data", (12,))
    split = load_index(data).split("train")
    texts = np.array([split.class_name(label) for label in split.labels])
    np.savez(tmp_path / "rows.npz", features=ROWS, labels=texts, split="train")
    opened = open_features(tmp_path / "rows.npz", data)
    assert opened.rows.labels.tolist() == split.labels.tolist()
    np.savez(tmp_path / "rows.npz", features=ROWS, labels=np.array(["owl"] * 12), split="train")
    with pytest.raises(DataError, match="'owl'"):
        open_features(tmp_path / "rows.npz", data)


@pytest.mark.parametrize("name", ["rows.pt", "rows.csv", "rows.parquet"])
def test_a_file_of_another_kind_is_refused_with_those_that_are_read(tmp_path, name):
    torch.save(torch.tensor(ROWS), tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}.*none of \.safetensors, \.npz, \.npy.*savez"):
        load_embeddings(tmp_path / name)


@pytest.mark.parametrize("count", [3, 12, 150])
def test_usual_numbers_of_neighbours_fit_files_of_few_rows(tmp_path, call, count):
    """Without --k; one that is given and does not fit is an error."""
    rng = np.random.default_rng(0)
    for name in ("train", "test"):
        labels = np.arange(count) % 3
        np.savez(tmp_path / f"{name}.npz", features=rng.normal(size=(count, 5)), labels=labels)
    files = [tmp_path / "train.npz", tmp_path / "test.npz"]
    out = tmp_path / "out.json"
    call("evaluate", "knn", *files, "--out", out)
    found = [
        int(re.search(r"k=(\d+)", each["protocol"])[1]) for each in json.loads(out.read_text())
    ]
    assert found == ([k for k in (10, 20, 100, 200) if k <= count] or [count])
    call("evaluate", "retrieval", *files, "--out", out)
    recalls = [each["metric"] for each in json.loads(out.read_text())]
    assert [f"Recall@{k}" for k in (1, 5, 10) if k <= count] == [
        each for each in recalls if each.startswith("Recall@")
    ]
    call("evaluate", "few-shot", *files, "--labels-per-class", 1)
    _, errors = call("evaluate", "knn", *files, "--k", count + 1, status=2)
    assert f"k = {count + 1} does not fit" in errors
    arrays = [np.load(file)[key] for file in files for key in ("features", "labels")]
    assert f"k={min(20, count)} " in sslpipe.knn(*arrays).protocol
