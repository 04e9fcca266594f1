"""Tars of arrays that others wrote: images of C channels, without a reader of sensors' files."""

import io

import numpy as np
import pytest

from sslpipe.data.index import load_index
from tests.helpers.shards import error_of, run, write_tar

CHANNELS = ("--channels", "a,b,c")


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.promise(16)
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_tars_of_others_are_indexed_and_measured(tmp_path, capsys, dtype):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 200, (20, 30, 3)).astype(dtype) for _ in range(4)]
    write_tar(tmp_path / "train-000000.tar", *((f"{k}.npy", npy(x)) for k, x in enumerate(images)))
    assert "--channels" in error_of(capsys, "index", tmp_path)
    assert run("index", tmp_path, *CHANNELS) == 0
    first = load_index(tmp_path).manifest
    assert first.image.channels == ("a", "b", "c")
    assert first.image.dtype == np.dtype(dtype).name
    low = np.array(first.image.low)
    units = (np.stack(images) - low) / (np.array(first.image.high) - low)
    np.testing.assert_allclose(first.mean, units.mean((0, 1, 2)), atol=1e-3)
    np.testing.assert_allclose(first.std, units.std((0, 1, 2)), atol=1e-3)
    assert run("index", tmp_path) == 0  # again, as dataset.json says
    assert load_index(tmp_path).manifest == first


@pytest.mark.parametrize(
    ("array", "more", "told"),
    [
        (np.zeros((4, 4, 1), np.int16), (), "images of int16; store uint8, uint16, float32"),
        (np.zeros((4, 4, 1), np.uint32), (), "images of uint32"),
        (np.full((4, 4, 1), np.nan, np.float32), (), "nothing but NaN"),
        (np.full((4, 4, 1), 20000, np.uint16), ("--range", "0,1"), "far outside of the range"),
        (np.zeros((4, 4, 1), np.uint8), ("--range", "0,9"), "--range is for 16 bits"),
    ],
)
def test_tars_of_others_that_cannot_be_measured_are_one_line(array, more, told, tmp_path, capsys):
    np.save(tmp_path / "a.npy", array)
    write_tar(tmp_path / "train-000000.tar", ("a.npy", (tmp_path / "a.npy").read_bytes()))
    assert told in error_of(capsys, "index", tmp_path, "--channels", "a", *more)
    assert "--channels names" in error_of(capsys, "index", tmp_path, "--range", "0,1")
