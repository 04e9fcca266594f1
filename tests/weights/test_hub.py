"""Weights by name: the hub's own client fetches them once; without a network, one clear line."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from timm.models import save_for_hf

from sslpipe.errors import WeightsError
from sslpipe.export.load import load_backbone
from tests.helpers.weights import equals, randomised, saved


@pytest.fixture
def folder(tmp_path):
    """A repository of timm, as its hub has it."""
    network = randomised(timm.create_model("test_resnet.r160_in1k"))
    save_for_hf(network, tmp_path / "repository", safe_serialization=True)
    return network, tmp_path / "repository"


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf-hub:someone/some-resnet@v2", ("someone/some-resnet", "v2")),
        ("timm:test_resnet.r160_in1k", ("timm/test_resnet.r160_in1k", None)),
        ("timm:test_resnet", ("timm/test_resnet.r160_in1k", None)),
    ],
)
def test_a_repository_is_a_folder(folder, monkeypatch, source, asked):
    network, path = folder
    seen = []

    def snapshot_download(name, revision, allow_patterns):
        seen.append((name, revision))
        assert not any(pattern.endswith((".bin", ".pth")) for pattern in allow_patterns)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = load_backbone(source)
    assert seen == [asked]
    assert equals(model, network)
    assert model.config.facts["init"]["source"] == source
    assert model.view.crop_px == 160


def test_torchvisions_file_is_downloaded_once(tmp_path, monkeypatch):
    network = randomised(torchvision.models.shufflenet_v2_x0_5())
    file, seen = saved(network.state_dict(), tmp_path), []

    def download_url_to_file(url, path, hash_prefix, progress):
        seen.append((url, hash_prefix))
        shutil.copy(file, path)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download_url_to_file)
    for source in ("torchvision:shufflenet_v2_x0_5", "torchvision:shufflenet_v2_x0_5.DEFAULT"):
        assert equals(load_backbone(source), network)
    url = torchvision.models.ShuffleNet_V2_X0_5_Weights.DEFAULT.url
    assert seen == [(url, Path(url).stem.rpartition("-")[2])]
    assert len(seen[0][1]) >= 8


def test_without_a_network_it_is_one_line(tmp_path, monkeypatch):
    def unreachable(*words, **options):
        raise OSError("Name or service not known\n(try again)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for source in ("hf-hub:a/b", "timm:test_resnet", "torchvision:resnet18"):
        with pytest.raises(WeightsError, match="Name or service not known") as caught:
            load_backbone(source)
        text = str(caught.value)
        assert text.startswith(f"{source} cannot be had")
        assert text.endswith("download it elsewhere and name the folder or the file")
        assert text.isprintable()


def test_names_that_do_not_exist_are_told_without_a_network():
    for source, message in (
        ("timm:resnet_18", "did you mean 'resnet18'"),
        ("timm:resnet18.nobody", r"it has: .*resnet18\.a1_in1k"),
        ("torchvision:resnet_18", "did you mean 'resnet18'"),
        ("torchvision:resnet18.V9", "it has: IMAGENET1K_V1"),
    ):
        with pytest.raises(WeightsError, match=message):
            load_backbone(source)
