"""Speed by hand, and the peak that utilisation is measured against."""

import itertools

import pytest
import torch

import sslpipe.run.throughput
from sslpipe.run.throughput import Meter, peak_flops


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sslpipe.run.throughput.time, "perf_counter", lambda: now[0])
    return now


def test_speed_waiting_and_flop_utilisation_by_hand(clock):
    meter = Meter(batch_size=10, flops=4.0, peak=2.0, world_size=2)

    def slow():
        for item in itertools.count():
            clock[0] += 1.0  # a second to come
            yield item

    stream = meter.waiting(slow())
    for _ in range(3):
        next(stream)
        clock[0] += 3.0  # three to be used
    numbers = meter.read(3)
    assert numbers["images_per_s"] == pytest.approx(3 * 10 / 12)
    assert numbers["data_wait_percent"] == pytest.approx(25)
    assert numbers["mfu_percent"] == pytest.approx(100 * 3 * 4 / 12 / (2 * 2))


def test_evaluation_and_saving_do_not_count_and_a_reading_starts_anew(clock):
    meter = Meter(batch_size=10, flops=1.0, peak=None, world_size=1)
    clock[0] += 2.0
    with meter.paused():
        clock[0] += 100.0
    assert meter.read(4) == {"images_per_s": 20.0, "data_wait_percent": 0.0}
    clock[0] += 1.0
    assert meter.read(9)["images_per_s"] == 50.0


PEAKS = {  # device name -> TFLOP/s in bf16, and in fp32 with TF32 convolutions
    "NVIDIA H100 80GB HBM3": (989.5, 494.5),
    "NVIDIA H100 PCIe": (756, 378),
    "NVIDIA H100 NVL": (835.5, 417.5),
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
