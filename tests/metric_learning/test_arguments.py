"""Losses, heads and miners in a loop of one's own: what does not fit is one line that names it."""

import math

import pytest
import torch

import sslpipe
from sslpipe.metric_learning import (
    HEADS,
    METRIC_LOSSES,
    ArcFace,
    DeepID2Loss,
    SemiHardMiner,
    TripletLoss,
)

Z = torch.arange(32.0).sin().view(8, 4)
Y = torch.arange(8) // 2


@pytest.mark.parametrize("value", [0.3, 1.0, 1, "yes"])
def test_a_number_by_place_is_no_switch(value):
    """`normalize` is the first of the settings of each metric loss."""
    with pytest.raises(TypeError, match=r"TripletLoss .*normalize = .* by name: .*margin"):
        TripletLoss(value)
    assert TripletLoss(False).normalize is False
    assert (ArcFace(7, 3).num_classes, ArcFace(7, 3).dim) == (7, 3)


@pytest.mark.parametrize("part", [sslpipe.NTXentLoss, TripletLoss])
def test_a_setting_that_would_have_to_be_trained_is_refused(part):
    """As CLIP's temperature: it would become a number, which no optimizer changes."""
    name = "temperature" if part is sslpipe.NTXentLoss else "margin"
    trained = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(TypeError, match=rf"does not train its {name}.*{name}=0\.5"):
        part(**{name: trained})
    assert getattr(part(**{name: trained.detach()}), name) == 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TripletLoss()(Z, Y, SemiHardMiner()), "miner=miner"),
        (lambda: TripletLoss()(Z, Y, SemiHardMiner()(Z, Y)), "not what it returns"),
        (lambda: TripletLoss()(Z, Y, miner=SemiHardMiner), r"no miner.*SemiHardMiner\(\)"),
        (lambda: ArcFace(4, 4)(Z, Y, miner="semi_hard"), "miner = 'semi_hard' is no miner"),
        (lambda: TripletLoss()(Z, list("aabbccdd")), r"labels = \['a'.*return_inverse"),
        (lambda: TripletLoss()(Z, [[0], [1, 2]]), r"labels = \[\[0\], \[1, 2\]\]"),
        (lambda: ArcFace(4, 7)(Z, Y), r"\(8, 4\), but dim = 7.*dim=4"),
        (lambda: DeepID2Loss(num_classes=4, dim=7)(Z, Y), r"\(8, 4\), but dim = 7.*dim=4"),
    ],
)
def test_a_part_in_a_loop_of_ones_own_names_what_does_not_fit(call, words):
    with pytest.raises(ValueError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "key"), [("arcface", "margin"), ("combined_margin", "m2"),
                                           ("tuplet_margin", "margin")])  # fmt: skip
def test_an_angle_in_degrees_is_refused_where_radians_are_meant(name, key):
    """ArcFace's loss was 0 with pytorch-metric-learning's margin of 28.6 degrees."""
    for value in (28.6, -28.6):
        with pytest.raises(ValueError, match=rf"{value:g} degrees are {math.radians(value):.4g}"):
            _made(name, {key: value})
    assert getattr(_made(name, {key: math.radians(28.6)}), key) == math.radians(28.6)


def _made(name, settings):
    if name in HEADS.names():
        return HEADS[name](num_classes=4, dim=4, **settings)
    return METRIC_LOSSES[name](**settings)
