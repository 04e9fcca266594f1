"""Arguments of public functions: a wrong name or type is one line before anything is done."""

import inspect
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import sslpipe
from sslpipe.arguments import checked
from sslpipe.errors import UserError
from sslpipe.metric_learning import ArcFace, TripletLoss

LABELS = np.arange(12) % 3
ROWS = np.eye(3)[LABELS]


@pytest.mark.parametrize("name", dir(sslpipe))
def test_help_shows_each_argument_and_its_type_in_a_few_words(name):
    """Neither an expanded union of numpy's, nor a bound, nor the address of a function."""
    value = getattr(sslpipe, name)
    assert inspect.getdoc(value)
    for parameter in inspect.signature(value).parameters.values():
        assert parameter.annotation is not parameter.empty, parameter
        assert len(str(parameter)) <= 100, parameter
        assert " at 0x" not in str(parameter), parameter


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, k=2.5), "k = 2.5 .* whole number"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, vote="both"), "vote = 'both' .*weighted"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, vote="majorty"), "mean 'majority'"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=5), r"k = 5 .*give \[5\]"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=[1, "b"]), r"k\[1\] = 'b' .* whole number"),
        (lambda: sslpipe.verification(ROWS, LABELS, far=["a"]), r"far\[0\] = 'a' .* a number"),
        (lambda: sslpipe.build_dataset("out", root="in", test_fraction="a"), "test_fraction = 'a'"),
        (lambda: sslpipe.build_dataset("out", root="in", resize_px="wide"), "resize_px = 'wide'"),
        (lambda: sslpipe.build_dataset("out", root="in", background=(255, 0, 0)), "background = "),
        (lambda: sslpipe.build_dataset("out", root="in", labels=0.3), "labels = 0.3 .*True"),
        (lambda: sslpipe.build_dataset("out", root="in", unseen_classes="bee"), r"\['bee'\]"),
        (lambda: sslpipe.build_dataset("out", root=5), "root = 5 .* a path"),
        (lambda: sslpipe.load_backbone("x", crop_px="wide"), "crop_px = 'wide' .* whole number"),
        (lambda: sslpipe.export_backbone("x", "out", "onnx"), r"formats = 'onnx' .*\['onnx'\]"),
        (lambda: sslpipe.suite("x", "data", against="timm:a"), r"against = .*\['timm:a'\]"),
        (lambda: sslpipe.train("r.toml", "data", "run", weights="best"), "weights = 'best' .*ema"),
        (lambda: sslpipe.ImageDataset("data", split=3), "split = 3 .* a text"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_taken(call, words):
    with pytest.raises(UserError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("function", "given", "nearest"),
    [
        (sslpipe.build_dataset, "roots", "root"),
        (sslpipe.train, "override", "overrides"),
        (sslpipe.embed, "batchsize", "batch_size"),
        (sslpipe.ImageDataset, "transfrom", "transform"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(function, given, nearest):
    with pytest.raises(TypeError, match=f"takes no {given}; did you mean '{nearest}'"):
        function(**{given: "x"})


def test_a_missing_argument_is_named():
    with pytest.raises(TypeError, match="test_features"):
        sslpipe.knn(ROWS, LABELS)


def test_numbers_of_numpy_are_numbers_and_what_is_given_arrives():
    @checked
    def given(
        a: int,
        b: float | None = None,
        *,
        c: list[str | Path] | None = None,
        d: Literal["x", "y"] = "x",
        e: re.Pattern[str] | int = 5,
    ) -> list[object]:
        return [a, b, c, d, e]

    assert given(np.int64(3), np.float32(0.5)) == [3, 0.5, None, "x", 5]
    assert type(given(np.uint8(3))[0]) is int
    assert given(a=3, c=["n", Path("m")], d="y", e="any") == [3, None, ["n", Path("m")], "y", "any"]


@pytest.mark.parametrize("value", [0.3, 1.0, 1, "yes"])
def test_a_number_by_place_is_no_switch(value):
    """`normalize` is the first of the settings of each metric loss."""
    with pytest.raises(TypeError, match=r"TripletLoss .*normalize = .* by name: .*margin"):
        TripletLoss(value)
    assert TripletLoss(False).normalize is False
    assert (ArcFace(7, 3).num_classes, ArcFace(7, 3).dim) == (7, 3)
