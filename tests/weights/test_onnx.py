"""An ONNX file embeds as the network that it was made from, and is neither trained nor exported."""

import numpy as np
import onnx
import pytest
import torch

from sslpipe.errors import ExportError, UserError, WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.export.write import FORMATS, export_model
from sslpipe.portable import sha256_of
from sslpipe.recipe.base import Component
from tests.helpers.exports import trained
from tests.helpers.weights import difference


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = trained()
    return model, FORMATS["onnx"].write(model, tmp_path_factory.mktemp("onnx"))


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, 3, 40, 52), dtype=torch.uint8, generator=generator)


def test_our_own_file_has_its_view_and_features(exported):
    model, path = exported
    ours = load_backbone(path)
    assert ours.config.view == model.config.view
    assert difference(ours, model, model.view.crop_px) <= 1e-5
    assert (ours.encode(images()) - model.encode(images())).abs().max() <= 1e-4
    init = ours.config.facts["init"]
    assert (init["format"], init["sha256"]) == ("ONNX", sha256_of(path))
    assert ours.config.weights_sha256 == sha256_of(path)
    session, stated = ours.backbone.network.session, ours.backbone.network.metadata
    assert stated["weights_sha256"] == model.config.weights_sha256
    assert session.get_inputs()[0].shape == ["batch", 3, 32, 32]
    assert session.get_outputs()[0].shape == ["batch", model.num_features]


def test_a_file_that_says_nothing_has_imagenets_view(exported, tmp_path):
    model, path = exported
    proto = onnx.load(path)
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "bare.onnx")
    bare = load_backbone(tmp_path / "bare.onnx")
    assert bare.view.crop_px == model.view.crop_px  # the graph's own
    assert bare.view.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert "the source names none" in " ".join(bare.config.facts["init"]["notes"])
    with pytest.raises(WeightsError, match="px only, not of 48"):
        load_backbone(tmp_path / "bare.onnx", crop_px=48)


def test_it_is_neither_trained_nor_exported(exported, tmp_path):
    _, path = exported
    with pytest.raises(UserError, match="cannot be trained"):
        load_backbone(path, component=Component(kind="small_resnet"), crop_px=32)
    with pytest.raises(ExportError, match="ONNX file"):
        export_model(load_backbone(path), tmp_path / "out", ["all"])
    assert not (tmp_path / "out").exists()


def test_files_beside_it_with_its_weights_are_part_of_the_hash(exported, tmp_path):
    beside, weights = tmp_path / "a.onnx", tmp_path / "a.bin"
    proto = onnx.load(exported[1])
    onnx.save(proto, beside, save_as_external_data=True, location="a.bin", size_threshold=64)
    before = load_backbone(beside)
    assert torch.equal(before.encode(images()), load_backbone(exported[1]).encode(images()))

    raw = np.frombuffer(weights.read_bytes(), np.float32) * np.float32(1.5)
    weights.write_bytes(raw.tobytes())
    after = load_backbone(beside)
    assert not torch.equal(before.encode(images()), after.encode(images()))
    assert after.config.weights_sha256 != before.config.weights_sha256
