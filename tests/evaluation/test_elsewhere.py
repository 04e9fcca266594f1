"""Features that another program wrote: .npy, .npz and safetensors without our metadata."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sslpipe.cli import app
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import load_embeddings

ROWS = np.random.default_rng(0).normal(size=(12, 5))


def test_a_npy_file_is_rows_without_labels(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.astype(np.float16))
    rows, metadata = load_embeddings(tmp_path / "rows.npy")
    np.testing.assert_array_equal(rows.features.numpy(), ROWS.astype(np.float16))
    assert rows.features.dtype == torch.float32
    assert rows.labels.tolist() == [-1] * 12
    assert rows.ids.tolist() == list(range(12))
    assert metadata == {}


@pytest.mark.parametrize("kind", [np.int16, np.uint8, np.int64])
def test_labels_and_ids_beside_the_features_are_kept(tmp_path, kind):
    labels = np.arange(12).astype(kind) % 3
    ids = np.arange(12)[::-1] + 7
    np.savez(tmp_path / "rows.npz", features=ROWS, labels=labels, ids=ids, split="test")
    rows, metadata = load_embeddings(tmp_path / "rows.npz")
    assert rows.labels.tolist() == labels.tolist()
    assert rows.ids.tolist() == ids.tolist()
    assert metadata == {"split": "test"}
    tensors = {"features": torch.tensor(ROWS), "labels": torch.tensor(labels.astype(np.int64))}
    save_file(tensors, tmp_path / "rows.safetensors")
    again, _ = load_embeddings(tmp_path / "rows.safetensors")
    torch.testing.assert_close(again.features, rows.features)


def test_knn_of_two_files_of_another_program(tmp_path, capsys, monkeypatch):
    labels = np.arange(12) % 3
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", features=np.eye(3)[labels] + 0.0, labels=labels)
    files = [str(tmp_path / f"{name}.npz") for name in ("train", "test")]
    monkeypatch.setattr(sys, "argv", ["sslpipe", "evaluate", "knn", *files, "--k", "3"])
    with pytest.raises(SystemExit) as stopped:
        app.run()
    assert stopped.value.code in (None, 0)
    assert "100.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"vectors": ROWS}, "features"),
        ({"features": ROWS[0]}, "features"),
        ({"features": ROWS.astype(int)}, "features"),
        ({"features": ROWS, "labels": np.zeros(11, int)}, "labels"),
        ({"features": ROWS, "labels": np.zeros(12)}, "labels"),
        (
            {"features": ROWS, "labels": np.array([*"abcabcabcabc"])},
            "labels are texts.*number them",
        ),
        ({"features": ROWS, "ids": np.array([*"abcdefghijkl"])}, "ids are texts.*leave them out"),
        ({"features": ROWS * np.nan}, r"features\[0\] is not finite, as are 12 of 12"),
        ({"features": np.array([{}])}, "rows.npz"),
    ],
)
def test_other_arrays_are_one_clear_error(tmp_path, arrays, named):
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(DataError, match=named):
        load_embeddings(tmp_path / "rows.npz")


@pytest.mark.parametrize("name", ["rows.pt", "rows.csv", "rows.parquet"])
def test_a_file_of_another_kind_is_refused_with_those_that_are_read(tmp_path, name):
    torch.save(torch.tensor(ROWS), tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}.*none of \.safetensors, \.npz, \.npy.*savez"):
        load_embeddings(tmp_path / name)
