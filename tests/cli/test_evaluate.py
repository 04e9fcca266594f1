"""From shards and a run directory to files, a table and eval.json, by the command lines."""

import hashlib
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from typer.testing import CliRunner

import sslpipe.report.suite
from sslpipe.api import train
from sslpipe.augment.eval_view import EvalView
from sslpipe.cli import embed as embed_tool
from sslpipe.cli import evaluate as evaluate_tool
from sslpipe.cli import export as export_tool
from sslpipe.cli import report as report_tool
from sslpipe.cli import suite_output
from sslpipe.cli.app import run as run_program
from sslpipe.cli.evaluations import print_results
from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.errors import UserError, naming_options
from sslpipe.evaluation.advice import advise
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.evals import EVALS
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.whiten import fit_whitening, whiten
from sslpipe.export.load import load_backbone
from sslpipe.export.named import open_init
from sslpipe.export.start import Start
from sslpipe.export.write import export_backbone
from sslpipe.models.state import module_sha256
from sslpipe.recipe.reading import load_recipe
from sslpipe.report.other_networks import short_name
from sslpipe.report.suite import Embedder
from tests.evaluation.test_knn import random_rows
from tests.helpers import finetunes
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.runs import ROOT, final_weights, launched, write_recipe

pytestmark = pytest.mark.usefixtures("proved_here", "few_resamples")


def call(tool, *arguments) -> str:
    words = [str(a) for a in arguments]
    with naming_options():
        result = CliRunner().invoke(tool.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(tool, words, message):
    with naming_options(), pytest.raises(UserError, match=message):
        tool.app([*map(str, words)], standalone_mode=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run directory, dataset.json): a training of a few steps on the tiny data set."""
    folder = tmp_path_factory.mktemp("run")
    data = write_dataset(folder / "data", (32, 32))
    write_dataset(folder / "data", (20,), split="test")
    run_dir = folder / "run"
    train(load_recipe(write_recipe(folder), ["steps=3"]), load_index(data), run_dir)
    return run_dir, data


def test_embed_writes_every_sample_of_the_split_through_the_runs_view(run, tmp_path):
    run_dir, data = run
    out = tmp_path / "test.safetensors"
    call(embed_tool, run_dir, "--data", data, "--out", out)
    rows, facts = load_embeddings(out)
    assert facts["canvas_px"] == 256  # twice the view at least
    backbone, index = load_backbone(run_dir), load_index(data)
    expected = embed(backbone.backbone, backbone.view, index.split("test"))
    assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))
    assert (facts["split"], facts["data_sha256"]) == ("test", index.sha256)
    assert facts["backbone_sha256"] == module_sha256(backbone.backbone)
    assert facts["view"] == {
        **{"crop_px": 16, "resize_px": 16},
        **{"mean": [0.5] * 3, "std": [0.25] * 3},
    }
    # several splits, in the files of one each
    both = ("--split", "train", "--split", "test")
    call(embed_tool, run_dir, "--data", data, *both, "--out", tmp_path / "{split}-2.safetensors")
    assert (tmp_path / "test-2.safetensors").read_bytes() == out.read_bytes()
    assert load_embeddings(tmp_path / "train-2.safetensors")[1]["split"] == "train"
    words = [run_dir, "--data", data, *both, "--out", tmp_path / "one.npz"]
    refused(embed_tool, words, "is one file for 2 splits")


def test_suite_reads_features_of_the_run_that_are_just_what_it_would_embed(run, tmp_path):
    run_dir, data = run
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    files = folder / "features" / "{split}.safetensors"
    both = ("--split", "train", "--split", "test", "--out", files)

    def suite(*options) -> tuple[str, dict]:
        arguments = ("suite", folder, "--data", data, "--out", tmp_path / "eval.json", *options)
        output = call(evaluate_tool, *arguments, "--no-baselines")
        return output, json.loads((tmp_path / "eval.json").read_text())

    # where there are none it leaves them in the run, as `embed` writes them
    _, anew = suite()
    left = {path: path.read_bytes() for path in (folder / "features").iterdir()}
    call(embed_tool, folder, "--data", data, *both)
    assert {path: path.read_bytes() for path in (folder / "features").iterdir()} == left
    output, reused = suite()
    assert output.count("read from") == 2
    assert f"read {folder / 'eval.json'}: copy {tmp_path / 'eval.json'} there" in output
    assert reused == anew
    # any other view or backbone is another feature
    test = folder / "features" / "test.safetensors"
    rows, facts = load_embeddings(test)
    others = {"backbone_sha256": "0" * 64, "view": {**facts["view"], "resize_px": 20}}
    for key, value in others.items():
        save_embeddings(test, rows._replace(features=rows.features + 1), {**facts, key: value})
        output, reused = suite()
        assert "train: read from" in output
        assert "test: read from" not in output
        assert reused == anew
    # rows that are missing, or labels of another index
    save_embeddings(test, rows._replace(labels=rows.labels.flip(0)), facts)
    assert "test: read from" not in suite()[0]
    save_embeddings(test, rows.rows(rows.ids > 0), facts)
    assert "test: read from" not in suite()[0]


def test_an_export_stores_a_whitening_and_applies_it_everywhere(run, tmp_path):
    run_dir, data = run
    (run_dir / "eval.json").unlink(missing_ok=True)
    export_backbone(run_dir, tmp_path / "out", ["safetensors"])
    exported, weights = load_backbone(tmp_path / "out"), final_weights(run_dir)
    for key, tensor in exported.backbone.state_dict().items():
        assert torch.equal(tensor, weights[f"backbone.{key}"])
    assert exported.config == load_backbone(run_dir).config
    assert "| run | 3 steps" in (tmp_path / "out" / "README.md").read_text()

    train_file, test_file = tmp_path / "train.safetensors", tmp_path / "test.npz"
    words = (tmp_path / "out", "--data", data)
    call(embed_tool, *words, "--split", "train", "--out", train_file)
    rows, facts = load_embeddings(train_file)
    assert rows.features.shape == (64, 16)
    torch.testing.assert_close(
        exported.encode([picture(number) for number in range(3)]), rows.features[:3]
    )
    call(export_tool, "whiten", tmp_path / "out", train_file, "--dims", "8", "--power", "1")
    call(embed_tool, *words, "--out", test_file)

    sums = (tmp_path / "out" / "SHA256SUMS").read_text()
    for name in ("whitening.safetensors", "config.json"):
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() in sums

    actual, found_facts = load_embeddings(test_file)
    exported = load_backbone(tmp_path / "out")
    view = EvalView(**facts["view"])
    plain = embed(exported.backbone, view, load_index(data).split("test"))
    expected = fit_whitening(rows, dims=8)(plain)
    assert actual.features.shape == (20, 8)
    torch.testing.assert_close(actual.features, expected.features, rtol=2e-3, atol=2e-3)
    assert found_facts["whitening_sha256"] == exported.config.whitening_sha256
    images = torch.stack([torch.from_numpy(picture(i)) for i in range(20)]).permute(0, 3, 1, 2)
    torch.testing.assert_close(exported.encode(images), expected.features, rtol=1e-4, atol=1e-4)

    refused(export_tool, ["whiten", tmp_path / "out", test_file], "is flattened already")
    (tmp_path / "out" / "whitening.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match=r"whitening\.safetensors is not the file that SHA256SUMS"):
        load_backbone(tmp_path / "out")


@pytest.mark.promise(12)
def test_suite_measures_the_backbone_beside_its_baselines_and_the_export_carries_it(run, tmp_path):
    run_dir, data = run
    out = run_dir / "eval.json"
    shown = call(evaluate_tool, "suite", run_dir, "--data", data, "--out", out)
    report = json.loads(out.read_text())
    lines = {(row["features"], row["whitened"]) for row in report["rows"]}
    assert lines == {(n, w) for n in ("ssl", "random", "pixels") for w in (False, True)}
    assert report["columns"] == ["kNN", "kNN, 10/class", "linear"]
    assert all(row["queries"] == 20 for row in report["rows"])
    assert (report["facts"]["step"], report["facts"]["steps"]) == (3, 3)
    assert "unfinished" not in shown
    assert "copy" not in shown
    assert shown.count("Next:") <= 1  # a command; the advice is a sentence
    for message in ("pixels", "random", "kNN, 100 labels per class"):
        assert message in shown
    for printed in (shown, call(report_tool, run_dir)):  # under the name of the run
        assert "tiny, flattened (power 1)" in printed
        assert "ssl" not in printed.replace("sslpipe", "")
    model, index = load_backbone(run_dir), load_index(data)
    sides = [embed(model.backbone, model.view, index.split(name)) for name in ("train", "test")]
    by_protocol = {
        r["protocol"]: r["value"]
        for r in report["rows"]
        if r["features"] == "ssl" and not r["whitened"]
    }
    for one in knn_results(*sides, k=(10, 20)):
        assert by_protocol[one.protocol] == one.value
    carried = model.config.facts["evaluation"]
    assert len(carried) == sum(row["column"] is not None for row in report["rows"])


def test_suite_from_python_is_the_commands_and_leaves_the_model_alone(run, stranger, tmp_path):
    run_dir, data = run
    out = tmp_path / "theirs.json"
    call(evaluate_tool, "suite", run_dir, "--data", data, "--against", stranger, "--out", out)
    ours = tmp_path / "ours" / "eval.json"
    report = sslpipe.suite(str(run_dir), str(data), out=str(ours), against=[stranger])
    assert ours.read_bytes() == out.read_bytes()
    assert report == json.loads(out.read_text())
    # shown as the command's two sentences, and a line for each row of its table
    answer, advice, *lines = repr(report).splitlines()
    assert (answer, advice) == advise(report)
    cells = [
        cell for line in lines if not line.startswith("not measured") for cell in line.split("], ")
    ]
    shown = [row for row in report["rows"] if row["column"] is not None]
    assert len(cells) == len(shown) > 3
    for cell, row in zip(cells, shown, strict=True):
        assert f"{row['column']} {100 * row['value']:.1f} [" in cell
    # a backbone in memory has the same numbers, and no folder to leave features in
    model = load_backbone(run_dir)
    before = module_sha256(model.backbone)
    alone = sslpipe.suite(model, load_index(data), against=[stranger])
    assert alone["rows"] == report["rows"]
    assert module_sha256(model.backbone) == before
    assert next(model.backbone.parameters()).device.type == "cpu"
    with pytest.raises(UserError, match="split='train'"):
        sslpipe.suite(model, data, "train")


def test_what_is_not_known_of_weights_of_others_is_printed(run, tmp_path):
    run_dir, data = run
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), tmp_path / "w.pth")
    source = f"timm/test_resnet@{tmp_path / 'w.pth'}"
    (note,) = load_backbone(source).notes
    assert "timm's usual weights" in note
    words = ("--data", data, "--split", "test", "--out", tmp_path / "rows.npz")
    assert note in call(embed_tool, source, *words)
    words = ("--data", data, "--against", source, "--out", tmp_path / "eval.json")
    assert note in call(evaluate_tool, "suite", run_dir, *words)
    recipe = load_recipe(ROOT / "recipes" / "adapt_mobile.toml")
    assert note.partition(": ")[2] in Start("named", load_backbone(source)).describe(recipe.tune)
    # of a join, its export, and a training that starts from a part of that
    join = f"{source}@64+{source}@96"
    notes = load_backbone(join).notes
    assert notes == load_backbone(f"{source}@64").notes == load_backbone(f"{source}@96").notes
    words = ("--data", data, "--split", "test", "--out", tmp_path / "join.npz")
    assert all(note in call(embed_tool, join, *words) for note in notes)
    export_backbone(load_backbone(join), tmp_path / "join")
    assert load_backbone(tmp_path / "join").notes == notes
    assert "timm's usual weights" in (tmp_path / "join" / "README.md").read_text()
    assert notes[0] in Start("named", open_init(recipe, tmp_path / "join")).describe(recipe.tune)
    # of a run of ours there is nothing to say, whatever it started from
    settings = ["steps=1", "augment.crop_px=16", "tune.eval_crop_px=16"]
    recipe = load_recipe(write_recipe(tmp_path), settings)
    train(recipe, load_index(data), tmp_path / "run", init=source)
    assert load_backbone(tmp_path / "run").notes == []


@pytest.mark.promise(6)
def test_suite_says_where_test_images_may_have_been_trained_on(run, tmp_path):
    """A data set that was built anew may have moved images from train to test."""
    run_dir, data = run
    anew = write_dataset(tmp_path / "data", (32, 31))
    write_dataset(tmp_path / "data", (20,), split="test")
    on_test = tmp_path / "run"
    settings = ["steps=2", "data.split=test", "data.holdout=0", "run.monitor_steps=0"]
    train(load_recipe(write_recipe(tmp_path), settings), load_index(data), on_test)
    cases = [(run_dir, data, ""), (run_dir, anew, "built anew"), (on_test, data, "trained on this")]
    for model, location, expected in cases:
        report = sslpipe.suite(model, location, baselines=False, leakage=False)
        said = [text for text in report["left_out"] if "trained on" in text]
        assert [expected in text for text in said] == [True] * bool(expected)


def test_suite_prints_an_unfinished_run_first_and_marks_a_fit_that_did_not_converge(capsys):
    knn = {"features": "ssl", "whitened": False, "column": "kNN", "value": 0.5, "details": {}}
    knn |= {"interval95": [0.4, 0.6], "queries": 20}
    cut = {**knn, "column": "linear", "details": {"converged": False}}
    columns = ["kNN", "kNN, 100/class", "linear"]
    report = {"verdict": "Better than nothing.", "columns": columns, "left_out": []}

    def printed(facts, *rows):
        with naming_options():
            suite_output.print_report({**report, "facts": facts, "rows": rows}, Path("eval.json"))
        return capsys.readouterr().out

    said = "Evaluated at step 27 of 40, unfinished: the train command resumes it.\nkNN accuracy"
    assert printed({"step": 27, "steps": 40}, knn).startswith(said)
    shown = printed({"step": 40, "steps": 40}, knn, cut)
    assert shown.startswith("kNN accuracy 50.0 %")
    assert "--against" in shown.partition("│")[0].splitlines()[1]  # before the table
    assert shown.index("Better than nothing.") > shown.rindex("│")
    assert "100/class" not in shown  # a column without a number
    assert shown.count("*") == 2
    assert "* this model, linear: the fit did not converge" in shown
    # under the name of the run, unless other features have it
    named, other = {"name": "[red]photos"}, {**knn, "features": "[red]photos"}
    assert "* [red]photos, linear:" in printed(named, knn, cut)
    assert "* this model, linear:" in printed(named, knn, cut, other)


@pytest.fixture(scope="module")
def stranger(run, tmp_path_factory):
    """An export of another training on the same data, whose view is another one."""
    folder = tmp_path_factory.mktemp("stranger")
    recipe = load_recipe(
        write_recipe(folder),
        ["steps=2", "seed=5", "augment.crop_px=12", "augment.mean=[0.4,0.5,0.6]"],
    )
    train(recipe, load_index(run[1]), folder / "run")
    export_backbone(folder / "run", folder / "weights", ["safetensors"])
    return folder / "weights"


def test_suite_compares_with_the_weights_of_others_through_their_own_view(run, stranger, tmp_path):
    run_dir, data = run
    out = tmp_path / "eval.json"
    arguments = ["suite", run_dir, "--data", data, "--against", stranger, "--out", out]
    shown = call(evaluate_tool, *arguments)
    report = json.loads(out.read_text())
    assert {row["features"] for row in report["rows"]} == {"ssl", "random", "pixels", "weights"}
    other, index = load_backbone(stranger), load_index(data)
    (named,) = report["facts"]["against"]
    assert named == {
        **{"name": "weights", "source": str(stranger), "format": "sslpipe"},
        "sha256": module_sha256(other.backbone),
    }
    sides = [embed(other.backbone, other.view, index.split(name)) for name in ("train", "test")]
    for whitened, pair in ((False, sides), (True, whiten(*sides))):
        (expected,) = knn_results(*pair, k=(20,))
        assert [expected.value] == [
            row["value"]
            for row in report["rows"]
            if (row["features"], row["whitened"], row["column"]) == ("weights", whitened, "kNN")
        ]
    assert "weights" in shown


def suite_that(monkeypatch, run, out, *options, **replaced):
    """`evaluate suite` with functions replaced: exit status, what it printed, the report if any."""
    for name, function in replaced.items():
        owner = Embedder if hasattr(Embedder, name) else sslpipe.report.suite
        monkeypatch.setattr(owner, name, function)
    arguments = ["suite", run[0], "--data", run[1], "--out", out, "--no-leakage", *options]
    with naming_options():
        result = CliRunner().invoke(evaluate_tool.app, [str(a) for a in arguments])
    report = json.loads(out.read_text()) if out.exists() else None
    return result.exit_code, " ".join(result.output.split()), report


def test_a_stopped_suite_writes_what_it_has_and_says_what_is_not_there(
    run, stranger, tmp_path, monkeypatch
):
    before = signal.getsignal(signal.SIGTERM)

    def killed(*words, **options):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the handler ends it
            raise AssertionError
        finally:  # `timeout` and schedulers send it again, to the group of processes
            os.kill(os.getpid(), signal.SIGTERM)

    out = tmp_path / "eval.json"
    against = ("--against", stranger)
    code, said, report = suite_that(monkeypatch, run, out, *against, pixel_features=killed)
    assert code == 130, said
    # the run, then what it is compared with, then the baselines
    names = ["ssl", "weights", "random"]
    assert list(dict.fromkeys(row["features"] for row in report["rows"])) == names
    assert report["incomplete"] == {"pixels": "interrupted"}
    assert f"error: not in {out}: pixels: interrupted; run the same command again" in said
    assert signal.getsignal(signal.SIGTERM) == before
    # the same command measures all
    monkeypatch.undo()
    code, said, whole = suite_that(monkeypatch, run, out, *against)
    assert code == 0, said
    kept = [row for row in whole["rows"] if row["features"] != "pixels"]
    assert kept == report["rows"] != whole["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]
    # before the first numbers, nothing is written
    out = tmp_path / "other.json"
    code, said, report = suite_that(monkeypatch, run, out, embed=killed)
    assert (code, report) == (130, None)
    assert f"{out} is not written" in said


def test_a_network_that_cannot_be_embedded_costs_no_other_number(
    run, stranger, tmp_path, monkeypatch
):
    def fails(*words, **options):
        raise RuntimeError("no memory")

    out, against = tmp_path / "eval.json", ("--against", stranger)
    code, said, report = suite_that(monkeypatch, run, out, *against, embed_other=fails)
    assert code == 2
    assert {row["features"] for row in report["rows"]} == {"ssl", "random", "pixels"}
    assert "weights: no memory; run the same command again" in said


def test_an_export_keeps_no_features_and_each_source_has_its_name(run, stranger, tmp_path):
    run_dir, data = run
    export_backbone(run_dir, tmp_path / "weights", ["safetensors"])
    files = sorted((tmp_path / "weights").rglob("*"))
    out = tmp_path / "eval.json"
    several = ["--against", stranger, "--against", f"{run_dir}"]
    arguments = ["suite", tmp_path / "weights", "--data", data, "--no-baselines", *several]
    call(evaluate_tool, *arguments, "--out", out)
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["facts"]["against"]] == ["weights"]
    (said,) = report["not_compared"]  # the export is of that run
    assert "and run are the same weights" in said
    assert sorted((tmp_path / "weights").rglob("*")) == files
    refused(
        evaluate_tool, [*arguments, "--against", stranger], "--against=.*weights' is given twice"
    )
    refused(evaluate_tool, [*arguments, "--against", "nothing-here"], "nothing-here")


@pytest.mark.promise(12)
def test_a_run_is_compared_with_the_weights_that_it_started_from(run, stranger, tmp_path):
    run_dir, data = run
    text = finetunes.RECIPE.replace("classes_per_batch = 4", "classes_per_batch = 2")
    text = text.replace("validation_classes = 2", "validation_classes = 0")
    text = text.replace('[backbone]\nkind = "small_resnet"\nwidths = [8, 16]\n', "")
    start = load_backbone(run_dir)
    tuned, out = tmp_path / "tuned", tmp_path / "eval.json"
    recipe = load_recipe(write_recipe(tmp_path, text), ["steps=2"])
    train(recipe, load_index(data), tuned, init=start)
    arguments = ["suite", tuned, "--data", data, "--no-baselines", "--out", out]

    # named by the user: it is known by its sha256
    call(evaluate_tool, *arguments, "--against", stranger, "--against", run_dir)
    report = json.loads(out.read_text())
    compared = {each["against"]: each["start"] for each in report["against"]}
    assert compared == {"weights": False, "run": True}
    assert "run, which it started from: " in report["verdict"]
    assert report["not_compared"] == []

    # kept in the run
    assert (tuned / "init" / "config.json").exists()
    shown = call(evaluate_tool, *arguments)
    report = json.loads(out.read_text())
    (named,) = report["facts"]["against"]
    assert (named["sha256"], named["name"]) == (start.config.weights_sha256, "start")
    assert {each["start"] for each in report["against"]} == {True}
    assert report["verdict"] in shown
    (tuned / "eval.json").write_text(out.read_text())
    call(report_tool, tuned)
    assert "start, which it started from" in (tuned / "report.html").read_text()

    # others, or gone
    shutil.rmtree(tuned / "init")
    shutil.copytree(stranger, tuned / "init")
    call(evaluate_tool, *arguments)
    (said,) = json.loads(out.read_text())["not_compared"]
    assert "what is there now are others; name it with --against" in said
    shutil.rmtree(tuned / "init")
    shown = call(evaluate_tool, *arguments)
    sha256 = start.config.weights_sha256[:16]
    assert f"\nNot compared with its own start, weights with sha256 {sha256}: " in shown


@pytest.mark.parametrize(
    ("source", "taken", "name"),
    [
        ("timm:vit_small_patch16_224.dino", (), "vit_small_patch16_224.dino"),
        ("hf-hub:facebook/dinov2-small", (), "dinov2-small"),
        ("/data/a/backbone", ("backbone",), "a-backbone"),
        ("weights/lite0.pth", (), "lite0"),
        ("weights/lite0.pth@128", (), "lite0-128"),
        ("lite0.pth", ("lite0", "lite0-2"), "lite0-3"),
        ("a/[b] <c>/", (), "b-c"),
        ("..", (), "other"),
    ],
)
def test_names_of_sources_are_short_and_unique(source, taken, name):
    assert short_name(source, taken) == name


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    rows = random_rows(300, 6, 4, seed=1), random_rows(80, 6, 4, seed=2, first_id=1000)
    paths = folder / "train.safetensors", folder / "test.safetensors"
    for path, part in zip(paths, rows, strict=True):
        save_embeddings(path, part, {"split": path.stem})
    return paths, rows


@pytest.mark.parametrize("name", EVALS)
def test_every_eval_is_a_subcommand_with_arguments_of_its_own_as_options(files, tmp_path, name):
    paths, rows = files
    options = {
        "clusters": {},
        "few-shot": {"labels_per_class": 5, "k": [5]},
        "knn": {"k": [1, 7], "vote": "majority"},
        "linear": {},
        "retrieval": {"k": [1, 3]},
        "verification": {"far": [0.1]},
    }[name]
    arguments = []
    for key, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            arguments += [f"--{key.replace('_', '-')}", each]
    out = tmp_path / "numbers.json"
    shown = call(evaluate_tool, name, *paths, *arguments, "--out", out)
    expected = [result.to_json() for result in EVALS[name](*rows, **options)]
    actual = json.loads(out.read_text())
    assert [row["protocol"] for row in actual] == [row["protocol"] for row in expected]
    for row, wanted in zip(actual, expected, strict=True):
        assert math.isclose(row["value"], wanted["value"], rel_tol=0, abs_tol=1e-12)
        number = wanted["value"]
        text = f"{100 * number:.1f}" if wanted["unit"] == "share" else f"{number:.4g}"
        assert text in shown


def test_what_all_results_share_is_said_once_above_their_table(capsys):
    at = [Result("retrieval cosine", f"Recall@{k}", 0.5, (0.4, 0.6), 20, 30) for k in (1, 5)]
    print_results("mine", at)
    title, _, heads, *_ = capsys.readouterr().out.splitlines()
    assert title == "mine; protocol: retrieval cosine; queries: 20; bank: 30"
    assert not {"protocol", "queries", "bank"} & {*heads.split()}
    print_results("mine", [at[0], replace(at[1], protocol="retrieval dot", bank=31)])
    title, _, heads, *_ = capsys.readouterr().out.splitlines()
    assert title == "mine; queries: 20"
    assert {"protocol", "metric", "value", "bank"} < {*heads.split()}


def test_two_processes_print_and_write_once_what_one_does(files, tmp_path):
    paths, _ = files
    call(evaluate_tool, "knn", *paths, "--out", tmp_path / "one.json")
    command = ["evaluate", "knn", *map(str, paths), "--device", "cpu", "--out"]
    ranks = launched(2, *command, str(tmp_path / "two.json"))
    assert [done.returncode for done in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    title = "knn: train.safetensors -> test.safetensors"
    assert [done.stdout.count(title) for done in ranks] == [1, 0]
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_an_evaluation_that_no_processes_share_refuses_several(files, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sslpipe.run.accelerator.join_processes", lambda **_: Rank(0, 2))
    message = "linear runs in one process, and the launcher started 2"
    refused(evaluate_tool, ["linear", *files[0]], message)


@pytest.mark.parametrize(
    ("option", "recorded", "shown", "mapped"),
    [
        (["--whiten-power", "1"], {"whitened": True}, "flattened (power 1)", whiten),
        (
            ["--whiten-power", "0.5"],
            {"power": 0.5},
            "flattened (power 0.5)",
            partial(whiten, power=0.5),
        ),
    ],
)
def test_a_map_is_applied_to_both_files_and_recorded(
    files, tmp_path, option, recorded, shown, mapped
):
    paths, rows = files
    out = tmp_path / "numbers.json"
    assert shown in call(evaluate_tool, "knn", *paths, "--k", "5", *option, "--out", out)
    (row,) = json.loads(out.read_text())
    maps = {key: row[key] for key in row if key in ("whitened", "power")}
    assert maps == {"whitened": False, **recorded}
    (expected,) = knn_results(*mapped(*rows), k=(5,))
    assert row["value"] == expected.value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("knn none none", "cannot read embeddings from none"),
        ("knn tests tests", "tests is a folder; name a file that `sslpipe embed` wrote"),
        ("linear README.md README.md --device tpu", "use auto, cpu, cuda or mps"),
        ("verification {0} {1} --far 0", "between 0 and 1"),
        ("knn {0} {1} --k 5000", "k = 5000 does not fit a bank of 300 rows; use 1 <= k <= 300"),
        ("knn {0} {1} --k 301", "as --k 20"),
        ("few-shot {0} {1} --labels-per-class 500", "ask for fewer (--labels-per-class)"),
        ("knn {plain} {1} --k 1", "plain.npy: 300 of 300 rows have no label"),
        ("retrieval {0} {plain}", "plain.npy: 300 of 300 rows have no label"),
        ("linear {0} {1} --out .", "--out . is a folder; name a file"),
        ("suite {2} --data {3} --split tset", "tset"),
        ("suite {2} --data {3} --split train", "name another split"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    files, run, words, message, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    plain = files[0][0].with_name("plain.npy")
    np.save(plain, files[1][0].features.numpy())
    words = [word.format(*files[0], *run, plain=plain) for word in words.split()]
    monkeypatch.setattr("sys.argv", ["sslpipe", "evaluate", *words])
    with pytest.raises(SystemExit) as stopped:
        run_program()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_two_files_that_were_not_made_alike_are_refused_with_the_key_that_differs(files, tmp_path):
    _, rows = files
    same = {"backbone_sha256": "a", "canvas_px": 256, "data_sha256": "d"}

    def written(name, part, **facts):
        save_embeddings(tmp_path / name, part, same | facts)
        return str(tmp_path / name)

    train = written("train.npz", rows[0], split="train")
    for key, other in (("backbone_sha256", "b"), ("canvas_px", 512), ("whitening_sha256", "w")):
        test = written("test.npz", rows[1], split="test", **{key: other})
        refused(evaluate_tool, ["knn", train, test], f"differ in {key}")
    for name in ("knn", "linear"):
        refused(evaluate_tool, [name, train, train], "both files are of split 'train'")


def test_rows_that_files_of_another_program_number_apart_would_find_themselves(files, tmp_path):
    """Without ids the rows of a part are 0, 1, ..., and of `--exclude-same-id` other ones."""
    _, rows = files
    labels = rows[0].labels.numpy()
    features = rows[0].features.numpy()
    some = slice(3, 20)
    whole = str(tmp_path / "whole.npz")
    part = str(tmp_path / "part.npz")
    alike = str(tmp_path / "alike.npz")
    np.savez(whole, features=features, labels=labels)
    np.savez(part, features=features[some], labels=labels[some])
    ids = np.arange(len(labels))
    np.savez(alike, features=features[some], labels=labels[some], ids=ids[some])
    for words in (["knn", whole, whole], ["linear", whole, part], ["retrieval", whole, part]):
        refused(evaluate_tool, words, "`sslpipe evaluate retrieval FILE FILE --exclude-same-id`")
    itself = ["--exclude-same-id"]
    refused(evaluate_tool, ["retrieval", whole, part, *itself], "`ids` in both that number rows")
    for searched in (whole, alike):
        call(evaluate_tool, "retrieval", whole, searched, "--k", "1", *itself)
