"""Arguments of public functions: a wrong name or type is one line before anything is done."""

import inspect
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image

import sslpipe
from sslpipe.arguments import checked
from sslpipe.errors import UserError
from tests.helpers.exports import trained

LABELS = np.arange(12) % 3
PICTURE = Image.new("RGB", (8, 8))
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
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, k="5"), "k = '5' .* whole number"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, k=True), "k = True .* whole number"),
        (lambda: sslpipe.build_dataset("out", root="in", skip_bad="no"), "skip_bad = 'no' .*True"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, vote="both"), "vote = 'both' .*weighted"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, vote="majorty"), "mean 'majority'"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=5), r"k = 5 .*give \[5\]"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=[1, "b"]), r"k\[1\] = 'b' .* whole number"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=[1, True]), r"k\[1\] = True .* whole number"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=["1"]), r"k\[0\] = '1' .* whole number"),
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
        (lambda: sslpipe.ImageDataset("data", split=3), "split = 3 .* a text"),
        (lambda: sslpipe.build_dataset(1, name=2, split=3, origin=4), "out = 1 .* a path"),
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


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple])
def test_arrays_of_one_dimension_are_lists(make):
    found = sslpipe.retrieval(ROWS, LABELS, k=make([1, 3]))
    assert {"Recall@1", "Recall@3"} <= {*found}
    with pytest.raises(UserError, match="k"):
        sslpipe.retrieval(ROWS, LABELS, k=make([0.5, 1.5]))
    with pytest.raises(UserError, match="k"):
        sslpipe.retrieval(ROWS, LABELS, k=np.array([[1, 3]]))


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


Z = torch.arange(32.0).sin().view(8, 4)
Y = torch.arange(8) // 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sslpipe.SupConLoss()(Z, Z, labels=Y * 0.5), "labels must be integers.*float32"),
        (lambda: sslpipe.SupConLoss()(Z, Z, labels=Y > 1), "labels must be integers.*bool"),
        (lambda: sslpipe.SupConLoss()(Z, Z, labels=[0] * 8), r"torch.tensor\(labels\)"),
        (lambda: sslpipe.NTXentLoss()(Z, Z.to("meta")), "z_b is on meta and z_a on cpu; move"),
        (lambda: sslpipe.NTXentLoss()(Z, Z, ids=Y.to("meta")), "ids is on meta and z_a on cpu"),
        (lambda: trained()(torch.zeros(1, 3, 16, 16).byte()), r"uint8 \(1, 3, 16, 16\).*encode"),
        (lambda: trained()(torch.zeros(3, 16, 16)), r"\(B, C, S, S\).*float32 \(3, 16, 16\)"),
        (lambda: trained()(["a.jpg"]), r"not a list; backbone.encode\(images\)"),
        (lambda: sslpipe.TwoViews()(Z), r"images\[None\]"),
        (lambda: sslpipe.TwoViews()([PICTURE]), r"images\[0\] is a Image.*pil_to_tensor"),
    ],
)
def test_a_part_in_a_loop_of_ones_own_names_what_does_not_fit(call, words):
    with pytest.raises(ValueError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_views_take_the_statistics_of_a_backbone_and_show_what_they_were_made_of():
    view = trained().view
    views = sslpipe.TwoViews("simclr", crop_px=8, mean=view.mean, std=view.std)
    plain = sslpipe.TwoViews("simclr", crop_px=8)
    images = torch.arange(2 * 3 * 20 * 20, dtype=torch.int64).view(2, 3, 20, 20).byte()
    for normalised, raw in zip(views(images, ids=[0, 1]), plain(images, ids=[0, 1]), strict=True):
        assert 0 <= raw.min() <= raw.max() <= 1
        expected = (raw - view.mean[:, None, None]) / view.std[:, None, None]
        torch.testing.assert_close(normalised, expected, rtol=1e-4, atol=1e-4)
    assert repr(plain) == "TwoViews('simclr', crop_px=8)"
    assert f"crop_px={view.crop_px}" in repr(view)
