"""The service and the page of docs/examples give the features of `encode`."""

import functools
import http.server
import importlib.util
import io
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.export.write import export_model
from tests.helpers import chromium
from tests.helpers.exports import trained

pytest.importorskip("onnxruntime")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
# the folder dist of the npm package onnxruntime-web
ORT_WEB = Path(os.environ.get("ORT_WEB", ""))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, proved_here):
    model, out = trained(widths=[8, 16]), tmp_path_factory.mktemp("examples") / "out"
    export_model(model, out, ["onnx"], preprocessing=True)
    return model, out / "model.pixels.onnx"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number in (0, 1):
        small = np.random.default_rng(number).integers(0, 256, (5, 7, 3), np.uint8)
        image = Image.fromarray(small).resize((70, 50), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.png")
    return [folder / "0.png", folder / "1.png"]


def test_the_service_answers_with_the_features_and_refuses_what_is_no_image(
    exported, pictures, monkeypatch
):
    pytest.importorskip("fastapi")
    client_of = pytest.importorskip("fastapi.testclient").TestClient
    model, file = exported
    monkeypatch.setenv("MODEL", str(file))
    spec = importlib.util.spec_from_file_location("service", EXAMPLES / "service.py")
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    client = client_of(service.app)
    for path in pictures:
        reply = client.post("/embed", content=path.read_bytes())
        assert reply.status_code == 200
        torch.testing.assert_close(
            torch.tensor(reply.json()), model.encode([path])[0], rtol=1e-4, atol=1e-4
        )
    whole = pictures[0].read_bytes()
    gif = io.BytesIO()
    Image.new("RGB", (4, 4)).save(gif, "gif")
    for body in (b"", b"text", whole[: len(whole) // 2], gif.getvalue()):
        assert client.post("/embed", content=body).status_code == 415
    monkeypatch.setattr(service, "MOST_BYTES", 100)
    assert client.post("/embed", content=whole).status_code == 413


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.skipif(not (ORT_WEB / "ort.wasm.min.js").is_file(), reason="needs ORT_WEB")
@pytest.mark.skipif(not chromium.CHROMIUM, reason="needs Chromium")
def test_the_page_shows_the_cosine_of_two_images(exported, pictures, tmp_path):
    pytest.importorskip("websockets")
    model, file = exported
    folder = tmp_path / "page"
    folder.mkdir()
    for name in ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        shutil.copy(ORT_WEB / name, folder)
    shutil.copy(EXAMPLES / "browser.html", folder)
    shutil.copy(file, folder)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium.Page(tmp_path / "profile") as page:
            page.open(f"http://127.0.0.1:{server.server_port}/browser.html")
            page.wait("!!document.getElementById('files')")
            root = page.send("DOM.getDocument")["root"]["nodeId"]
            node = page.send("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
            page.send("DOM.setFileInputFiles", nodeId=node, files=[*map(str, pictures)])
            said = "document.getElementById('answer').textContent"
            page.wait(f"!{said}.startsWith('Choose')")
            found = page.value(said)
            expected = torch.cosine_similarity(*model.encode(pictures)[:, None])
            assert found == f"Cosine {float(expected):.4f}", page.errors
    finally:
        server.shutdown()
        server.server_close()
