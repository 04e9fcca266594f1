"""`sslpipe search`: an image finds itself and its like, as lines, JSON and a page."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.search.test_cli_gallery import write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def shop(call, model, tmp_path):
    """Pictures of three patterns in class folders, their shards and features."""
    rng = np.random.default_rng(0)
    for name in ("ann", "bob", "<cy>"):
        pattern = rng.integers(0, 200, (20, 24, 3))
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            noisy = (pattern + rng.integers(0, 20, pattern.shape)).astype(np.uint8)
            Image.fromarray(noisy).save(tmp_path / "photos" / name / f"{number}.png")
    root = ("--root", tmp_path / "photos", "--name-pattern", "(?P<who>[^/]+)/.*")
    call("shards", "build", tmp_path / "data", "--split", "all", *root)
    words = "--data", tmp_path / "data", "--split", "all", "--out", tmp_path / "all.safetensors"
    call("embed", model, *words)
    return tmp_path


def test_an_image_finds_itself_then_its_class(call, shop, model):
    query = shop / "photos/bob/1.png"
    words = ["search", shop / "all.safetensors", query, "--model", model, "--data", shop / "data"]
    said, errors = call(*words, "--top", 3, "--out", shop / "found.html")
    assert "features as they are: 9 images are too few to flatten (100)" in errors
    lines = [line.split("\t") for line in said.splitlines()]
    assert [line[1] for line in lines] == ["1", "2", "3"]
    assert [line[5] for line in lines] == ["bob"] * 3
    assert lines[0][2] == "1.0000"
    page = (shop / "found.html").read_text()
    assert page.count("data:image/png") == 4  # the query and three images
    tree = json.loads(call(*words, "--top", 3, "--json")[0])
    assert [f"all:{one['id']}" for one in tree] == [line[3] for line in lines]
    said, _ = call(*words, "--where", "who = '<cy>'", "--out", shop / "found.html")
    assert {line.split("\t")[5] for line in said.splitlines()} == {"<cy>"}
    assert "<cy>" not in (shop / "found.html").read_text()  # escaped


def test_a_query_of_16_bits_is_on_the_page(call, shop, model):
    deep = np.arange(640 * 480, dtype=np.uint32).astype(np.uint16).reshape(480, 640)
    Image.fromarray(deep).save(shop / "deep.png")
    words = ["search", shop / "all.safetensors", shop / "deep.png", "--model", model]
    call(*words, "--data", shop / "data", "--out", shop / "found.html")
    assert (shop / "found.html").read_text().count("<img") == 10  # the query and nine images


def test_mistakes_are_one_line(call, shop, model, tmp_path):
    features, data = shop / "all.safetensors", shop / "data"
    query, other = shop / "photos/bob/1.png", tmp_path / "other"
    other.mkdir()
    write_model(other, seed=1)
    (shop / "text.png").write_text("no image")
    usual = {"--model": model, "--data": data}
    for words, options, named in (
        ([features, query], {"--model": other}, "backbone_sha256"),
        ([shop / "none.safetensors", query], {}, "there is no such file"),
        ([features, shop / "text.png"], {}, "text.png"),
        ([features, shop / "gone.png"], {}, "gone.png"),
        ([tmp_path / "none.json", query], {}, "there is no such file"),
        ([features, query], {"--where": "colour = red"}, "no column 'colour'"),
        ([f"{features},{features},{features}", query, "--data", data], {}, "--data names 2"),
    ):
        given = [word for pair in {**usual, **options}.items() for word in pair]
        said, errors = call("search", *words, *given, status=2)
        assert said == ""
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert named in line


def test_of_many_queries_those_that_cannot_be_read_are_skipped_and_named(call, shop, model):
    queries = shop / "queries"
    shutil.copytree(shop / "photos/bob", queries)
    usual = [shop / "all.safetensors", queries, "--model", model, "--data", shop / "data"]
    without, _ = call("search", *usual)
    (queries / "0 broken.png").write_bytes((queries / "1.png").read_bytes()[:60])
    said, errors = call("search", *usual)
    assert said == without
    (line,) = [line for line in errors.splitlines() if line.startswith("skipped: ")]
    assert "0 broken.png" in line


def test_the_python_of_the_page_runs(call, shop, model, monkeypatch, capsys):
    (shop / "out").mkdir()
    (shop / "runs").mkdir()
    (shop / "data").rename(shop / "out/photos")
    (shop / "all.safetensors").rename(shop / "out/photos.safetensors")
    shutil.copytree(model, shop / "runs/photos")
    shutil.copy(shop / "photos/bob/1.png", shop / "query.jpg")
    monkeypatch.chdir(shop)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/search.md").read_text(), re.DOTALL)
    page = {"__name__": "page"}
    for code in blocks:
        if "# not installed with sslpipe" not in code:
            exec(code, page)
    first, *others = capsys.readouterr().out.splitlines()
    assert (first[:6], len(others)) == ("1.000 ", 4)
    (hits,) = page["search"].find(page["backbone"].encode(["query.jpg"]), top=5)
    assert page["found"][0].tolist() == [hit.id for hit in hits]  # by faiss
    assert page["scores"][0] == pytest.approx([hit.score for hit in hits], abs=1e-6)


def test_features_are_flattened_unless_told_otherwise(call, shop, model, monkeypatch):
    words = ["search", shop / "all.safetensors", shop / "photos/bob/1.png", "--model", model]
    words += ["--data", shop / "data"]
    plain, _ = call(*words)
    monkeypatch.setattr("sslpipe.evaluation.flatten.LEAST_FLATTENED", 9)
    flat, errors = call(*words)
    assert "features flattened, fitted on 9 images (power 0.25)" in errors
    assert flat != plain
    same, errors = call(*words, "--no-flatten")
    assert (same, "features as they are" in errors) == (plain, True)
