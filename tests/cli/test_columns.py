"""`sslpipe evaluate` by columns of the data set that features files were embedded from."""

import json

import numpy as np
import pytest
import torch

from sslpipe.cli import evaluate as evaluate_tool
from sslpipe.cli.evaluations import print_values
from sslpipe.data.index import load_index
from sslpipe.evaluation import EVALS
from sslpipe.evaluation.embed import embed, save_embeddings
from sslpipe.evaluation.erase import erase
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.groups import GroupCodes, group_codes, worst_value
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.nuisance import nuisance
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.suite_file import check_report
from sslpipe.evaluation.whiten import whiten
from sslpipe.export.load import load_backbone
from sslpipe.export.write import export_backbone
from sslpipe.pretrain import pretrain
from sslpipe.recipe import load_recipe
from sslpipe.report.compare import merged
from sslpipe.report.results import task_tables
from tests.cli.test_evaluate import call, refused
from tests.evaluation.test_knn import random_rows
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import write_recipe

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
    shown = call(evaluate_tool, name, *paths, "--data", manifest, *options, "--out", out)
    return json.loads(out.read_text()), shown


def plain(results):
    return json.loads(json.dumps([{"whitened": False, **one.to_json()} for one in results]))


@pytest.mark.parametrize(
    ("words", "options", "column"),
    [
        ("knn --k 5", {"k": [5]}, "exclude_same"),
        ("linear", {}, "by"),
        ("retrieval", {}, "cross"),
        ("nuisance", {}, "column"),
    ],
)
def test_a_column_is_looked_up_by_the_ids_of_both_files(given, tmp_path, words, options, column):
    _, _, rows, codes = given
    name, *words = words.split()
    actual, shown = run(given, tmp_path, name, *words, f"--{column.replace('_', '-')}", "camera")
    assert actual == plain(EVALS[name](*rows, **options, **{column: codes}))
    if column == "by":
        assert "values of camera with at least 20 queries" in " ".join(shown.split())


def test_an_erased_column_is_fitted_on_the_first_file_and_recorded(given, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")  # no line is folded
    _, paths, rows, codes = given
    expected = erase(*rows, columns={"camera": codes.bank})
    words = ["nuisance", "--column", "camera", "--erase", "camera", "--whiten"]
    (row,), shown = run(given, tmp_path, *words)
    (result,) = nuisance(*whiten(*expected), column=codes)
    assert row == {**plain([result])[0], "whitened": True, "erased": ["camera"]}
    assert "erased=camera whitened nuisance" in " ".join(shown.split())
    words = ["knn", *paths, "--erase", "camera"]
    refused(evaluate_tool, words, "--erase camera is looked up in the data set")


def test_query_and_gallery_keep_the_rows_that_they_describe(given, tmp_path, monkeypatch):
    _, _, (train, test), codes = given
    options = ["--query", "camera = a", "--gallery", "camera != a and age < 150", "--k", "3"]
    monkeypatch.setenv("COLUMNS", "250")  # no line is folded
    actual, shown = run(given, tmp_path, "knn", *options, "--by", "camera")
    bank = np.isin(codes.bank, [1, 2]) & (np.arange(200) < 150)
    queries = codes.queries == 0
    expected, worst = knn_results(
        train.rows(torch.from_numpy(bank)),
        test.rows(torch.from_numpy(queries)),
        k=(3,),
        by=codes._replace(bank=codes.bank[bank], queries=codes.queries[queries]),
    )
    said = " gallery[camera != a and age < 150] query[camera = a]"
    assert [(row["protocol"], row["value"]) for row in actual] == [
        (each.protocol + said, each.value) for each in (expected, worst)
    ]
    assert actual[0]["bank"] == bank.sum()
    assert shown.count(f"{expected.protocol}{said}") == 1
    assert f"query 'camera = a': {queries.sum()} of 90 rows of test.safetensors" in shown


def test_values_are_shown_as_they_are_written(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    hits, codes = np.repeat([True, False], [30, 30]), np.repeat([0, 1], 30)
    by = GroupCodes("camera", codes[:0], codes, ("[/b]", "[red]x"))
    overall = Result("knn query[a = b]", "top1", 0.5, (0, 1), 60, 9, scores=hits)
    print_values([overall, worst_value(overall, by)])
    shown = capsys.readouterr().out
    for text in ("[/b]", "[red]x is the worst of 2", "knn query[a = b] by=camera"):
        assert text in shown


def test_one_file_on_both_sides_needs_conditions_that_no_row_meets_twice(given, tmp_path):
    manifest, (train, _), (rows, _), codes = given
    words = ["knn", train, train, "--data", manifest, "--k", "3"]
    query = ["--query", "camera = a"]
    out = tmp_path / "numbers.json"
    call(evaluate_tool, *words, *query, "--gallery", "camera != a", "--out", out)
    queries, bank = (
        rows.rows(torch.from_numpy(kept)) for kept in (codes.bank == 0, codes.bank > 0)
    )
    (expected,) = knn_results(bank, queries, k=(3,))
    assert json.loads(out.read_text())[0]["value"] == expected.value
    refused(evaluate_tool, [*words, *query], "every sample would find itself")


@pytest.mark.parametrize("name", ["knn", "retrieval"])
def test_equal_ids_of_two_splits_are_not_taken_for_one_sample(given, name):
    _, (train, _), _, _ = given
    test = train.with_name("test.safetensors")
    message = (
        r"--exclude-same-id is for two files of one split, and these are of split 'train' of (\w+) "
        r"and split 'test' of \1, whose equal ids are different samples; leave it out"
    )
    refused(evaluate_tool, [name, train, test, "--exclude-same-id"], message)
    call(evaluate_tool, name, train, train, "--exclude-same-id", "--k", "3")


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
    arguments = ["knn", *paths, "--data", manifest, *words]
    refused(evaluate_tool, arguments, message)


def test_columns_are_those_of_the_data_that_was_embedded(given, tmp_path):
    manifest, paths, rows, _ = given
    for words in (["--exclude-same", "camera"], ["--query", "camera = a"]):
        message = r"name the dataset\.json that .* with --data"
        refused(evaluate_tool, ["knn", *paths, *words], message)
    other = write_dataset(tmp_path, (200,))
    words = ["knn", *paths, "--data", other, "--exclude-same", "camera"]
    refused(evaluate_tool, words, r"train.safetensors was not embedded from .* embed the")
    longer = tmp_path / "longer.safetensors"
    shifted = rows[1]._replace(ids=rows[1].ids + 1)
    save_embeddings(longer, shifted, data_metadata(load_index(manifest).split("test")))
    words = ["knn", paths[0], longer, "--data", manifest]
    refused(evaluate_tool, words, r"has an id 90, and split 'test' of .* has 90 samples")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """(run directory, dataset.json with columns, eval.json as the suite wrote it, its output)."""
    folder = tmp_path_factory.mktemp("run")
    manifest = write_dataset(folder / "data", (40, 40))
    write_dataset(folder / "data", (30,), split="test")
    bright = ["dark", "light", None, "dark"] * 20
    add_columns(manifest, scanner=bright, shop=["<b>|s"] * 40 + ["t"] * 40, alone=["a"] * 80)
    add_columns(manifest, "test", scanner=bright[:30], page=["p", "q"] * 15)
    run_dir = folder / "run"
    pretrain(load_recipe(write_recipe(folder), ["steps=3"]), load_index(manifest), run_dir)
    out = run_dir / "eval.json"
    shown = call(evaluate_tool, "suite", run_dir, "--data", manifest, "--out", out)
    return run_dir, manifest, json.loads(out.read_text()), shown


def test_a_suite_says_what_else_the_features_know_beside_the_baselines(evaluated):
    run_dir, manifest, report, shown = evaluated
    index, model = load_index(manifest), load_backbone(run_dir)
    splits = [index.split(name) for name in ("train", "test")]
    rows = [embed(model.backbone, model.view, split) for split in splits]
    codes = group_codes("scanner", *((split, np.arange(len(split))) for split in splits))
    (expected,) = nuisance(*rows, column=codes)
    # one column of few values in train that test has, too; each kind of features
    assert [(row["features"], row["column"]) for row in report["nuisance"]] == [
        (name, "scanner") for name in ("ssl", "random", "pixels")
    ]
    own = report["nuisance"][0]
    assert own["value"] == expected.value
    assert own["details"]["chance"] == expected.details["chance"]
    assert any("'shop': no test row has a value" in said for said in report["left_out"])
    assert "What else the features know" in shown
    chance = f"chance | {100 * expected.details['chance']:.1f}"
    assert chance in " ".join(shown.replace("│", "|").split())
    check_report(report)
    tree = {key: value for key, value in report.items() if key != "sha256"}
    check_report({key: value for key, value in tree.items() if key != "nuisance"})
    tree["nuisance"] = [{**own, "details": {**own["details"], "chance": 1.5}}]
    with pytest.raises(ValueError, match=r"nuisance\.0\.details\.chance"):
        check_report(tree)
    words = ["suite", run_dir, "--data", manifest, "--columns", "scaner"]
    refused(evaluate_tool, words, "no column 'scaner'; did you mean 'scanner'")


def test_an_export_and_the_report_carry_what_else_the_features_know(evaluated, tmp_path):
    run_dir, _, report, _ = evaluated
    hostile = json.loads(json.dumps(report).replace("scanner", "<b>s|c"))
    del hostile["sha256"]
    (run_dir / "eval.json").write_text(json.dumps(hostile))
    export_backbone(run_dir, tmp_path / "out", ["safetensors"])
    card = (tmp_path / "out" / "README.md").read_text()
    (run_dir / "eval.json").write_text(json.dumps(report))
    own, name = report["nuisance"][0], report["facts"]["name"]
    line = f"| \\<b\\>s\\|c | {name} | {own['value']:.1%} |"
    assert line in card
    html = task_tables(hostile)
    assert "What else the features know" in html
    assert f"&lt;b&gt;s|c (2 values, chance {100 * own['details']['chance']:.1f})" in html
    assert "<b>s" not in html
    # two runs: each under its name, pixels once, random weights of each where they differ
    other = json.loads(json.dumps(report))
    other["nuisance"][1]["value"] = 0.123
    together = merged({"before": report, "after": other})
    names = [row["features"] for row in together["nuisance"]]
    random = [f"random weights of {run}" for run in ("before", "after")]
    assert names == ["before", random[0], "pixels", "after", random[1]]
