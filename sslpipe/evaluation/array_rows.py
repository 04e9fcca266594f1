"""Rows of features and labels made of plain arrays: numpy, torch, lists, pandas."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sslpipe.errors import DataError, UserError, shown
from sslpipe.evaluation.embed import Embeddings

Array = ArrayLike | Tensor | Embeddings


def embeddings_from_arrays(features: Array, labels: Array | None, side: str) -> Embeddings:
    """Make float32 features and int64 labels of arrays, numbering the rows 0, 1, ...

    Args:
        features: (N, F) of any float dtype; or `Embeddings`, of which only these count.
        labels: (N,) integers, or texts, which are numbered in their order; None: none has one.
        side: "train" or "test": begins the arguments' names in messages; "" for none.

    Raises:
        DataError: A shape or dtype does not fit, or a number is beyond float32 or int64.
    """
    named = {name: f"{side}_{name}".removeprefix("_") for name in ("features", "labels")}
    if isinstance(features, Embeddings):
        features = features.features
    if isinstance(features, str | Path):
        raise DataError(
            f"{named['features']} = {shown(features)} is a path: give the array, such as "
            "numpy.load(path)"
        )
    try:
        rows = features if isinstance(features, Tensor) else as_tensor(np.array(features))
    except (TypeError, ValueError) as error:  # rows of different lengths, texts, objects
        raise DataError(
            f"{named['features']} must be floats of shape (rows, features), not "
            f"{shown(features)}: {error}"
        ) from None
    if rows.dim() != 2 or not rows.dtype.is_floating_point:
        dtype = str(rows.dtype).removeprefix("torch.")
        convert = "; convert them, as in features.astype('float32')" * (rows.dim() == 2)
        raise DataError(
            f"{named['features']} must be floats of shape (rows, features), not {dtype} "
            f"{(*rows.shape,)}{convert}"
        )
    if not rows.numel():
        raise DataError(f"{named['features']} has no rows: its shape is {(*rows.shape,)}")
    numbers = np.full(len(rows), -1) if labels is None else labels_of(labels, named["labels"])
    if len(numbers) != len(rows):
        raise DataError(
            f"{named['features']} has {len(rows)} rows and {named['labels']} {len(numbers)}; "
            "each row needs one label"
        )
    if is_text(numbers):
        numbers = np.unique(numbers, return_inverse=True)[1]
    if int(numbers.max()) > np.iinfo(np.int64).max:
        raise DataError(
            f"{named['labels']} reaches {numbers.max()}, beyond int64; number the classes"
        )
    return Embeddings(
        features=rows.detach().float(),
        labels=torch.from_numpy(numbers.astype(np.int64)),
        ids=torch.arange(len(rows)),
    ).to(rows.device)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor, in this machine's order of bytes, which HDF5 and FITS have not.

    Raises:
        TypeError: Its dtype is none of torch.
    """
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    return torch.from_numpy(native)


def labels_of(labels: Array, name: str) -> NDArray[Any]:
    """Return labels as integers (N,), or as texts (N,). Raises: DataError."""
    if isinstance(labels, Embeddings):
        labels = labels.labels
    try:
        values = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError:  # rows of different lengths
        values = np.empty((), object)
    if values.shape == (0,):
        return np.zeros(0, np.int64)  # numpy makes floats of []; the features are refused
    if values.dtype.kind == "U" and not isinstance(labels, np.ndarray):
        values = np.asarray(labels, dtype=object)  # else a NaN among texts becomes a text
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    if values.ndim == 1 and values.dtype.kind in "OST":  # a list, of pandas, or of HDF5
        values = np.array([_decoded(each) for each in values], dtype=object)
        texts = any(isinstance(each, str) for each in values)
        kind: Any = str if texts else int | np.integer
        wrong = [place for place, each in enumerate(values) if not isinstance(each, kind)]
        if wrong:
            raise DataError(
                f"{name}[{wrong[0]}] is {shown(values[wrong[0]])}, no "
                f"{'text' if texts else 'integer'}, as are {len(wrong):,} of {len(values):,}; give "
                "a text or an integer for each row, and leave rows without a class out"
            )
        if not texts and max(values) > np.iinfo(np.int64).max:
            raise DataError(f"{name} reaches {max(values)}, beyond int64; number the classes")
        values = values.astype(np.str_ if texts else np.int64)
    if values.dtype.kind == "O":  # rows of different lengths, or other things
        raise DataError(f"{name} = {shown(labels)} are no integers or texts of shape (rows,)")
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(
            f"{name} must be integers or texts of shape (rows,), not {values.dtype} "
            f"{values.shape}; number the classes 0, 1, ..., or name them"
        )
    return values


def _decoded(label: object) -> object:
    """Return a text for bytes, as HDF5 has them; what is no UTF-8 stays, and anything else."""
    if isinstance(label, bytes):
        with suppress(UnicodeDecodeError):
            return label.decode()
    return label


def is_text(labels: NDArray[Any]) -> bool:
    """Return whether labels are texts, not integers."""
    return bool(labels.dtype.kind == "U")


def refuse_zeros(rows: Tensor, what: str, names: Sequence[str] = ()) -> None:
    """Raise UserError for a row of zeros: it has no direction, its cosine with all would be 0."""
    zeros = (rows == 0).all(1).nonzero()[:, 0].tolist()
    if zeros:
        whose = f" ({names[zeros[0]]!r})" if len(names) > zeros[0] else ""
        raise UserError(
            f"{what} {zeros[0]}{whose} is all zeros: it has no direction to compare; embed the "
            "image again, or leave it out"
        )
