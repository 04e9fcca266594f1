"""`sslpipe evaluate` by columns of the data set that features files were embedded from."""

import json

import numpy as np
import pytest
import torch

from sslpipe.cli import evaluate as evaluate_tool
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.knn import few_shot_knn, knn_results
from sslpipe.evaluation.linear_probe import linear_probe
from sslpipe.evaluation.nuisance import nuisance
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.verification import verification
from tests.cli.test_evaluate import call
from tests.evaluation.test_knn import random_rows
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset


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
        save_embeddings(path, part, data_metadata(index, path.stem))
    return manifest, paths, rows, GroupCodes("camera", *sides, ("a", "b", "c"))


def run(given, tmp_path, name, *options):
    manifest, paths, _, _ = given
    out = tmp_path / "numbers.json"
    shown = call(evaluate_tool, name, *paths, "--data", manifest, *options, "--out", out)
    return json.loads(out.read_text()), shown


def plain(results):
    return json.loads(json.dumps([{"whitened": False, **one.to_json()} for one in results]))


@pytest.mark.parametrize(
    ("name", "words", "evaluate", "options", "columns"),
    [
        ("knn", ["--k", "5", "--exclude-same", "camera"], knn_results, {"k": [5]}, "exclude_same"),
        ("knn", ["--k", "5", "--by", "camera"], knn_results, {"k": [5]}, "by"),
        (
            "few-shot",
            ["--labels-per-class", "5", "--by", "camera"],
            few_shot_knn,
            {"labels_per_class": 5},
            "by",
        ),
        ("linear", ["--exclude-same", "camera"], linear_probe, {}, "exclude_same"),
        ("retrieval", ["--exclude-same", "camera"], retrieval, {}, "exclude_same"),
        ("retrieval", ["--cross", "camera"], retrieval, {}, "cross"),
        (
            "verification",
            ["--pairs", "300", "--far", "0.1", "--exclude-same", "camera"],
            verification,
            {"pairs": 300, "far": [0.1]},
            "exclude_same",
        ),
        ("nuisance", ["--column", "camera"], nuisance, {}, "column"),
    ],
)
def test_a_column_is_looked_up_by_the_ids_of_both_files(
    given, tmp_path, name, words, evaluate, options, columns
):
    _, _, rows, codes = given
    actual, shown = run(given, tmp_path, name, *words)
    assert actual == plain(evaluate(*rows, **options, **{columns: codes}))
    if columns == "by":
        assert "values of camera with at least 20 queries" in " ".join(shown.split())


def test_query_and_gallery_keep_the_rows_that_they_describe(given, tmp_path):
    _, _, (train, test), codes = given
    options = ["--query", "camera = a", "--gallery", "camera != a and age < 150", "--k", "3"]
    actual, _ = run(given, tmp_path, "knn", *options, "--by", "camera")
    bank = np.isin(codes.bank, [1, 2]) & (np.arange(200) < 150)
    queries = codes.queries == 0
    expected, worst = knn_results(
        train.rows(torch.from_numpy(bank)),
        test.rows(torch.from_numpy(queries)),
        k=(3,),
        by=codes._replace(bank=codes.bank[bank], queries=codes.queries[queries]),
    )
    said = " gallery[camera != a and age < 150] query[camera = a]"
    assert [row["protocol"] for row in actual] == [
        expected.protocol + said,
        worst.protocol + said,
    ]
    assert [row["value"] for row in actual] == [expected.value, worst.value]
    assert actual[0]["bank"] == bank.sum()


def test_one_file_on_both_sides_needs_conditions_that_no_row_meets_twice(given, tmp_path):
    manifest, (train, _), (rows, _), codes = given
    words = ["knn", str(train), str(train), "--data", str(manifest), "--k", "3"]
    query = ["--query", "camera = a"]
    out = tmp_path / "numbers.json"
    call(evaluate_tool, *words, *query, "--gallery", "camera != a", "--out", out)
    queries, bank = (
        rows.rows(torch.from_numpy(kept)) for kept in (codes.bank == 0, codes.bank > 0)
    )
    (expected,) = knn_results(bank, queries, k=(3,))
    assert json.loads(out.read_text())[0]["value"] == expected.value
    with pytest.raises(UserError, match="every sample would find itself"):
        evaluate_tool.app([*words, *query], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exclude-same", "camra"], "no column 'camra'; did you mean 'camera'"),
        (["--query", "camera = d"], "no sample has camera = 'd'"),
        (["--query", "age > 900"], "--query 'age > 900': it holds for none of 90 rows of"),
    ],
)
def test_what_the_columns_do_not_have_is_refused(given, words, message):
    manifest, paths, _, _ = given
    arguments = ["knn", *map(str, paths), "--data", str(manifest), *words]
    with pytest.raises(UserError, match=message):
        evaluate_tool.app(arguments, standalone_mode=False)


def test_columns_are_those_of_the_data_that_was_embedded(given, tmp_path):
    manifest, paths, rows, _ = given
    for words in (["--exclude-same", "camera"], ["--query", "camera = a"]):
        with pytest.raises(UserError, match=r"name the dataset\.json that .* with --data"):
            evaluate_tool.app(["knn", *map(str, paths), *words], standalone_mode=False)
    other = write_dataset(tmp_path, (200,))
    words = ["knn", *map(str, paths), "--data", str(other), "--exclude-same", "camera"]
    with pytest.raises(UserError, match=r"train.safetensors was not embedded from .* embed the"):
        evaluate_tool.app(words, standalone_mode=False)
    longer = tmp_path / "longer.safetensors"
    shifted = rows[1]._replace(ids=rows[1].ids + 1)
    save_embeddings(longer, shifted, data_metadata(load_index(manifest), "test"))
    words = ["knn", str(paths[0]), str(longer), "--data", str(manifest)]
    with pytest.raises(UserError, match=r"has an id 90, and split 'test' of .* has 90 samples"):
        evaluate_tool.app(words, standalone_mode=False)
