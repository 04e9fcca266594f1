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


def test_of_two_data_sets_a_sample_is_named_with_its_own(call, shop, model, tmp_path):
    other = shutil.copytree(shop / "data", tmp_path / "more")
    rows, data, query = shop / "all.safetensors", shop / "data", shop / "photos/bob/1.png"
    words = ["search", f"{rows},{rows}", query, "--model", model, "--top", 2, "--data", data]
    samples = [line.split("\t")[3] for line in call(*words, "--data", other)[0].splitlines()]
    found = json.loads(call(*words, "--data", other, "--json")[0])
    assert samples == [f"{one['data']}:all:{one['id']}" for one in found]
    assert {one["data"] for one in found} == {str(data), str(other)}
    alone = [line.split("\t")[3] for line in call(*words)[0].splitlines()]
    assert alone == [f"all:{one['id']}" for one in found]


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
    (queries / "dead.png").symlink_to("/nowhere.png")
    (queries / "empty.jpg").touch()
    said, errors = call("search", *usual)
    assert said == without
    lines = [line for line in errors.splitlines() if line.startswith("skipped: ")]
    assert [re.search(r"(\w+)\.(png|jpg)", line)[1] for line in lines] == [
        "broken",
        "dead",
        "empty",
    ]
    assert "3 of 6 images were skipped" in errors


def test_the_python_of_the_page_runs(call, shop, model, monkeypatch, capsys):
    (shop / "out").mkdir()
    (shop / "runs").mkdir()
    (shop / "data").rename(shop / "out/photos")
    (shop / "all.safetensors").rename(shop / "out/photos.safetensors")
    shutil.copytree(model, shop / "runs/photos")
    shutil.copy(shop / "photos/bob/1.png", shop / "query.jpg")
    names = ("ada.jpg", "bob.jpg", "stranger.jpg")
    for name, image in zip(names, sorted(shop.glob("photos/*/*.png"))[::3], strict=True):
        shutil.copy(image, shop / name)
    monkeypatch.chdir(shop)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/search.md").read_text(), re.DOTALL)
    page = {"__name__": "page"}
    for code in blocks:
        if "# not installed with sslpipe" not in code:
            exec(code, page)
    first, *others, match = capsys.readouterr().out.splitlines()
    assert (first[:6], len(others)) == ("1.000 ", 4)
    assert match.startswith("[Match(name=") or match == "[None]"
    assert page["gallery"].names == ("Ada", "Bob")
    (hits,) = page["search"].find(page["backbone"].encode(["query.jpg"]), top=5)
    assert page["found"][0].tolist() == [hit.id for hit in hits]  # by faiss
    assert page["scores"][0] == pytest.approx([hit.score for hit in hits], abs=1e-6)


def test_features_are_flattened_unless_told_otherwise(call, shop, model, monkeypatch):
    words = ["search", shop / "all.safetensors", shop / "photos/bob/1.png", "--model", model]
    words += ["--data", shop / "data"]
    plain, _ = call(*words)
    monkeypatch.setattr("sslpipe.search.flattening.LEAST_FLATTENED", 9)
    flat, errors = call(*words)
    assert "features flattened, fitted on 9 images (power 0.25)" in errors
    assert flat != plain
    same, errors = call(*words, "--no-flatten")
    assert (same, "features as they are" in errors) == (plain, True)


@pytest.fixture
def vectors(tmp_path):
    """Vectors that another program made, with names and classes, and a file of queries."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(30, 6)).astype(np.float32)
    queries = rng.normal(size=(2, 6)).astype(np.float32)
    names = np.array([f"shop/{place} ä.jpg" for place in range(30)])
    classes = np.array([["owl", "ape", ""][place % 3] for place in range(30)])
    np.savez(tmp_path / "rows.npz", features=rows, ids=names, labels=classes)
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "queries.npy", queries)
    units = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, rows)]
    return tmp_path, units[0] @ units[1].T, names, classes


@pytest.mark.parametrize("file", ["rows.npz", "rows.npy"])
def test_vectors_are_searched_by_vectors_without_a_model_or_data(call, vectors, file):
    folder, cosines, names, classes = vectors
    words = ["search", folder / file, folder / "queries.npy", "--no-flatten", "--json"]
    found = json.loads(call(*words, "--top", 4)[0])
    assert [one["query"] for one in found] == [f"{folder / 'queries.npy'}:{q}" for q in "00001111"]
    nearest = np.argsort(-cosines, axis=1)[:, :4].ravel().tolist()
    scores = np.sort(-cosines, axis=1)[:, :4].ravel()
    np.testing.assert_allclose([one["score"] for one in found], -scores, atol=1e-5)
    texts = names.tolist() if file == "rows.npz" else [*map(str, range(30))]
    assert [one["name"] for one in found] == [texts[place] for place in nearest]
    known = [classes[place] or None if file == "rows.npz" else None for place in nearest]
    assert [one["class"] for one in found] == known


def test_what_a_search_of_vectors_lacks_is_one_line(call, shop, model, vectors):
    folder, *_ = vectors
    rows, queries, image = folder / "rows.npy", folder / "queries.npy", shop / "photos/bob/1.png"
    np.save(folder / "wide.npy", np.ones((2, 9)))
    for words, named in (
        ([rows, image], "--model"),
        ([shop / "all.safetensors", image], "--model"),
        ([rows, image, "--model", model], "which network"),
        ([rows, queries, "--where", "a = b"], "--data"),
        ([rows, queries, "--out", folder / "found.html"], "--model"),
        ([rows, folder / "wide.npy"], "wide.npy has 9 features"),
        ([rows, folder / "none.npy"], "there is no such file"),
    ):
        _, errors = call("search", *words, status=2)
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert named in line


def test_an_image_finds_itself_without_the_data_set(call, shop, model):
    words = ["search", shop / "all.safetensors", shop / "photos/bob/1.png", "--model", model]
    bare = json.loads(call(*words, "--json")[0])
    full = json.loads(call(*words, "--json", "--data", shop / "data")[0])
    assert [(one["id"], one["score"]) for one in bare] == [(o["id"], o["score"]) for o in full]
    assert {one["split"] for one in bare} == {"all"}
