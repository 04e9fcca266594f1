"""The colour under transparent parts is part of a data set: every reader of a file applies it."""

import importlib.util
import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import sslpipe
from sslpipe.cli.app import run
from sslpipe.data.decode import decode
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.feature_files import load_embeddings
from sslpipe.export.join import join
from sslpipe.export.load import load_run
from sslpipe.search.gallery import Gallery
from tests.helpers.runs import ROOT, write_recipe
from tests.search.test_cli_gallery import write_model

ORANGE = (255, 128, 0)
ON_ORANGE = RGB8.on(ORANGE)


def drawing(number):
    """(h, w) alpha of a drawing: what is not drawn is transparent."""
    rng = np.random.default_rng(number)
    return np.kron(rng.integers(0, 2, (4, 5)) * 255, np.ones((6, 5))).astype(np.uint8)


def write_drawing(number, path):
    """A file of one of the ways in which transparency is stored; black under it, or noise."""
    alpha, kind = drawing(number), number % 5
    black = np.zeros_like(alpha)
    if kind == 0:
        Image.fromarray(np.dstack([black, black, black, alpha])).save(path.with_suffix(".png"))
    elif kind == 1:
        Image.fromarray(np.dstack([black, alpha // 2]), "LA").save(path.with_suffix(".png"))
    elif kind == 2:  # a palette with a transparent colour
        image = Image.fromarray((alpha == 0).astype(np.uint8), "P")
        image.putpalette([0, 0, 0, 0, 0, 1])
        image.save(path.with_suffix(".png"), transparency=1)
    elif kind == 3:  # a colour that means transparent
        pixels = np.where(alpha[..., None] > 0, [0, 0, 0], [0, 0, 1]).astype(np.uint8)
        Image.fromarray(pixels).save(path.with_suffix(".png"), transparency=(0, 0, 1))
    else:
        noise = np.random.default_rng(7).integers(0, 256, (*alpha.shape, 3), np.uint8)
        options = {"lossless": True, "exact": True}
        Image.fromarray(np.dstack([noise, alpha])).save(path.with_suffix(".webp"), **options)


def call(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sslpipe", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            run()
    assert not end.value.code


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Drawings on orange as shards, a run on them, its export, and features of others' weights."""
    folder = tmp_path_factory.mktemp("shop")
    for number in range(30):
        (folder / "drawings" / f"n{number % 3}").mkdir(parents=True, exist_ok=True)
        write_drawing(number, folder / "drawings" / f"n{number % 3}" / f"{number:02d}.x")
    root = ("--root", folder / "drawings", "--samples-per-shard", 10)
    call("shards", "build", folder / "data", *root, "--background", "#ff8000")
    recipe = write_recipe(folder)
    data = ("--data", folder / "data")
    small = ("steps=1", "data.batch_size=8", "data.num_streams=1", "data.holdout=0")
    call("train", recipe, *data, "--run-dir", folder / "run", *small)
    call("export", folder / "run", "--out", folder / "export", "--format", "safetensors")
    (folder / "weights").mkdir()
    write_model(folder / "weights", seed=0)
    words = (*data, "--split", "train")
    call("embed", folder / "weights", *words, "--out", folder / "weights.safetensors")
    call("embed", folder / "export", *words, "--out", folder / "export.safetensors")
    return folder


def files(shop):
    return sorted((shop / "drawings").rglob("*.*g")) + sorted((shop / "drawings").rglob("*.webp"))


def expected(path):
    """The oracle: float arithmetic of the alpha on orange, (h, w, 3)."""
    rgba = np.asarray(Image.open(path).convert("RGBA")).astype(float)
    share = rgba[..., 3:] / 255
    return rgba[..., :3] * share + np.array(ORANGE) * (1 - share)


def test_the_background_is_part_of_the_data_set_the_run_the_export_and_the_features(shop):
    assert load_index(shop / "data").image_type == ON_ORANGE
    assert json.loads((shop / "data/dataset.json").read_text())["image"]["background"] == [*ORANGE]
    assert load_run(shop / "run").image_type == ON_ORANGE
    assert sslpipe.load_backbone(shop / "export").image_type == ON_ORANGE
    assert "`#ff8000`" in (shop / "export/README.md").read_text()
    for name in ("weights", "export"):
        _, metadata = load_embeddings(shop / f"{name}.safetensors")
        assert metadata["image"]["background"] == [*ORANGE]


def test_files_are_decoded_as_the_build_stored_them(shop):
    for path in files(shop):
        pixels = decode(path.read_bytes(), 256, image_type=ON_ORANGE).transpose(1, 2, 0)
        assert np.abs(pixels - expected(path)).max() <= 0.5
    assert len(files(shop)) == 30


@pytest.mark.parametrize("model", ["weights", "export", "run"])
def test_a_transparent_image_finds_itself(shop, model, capsys):
    features = shop / f"{'export' if model == 'run' else model}.safetensors"
    words = ["search", features, *files(shop), "--model", shop / model, "--data", shop / "data"]
    call(*words, "--top", 1, "--no-flatten", "--json", "--out", shop / "found.html")
    hits = json.loads(capsys.readouterr().out)
    assert len(hits) == 30
    for hit in hits:
        assert hit["query"].endswith(f"/{hit['name']}"), hit
        assert hit["score"] > 1 - 1e-5


def test_in_python_too_from_paths_and_opened_images(shop):
    search = sslpipe.ImageSearch((shop / "weights.safetensors", shop / "data"), flatten=False)
    raw = sslpipe.load_backbone(shop / "weights")
    with pytest.raises(DataError, match=r"background.*matched"):
        search.check_network(raw.network_facts)
    backbone, _ = raw.matched(*search.splits)
    search.check_network(backbone.network_facts)
    opened = [Image.open(path) for path in files(shop)]
    for given in (files(shop), opened):
        for path, hits in zip(files(shop), search.find(backbone.encode(given), 1), strict=True):
            assert search.key(hits[0]).endswith(path.name)
            assert hits[0].score > 1 - 1e-5


def test_vectors_of_one_background_are_searched_by_vectors_of_it(shop, capsys):
    features = shop / "export.safetensors"
    call("search", features, features, "--top", 1, "--no-flatten", "--json")
    hits = json.loads(capsys.readouterr().out)
    assert [hit["query"].rpartition(":")[2] for hit in hits] == [str(hit["id"]) for hit in hits]


def test_a_gallery_enrols_and_identifies_on_the_background(shop, capsys, tmp_path):
    for path in files(shop):
        (tmp_path / "who" / path.stem).mkdir(parents=True)
        (tmp_path / "who" / path.stem / path.name).write_bytes(path.read_bytes())
    book = tmp_path / "book.safetensors"
    model = ("--model", shop / "export")
    call("gallery", "enrol", book, tmp_path / "who", *model)
    assert Gallery.load(book).metadata["image"]["background"] == [*ORANGE]
    capsys.readouterr()
    call("gallery", "identify", book, *files(shop), *model)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines] == [path.stem for path in files(shop)]


def test_onnx_with_preprocessing_says_the_background_and_the_service_applies_it(
    shop, tmp_path, monkeypatch
):
    pytest.importorskip("onnxruntime")
    out = tmp_path / "onnx"
    call("export", shop / "run", "--out", out, "--format", "onnx", "--with-preprocessing")
    monkeypatch.setenv("MODEL", str(out / "model.pixels.onnx"))

    class App:
        def post(self, path):
            return lambda function: function

    parts = {"FastAPI": App, "HTTPException": Exception, "Request": object}
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(**parts))
    place = ROOT / "docs" / "examples" / "service.py"
    spec = importlib.util.spec_from_file_location("service", place)
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    for path in files(shop):
        assert np.abs(service.read(path.read_bytes())[0] - expected(path)).max() <= 1


def test_without_a_background_build_and_encode_drop_alpha(shop, tmp_path):
    call("shards", "build", tmp_path / "out", "--root", shop / "drawings")
    index = load_index(tmp_path / "out")
    assert index.manifest.image is None
    raw = sslpipe.load_backbone(shop / "weights")
    for path in files(shop):
        dropped = np.asarray(Image.open(path).convert("RGBA"))[..., :3]
        assert np.array_equal(decode(path.read_bytes(), 256).transpose(1, 2, 0), dropped)
        pixels = torch.from_numpy(dropped.copy()).permute(2, 0, 1)
        torch.testing.assert_close(raw.encode(path), raw.encode(pixels))


def test_a_data_set_has_one_background(shop, tmp_path, capsys):
    words = ["shards", "build", tmp_path / "out", "--root", shop / "drawings"]
    call(*words, "--background", "white", "--split", "train")
    with pytest.raises(AssertionError):
        call(*words, "--split", "test")
    said = capsys.readouterr().err
    assert "--background" in said
    assert "#ffffff" in said
    call(*words, "--split", "test", "--background", "#fff")
    assert {*load_index(tmp_path / "out").manifest.splits} == {"train", "test"}


def test_a_join_takes_the_background_that_a_part_knows(shop, tmp_path):
    run_backbone, raw = load_run(shop / "run"), sslpipe.load_backbone(shop / "weights")
    for parts in ([run_backbone, raw], [raw, run_backbone]):
        assert join(parts, "a+b").image_type == ON_ORANGE
    with pytest.raises(UserError, match=r"#00ff00 and #ff8000"):
        join([run_backbone, raw.on((0, 255, 0))], "a+b")


def test_a_background_is_a_colour_of_8_bit_rgb():
    for wrong in ([256, 0, 0], [0, 0], "white", [-1, 0, 0]):
        with pytest.raises(ValueError, match="background"):
            ImageType.model_validate({**RGB8.model_dump(), "background": wrong})
    grey = {"channels": ["grey"], "dtype": "uint8", "low": [0], "high": [255]}
    with pytest.raises(ValueError, match="8-bit RGB"):
        ImageType.model_validate({**grey, "background": [0, 0, 0]})
    assert "background" not in RGB8.model_dump()


def test_exif_orientation_and_background(shop):
    path = files(shop)[0]
    upright = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(path).save(upright, "png", exif=exif)
    turned = decode(upright.getvalue(), 256, image_type=ON_ORANGE).transpose(1, 2, 0)
    assert np.abs(turned - np.rot90(expected(path), -1)).max() <= 0.5


def test_the_loader_puts_members_with_alpha_on_the_background_that_dataset_json_says(
    shop, tmp_path
):
    out = tmp_path / "out"
    call(
        "shards", "build", out, "--root", shop / "drawings"
    )  # which keeps PNG and WebP as they are
    tree = json.loads((out / "dataset.json").read_text())
    tree |= {"schema_version": 3, "image": ON_ORANGE.model_dump()}
    (out / "dataset.json").write_text(json.dumps(tree))
    call("shards", "verify", out)
    wanted = [expected(path) for path in files(shop)]
    count = 0
    for batch in one_pass(load_index(out).split("train")):
        for row in range(len(batch.ids)):
            height, width = batch.sizes[row].tolist()
            pixels = batch.images[row, :, :height, :width].permute(1, 2, 0).numpy()
            assert min(np.abs(pixels - each).max() for each in wanted) <= 0.5
            count += 1
    assert count == 30
