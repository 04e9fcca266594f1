"""A folder that is no export, or a hostile one, is one line that names it, at once."""

import json
import re
import time

import pytest

from sslpipe.errors import ExportError, WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.export.write import export_backbone
from sslpipe.models import limits
from tests.helpers.exports import trained

SLOWEST_S = 120.0  # without the limits for ever; a busy machine is slow, too
pytestmark = pytest.mark.usefixtures("proved_here")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The files of a good export by name."""
    out = tmp_path_factory.mktemp("export") / "out"
    export_backbone(trained(), out, ["safetensors"])
    names = [path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS"]
    return {path.name: path.read_bytes() for path in names}  # a stranger's sums would agree


@pytest.fixture
def folder(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_MODULES", 1000)  # so many take seconds less
    for name, raw in exported.items():
        (tmp_path / name).write_bytes(raw)
    assert load_backbone(tmp_path).num_features == 128
    return tmp_path


def refused(folder) -> str:
    begin_s = time.monotonic()
    with pytest.raises((ExportError, WeightsError)) as caught:
        load_backbone(folder)
    assert time.monotonic() - begin_s < SLOWEST_S
    text = str(caught.value)
    assert text.isprintable()
    assert str(folder) in text
    return text


def changed(folder, **keys) -> str:
    """Change keys of config.json, a section's with two underscores; the refusal."""
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    for key, value in keys.items():
        *parents, leaf = key.split("__")
        place = tree
        for parent in parents:
            place = place[parent]
        place[leaf] = value
    path.write_text(json.dumps(tree))
    return refused(folder)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"backbone__blocks": 10**6}, "modules"),
        ({"backbone__widths": [2**31 - 1]}, r"widths\.0 = 2147483647: .* 65536"),
        ({"backbone__widths": [2**62, 2**62]}, "backbone"),
        ({"backbone__blocks": 2**70}, "blocks"),
        ({"backbone": {"kind": "timm/vit_tiny_patch16_224", "num_heads": 7}}, "num_heads"),
        ({"backbone": {"kind": "timm/vit_tiny_patch16_224", "depth": 10**4}}, "modules"),
        ({"backbone": {"kind": "timm/resnet10t", "global_pool": "none"}}, "backbone"),
        ({"backbone": {"kind": "small_resnet", "embedding_dim": 2**40}}, "embedding_dim"),
        ({"view__crop_px": 10**6, "view__resize_px": 10**6}, "resize_px"),
        ({"view__mean": [0.5, 0.5, 0.5, 0.5]}, "mean"),
        ({"view__std": [0.5, 0.0, 0.5]}, "std"),
        ({"view__interpolation": ["bilinear"]}, "interpolation"),
        ({"crop_px": 10**6}, "crop_px"),
        ({"num_features": 3}, "num_features = 3"),
        ({"weights_sha256": "\x1b[31m\n"}, "not those that config.json names"),
        ({"format_version": 2}, "format_version = 2"),
        ({"view": None}, "view"),
        ({"backbone__kind": "small_resnt"}, "did you mean"),
        ({"backbone__widths": [8]}, "num_features = 128, but its backbone has 8"),
    ],
    ids=range(19),
)
def test_a_hostile_config_is_one_line(folder, keys, text):
    assert re.search(text, changed(folder, **keys))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_where_a_file_should_be_is_one_line(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    assert name in refused(folder) or "directory" in refused(folder)


@pytest.mark.parametrize("raw", [b"[" * 10**6, b"\xff\xfe", b"null", b"[1]", b'{"sslpipe": 3}'])
def test_a_config_that_is_no_table_is_one_line(folder, raw):
    (folder / "config.json").write_bytes(raw)
    refused(folder)
