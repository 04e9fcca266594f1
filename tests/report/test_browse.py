"""`sslpipe browse`: its table against the data, its page in Chromium; needs the extra `browse`."""

import io
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.data.index import load_index
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.search import ImageSearch
from sslpipe.report import browse
from tests.helpers import chromium
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, write_dataset

pytest.importorskip("pyarrow")
HOSTILE = '<img src=x onerror="window.hacked = 1"><b>bold</b>'
COUNT = 60


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Sixty images of four classes around four places, one broken, with a hostile column."""
    tmp_path = tmp_path_factory.mktemp("shop")
    sellers = [HOSTILE if number % 3 else None for number in range(COUNT)]
    index = write_dataset(tmp_path / "data", (40, 20), broken={7: b"no image"})
    index = add_columns(index, seller=sellers)
    draws = torch.Generator().manual_seed(0)
    places = torch.eye(4).repeat(COUNT // 4, 2)
    features = places + 0.05 * torch.randn(COUNT, 8, generator=draws)
    rows = Embeddings(features, torch.arange(COUNT) % 4, torch.arange(COUNT))
    path = tmp_path / "all.safetensors"
    facts = {"backbone_sha256": "0" * 64, "view": {}, **data_metadata(index.split("train"))}
    save_embeddings(path, rows, facts)
    return path, tmp_path / "data", rows


def table_of(shop, **options):
    path, data, _ = shop
    search = ImageSearch((path, str(data)), flatten=False)
    return browse.make_table(search, pca=True, **options)


def test_each_image_that_can_be_read_is_a_row_with_its_neighbours(shop, tmp_path):
    table = table_of(shop, clusters=4)
    browse.save_table(table, tmp_path / "map.parquet")
    columns = browse.load_table(tmp_path / "map.parquet").to_pydict()
    ids = [number for number in range(COUNT) if number != 7]
    assert columns["id"] == ids
    assert columns["row"] == [*range(COUNT - 1)]
    assert columns["name"] == [f"train{number:06d}" for number in ids]
    assert columns["class"] == [f"class {number % 4}" for number in ids]
    assert columns["seller"] == [HOSTILE if number % 3 else None for number in ids]
    groups = {}
    for cluster, number in zip(columns["cluster"], ids, strict=True):
        groups.setdefault(cluster, set()).add(number % 4)
    assert sorted(map(len, groups.values())) == [1, 1, 1, 1]
    for number, one in zip(ids, columns["image"], strict=True):
        with Image.open(io.BytesIO(one["bytes"])) as image:
            found = np.asarray(image, np.float64)
        assert found.shape == (16, 16, 3)
        assert np.abs(found - picture(number)).mean() < 60  # noise, as a JPEG has it
    units = shop[2].features.double()[ids]
    units = units / units.norm(dim=1, keepdim=True)
    cosines = units @ units.T - 9 * torch.eye(len(ids))
    for row, near in enumerate(columns["neighbours"]):
        order = cosines[row].sort(descending=True)
        assert near["ids"] == order.indices[:15].tolist()
        np.testing.assert_allclose(near["distances"], 1 - order.values[:15], atol=1e-6)
    # two main axes, whatever their signs
    centred = units - units.mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False)[2][:2]
    for name, axis in zip("xy", axes, strict=True):
        place, expected = np.array(columns[name]), (centred @ axis).numpy()
        assert min(np.abs(place - expected).max(), np.abs(place + expected).max()) < 1e-4


def test_mistakes_are_named(shop, tmp_path, monkeypatch):
    _, data, rows = shop
    few = tmp_path / "few.safetensors"
    split = load_index(data).split("train")
    facts = {"backbone_sha256": "0" * 64, "view": {}, **data_metadata(split)}
    save_embeddings(few, rows.rows(torch.arange(16)), facts)
    with pytest.raises(DataError, match="15 images are too few for a map; give 17 or more"):
        browse.make_table(ImageSearch((few, str(data))), pca=True)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match="cannot read a map from"):
        browse.load_table(tmp_path / "a.parquet")
    import pyarrow

    browse.save_table(pyarrow.table({"row": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="is no map of `sslpipe browse`: it has no class"):
        browse.load_table(tmp_path / "b.parquet")
    with browse.open_port(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: .*in use; name another one"):
            browse.open_port(port)
        assert taken.getsockname()[0] == "127.0.0.1"
    monkeypatch.setitem(sys.modules, "embedding_atlas", None)
    with pytest.raises(UserError, match=r"pip install 'sslpipe\[browse\]'"):
        browse.import_parts("embedding_atlas")


@pytest.fixture(scope="module")
def served(shop, tmp_path_factory):
    """The command, on a free port; what it said."""
    pytest.importorskip("embedding_atlas")
    words = ["browse", shop[0], "--data", shop[1], "--no-flatten", "--port", 0, "--clusters", 4]
    words = [sys.executable, "-m", "sslpipe", *map(str, words)]
    log = tmp_path_factory.mktemp("served") / "log"
    with log.open("w") as file, subprocess.Popen(words, stderr=file) as process:
        try:
            for _ in range(3000):  # numba compiles UMAP first
                if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
                    break
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield found[0], log
        finally:
            process.terminate()


@pytest.mark.skipif(not chromium.CHROMIUM, reason="needs Chromium")
def test_the_page_shows_thumbnails_neighbours_and_hostile_names_as_text(served, tmp_path):
    address, log = served
    assert "map by UMAP" in log.read_text()
    with chromium.Page(tmp_path / "profile") as page:
        page.open(address)
        page.wait("document.body?.innerText.includes('59 / 59 points')")
        page.wait("[...document.images].filter(i => i.naturalWidth == 16).length > 3")
        page.wait(f"document.body?.innerText.includes({HOSTILE!r})")
        page.wait("document.body?.innerText.includes('seller')")
        assert page.value("window.hacked") is None
        assert page.value("[...document.querySelectorAll('b')].map(b => b.innerText)") == []
        # nothing is asked of other machines; the console shows what the policy has stopped
        asked = page.value("performance.getEntriesByType('resource').map(e => e.name)")
        assert {name for name in asked if not name.startswith((address, "data:", "blob:"))} == set()
        blocked = page.value("fetch('http://127.0.0.2:1/').then(() => 0, e => String(e))")
        assert "Failed to fetch" in blocked
        assert any("Content Security Policy" in error for error in page.errors)
        page.screenshot(tmp_path / "page.png")
        with Image.open(tmp_path / "page.png") as shot:
            assert shot.size[0] >= 1000


def test_only_this_machine_by_its_name_is_answered(served):
    address, _ = served
    with urllib.request.urlopen(f"{address}/data/metadata.json") as reply:
        assert "connect-src 'self'" in reply.headers["Content-Security-Policy"]
        assert reply.headers["Access-Control-Allow-Origin"] is None
    other = urllib.request.Request(f"{address}/data/metadata.json", headers={"Host": "evil.test"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(other)
    body = b'{"type": "json", "sql": "SELECT 1"}'
    query = urllib.request.Request(f"{address}/data/query", body, {"Origin": address})
    assert urllib.request.urlopen(query).status == 200
    body = b'{"predicate": "id < 3", "format": "csv"}'
    selection = urllib.request.Request(f"{address}/data/selection", body)
    assert b"split" in urllib.request.urlopen(selection).read()
    image = urllib.request.Request(f"{address}/data/query?query=%7B%7D")  # as an <img> asks
    image.add_header("Sec-Fetch-Site", "cross-site")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(image)
    query.add_header("Origin", "http://evil.test")  # a page of another site, in the same browser
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(query)
    assert shutil.which("ss") is None or "0.0.0.0:" + address.rsplit(":")[-1] not in (
        subprocess.run(["ss", "-ltn"], capture_output=True, text=True).stdout
    )
