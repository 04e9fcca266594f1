"""One HTML file: complete, escaped, true to its sources, and nothing asked of the network."""

import base64
import hashlib
import io
import json
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import sslpipe.api
import sslpipe.pretrain
from sslpipe.cli.suite_output import against_table, suite_table
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.advice import advise
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.suite_file import content_sha256, features_name
from sslpipe.recipe.reading import load_recipe
from sslpipe.report.charts import (
    CHARTS,
    MOST_POINTS,
    Series,
    charts,
    line_chart,
    thinned,
)
from sslpipe.report.compare import differences, results
from sslpipe.report.embeddings import NEIGHBOURS, RANDOM_QUERIES, named_labels, neighbour_rows
from sslpipe.report.page import LIBRARY, coded, render
from sslpipe.report.pictures import thumbnails
from sslpipe.report.result_tables import (
    Line,
    clear_best,
    leakage,
    result_table,
    summary,
)
from sslpipe.report.run_files import read_run, without_places
from sslpipe.report.run_page import confusion, header, searched_split, shown_split
from tests.evaluation.test_verdict import compared
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.runs import RECIPE, command_line, write_recipe

pytestmark = pytest.mark.usefixtures("few_resamples")
EVIL = "<script>alert('1')<script>"  # a run's name may hold no slash
QUOTES = "' onload='alert(2)' \"><img src=x onerror='alert(3)'>"
VENDORED = {  # vega 5.33.0, vega-lite 5.23.0, vega-embed 6.29.0: beginnings of their sha256
    "vega": "a71f14828abacac8",
    "vega-lite": "58c27358e26f2d31",
    "vega-embed": "12d02acfbe3ec59e",
}
NAME = "<b>second</b> & last"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Tags with their attributes, all text outside scripts, and the cells of table.results."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text, self.style = "", ""
        self._open: list[str] = []
        self.feed(str(html))
        self.close()
        assert not self._open, f"not closed: {self._open}"
        tables = re.findall(r"<table class='results'>(.*?)</table>", str(html), re.DOTALL)
        self.rows = [
            [_cell(cell) for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", row)]
            for table in tables
            for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "style":
            self.style += data
        elif not self._open or self._open[-1] != "script":
            self.text += data

    def plots(self) -> list[dict[str, str]]:
        return [attrs for attrs in self.all("div") if attrs.get("class") == "plot"]

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


def _cell(html: str) -> dict[str, str | None]:
    value = re.search(r"<data value='([^']*)'", html)
    return {"text": unescape(re.sub(r"<[^>]*>", "", html)), "value": value and value[1]}


def report(*arguments: object) -> None:
    command_line("report", *map(str, arguments), status=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SimpleNamespace:
    """A run that was trained, evaluated and embedded by the real programs, and its page."""
    folder = tmp_path_factory.mktemp("report")
    data = write_dataset(folder / "data")
    write_dataset(folder / "data", (20, 20), split="test")
    manifest = json.loads(data.read_text())
    manifest |= {"classes": ["plain", EVIL, QUOTES, "$a_b$ & co"], "license": EVIL}
    data.write_text(json.dumps(manifest))
    recipe = write_recipe(folder, RECIPE.replace('name = "tiny"', f'name = "{EVIL}"'))
    run_dir = folder / "run"
    sslpipe.api.train(
        load_recipe(recipe, ["steps=8", "run.monitor_steps=4"]), load_index(data), run_dir
    )
    bad = {"id": 3, "shard": "train-000000.tar", "key": EVIL, "reason": "no image in /home/ann/x"}
    (run_dir / "quarantine.jsonl").write_text(json.dumps(bad) + "\n" + '{"id": 4, "sha')
    common = [str(run_dir), "--data", str(data), "--num-workers", "0", "--device", "cpu"]
    command_line("evaluate", "suite", *common, "--out", str(run_dir / "eval.json"), status=0)
    for split in ("train", "test"):
        out = str(run_dir / "features" / f"{split}.safetensors")
        command_line("embed", *common, "--split", split, "--out", out, status=0)
    report(run_dir, "--data", data)
    html = (run_dir / "report.html").read_text(encoding="utf-8")
    return SimpleNamespace(run_dir=run_dir, data=data, html=html, page=Page(html))


def test_the_page_asks_nothing_of_the_network_and_runs_the_chart_library_alone(whole):
    (policy,) = [a["content"] for a in whole.page.all("meta") if "http-equiv" in a]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert (rules["default-src"], rules["img-src"]) == ("'none'", "data:")
    bodies = re.findall(r"<script([^>]*)>(.*?)</script>", whole.html, re.DOTALL)
    run = [body for attributes, body in bodies if not attributes]
    hashes = [hashlib.sha256(body.encode()).digest() for body in run]
    allowed = [f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes]
    assert rules["script-src"].split() == allowed
    for attributes, body in bodies:
        if attributes:  # data
            assert attributes.startswith(" type='application/json'")
            assert not set("<>&") & set(body)
            json.loads(body)
    folder = resources.files("sslpipe.report")
    assert run == [
        (folder / name).read_text(encoding="utf-8").split("\n//# sourceMappingURL")[0]
        for name in (*LIBRARY, "templates/draw.js")
    ]
    for tag, attrs in whole.page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for key, value in attrs.items():
            assert not key.startswith("on")
            if key in ("src", "href", "xlink:href", "srcset", "action"):
                assert value.startswith(("data:image/", "#")), (tag, key, value[:60])
    assert whole.page.style
    assert not re.search(r"url\(|@import|https?:", whole.page.style)
    assert len(whole.html) < 2e6


def test_the_chart_library_is_what_npm_has_and_carries_its_licence():
    folder = resources.files("sslpipe.report") / "vega"
    found = {
        name: hashlib.sha256((folder / f"{name}.min.js").read_bytes()).hexdigest()[:16]
        for name in ("vega", "vega-lite", "vega-embed")
    }
    assert found == VENDORED
    licence = (folder / "LICENSE").read_text(encoding="utf-8")
    assert licence.count("Redistribution and use in source and binary forms") == 3


def test_alarms_are_told_with_their_step_and_whether_they_stand(whole, tmp_path):
    run_dir = _copy(whole.run_dir, tmp_path)
    assert "No alarm" in render("run.alarms", run=read_run(run_dir))
    lines = [
        {"step": 30, "raised": ["rank_collapse"], "over": [], "value": {"rank_collapse": 1.2}},
        {"step": 60, "raised": [EVIL], "over": [], "value": {EVIL: 0.01}},
        {"step": 90, "raised": [], "over": ["rank_collapse"], "value": {"rank_collapse": 9.5}},
    ]
    lines = [{"threshold": dict.fromkeys(each["value"], 2.5), **each} for each in lines]
    texts = (json.dumps({"kind": "alarm", **each}) for each in lines)
    (run_dir / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    run = read_run(run_dir)
    assert run.standing == EVIL
    html = render("run.alarms", run=run)
    assert EVIL not in html
    for said in (
        "step 30: rank collapse raised, at 1.2 (threshold 2.5)",
        "step 90: rank collapse over, at 9.5",
        f"Standing at the end: {EVIL}.",
    ):
        assert Page(html).text.count(said) == 1


def test_texts_from_files_are_shown_as_text(whole):
    text = whole.page.text
    assert f"{EVIL}: sslpipe report" in text  # the title
    assert f"3train-000000.tar{EVIL}no image" in text  # a key in the quarantine
    assert f"license{EVIL}" in text
    assert f"plain{EVIL}{QUOTES}" in text  # the legend
    assert QUOTES in whole.page.text
    assert "$a_b$ & co" in whole.page.text
    assert not [a for a in whole.page.all("img") if a.get("src") == "x"]


def test_a_number_of_the_answer_and_its_percent_sign_stand_on_one_line(whole):
    (answer,) = re.findall(r"<p class='lead'>(.*?)</p>", whole.html)
    assert "95\N{NO-BREAK SPACE}%" in answer
    assert " %" not in answer


def test_links_lead_somewhere_and_every_picture_has_an_alternative_text(whole):
    ids = [attrs["id"] for _, attrs in whole.page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"][1:] for attrs in whole.page.all("a")} <= set(ids)
    assert all(attrs.get("alt") for attrs in whole.page.all("img"))
    plots = whole.page.plots()
    assert all(attrs.get("aria-label") for attrs in plots)
    assert len(plots) == 12 + 2 + 1  # training, speed, map


def test_the_table_holds_the_numbers_of_eval_json(whole):
    evaluation = json.loads((whole.run_dir / "eval.json").read_text())
    head, *body = whole.page.rows
    columns = [cell["text"] for cell in head[1:]]
    assert columns == evaluation["columns"]
    names = {"ssl": "this run", "random": "random weights", "pixels": "raw pixels"}
    wanted = {
        (features_name(row, names[row["features"]]), row["column"]): row
        for row in evaluation["rows"]
        if row["column"]
    }
    shown = {
        (line[0]["text"], column): cell
        for line in body
        for column, cell in zip(columns, line[1:], strict=True)
        if cell["value"] is not None
    }
    assert shown.keys() == wanted.keys()
    for key, row in wanted.items():
        assert float(shown[key]["value"]) == row["value"]
        low, high = row["interval95"]
        text = f"{100 * row['value']:.1f} {100 * low:.1f}–{100 * high:.1f}"
        assert shown[key]["text"] == text
        assert row["protocol"] in whole.page.text
    for sentence in evaluation["left_out"]:
        assert sentence in whole.page.text


def test_the_last_numbers_of_training_are_those_of_the_log(whole):
    log = (whole.run_dir / "metrics.jsonl").read_text()
    lines = [json.loads(text) for text in log.splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert last["step"] == 8
    for key in ("loss", "effective_rank", "alignment"):
        assert f"{last[key]:.4g}" in whole.page.text.replace("−", "-")
    assert "for 8 steps" in whole.page.text
    assert "on 128 images of tiny (about 16 held out)" in whole.page.text


def test_the_speed_is_that_of_all_steps_each_at_what_its_line_says(whole):
    lines = [
        {"step": 10, "images_per_s": 100.0, "data_wait_percent": 20.0},  # 160 images in 1.6 s
        {"step": 40, "images_per_s": 200.0, "data_wait_percent": 50.0},  # 480 in 2.4 s
    ]
    speed = read_run(whole.run_dir)._replace(train=lines).speed
    assert speed == pytest.approx((4.0, 640 / 4.0, 100 * (0.32 + 1.2) / 4.0))


def test_a_run_that_stopped_between_two_log_lines_is_shown_at_its_last_save(whole, tmp_path):
    run_dir = _copy(whole.run_dir, tmp_path, "metrics.jsonl")
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["step"] <= 4]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    text = Page(header(read_run(run_dir))).text
    assert "for 4 steps (0.6 epochs)" in text  # 7 steps an epoch
    assert "held-out kNN, step" not in text
    (run_dir / "checkpoints" / "step-00000007").mkdir(parents=True)
    text = Page(header(read_run(run_dir))).text
    assert "for 7 steps (1.0 epochs)" in text
    assert "held-out kNN, step 4 of 7" in text  # which is not the run's result


def test_the_held_out_number_is_of_the_step_whose_weights_were_evaluated(whole):
    run = read_run(whole.run_dir)
    evals = [{"step": step, "holdout_knn": score} for step, score in ((0, 0.25), (4, 0.75))]
    for step, expected in ((0, "kNN, step 0 of 825.0 %"), (5, "kNN, step 4 of 875.0 %")):
        facts = {**run.metadata, "step": step}
        shown = run._replace(evals=evals, evaluation={**run.evaluation, "facts": facts})
        assert expected in Page(header(shown)).text  # 25.0 % in the next cell


def test_a_run_that_scored_no_held_out_image_says_which_charts_it_lacks(whole):
    run = read_run(whole.run_dir)
    scored = [{"step": 4, "holdout_knn": 0.75}]
    for evals, lacks in (([], True), (scored, False)):
        shown = run._replace(evals=evals)
        training = str(render("run.training", charts=charts(shown, CHARTS), run=shown))
        assert ("held-out kNN" in training) == (not lacks)
        assert ("No held-out images were scored" in training) == lacks


def test_a_fine_tuning_does_not_claim_all_images_of_the_split(whole):
    run = read_run(whole.run_dir)
    sampler = {"classes_per_batch": 4, "images_per_class": 3, "random_images": 0}
    said = Page(header(run._replace(recipe={**run.recipe, "sampler": sampler}))).text
    assert "those held out and those of classes with fewer than 3" in said
    assert "fewer than" not in Page(header(run)).text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read /home/ann/data/a.tar: gone", "cannot read …/a.tar: gone"),
        ("/scratch/x", "…/x"),
        ("~/data/set", "…/set"),
        (r"C:\Users\ann\a.png", "…/a.png"),
        ("timm/vit_small_patch16_224", "timm/vit_small_patch16_224"),
        ("images/s at 1/2", "images/s at 1/2"),
        ("s3://bucket/folder/a.tar", "s3://bucket/folder/a.tar"),
        ("https://ann:pw@host/a.tar?sig=1#x gone", "https://host/a.tar gone"),
        ("'/data/my set/a'", "'…/my set/a'"),
    ],
)
def test_texts_lose_absolute_folders_and_credentials_only(text, shown):
    assert without_places(text) == shown


def test_places_and_secrets_are_not_told(whole, tmp_path):
    assert str(whole.run_dir.parent) not in whole.html
    assert "/home/ann" not in whole.html
    assert "no image in …/x" in whole.page.text
    run_dir = _copy(whole.run_dir, tmp_path)
    recipe = json.loads((run_dir / "recipe.json").read_text())
    recipe["run"] |= {"api_key": "hunter2", "cache": "/scratch/ann/cache"}
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    html = render("run.settings", run=read_run(run_dir))
    assert "hunter2" not in html
    assert "/scratch" not in html
    assert "run.api_key" in html


def test_a_bare_run_names_everything_that_is_missing(whole, tmp_path):
    run_dir = _copy(whole.run_dir, tmp_path)
    report(run_dir, "--out", tmp_path / "deep" / "page.html")
    page = Page((tmp_path / "deep" / "page.html").read_text())
    for words in (
        "Whether it is better than random weights is not known: it has no eval.json",
        "It has not been evaluated yet",
        *("No eval.json yet", "sslpipe evaluate suite RUN"),
        "No step of training is logged",
        *("No views.png yet", "sslpipe preview RECIPE"),
        *("No embeddings of the test split yet", "sslpipe embed RUN"),
        "No sample was skipped",
    ):
        assert words in page.text, words
    assert not page.all("img")
    # a grid of views in the run is shown as it is
    Image.new("RGB", (7, 5), (1, 2, 3)).save(run_dir / "views.png")
    report(run_dir)
    (image,) = Page((run_dir / "report.html").read_text()).all("img")
    assert raw_png(image["src"]) == (run_dir / "views.png").read_bytes()


def test_data_of_train_alone_shows_its_neighbours_and_a_command_for_them(whole, tmp_path):
    run_dir = _copy(whole.run_dir, tmp_path)
    data = json.loads((run_dir / "data.json").read_text())
    (run_dir / "data.json").write_text(json.dumps({**data, "samples": {"train": 64}}))
    report(run_dir, "--data", whole.data)
    page = Page((run_dir / "report.html").read_text())
    assert "--split train --out RUN/features/train.safetensors" in page.text
    assert "--split test --out" not in page.text
    (run_dir / "features").mkdir()
    shutil.copy(whole.run_dir / "features/train.safetensors", run_dir / "features")
    report(run_dir, "--data", whole.data)
    page = Page((run_dir / "report.html").read_text())
    assert "their nearest neighbours in the split 'train'" in page.text
    assert "sslpipe embed RUN" not in page.text
    assert page.all("img")


def raw_png(uri: str) -> bytes:
    return base64.b64decode(uri.removeprefix("data:image/png;base64,"))


def test_views_are_drawn_for_a_run_without_a_picture_of_them(whole, tmp_path):
    assert not (whole.run_dir / "views.png").exists()
    (image,) = [each for each in whole.page.all("img") if each["alt"].startswith("A row for each")]
    words = str(whole.run_dir), "--data", str(whole.data), "--out", str(tmp_path / "views.png")
    command_line("preview", *words, status=0)
    shown = Image.open(io.BytesIO(raw_png(image["src"])))
    with Image.open(tmp_path / "views.png") as expected:
        assert np.array_equal(np.asarray(shown), np.asarray(expected))
    # that a part of the run's is not there spoils no report
    run_dir = _copy(whole.run_dir, tmp_path)
    recipe = json.loads((run_dir / "recipe.json").read_text())
    recipe["augment"]["preset"] = "own"
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    done = command_line("report", str(run_dir), "--data", str(whole.data), status=0)
    assert "without a picture of the views: " in done.stderr
    assert "No views.png yet" in (run_dir / "report.html").read_text()


def test_python_writes_the_pages_of_the_command(whole, other, tmp_path):
    ours = tmp_path / "ours" / "page.html"
    assert sslpipe.write_report(str(whole.run_dir), str(whole.data), str(ours)) == ours
    report(whole.run_dir, "--data", whole.data, "--out", tmp_path / "theirs.html")
    assert ours.read_bytes() == (tmp_path / "theirs.html").read_bytes()
    both = (whole.run_dir, other)
    assert sslpipe.write_report([str(each) for each in both], out=ours) == ours
    report(*both, "--out", tmp_path / "theirs.html")
    assert ours.read_bytes() == (tmp_path / "theirs.html").read_bytes()
    assert sslpipe.write_report(other) == other / "report.html"
    for given, named in ((tmp_path, "recipe.json"), ([other, other], "twice"), ([], "a run")):
        with pytest.raises(UserError, match=named):
            sslpipe.write_report(given)
    with pytest.raises(UserError, match="data is for the report of one run"):
        sslpipe.write_report(both, whole.data)


def test_a_run_is_shown_without_its_data_set(whole, tmp_path):
    report(whole.run_dir, "--out", tmp_path / "page.html")
    page_html = (tmp_path / "page.html").read_text().split("<body>")[1].split("<script>")[0]
    page = Page((tmp_path / "page.html").read_text())
    assert len(page.plots()) == len(whole.page.plots())
    assert '"image":"data:image/' in whole.html  # for hovering over the map
    assert "data:image/" not in page_html
    assert "The images are shown with --data only" in page.text
    assert page.rows == whole.page.rows


def test_embeddings_of_another_data_set_have_its_classes_and_are_told_apart(whole, tmp_path):
    said = "These embeddings are of another network or data set than the results."
    assert said not in whole.page.text
    assert "labelled train images" not in whole.page.text  # of Recall@1 the bank is the test split
    data = write_dataset(tmp_path / "grown", (24,), split="test")
    manifest = json.loads(data.read_text())
    data.write_text(json.dumps({**manifest, "classes": ["ant", "bee", "cat", "dog"]}))
    run_dir = _copy(whole.run_dir, tmp_path, "eval.json")
    out = run_dir / "features" / "test.safetensors"
    words = [str(whole.run_dir), "--data", str(data), "--split", "test", "--out", str(out)]
    command_line("embed", *words, "--num-workers", "0", "--device", "cpu", status=0)
    for more in (["--data", data], []):
        report(run_dir, *more)
        html = (run_dir / "report.html").read_text()
        assert said in Page(html).text
        assert all(name in html for name in ("ant", "bee", "cat", "dog"))
        shown = [image["alt"] for image in Page(html).all("img")]
        assert not any("plain" in alt for alt in shown)
        assert any("bee" in alt for alt in shown) == bool(more)


def test_mistakes_are_one_line(whole, tmp_path):
    other, run = write_dataset(tmp_path / "other", (4,), split="test"), whole.run_dir
    old = _copy(run, tmp_path)
    (old / "eval.json").write_text('{"schema_version": 99}')
    for words, said in (
        ([run, run / ".." / "run"], "is named twice; name each run once"),
        ([run, old, "--data", whole.data], "--data is for the report of one run"),
        ([run, "--data", other], "not the data set of the run's features"),
        ([old], "schema_version = 99"),
    ):
        done = command_line("report", *map(str, words), status=2)
        (line,) = done.stderr.strip().splitlines()
        assert said in line


def _copy(source: Path, folder: Path, *more: str) -> Path:
    """A run of which nothing is known but how it began."""
    run_dir = folder / "bare"
    run_dir.mkdir()
    for name in ("recipe.json", "data.json", "run.json", *more):
        (run_dir / name).write_bytes((source / name).read_bytes())
    return run_dir


def row(features, value, low, high, *, whitened=False, column="kNN", **more) -> dict:
    place = {"features": features, "whitened": whitened, "column": column}
    number = {"protocol": "p", "metric": "top1", "value": value, "interval95": [low, high]}
    return {**place, **number, "queries": 1000, "bank": 50, "details": {}, **more}


def evaluation_of(*rows) -> dict:
    facts = {"data_sha256": "d", "split": "test", "train_split": "train"}
    return {"schema_version": 1, "facts": facts, "columns": ["kNN"], "rows": rows, "left_out": []}


def test_the_best_is_marked_only_where_no_interval_of_other_features_overlaps():
    def best_of(*ends, metric="top1"):
        lines = [
            Line(name, form, {"kNN": row(name, 0, low, high, metric=metric)})
            for (name, form), (low, high) in zip(kinds, ends, strict=True)
        ]
        return [lines.index(line) for line in clear_best(lines, "kNN")]

    kinds = [("ssl", False), ("ssl", True), ("pixels", False), ("random", False)]
    assert best_of((0.6, 0.7), (0.65, 0.75), (0.4, 0.5), (0.3, 0.59)) == [0, 1]  # both forms
    assert best_of((0.6, 0.7), (0.65, 0.75), (0.4, 0.6), (0.3, 0.4)) == [1]
    assert best_of((0.6, 0.7), (0.65, 0.75), (0.4, 0.66), (0.3, 0.4)) == []
    errors = [(0.3, 0.4), (0.25, 0.35), (0.5, 0.6), (0.4, 0.9)]  # the fewest are best
    assert best_of(*errors, metric="fpr@95tpr") == [1]
    kinds = kinds[:2]
    assert best_of((0.6, 0.7), (0.1, 0.2)) == []  # nothing to compare with
    assert clear_best([Line("ssl", False, {})], "kNN") == []


def test_the_page_begins_with_the_two_sentences_of_the_suite(whole):
    evaluation = evaluation_of(row("ssl", 0.9, 0.88, 0.92), row("random", 0.5, 0.4, 0.6))
    run = read_run(whole.run_dir)._replace(evaluation={**evaluation, "against": [compared()]})
    top = header(run).partition("<div")[0].replace("\N{NO-BREAK SPACE}", " ")
    for sentence in advise(run.evaluation):
        assert coded(sentence) in top
    assert "not known" in header(run._replace(evaluation=None)).partition("<div")[0]


def test_pictures_are_of_the_split_that_was_measured_and_of_its_protocol(whole):
    run = read_run(whole.run_dir)
    samples = {"train": 9, "test": 4, "unseen": 5}
    for column, split, searched in (("kNN", "unseen", "train"), ("Recall@1", "unseen", "unseen")):
        evaluation = evaluation_of(row("ssl", 0.9, 0.88, 0.92, column=column))
        evaluation["facts"]["split"] = split
        measured = run._replace(evaluation=evaluation, data={**run.data, "samples": samples})
        assert (shown_split(measured), searched_split(measured)) == (split, searched)
        assert f"of 1,000 images of the split <code>{split}</code>" in header(measured)
    assert shown_split(run._replace(evaluation=None)) == "test"


def test_the_first_paragraph_names_baselines_in_the_same_form_judges_once_and_says_what_leaked(
    whole,
):
    # paired, they are apart; one by one their intervals overlap
    evaluation = evaluation_of(
        row("random", 0.4, 0.38, 0.42),
        row("random", 0.5, 0.48, 0.52, whitened=True),
        row("pixels", 0.6, 0.58, 0.62),
        row("pixels", 0.3, 0.28, 0.32, whitened=True),
        row("ssl", 0.63, 0.61, 0.65),
        row("ssl", 0.99, 0.98, 1.0, whitened=True),
    )
    others = {"features": "pixels", "column": "kNN", "whitened": False, "clean_value": 0.1}
    own = {**others, "features": "ssl", "clean_value": 0.55}
    found = {"samples": 1000, "leaked": 340, "how": "by pixels", "rows": [others, own]}

    def said(leakage=None):
        run = read_run(whole.run_dir)._replace(evaluation={**evaluation, "leakage": leakage})
        return summary(run).split("kNN on ")[1]

    assert "<b>63.0 %</b> of 1,000 test images" in said()
    assert said().endswith("raw pixels: 60.0 %; random weights: 40.0 %.")
    assert not any(word in said() for word in ("distinguish", "above", "below", "better"))
    without = "340 of 1,000 test images are in train, too; without them it gets 55.0 %."
    assert said(found).endswith(f"random weights: 40.0 %. {without}")
    assert said({**found, "leaked": 0}) == said()
    none = {**found, "rows": [{**own, "clean_value": None}]}
    assert said(none).endswith("are in train, too.")


def test_what_was_not_measured_is_a_sentence_and_leaks_are_told_with_what_lists_them():
    evaluation = evaluation_of(row("ssl", 0.5, 0.4, 0.6))
    evaluation |= {"columns": ["kNN", "kNN, 100/class"], "left_out": ["a < b", "c"]}
    html = result_table(evaluation)
    assert "<p class='note'>Not measured: a &lt; b; c.</p>" in html
    assert "100/class" not in html
    clean = {"clean_value": 0.25, "clean_interval95": [0.2, 0.3], "clean_queries": 30}
    found = {"samples": 40, "leaked": 10, "how": "by pixels"}
    html = leakage({"leakage": {**found, "rows": [row("ssl", 0.5, 0.4, 0.6) | clean]}})
    assert "10 of 40 test samples" in html
    assert "<td>50.0</td><td>25.0 (20.0–30.0)</td><td>30</td>" in html
    assert "<code>sslpipe curate duplicates DATA --out DIR</code> lists the pairs" in html
    assert "`" not in html


def test_a_column_of_fewer_test_images_says_how_many():
    rows = [row("ssl", 0.5, 0.4, 0.6), row("ssl", 0.5, 0.4, 0.6, column="linear")]
    evaluation = evaluation_of(*rows) | {"columns": ["kNN", "linear"]}
    total = rows[0]["queries"]
    console = Console(width=200, record=True, file=io.StringIO())
    for fewer, text in ((total, ""), (337, " (linear: 337)")):
        rows[1]["queries"] = fewer
        assert f"over {total:,} test images{text} (over classes" in result_table(evaluation)
        console.print(suite_table(evaluation))
        assert f"{total:,} test samples{text}" in " ".join(console.export_text().split())


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ({"C": 0.125, "C_at_edge": False}, ""),  # as eval.json was before
        ({"C": 0.125, "C_at_edge": True}, "C = 0.125 is at the edge of its grid"),
        ({"C": 0.125, "C_at_edge": False, "converged": False}, "the fit did not converge"),
    ],
)
def test_a_fit_at_its_grids_edge_or_cut_short_is_told_below_the_table(details, told):
    html = result_table(evaluation_of(row(EVIL, 0.5, 0.4, 0.6, details=details)))
    table, below = html.split("</table>")[:2]
    assert table.count("<b>not converged</b>") == (not details.get("converged", True))
    assert told in below
    assert html.count("at the edge") + html.count("did not converge") == bool(told)
    assert EVIL not in html


def test_other_networks_stand_in_the_table_with_their_answers_and_colours_of_their_own(whole):
    others = [f"{EVIL}{number}" for number in range(2)]
    rows = [row("ssl", 0.5, 0.4, 0.6), *(row(name, 0.6, 0.5, 0.7) for name in others)]
    answers = [
        compared(against=others[0], answer="worse", difference=-0.1, interval95=[-0.2, -0.05]),
        compared(against=others[1], start=True, of=2, whitened=True),
        compared(against=others[1], measure="MAP@R", primary=False, unit="classes", count=7),
    ]
    evaluation = {**evaluation_of(*rows), "against": answers, "not_compared": [f"gone: {QUOTES}"]}
    html = result_table(evaluation)
    page = Page(html)
    assert not {"script", "img", "b onload"} & {tag for tag, _ in page.tags}
    for text in ("worse", "better", "-10.0 -20.0 to -5.0", "7 classes", "1,000 images", others[0]):
        assert text in page.text
    assert [html.count(f"<b>{answer}</b>") for answer in ("worse", "better")] == [1, 1]
    assert html.count("<td>does not decide</td>") == 1
    table = against_table(answers)  # on the console
    assert [*map(str, table.columns[-1].cells)] == ["worse", "better", "does not decide"]
    said = Page(summary(read_run(whole.run_dir)._replace(evaluation=evaluation))).text
    assert said.startswith(f"Worse than {others[0]}: use the model you have: kNN")
    assert f"Better than {others[1]}, which it started from: " in said
    assert f"gone: {QUOTES}" in said
    assert said.index("hold together") < said.index("random weights is not known")


def test_many_classes_give_lists_instead_of_a_matrix():
    counts = np.diag(np.full(30, 10))
    counts[7, 9], counts[7, 7], counts[29, 29] = 6, 4, 1
    details = {"confusion": counts.tolist(), "C": 1.0, "C_at_edge": False}
    html = confusion(
        evaluation_of(row("ssl", 0.9, 0.8, 1.0, column="linear", details=details)), [EVIL] * 8
    )
    assert "<table" not in html
    assert "class 9: 6" in html
    assert f"{EVIL}" not in html
    assert "recall 40 %" in html
    assert "class 29: recall" not in html  # of its one image, 100 %


def test_classes_without_a_name_are_called_by_their_label_however_large():
    labels = np.array([-1, 0, 10**12, 1, 7, 10**12])
    names, places = named_labels(["ape", "bee"], labels)
    called = [names[k] if k >= 0 else None for k in places.tolist()]
    assert called == [None, "ape", f"class {10**12}", "bee", "class 7", f"class {10**12}"]
    details = {"confusion": [[3, 4], [0, 5]], "numbers": [1, 10**12], "C": 1.0, "C_at_edge": False}
    html = confusion(
        evaluation_of(row("ssl", 0.9, 0.8, 1.0, column="linear", details=details)), ["ape", "bee"]
    )
    assert f"bee predicted as class {10**12}: 4" in html


def test_thumbnails_are_the_samples(whole):
    pictures = thumbnails(load_index(whole.data).split("train"), [5, 100, 5])
    assert sorted(pictures) == [5, 100]
    for sample, uri in pictures.items():
        shown = Image.open(io.BytesIO(raw_png(uri)))
        assert np.array_equal(np.asarray(shown), picture(sample))


@pytest.mark.parametrize("same_split", [False, True])
def test_neighbours_are_those_of_a_loop_over_all_cosines(same_split):
    generator = torch.Generator().manual_seed(0)
    bank = Embeddings(
        torch.randn(60, 5, generator=generator),
        torch.randint(0, 3, (60,), generator=generator),
        torch.arange(60),
    )
    queries = bank.rows(torch.arange(30))
    if not same_split:
        queries = queries._replace(features=torch.randn(30, 5, generator=generator))
    rows = neighbour_rows(bank, queries, same_split=same_split)
    assert len({r.id for r in rows}) == len(rows) > RANDOM_QUERIES
    for r in rows:
        cosines = {
            i: float(torch.cosine_similarity(queries.features[r.id], bank.features[i], dim=0))
            for i in range(60)
            if not (same_split and i == r.id)
        }
        nearest = sorted(cosines, key=lambda i: -cosines[i])[:NEIGHBOURS]
        ids, labels, similarities = zip(*r.near, strict=True)
        assert list(ids) == nearest
        assert list(labels) == bank.labels[nearest].tolist()
        assert similarities == pytest.approx([cosines[i] for i in nearest], abs=1e-6)
    assert all(r.wrong for r in rows[RANDOM_QUERIES:])


def test_a_long_line_keeps_its_ends_and_its_spikes():
    y = np.sin(np.arange(50_000) / 5000)
    y[12_345], y[40_001], y[100] = 9.0, -9.0, np.nan
    short = thinned(Series("s", np.arange(50_000.0), y))
    assert len(short.x) <= MOST_POINTS + 2
    assert {0.0, 12_345.0, 40_001.0, 49_999.0} <= set(short.x)
    assert np.array_equal(short.y, y[short.x.astype(int)], equal_nan=True)


def spec_of(html: str) -> dict:
    """The Vega-Lite specification inside a chart."""
    return json.loads(re.search(r"<script type='application/json'>(.*?)</script>", html)[1])


def test_a_chart_breaks_its_line_where_there_is_no_number():
    html = line_chart("loss", [Series("loss", np.arange(5.0), np.array([3, 2, np.nan, 1, 0.5]))])
    assert [row["y"] for row in spec_of(html)["data"]["values"]] == [3, 2, None, 1, 0.5]
    assert "no finite value" in line_chart("x", [Series("x", np.zeros(1), np.array([np.inf]))])


def test_names_of_strangers_stay_data_inside_a_chart():
    evil = "</script><script>alert(1)</script><!--" + QUOTES
    lines = [Series(evil, np.arange(3.0), np.arange(3.0)), Series("b", np.arange(3.0), np.ones(3))]
    html = line_chart(evil, lines)
    assert html.count("<script") == html.count("</script>") == 1
    assert "<!--" not in html
    assert "<img" not in html
    assert {row["n"] for row in spec_of(html)["data"]["values"]} == {evil, "b"}


LEFT_OUT = ("checkpoints", "*.html", "MANIFEST.json")  # the files are changed


@pytest.fixture
def other(whole, tmp_path) -> Path:
    """The run again, with another name, learning rate and accuracy."""
    run_dir = tmp_path / "other"
    shutil.copytree(whole.run_dir, run_dir, ignore=shutil.ignore_patterns(*LEFT_OUT))
    recipe = json.loads((run_dir / "recipe.json").read_text())
    recipe["name"], recipe["optim"]["peak_lr"] = NAME, 0.125
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    evaluation = json.loads((run_dir / "eval.json").read_text())
    for line in evaluation["rows"]:
        if line["features"] == "ssl":
            line["value"], line["interval95"] = 0.0625, [0.05, 0.08]
    evaluation["sha256"] = content_sha256(evaluation)
    (run_dir / "eval.json").write_text(json.dumps(evaluation))
    return run_dir


def test_a_comparison_shows_both_runs_their_numbers_and_what_differs(whole, other, tmp_path):
    report(whole.run_dir, other, "--out", tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    page = Page(html)
    assert not {"link", "iframe", "b onload"} & {tag for tag, _ in page.tags}
    assert not page.plots()
    for text in (EVIL, NAME):
        assert text not in html
        assert text in page.text
    by_name = {line[0]["text"]: line for line in page.rows if line[0]["text"]}
    for name, run_dir in ((EVIL, whole.run_dir), (NAME, other)):
        rows = json.loads((run_dir / "eval.json").read_text())["rows"]
        first = next(r for r in rows if r["features"] == "ssl" and r["column"] == "kNN")
        assert float(by_name[name][1]["value"]) == first["value"]
        assert any(shown.startswith(f"{name}, flattened (power ") for shown in by_name)
    assert len([name for name in by_name if name.startswith("raw pixels")]) == 2  # once, not twice
    cells = re.findall(r"<tr><th scope='row'><code>(recipe\.[^<]*)</code></th>(.*?)</tr>", html)
    assert [key for key, _ in cells] == ["recipe.optim.peak_lr"]
    assert "<code>0.125</code>" in cells[0][1]


def test_runs_of_other_test_data_are_not_put_side_by_side(whole, other):
    runs = {"a": read_run(whole.run_dir), "b": read_run(other)}
    assert "Nothing" in differences({"a": runs["a"], "b": runs["a"]})
    assert "not comparable" not in results(runs)
    for key in ("data_sha256", "split", "train_split"):
        facts = {**runs["b"].evaluation["facts"], key: "another"}
        changed = runs["b"]._replace(evaluation={**runs["b"].evaluation, "facts": facts})
        html = results({**runs, "b": changed})
        assert "not comparable" in html
        assert html.count("<table class='results'>") == 2
    html = results({**runs, "b": runs["b"]._replace(evaluation=None)})
    assert "b has not been evaluated. Run: <code>sslpipe evaluate suite" in html


def test_an_evaluation_of_weights_before_the_last_is_said(whole):
    run = read_run(whole.run_dir)
    assert "Evaluated at" not in header(run)
    run.evaluation["facts"]["step"] = 4
    said = "Evaluated at step 4 of 8, unfinished: the train command resumes it."
    assert header(run).split("<p class='verdict'>")[1].startswith(f"<b>{said}</b>")
    run.recipe["steps"], run.evaluation["facts"]["steps"] = None, 8  # as the terminal says it
    assert "Evaluated at step 4 of 8" in header(run)
