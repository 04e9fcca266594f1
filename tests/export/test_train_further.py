"""A loaded backbone is trained on by the lines of the page, and exported anew."""

import importlib.util
import re

import pytest
import torch
import torchvision

import sslpipe
from sslpipe.export.write import export_backbone
from sslpipe.models.state import module_sha256
from tests.helpers.exports import features, trained
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.usefixtures("proved_here")
PAGE = (ROOT / "docs" / "export.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LOADING, LOOP, BY_LIBRARY = (
    next(code for code in BLOCKS if text in code)
    for text in ("requires_grad_", "cross_entropy", "pytorch_metric_learning")
)


@pytest.fixture
def known(data, tmp_path):
    """What the lines of the page know after the plain loop."""
    export_backbone(trained("timm/resnet10t"), tmp_path / "export", ["safetensors"])
    images = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    names = {"sslpipe": sslpipe, "images": images, "sizes": torch.tensor([[40, 40]] * 2)}
    for code in (LOADING, LOOP):
        for word, path in (("FOLDER", "export"), ("TRAINED", "trained")):
            code = code.replace(f'"{word}"', repr(str(tmp_path / path)))
        exec(code.replace('"DATA"', repr(str(data))), names)
    return names


def test_the_plain_loop_ends_with_an_export_of_what_it_trained(known, tmp_path):
    backbone = known["backbone"]
    before = sslpipe.load_backbone(tmp_path / "export")
    again = sslpipe.load_backbone(tmp_path / "trained")
    assert torch.equal(features(again), features(backbone.eval()))
    assert not torch.allclose(features(again), features(before), rtol=1e-3)
    assert again.config.weights_sha256 == module_sha256(again.backbone)
    # what is known of the weights that it began with is not said of these
    assert again.config.facts["init"]["weights_sha256"] == before.config.weights_sha256
    assert "digest" not in again.config.facts
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "trained further" in card
    assert before.config.weights_sha256[:16] in card
    # an embedding says which weights made it
    assert again.network_facts == sslpipe.load_backbone(backbone).network_facts


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_metric_learning") is None, reason="an extra: pml"
)
def test_the_loop_with_pytorch_metric_learning_trains(known):
    before = module_sha256(known["backbone"].backbone)
    exec(BY_LIBRARY, known)
    assert torch.isfinite(known["loss"])
    assert module_sha256(known["backbone"].backbone) != before


def test_a_backbone_in_another_dtype_is_not_taken_for_a_trained_one():
    model = trained("timm/resnet10t")
    config = model.config
    assert sslpipe.load_backbone(model.double()).config == config


def test_the_network_inside_has_the_names_of_its_library():
    backbone = trained("torchvision/resnet18", stem="imagenet")
    other = torchvision.models.resnet18(weights=None)
    keys = other.load_state_dict(backbone.backbone.network.state_dict(), strict=False)
    assert keys.unexpected_keys == []
    assert {*keys.missing_keys} == {"fc.weight", "fc.bias"}
