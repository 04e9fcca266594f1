"""ONNX files in int8, and with preprocessing inside, beside the model in memory."""

import importlib.util
import io
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from PIL import Image

import sslpipe
from sslpipe.augment.eval_view import EvalView, JoinedView
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.errors import ExportError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export import onnx_files
from sslpipe.export.onnx_files import Agreement, add_preprocessing, agreement
from sslpipe.export.verify import OnnxSession
from sslpipe.export.whitening import flatten_backbone
from sslpipe.export.write import export_backbone
from tests.helpers.dataset import write_dataset
from tests.helpers.exports import trained, tree

DOCS = Path(__file__).parents[2] / "docs"
INT8 = "onnx-int8"
pytestmark = pytest.mark.usefixtures("proved_here")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), (40, 40), px=32)


@pytest.fixture(scope="module")
def images(data):
    return load_index(data).split("train")


@pytest.fixture(scope="module")
def lowered(tmp_path_factory, images):
    """A network in float32 and int8, each with and without preprocessing."""
    model, out, found = trained(widths=[8, 16]), tmp_path_factory.mktemp("lower") / "out", {}
    written = export_backbone(
        model,
        out,
        ["onnx", INT8],
        with_preprocessing=True,
        data=images.index,
        split="train",
        least_equal=0,
        on_agreement=found.__setitem__,
    )
    return model, out, written, found


def by_loops(ours, theirs):
    """The share of equal first neighbours and of equal top-10, in float64, an image at a time."""
    orders = []
    for rows in (ours, theirs):
        units = rows.double() / rows.double().norm(dim=1, keepdim=True)
        cosines = (units @ units.T).fill_diagonal_(-2)
        orders.append(cosines.argsort(dim=1, descending=True)[:, :10].tolist())
    pairs = list(zip(*orders, strict=True))
    first = np.mean([one[0] == other[0] for one, other in pairs])
    return first, np.mean([len({*one} & {*other}) / 10 for one, other in pairs])


def test_the_agreement_is_that_of_loops():
    torch.manual_seed(0)
    rows = torch.randn(60, 5)
    for noise in (0, 0.1, 1):
        others = rows + noise * torch.randn(60, 5)
        found = agreement(rows, others, "some", "test")
        assert (found.first, found.ten) == pytest.approx(by_loops(rows, others))
        assert (found.images, found.data, found.split) == (60, "some", "test")
    assert agreement(rows, 3 * rows).first == 1
    text = str(Agreement(0.95, 0.5, 1000, "some", "test"))
    assert "95.0% of 1,000 images of some, split test" in text


def test_int8_is_proved_by_neighbours_and_says_so(lowered, images):
    model, out, written, found = lowered
    split = images
    assert list(found) == [INT8]
    card = (out / "README.md").read_text()
    rng = np.random.default_rng(0).permutation(80)
    (batch,) = one_pass(split, ids=np.sort(rng[40:]))  # the other half has calibrated
    views = model.view(batch.images, torch.full((40, 2), 32))
    with torch.no_grad():
        expected = model(views)
    actual = OnnxSession(written[INT8])(views)
    first, ten = by_loops(expected, actual)
    stated = {e.key: e.value for e in onnx.load(written[INT8]).metadata_props}
    told = Agreement(**json.loads(stated["agreement"]))
    assert (told.first, told.ten, told.images) == pytest.approx((first, ten, 40))
    assert told == found[INT8]
    assert f"# {told}" in card
    assert torch.cosine_similarity(actual, expected).min() > 0.97
    assert found[INT8].first >= 0.75


def test_int8_of_a_flattened_backbone_is_proved_by_the_flattened_rows(tmp_path, images):
    model = trained(widths=[8])
    split = images
    (batch,) = one_pass(split, ids=np.arange(80), batch_size=80)
    views = model.view(batch.images, torch.full((80, 2), 32))
    with torch.no_grad():
        rows = Embeddings(model(views), torch.arange(80), torch.arange(80))
    fitted = fit_whitening(rows, dims=5, power=0.5)
    flatten_backbone(model, fitted)
    found = {}
    written = export_backbone(
        *(model, tmp_path / "out", [INT8]),
        data=images.index,
        split="train",
        least_equal=0,
        on_agreement=found.__setitem__,
    )
    actual = OnnxSession(written[INT8])(views)
    expected = fitted.apply(rows.features)  # (80, 5)
    assert torch.cosine_similarity(actual, expected).mean() > 0.9
    kept = np.sort(np.random.default_rng(0).permutation(80)[40:])  # the other half has calibrated
    told = pytest.approx((found[INT8].first, found[INT8].ten))
    assert by_loops(expected[kept], actual[kept]) == told


def test_int8_weights_have_seven_bits_and_a_scale_each_channel(lowered):
    """Products of 8-bit weights may overflow without VNNI: the proof would not hold there."""
    graph = onnx.load(lowered[2][INT8]).graph
    kernels = [
        onnx.numpy_helper.to_array(each)
        for each in graph.initializer
        if each.data_type == onnx.TensorProto.INT8 and len(each.dims) == 4
    ]
    assert len(kernels) > 3
    assert max(int(np.abs(kernel.astype(int)).max()) for kernel in kernels) <= 64
    scales = [tuple(e.dims) for e in graph.initializer if e.name.endswith("weight_scale")]
    assert scales
    assert all(len(dims) == 1 and dims[0] > 1 for dims in scales)


def test_the_same_model_and_images_give_the_same_bytes(tmp_path, lowered, data):
    model, out, _, _ = lowered
    written = sslpipe.export_backbone(
        model,
        tmp_path / "again",
        [INT8],
        with_preprocessing=True,
        data=data,
        split="train",
        least_equal=0,
    )
    assert written[f"{INT8}-pixels"].name == "model.int8.pixels.onnx"
    raw = (out / "model.int8.onnx").read_bytes()
    assert raw == (tmp_path / "again" / "model.int8.onnx").read_bytes()
    assert str(tmp_path).encode() not in raw
    assert b"/tmp/" not in raw


def test_a_format_that_finds_others_is_refused_and_leaves_no_file(tmp_path, images, monkeypatch):
    quantise = onnx_files._quantised

    def coarse(*arguments):
        graph = quantise(*arguments)
        for each in graph.graph.initializer:
            if each.data_type == onnx.TensorProto.INT8 and len(each.dims) == 4:
                signs = np.sign(onnx.numpy_helper.to_array(each))
                each.CopyFrom(onnx.numpy_helper.from_array(signs, each.name))
        return graph

    monkeypatch.setattr(onnx_files, "_quantised", coarse)
    with pytest.raises(ExportError, match=r"onnx-int8: nearest .*95.0% are wanted.*least_equal=0"):
        export_backbone(
            trained(widths=[8, 16]),
            tmp_path / "out",
            ["onnx-int8"],
            data=images.index,
            split="train",
        )
    assert tree(tmp_path) == []


def test_mistakes_are_named(tmp_path, images, monkeypatch):
    model = trained(widths=[4])
    out = tmp_path / "out"
    with pytest.raises(ExportError, match=r"onnx-int8 is proved with images.*\(data, split\)"):
        export_backbone(model, out, ["safetensors", "onnx-int8"])
    few = str(write_dataset(tmp_path / "few", (3,)))
    with pytest.raises(ExportError, match=r"split 'train' of tiny has 3 images.* 50 or more"):
        export_backbone(model, out, [INT8], data=few, split="train")
    with pytest.raises(ExportError, match="did you mean 'onnx-int8'"):
        export_backbone(model, out, ["onnx-int"])
    with pytest.raises(ExportError, match="add a format"):
        export_backbone(model, out, ["safetensors"], with_preprocessing=True)
    model.view = JoinedView([EvalView(32, 40), EvalView(24, 24)])
    with pytest.raises(ExportError, match="of several networks"):
        export_backbone(model, out, ["onnx"], with_preprocessing=True)
    assert sorted(tree(tmp_path))[0].startswith("few")
    assert not out.exists()


SHAPES = ((32, 32), (21, 30), (64, 41), (90, 31), (31, 95), (1, 2))


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("crop", "resize"), [(32, 32), (28, 33), (33, 40)])
def test_preprocessing_is_that_of_torchvision(tmp_path, squash, interpolation, crop, resize):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.2, 0.3)
    view = EvalView(crop, resize, mean, std, interpolation=interpolation, squash=squash)
    opset = [onnx.helper.make_opsetid("", 20)]
    graph = onnx_files._front(view, opset, 10).SerializeToString()
    session = onnxruntime.InferenceSession(graph)
    torch.manual_seed(0)
    for height, width in SHAPES:
        pixels = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8)
        (actual,) = session.run(None, {"pixels": pixels.numpy()})
        mode = tv.InterpolationMode(interpolation)
        size = [resize, resize] if squash else [resize]
        whole = tv.resize(pixels.permute(0, 3, 1, 2) / 255, size, mode, antialias=True).clamp(0, 1)
        expected = tv.normalize(tv.center_crop(whole, [crop, crop]), mean, std)
        torch.testing.assert_close(
            torch.from_numpy(actual), expected, rtol=0, atol=onnx_files.TOLERANCE
        )


def test_a_file_with_preprocessing_gives_the_features_of_encode(lowered):
    model, out, written, _ = lowered
    card = (out / "README.md").read_text()
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (3, 45, 60, 3), dtype=torch.uint8)
    expected = model.encode(pixels.permute(0, 3, 1, 2))
    for name in ("onnx", INT8):
        path = written[f"{name}-pixels"]
        assert path == written[name].with_name(f"{written[name].stem}.pixels.onnx")
        actual = OnnxSession(path, "pixels")(pixels)
        assert torch.cosine_similarity(actual, expected).min() > (
            1 - 1e-6 if name == "onnx" else 0.97
        )
        (code,) = [b for b in re.findall(r"```python\n(.*?)```", card, re.S) if path.name in b]
        names = {"pixels": pixels.numpy()}
        exec(code.replace("FOLDER", str(out)), names)
        assert np.array_equal(names["features"], actual.numpy())
        stated = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
        assert "uint8" in stated["images"]


@pytest.fixture
def picture():
    """A smooth PNG, of which decoders make the same pixels."""
    small = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((70, 50), Image.Resampling.BICUBIC).save(file, "png")
    return file.getvalue()


def test_the_lines_of_the_page_run(lowered, tmp_path, monkeypatch, picture):
    model, out, _, _ = lowered
    page = (DOCS / "export.md").read_text()
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "model.pixels" in b]
    monkeypatch.chdir(tmp_path)
    Path("q.png").write_bytes(picture)
    names = {}
    exec(code.replace("FOLDER", str(out)).replace("query.jpg", "q.png"), names)
    torch.testing.assert_close(torch.from_numpy(names["features"]), model.encode("q.png"))


def test_the_service_answers_with_the_features_and_refuses_what_is_no_image(
    lowered, tmp_path, monkeypatch, picture
):
    pytest.importorskip("fastapi")
    client_of = pytest.importorskip("fastapi.testclient").TestClient
    model, out, _, _ = lowered
    monkeypatch.setenv("MODEL", str(out / "model.pixels.onnx"))
    spec = importlib.util.spec_from_file_location("service", DOCS / "examples" / "service.py")
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    client = client_of(service.app)
    (tmp_path / "q.png").write_bytes(picture)
    reply = client.post("/embed", content=picture)
    assert reply.status_code == 200
    expected = model.encode([tmp_path / "q.png"])[0]
    torch.testing.assert_close(torch.tensor(reply.json()), expected, rtol=1e-4, atol=1e-4)
    gif = io.BytesIO()
    Image.new("RGB", (4, 4)).save(gif, "gif")
    for body in (b"", b"text", picture[: len(picture) // 2], gif.getvalue()):
        assert client.post("/embed", content=body).status_code == 415
    monkeypatch.setattr(service, "MOST_BYTES", 100)
    assert client.post("/embed", content=picture).status_code == 413


def test_other_images_or_features_are_refused(tmp_path, monkeypatch, lowered):
    model, out, _, _ = lowered
    (tmp_path / "model.onnx").write_bytes((out / "model.onnx").read_bytes())
    other = EvalView(32, 33, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    build = onnx_files._front
    monkeypatch.setattr(onnx_files, "_front", lambda view, *rest: build(other, *rest))
    with pytest.raises(ExportError, match="onnxruntime makes other images of"):
        add_preprocessing(tmp_path / "model.onnx", model.view)
