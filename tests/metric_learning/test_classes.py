"""Losses, heads and miners as classes: by name, by repr, in a notebook."""

import copy
import inspect
import pickle

import pytest
import torch

import sslpipe.metric_learning as metric_learning
from sslpipe.errors import UserError
from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS, MetricLoss, Miner
from sslpipe.metric_learning.heads import Head
from tests.helpers.metric_rows import LABELS as ROW_LABELS
from tests.helpers.metric_rows import rows

LABELS = torch.tensor(ROW_LABELS)
NEEDED = {"num_classes": 4, "dim": 6, "rows": 4, "name": "FastAPLoss"}
TABLES = {"metric loss": METRIC_LOSSES, "head": HEADS, "miner": MINERS}
ENTRIES = [(what, name) for what in TABLES for name in TABLES[what] if name != "pml"]


def made(what, name, **settings):
    parameters = inspect.signature(TABLES[what][name]).parameters
    needed = {k for k, p in parameters.items() if p.default is p.empty}
    return TABLES[what][name](**{k: NEEDED[k] for k in needed}, **settings)


@pytest.mark.parametrize(("what", "name"), ENTRIES)
def test_every_entry_is_a_class_that_its_package_exports(what, name):
    entry = TABLES[what][name]
    assert issubclass(entry, {"metric loss": MetricLoss, "head": Head, "miner": Miner}[what])
    assert getattr(metric_learning, entry.__name__) is entry
    assert entry.__name__ in metric_learning.__all__
    if what != "miner":
        names = [*inspect.signature(entry.forward).parameters]
        assert names == ["self", "embeddings", "labels", "ids", "ref", "miner", "counts"]


@pytest.mark.parametrize(("what", "name"), ENTRIES)
def test_a_repr_builds_the_same_again(what, name):
    one = made(what, name)
    public = {each: getattr(metric_learning, each) for each in metric_learning.__all__}
    again = eval(repr(one), public)
    assert type(again) is type(one)
    assert repr(again) == repr(one)
    assert repr(copy.deepcopy(one)) == repr(pickle.loads(pickle.dumps(one))) == repr(one)


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    for kind in (KeyError, UserError):
        with pytest.raises(kind, match="no head is named 'arc_face'; did you mean 'arcface'"):
            HEADS["arc_face"]
    assert HEADS.get("arc_face") is None
    assert "arc_face" not in HEADS


def test_an_argument_that_is_unknown_or_missing_is_named():
    for make in (metric_learning.TripletLoss, metric_learning.ArcFace):
        with pytest.raises(TypeError, match="takes no marign; did you mean 'margin'"):
            make(marign=1.0)
    with pytest.raises(TypeError, match="DeepID2Loss needs num_classes, dim"):
        metric_learning.DeepID2Loss()


def test_the_miner_that_compares_losses_says_so_alone():
    with pytest.raises(ValueError, match="use it in one"):
        MINERS["maximum_loss"](rows=4)(rows(), LABELS)


def test_a_semi_hard_miner_is_the_triplet_miner_of_that_kind():
    semi_hard = metric_learning.SemiHardMiner(margin=0.3)(rows(), LABELS)
    general = MINERS["triplets"](triplets="semi_hard", margin=0.3)(rows(), LABELS)
    assert torch.equal(semi_hard.triplets, general.triplets)
