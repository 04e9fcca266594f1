"""The peak that a run's utilisation is measured against."""

import pytest
import torch

from sslpipe.run.throughput import peak_flops

PEAKS = {  # device name -> TFLOP/s in bf16, and in fp32 with TF32 convolutions
    "NVIDIA H100 80GB HBM3": (989.5, 494.5),
    "NVIDIA H100 PCIe": (756, 378),
    "NVIDIA H100 NVL": (835.5, 417.5),
    "NVIDIA GH200 480GB": (990, 494),
    "NVIDIA H200": (989.5, 494.5),
    "NVIDIA A100-SXM4-80GB": (312, 156),
    "NVIDIA A100 80GB PCIe": (312, 156),
    "NVIDIA A10": (125, 62.5),
    "NVIDIA L4": (121, 60),
    "NVIDIA L40S": (362, 183),
    "Tesla V100-SXM2-16GB": (None, 15.7),
    "Tesla V100-PCIE-32GB": (None, 14),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (None, None),
    "NVIDIA GeForce RTX 4090 D": (None, None),
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": (None, None),
    "AMD Instinct MI300X": (None, None),
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_card_is_found_by_its_whole_name(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peaks = [peak_flops(torch.device("cuda"), precision) for precision in ("bf16", "fp32")]
    assert peaks == [None if peak is None else 1e12 * peak for peak in PEAKS[name]]


def test_fp32_counts_as_fp32_where_convolutions_may_not_round(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        assert peak_flops(torch.device("cuda"), "fp32") == 19.5e12
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert peak_flops(torch.device("cpu"), "fp32") is None
