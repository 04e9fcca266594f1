"""`sslpipe browse`: its table against the data, and how embedding-atlas is started."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import sslpipe
from sslpipe.data.index import load_index
from sslpipe.errors import DataError, UserError, install
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.search import browse
from sslpipe.search.images import ImageSearch
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.runs import ROOT

parquet = pytest.importorskip("pyarrow.parquet")
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


def test_a_map_is_written_again_and_columns_named_as_its_own_are_all_there(
    tmp_path, monkeypatch, call
):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Umap))
    monkeypatch.setitem(sys.modules, "embedding_atlas", SimpleNamespace())
    monkeypatch.setattr("sslpipe.search.browse.show_map", lambda *given, **named: None)
    names = ("id", "id_column", "id_column_column", "image", "x")
    index = write_dataset(tmp_path / "data", (20,))
    cells = {name: [f"{name} {number}" for number in range(20)] for name in names}
    index = add_columns(index, **cells)
    rows = Embeddings(torch.randn(20, 8), torch.arange(20) % 4, torch.arange(20))
    facts = {"backbone_sha256": "0" * 64, "view": {}, **data_metadata(index.split("train"))}
    save_embeddings(tmp_path / "all.safetensors", rows, facts)
    words = ("browse", tmp_path / "all.safetensors", "--data", tmp_path / "data")
    for _ in range(2):  # what was accepted once is accepted again
        call(*words, "--out", tmp_path / "map.parquet")
    table = parquet.read_table(tmp_path / "map.parquet")
    assert len({*table.column_names}) == len(table.column_names)
    texts = [table.column(name).to_pylist() for name in table.column_names]
    assert all(own in texts for own in cells.values())
    assert "ends in .parquet" in call(*words, "--out", tmp_path / "map.html", status=2)[1]


class Umap:
    """Stands for umap-learn: keeps the neighbours that it is given, and puts rows in a line."""

    given = None

    def __init__(self, *, random_state, n_jobs=-1, **settings):
        if n_jobs != 1 and random_state is not None:  # as umap 0.5 does; a test fails of a warning
            warnings.warn("n_jobs value 1 overridden to 1 by setting random_state", stacklevel=2)
        Umap.given = settings

    def fit_transform(self, features):
        warnings.warn("precomputed_knn[2] is not an NNDescent object", stacklevel=2)  # 0.5.9
        return np.stack([np.arange(len(features)), -np.arange(len(features))], 1)


def test_each_image_that_can_be_read_is_a_row_with_its_neighbours(shop, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Umap))
    path, data, all_rows = shop
    search = ImageSearch((path, str(data)), flatten=False)
    assert browse.write_map(search, tmp_path / "map.parquet") == COUNT - 1
    columns = parquet.read_table(tmp_path / "map.parquet").to_pydict()
    ids = [number for number in range(COUNT) if number != 7]
    assert columns["id"] == ids
    assert columns["name"] == [f"train{number:06d}" for number in ids]
    assert columns["class"] == [f"class {number % 4}" for number in ids]
    assert columns["seller"] == [HOSTILE if number % 3 else None for number in ids]
    assert (columns["x"][:3], columns["y"][:3]) == ([0, 1, 2], [0, -1, -2])
    for number, one in zip(ids, columns["image"], strict=True):
        with Image.open(io.BytesIO(one["bytes"])) as image:
            found = np.asarray(image, np.float64)
        assert found.shape == (16, 16, 3)
        assert np.abs(found - picture(number)).mean() < 60  # noise, as a JPEG has it
    units = all_rows.features.double()[ids]
    units = units / units.norm(dim=1, keepdim=True)
    cosines = units @ units.T - 9 * torch.eye(len(ids))
    indices, distances, _ = Umap.given["precomputed_knn"]
    for row, near in enumerate(columns["neighbours"]):
        order = cosines[row].sort(descending=True)
        assert near["ids"] == order.indices[:15].tolist()
        np.testing.assert_allclose(near["distances"], 1 - order.values[:15], atol=1e-6)
        assert indices[row].tolist() == [row, *near["ids"][:14]]
        np.testing.assert_allclose(distances[row], [0, *near["distances"][:14]])


def test_mistakes_are_named(shop, tmp_path, monkeypatch):
    _, data, rows = shop
    few = tmp_path / "few.safetensors"
    split = load_index(data).split("train")
    facts = {"backbone_sha256": "0" * 64, "view": {}, **data_metadata(split)}
    save_embeddings(few, rows.rows(torch.arange(16)), facts)
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace())
    with pytest.raises(DataError, match="15 images are too few for a map; give 17 or more"):
        browse.write_map(ImageSearch((few, str(data))), tmp_path / "map.parquet")
    assert not (tmp_path / "map.parquet").exists()
    monkeypatch.setitem(sys.modules, "embedding_atlas", None)
    with pytest.raises(UserError, match=re.escape(install("browse"))):
        browse.show_map(tmp_path / "map.parquet")


@pytest.mark.parametrize("lacking", ["umap", "embedding_atlas"])
def test_what_is_not_installed_is_named_before_anything_is_read(
    shop, tmp_path, monkeypatch, lacking
):
    for name in ("umap", "embedding_atlas"):
        monkeypatch.setitem(sys.modules, name, None if name == lacking else SimpleNamespace())
    path, data, _ = shop
    said: list[str] = []
    with pytest.raises(UserError, match=f"browse needs {lacking}: {re.escape(install('browse'))}"):
        sslpipe.browse(path, data, out=tmp_path / "map.parquet", say=said.append)
    assert not said
    assert not (tmp_path / "map.parquet").exists()


def test_the_map_is_opened_by_the_command_that_is_printed(tmp_path, monkeypatch):
    """A package of its name takes the words; the real one's options are those of 0.22."""
    (tmp_path / "embedding_atlas").mkdir()
    (tmp_path / "embedding_atlas" / "__init__.py").touch()
    program = "import json, sys; json.dump(sys.argv[1:], open('words.json', 'w'))"
    (tmp_path / "embedding_atlas" / "cli.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = []
    browse.show_map(Path("a map.parquet"), said.append)
    words = json.loads((tmp_path / "words.json").read_text())
    assert ["embedding-atlas", *words[: words.index("--host")]] == shlex.split(said[0])
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[0] == "a map.parquet"


DEAF = """import signal, time
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, signal.SIG_IGN)
print("serving", flush=True)
time.sleep(60)
"""
COMMAND = """import pathlib, signal, sys
from sslpipe.search.browse import show_map
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
try:
    show_map(pathlib.Path("map.parquet"))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_server_ends_with_the_command_also_where_it_hears_no_signal(tmp_path, sent, status):
    (tmp_path / "embedding_atlas").mkdir()
    (tmp_path / "embedding_atlas" / "__init__.py").touch()
    (tmp_path / "embedding_atlas" / "cli.py").write_text(DEAF)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as command:
        assert command.stdout.readline() == b"serving\n"
        command.send_signal(sent)
        command.communicate(timeout=30)  # the pipe is closed when both have ended
        assert command.returncode == status


@pytest.mark.parametrize("kind", ["file", "array", "embeddings"])
def test_vectors_alone_are_a_map_without_images(shop, tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Umap))
    rows = shop[2]
    given = {"array": rows.features.numpy().astype(np.float64), "embeddings": rows}.get(kind)
    if given is None:
        given = tmp_path / "rows.npz"
        labels = np.array([["a", "b", "c", ""][number % 4] for number in range(COUNT)])
        np.savez(given, features=rows.features.numpy(), labels=labels)
    path = sslpipe.browse(given, out=tmp_path / "map.parquet", flatten=False, show=False)
    columns = parquet.read_table(path).to_pydict()
    assert {*columns} == {"id", "name", "class", "neighbours", "x", "y"}
    assert columns["name"] == [str(number) for number in range(COUNT)]
    classes = {"file": ["a", "b", "c", None], "array": [None] * 4, "embeddings": [*"0123"]}
    assert columns["class"] == classes[kind] * (COUNT // 4)
    units = torch.nn.functional.normalize(rows.features.double())
    cosines = units @ units.T - 9 * torch.eye(COUNT)
    assert [near["ids"] for near in columns["neighbours"]] == [
        row.sort(descending=True).indices[:15].tolist() for row in cosines
    ]


def test_a_map_without_images_is_opened_without_their_column(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "embedding_atlas", SimpleNamespace())
    words = []
    monkeypatch.setattr(browse.subprocess, "run", lambda given, check: words.extend(given))
    browse.show_map(Path("map.parquet"), images=False)
    assert "--image" not in words
    assert "--neighbors" in words
