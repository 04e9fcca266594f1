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
from sslpipe.metric_learning.losses.pairwise import compare, unit

LABELS = torch.tensor([0, 1, 2, 0, 1, 3, 2, 0, 1, 2])
NEEDED = {"num_classes": 4, "dim": 6, "rows": 4, "name": "FastAPLoss"}
TABLES = {"metric loss": METRIC_LOSSES, "head": HEADS, "miner": MINERS}
ENTRIES = [(what, name) for what in TABLES for name in TABLES[what] if name != "pml"]


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return unit(torch.randn(10, 6, generator=generator, dtype=torch.float64))


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
    again = eval(repr(one), vars(metric_learning))
    assert type(again) is type(one)
    assert again.settings == one.settings
    assert copy.deepcopy(one).settings == pickle.loads(pickle.dumps(one)).settings == one.settings


@pytest.mark.parametrize(
    ("what", "wrong", "near"),
    [
        ("metric loss", "tripplet", "triplet"),
        ("head", "arc_face", "arcface"),
        ("miner", "batch-hard", "batch_hard"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(what, wrong, near):
    for kind in (KeyError, UserError):
        with pytest.raises(kind) as error:
            TABLES[what][wrong]
    assert str(error.value).startswith(f"no {what} is named {wrong!r}; did you mean {near!r}?")
    assert TABLES[what].get(wrong) is None
    assert wrong not in TABLES[what]


@pytest.mark.parametrize(
    ("entry", "needed"), [("triplet", {}), ("arcface", {"num_classes": 4, "dim": 6})]
)
def test_an_unknown_argument_is_an_error_that_names_the_nearest(entry, needed):
    table = METRIC_LOSSES if entry in METRIC_LOSSES else HEADS
    with pytest.raises(TypeError, match="takes no marign; did you mean 'margin'"):
        table[entry](**needed, marign=1.0)
    with pytest.raises(TypeError, match="DeepID2Loss needs num_classes, dim"):
        metric_learning.DeepID2Loss()


@pytest.mark.parametrize("name", sorted(set(MINERS) - {"maximum_loss"}))
def test_a_miner_takes_embeddings_and_labels_and_gives_what_a_loss_would_see(name):
    batch, pairs = compare(rows(), LABELS, None, None)
    expected = MINERS[name]()(batch, pairs)
    leaf = rows().requires_grad_()
    selected = MINERS[name]()(leaf, LABELS)
    assert selected.positive.shape == selected.negative.shape == (10, 10)
    assert torch.equal(selected.positive, expected.positive)
    assert torch.equal(selected.negative, expected.negative)
    assert (selected.triplets is None) == (expected.triplets is None)
    if expected.triplets is not None:
        assert torch.equal(selected.triplets, expected.triplets)


def test_the_miner_that_compares_losses_says_so_alone():
    with pytest.raises(ValueError, match="use it in one"):
        MINERS["maximum_loss"](rows=4)(rows(), LABELS)


def test_a_semi_hard_miner_is_the_triplet_miner_of_that_kind_also_in_a_loss():
    semi_hard = metric_learning.SemiHardMiner(margin=0.3)
    general = MINERS["triplets"](kind="semi_hard", margin=0.3)
    assert torch.equal(semi_hard(rows(), LABELS).triplets, general(rows(), LABELS).triplets)
    loss = metric_learning.TripletLoss(margin=0.3)
    value = loss(rows(), LABELS, miner=semi_hard)
    assert float(value) > 0
    assert torch.equal(value, loss(rows(), LABELS, miner=general))
    selected = semi_hard(rows(), LABELS)
    assert loss.last_count == int(selected.triplets.sum()) > 0
