"""`sslpipe curate` on a file of features: what is written, and what is refused before work."""

import csv
import os
import signal

import numpy as np
import pytest
import torch

from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import save_embeddings
from tests.helpers.columns import add_columns
from tests.helpers.dataset import png, write_dataset

SAMPLES = 40
NEAR = ("--k", 5)  # of the ten of a kind


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory):
    """A data set without labels, a black picture in it, and features of four kinds of samples."""
    folder = tmp_path_factory.mktemp("unlabelled")
    black = png(np.zeros((16, 16, 3), np.uint8))
    return write(
        folder, write_dataset(folder / "data", (20, 20), labelled=False, broken={7: black})
    )


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    return write(folder, write_dataset(folder / "data", (20, 20)))


def write(folder, data):
    index = load_index(data)
    rng = np.random.default_rng(0)
    ids = torch.arange(SAMPLES)
    features = 5 * np.eye(8)[ids.numpy() % 4] + 0.5 * rng.normal(size=(SAMPLES, 8))
    features[33] = -np.ones(8)  # like no other
    rows = Embeddings(torch.from_numpy(features).float(), ids % 4, ids)
    if index.split("train").labels.min() < 0:
        rows = rows._replace(labels=torch.full_like(ids, -1))
    facts = {"data_sha256": index.sha256, "split": "train", "view": {"resize_px": 16}}
    save_embeddings(folder / "train.safetensors", rows, facts)
    return folder


@pytest.fixture
def curate(call):
    """`sslpipe curate COMMAND FOLDER/train.safetensors ...`: what it printed on each stream."""

    def curate(folder, command, *words, features=None, status=0):
        features = features or folder / "train.safetensors"
        return call("curate", command, features, "--data", folder / "data", *words, status=status)

    return curate


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_outliers_have_reasons_values_and_a_page(curate, unlabelled, tmp_path):
    shown, _ = curate(unlabelled, "outliers", "--out", tmp_path, *NEAR)
    assert "of 40 samples of train: 1 no neighbour, 1 constant" in shown
    rows = table(tmp_path / "outliers.csv")
    assert [(row["id"], row["key"], row["reason"]) for row in rows] == [
        ("33", "train000033", "no neighbour"),
        ("7", "train000007", "constant"),
    ]
    assert float(rows[0]["value"]) > float(rows[0]["limit"])
    assert float(rows[1]["value"]) == 0
    page = (tmp_path / "outliers.html").read_text()
    assert page.count("<img src='data:image/") == 2
    assert "No neighbour" in page
    shown, _ = curate(unlabelled, "outliers", "--out", tmp_path, "--tiny-px", 17)
    assert ", 40 tiny" in shown


def test_clusters_are_listed_and_mapped(curate, labelled, tmp_path):
    words = ("clusters", "--out", tmp_path, "--count", 5)
    curate(labelled, *words)
    rows = table(tmp_path / "clusters.csv")
    assert [int(row["id"]) for row in rows] == list(range(SAMPLES))
    sizes = np.bincount([int(row["cluster"]) for row in rows])
    assert sizes.tolist() == [10, 10, 10, 9, 1]
    assert all(int(row["samples"]) == sizes[int(row["cluster"])] for row in rows)
    page = (tmp_path / "clusters.html").read_text()
    assert '"shown":"data:image/' in page
    names = load_index(labelled / "data").manifest.classes
    assert all(f"{name} 100 %" in page for name in names)


def test_of_copies_one_is_chosen_and_none_of_what_has_a_label(curate, tmp_path):
    data = write_dataset(tmp_path / "data", (20, 20))
    add_columns(data, duplicate_group=(np.arange(SAMPLES) // 4).tolist())  # 0..3 are one picture
    folder = write(tmp_path, data)
    (tmp_path / "labels.csv").write_text("split,id,label\ntrain,1,a\ntrain,6,b\n")
    words = ["--labels", tmp_path / "labels.csv", "--count", 8, "--out", tmp_path / "out"]
    shown, _ = curate(folder, "select", *words)
    assert "30 copies of other samples are skipped, by duplicate_group" in shown
    chosen = [int(row["id"]) // 4 for row in table(tmp_path / "out" / "chosen.csv")]
    assert {*chosen} == {*range(10)} - {0, 1}


def test_what_is_chosen_and_labelled_becomes_a_data_set(curate, call, unlabelled, tmp_path):
    chosen, out = tmp_path / "chosen", tmp_path / "built"
    words = ("select", "--count", 8, "--images", "--out", chosen)
    curate(unlabelled, *words)
    rows = table(chosen / "chosen.csv")
    assert [int(row["order"]) for row in rows] == list(range(8))
    assert all(row["label"] == "" and (chosen / row["path"]).is_file() for row in rows)
    assert (chosen / "chosen.html").read_text().count("<img src='data:image/") == 8

    # a person fills in the labels
    for row in rows:
        row["label"] = f"kind {int(row['id']) % 4}"
    with (chosen / "chosen.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)

    # the next choice takes others
    words = ("--count", 6, "--out", tmp_path / "next", "--labels", chosen / "chosen.csv")
    curate(unlabelled, "select", *words)
    later = {row["id"] for row in table(tmp_path / "next" / "chosen.csv")}
    assert len(later) == 6
    assert not later & {row["id"] for row in rows}

    # and `shards build` takes the table
    call("shards", "build", out, "--source", "csv", "--csv", chosen / "chosen.csv")
    index = load_index(out)
    assert index.manifest.classes == tuple(sorted({row["label"] for row in rows}))
    assert len(index.split("train")) == 8


def test_what_cannot_be_worked_with_is_one_line(curate, labelled, unlabelled, tmp_path):
    index = load_index(unlabelled / "data")
    facts = {"data_sha256": index.sha256, "split": "train", "view": {"resize_px": 16}}
    broken = {}
    for name, ids, width in (("twice", [0, 1, 1], 8), ("beyond", [0, 2**31], 8), ("flat", [0], 0)):
        rows = torch.ones(len(ids), width), torch.full((len(ids),), -1), torch.tensor(ids)
        broken[name] = tmp_path / f"{name}.npz"
        save_embeddings(broken[name], Embeddings(*rows), facts)
    few, out = ("select", "--count", 4), tmp_path / "out"
    for folder, words, features, message in (
        (labelled, few, None, "all 40 samples of split 'train' have a label"),
        (labelled, (*few, "--labels", "x", "--ignore-labels"), None, "--ignore-labels does not"),
        (labelled, ("outliers", "--z", "nan"), None, "--z"),
        (unlabelled, few, labelled / "train.safetensors", "was not embedded from"),
        (unlabelled, few, tmp_path / "no", "there is no such file"),
        (unlabelled, ("outliers",), broken["twice"], "has the id 1 twice; embed it again"),
        (unlabelled, ("clusters",), broken["beyond"], "has an id 2147483648, and split 'train'"),
        (unlabelled, ("outliers",), broken["flat"], "(1, 0), not float32 (N, F)"),
    ):
        _, error = curate(folder, *words, "--out", out, features=features, status=2)
        assert message in error
        assert not out.exists()
    curate(labelled, *few, "--ignore-labels", "--out", out)
    assert len(table(out / "chosen.csv")) == 4


def test_labels_that_were_filled_in_are_never_written_over(curate, unlabelled, tmp_path):
    words = ("select", "--count", 3, "--out", tmp_path)
    curate(unlabelled, *words)
    curate(unlabelled, *words)  # nobody has filled in any
    path = tmp_path / "chosen.csv"
    filled = path.read_text().replace(",\n", ",cat\n", 1)
    path.write_text(filled)
    _, error = curate(unlabelled, *words, status=2)
    assert "chosen.csv holds labels, which would be lost; name another --out" in error
    assert path.read_text() == filled


def test_ctrl_c_ends_it_without_a_file_half_written(
    request, curate, unlabelled, tmp_path, monkeypatch
):
    replace = os.replace
    # a shell has jobs in the background ignore Ctrl-C, and so the tests that such a job runs
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ours))

    def ended(*paths):
        os.kill(os.getpid(), signal.SIGINT)
        replace(*paths)

    monkeypatch.setattr("os.replace", ended)
    words = ("select", "--count", 3, "--images", "--out", tmp_path / "out")
    _, error = curate(unlabelled, *words, status=130)
    assert error == ""
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
