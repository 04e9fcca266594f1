"""Speed by hand."""

import itertools

import pytest

import sslpipe.run.throughput
from sslpipe.run.throughput import Meter


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sslpipe.run.throughput.time, "perf_counter", lambda: now[0])
    return now


def test_speed_and_waiting_by_hand(clock):
    meter = Meter(batch_size=10)

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


def test_evaluation_and_saving_do_not_count_and_a_reading_starts_anew(clock):
    meter = Meter(batch_size=10)
    clock[0] += 2.0
    with meter.paused():
        clock[0] += 100.0
    assert meter.read(4) == {"images_per_s": 20.0, "data_wait_percent": 0.0}
    clock[0] += 1.0
    assert meter.read(9)["images_per_s"] == 50.0
