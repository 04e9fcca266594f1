"""Exports: the files that FiftyOne's importer is said to read."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.curate.exports import export
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from tests.helpers.dataset import picture, write_dataset

# what two tables say of samples of the split `train`
OUTLIERS = """split,id,key,reason,value,limit
train,1,k,dark,0.125,0.32
train,1,k,blurred,0,0.29
train,6,k,unreadable,,
test,2,k,dark,0.1,0.32
"""
CHOSEN = """order,split,id,reason,path,label
0,train,5,typical of 3 samples,images/x.png,
1,train,1,typical of 2 samples,images/y.png,cat
"""


@pytest.fixture
def data(tmp_path):
    index = load_index(write_dataset(tmp_path / "data", (4, 4)))
    (tmp_path / "outliers.csv").write_text(OUTLIERS)
    (tmp_path / "chosen.csv").write_text(CHOSEN)
    return index


@pytest.fixture
def rows():
    """Features of all but sample 3, not in the order of their ids."""
    ids = torch.tensor([7, 0, 1, 2, 4, 5, 6])
    features = ids[:, None] + torch.tensor([0.0, 0.5])
    return Embeddings(features, ids % 4, ids)


def call(tmp_path, index, rows, **options):
    tables = [tmp_path / "outliers.csv", tmp_path / "chosen.csv"]
    out = tmp_path / "out"
    split = index.split("train")
    total = export(out, index, split, rows, space="sslpipe/x", tables=tables, **options)
    samples = json.loads((out / "samples.json").read_text())["samples"]
    assert total == len(samples)
    return out, samples


def test_pictures_and_features_are_in_the_order_of_the_samples(tmp_path, data, rows):
    out, samples = call(tmp_path, data, rows)
    ids = [0, 1, 2, 4, 5, 6, 7]
    assert len(samples) == len(ids)
    for one, sample_id in zip(samples, ids, strict=True):
        assert one["filepath"] == f"images/train-{sample_id:09d}.png"
        with Image.open(out / one["filepath"]) as image:
            assert np.array_equal(np.asarray(image), picture(sample_id))
    features = np.load(out / "embeddings.npy")
    assert features.dtype == np.float32
    assert features.tolist() == [[i, i + 0.5] for i in ids]


def test_fiftyone_samples_hold_what_tables_and_labels_say(tmp_path, data, rows):
    out, samples = call(tmp_path, data, rows)
    metadata = json.loads((out / "metadata.json").read_text())
    assert "version" not in metadata  # by that the importer knows a format without its database
    assert metadata["media_type"] == "image"
    assert samples[0] == {
        "filepath": "images/train-000000000.png",
        "tags": ["train"],
        "split": "train",
        "source_id": 0,
        "key": "train000000",
        "ground_truth": {"_cls": "Classification", "label": data.manifest.classes[0]},
    }
    one = samples[1]
    assert one["tags"] == ["train", "outliers", "dark", "blurred", "chosen"]
    assert one["outliers_reason"] == ["dark", "blurred"]
    assert one["outliers_value"] == [0.125, 0.0]
    assert {type(value) for value in one["outliers_value"]} == {float}  # of a column, one type
    assert (one["chosen_order"], one["chosen_label"]) == (1, "cat")
    unreadable = samples[5]
    assert unreadable["outliers_reason"] == ["unreadable"]
    assert "outliers_value" not in unreadable
    assert not {"path", "chosen_path", "chosen_id"} & {key for s in samples for key in s}


def test_listed_samples_alone_as_small_jpegs(tmp_path, data, rows):
    # where no sample has two rows a reason is still a tag
    single = [line for line in OUTLIERS.splitlines() if "blurred" not in line]
    (tmp_path / "outliers.csv").write_text("\n".join(single))
    out, samples = call(tmp_path, data, rows, listed=True, most_px=8)
    assert [one["source_id"] for one in samples] == [1, 5, 6]
    assert samples[0]["tags"] == ["train", "outliers", "dark", "chosen"]
    for one in samples:
        with Image.open(out / one["filepath"]) as image:
            assert (image.format, image.size) == ("JPEG", (8, 8))


@pytest.mark.parametrize(("file", "columns"), [("ground", "truth"), ("chosen", "a b,a_b")])
def test_columns_that_would_be_one_field_are_refused(tmp_path, data, rows, file, columns):
    table = tmp_path / "more" / f"{file}.csv"
    table.parent.mkdir()
    table.write_text(f"split,id,{columns}\ntrain,1,{columns.replace(' ', '')}\n")
    with pytest.raises(DataError, match="would be the field"):
        export(tmp_path / "out", data, data.split("train"), rows, space="", tables=[table])
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused(tmp_path, data, rows):
    split = data.split("train")

    def refused(out, tables, rows=rows):
        with pytest.raises(DataError) as error:
            export(out, data, split, rows, space="", tables=tables, listed=True)
        return str(error.value)

    assert "not empty" in refused(tmp_path / "data", [])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "chosen.csv").write_text("split,id\ntrain,8\n")
    assert "row 2: id '8' is no sample" in refused(tmp_path / "o", [tmp_path / "b" / "chosen.csv"])
    twice = [tmp_path / "chosen.csv", tmp_path / "chosen.csv"]
    assert "two tables are named chosen" in refused(tmp_path / "o", twice)
    one = rows.rows(torch.tensor([0]))
    assert "nothing to export" in refused(tmp_path / "o", [tmp_path / "chosen.csv"], one)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("was_there", [False, True])
def test_an_export_that_was_ended_leaves_nothing_and_can_be_repeated(
    tmp_path, data, rows, monkeypatch, was_there
):
    out = tmp_path / "out"
    if was_there:
        out.mkdir()

    def full(*arguments, **options):
        assert list((out / "images").iterdir())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(KeyboardInterrupt):
            export(out, data, data.split("train"), rows, space="")
    assert out.exists() == was_there
    assert not was_there or not list(out.iterdir())
    export(out, data, data.split("train"), rows, space="")
    assert (out / "samples.json").is_file()
