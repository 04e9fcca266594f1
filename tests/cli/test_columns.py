"""`sslpipe evaluate` by columns of the data set that features files were embedded from."""

import json

import numpy as np
import pytest
import torch

from sslpipe.cli import evaluate as evaluate_tool
from sslpipe.data.index import load_index
from sslpipe.evaluation.evals import EVALS
from sslpipe.evaluation.feature_files import save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.knn import knn_results
from tests.cli.test_evaluate import call, refused
from tests.evaluation.test_knn import random_rows
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset

pytestmark = pytest.mark.usefixtures("proved_here", "few_resamples")


def values_of(codes):
    return [None if code < 0 else "abc"[code] for code in codes]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """(dataset.json, features of train and test, their rows, codes of the column camera)."""
    folder = tmp_path_factory.mktemp("columns")
    manifest = write_dataset(folder, (200,))
    write_dataset(folder, (90,), split="test")
    rng = np.random.default_rng(0)
    sides = [rng.integers(-1, 3, size=n) for n in (200, 90)]
    add_columns(manifest, camera=values_of(sides[0]), age=list(range(200)))
    index = add_columns(manifest, "test", camera=values_of(sides[1]), age=list(range(90)))
    rows = random_rows(200, 5, 4, seed=1), random_rows(90, 5, 4, seed=2)
    paths = folder / "train.safetensors", folder / "test.safetensors"
    for path, part in zip(paths, rows, strict=True):
        save_embeddings(path, part, data_metadata(index.split(path.stem)))
    return manifest, paths, rows, GroupCodes("camera", *sides, ("a", "b", "c"))


def run(given, tmp_path, name, *options):
    manifest, paths, _, _ = given
    out = tmp_path / "numbers.json"
    call(evaluate_tool, name, *paths, "--data", manifest, *options, "--out", out)
    return json.loads(out.read_text())


def plain(results):
    return json.loads(json.dumps([{"whitened": False, **one.to_json()} for one in results]))


@pytest.mark.parametrize(
    ("words", "options", "column"),
    [
        ("knn --k 5", {"k": [5]}, "exclude_same"),
        ("retrieval", {}, "cross"),
    ],
)
def test_a_column_is_looked_up_by_the_ids_of_both_files(given, tmp_path, words, options, column):
    _, _, rows, codes = given
    name, *words = words.split()
    actual = run(given, tmp_path, name, *words, f"--{column.replace('_', '-')}", "camera")
    assert actual == plain(EVALS[name](*rows, **options, **{column: codes}))


def test_two_files_of_one_split_may_not_share_a_sample(given, tmp_path):
    manifest, _, (rows, _), _ = given
    metadata = data_metadata(load_index(manifest).split("train"))
    sides = [rows.rows(torch.arange(0, 120)), rows.rows(torch.arange(120, 200))]
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for path, side in zip(paths, sides, strict=True):
        save_embeddings(path, side, metadata)
    out = tmp_path / "numbers.json"
    call(evaluate_tool, "knn", *paths, "--k", "3", "--out", out)
    (expected,) = knn_results(*sides, k=(3,))
    assert json.loads(out.read_text())[0]["value"] == expected.value
    save_embeddings(paths[1], rows.rows(torch.arange(119, 200)), metadata)
    refused(evaluate_tool, ["knn", *paths, "--k", "3"], "every sample would find itself")


@pytest.mark.parametrize("name", ["knn", "retrieval"])
def test_equal_ids_of_two_splits_are_not_taken_for_one_sample(given, name):
    _, (train, _), _, _ = given
    test = train.with_name("test.safetensors")
    message = (
        r"`--exclude-same-id` is for two files of one split, and these are of split 'train' of "
        r"(\w+) and split 'test' of \1, whose equal ids are different samples; leave it out"
    )
    refused(evaluate_tool, [name, train, test, "--exclude-same-id"], message)
    call(evaluate_tool, name, train, train, "--exclude-same-id", "--k", "3")


def test_a_column_that_the_data_lacks_is_refused(given):
    manifest, paths, _, _ = given
    words = ["knn", *paths, "--data", manifest, "--exclude-same", "camra"]
    refused(evaluate_tool, words, "no column 'camra'; did you mean 'camera'")


def test_columns_are_those_of_the_data_that_was_embedded(given, tmp_path):
    manifest, paths, rows, _ = given
    message = r"name the dataset\.json that .* with --data"
    refused(evaluate_tool, ["knn", *paths, "--exclude-same", "camera"], message)
    other = write_dataset(tmp_path, (200,))
    words = ["knn", *paths, "--data", other, "--exclude-same", "camera"]
    refused(evaluate_tool, words, r"train.safetensors was not embedded from .* embed the")
    longer = tmp_path / "longer.safetensors"
    shifted = rows[1]._replace(ids=rows[1].ids + 1)
    save_embeddings(longer, shifted, data_metadata(load_index(manifest).split("test")))
    words = ["knn", paths[0], longer, "--data", manifest]
    refused(evaluate_tool, words, r"has an id 90, and split 'test' of .* has 90 samples")
