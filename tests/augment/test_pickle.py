"""Views, presets, objectives and plugged ops in spawned processes, pickles and deep copies."""

import copy
import inspect
import multiprocessing
import pickle
from importlib.util import find_spec

import pytest
import torch

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.ops import OPS, register_op
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.two_views import AUGMENTS, TwoViews
from sslpipe.cli.explain import sections
from sslpipe.losses.distill import TeacherFeatures
from tests.augment.test_plugged_op import Posterize

IMAGES = torch.randint(
    0, 256, (4, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
CUTOUT = [{"name": "RandomInvert", "args": {"p": 0.5}}]


def views_of(views):
    return torch.cat(views(IMAGES[:, : len(views.views.channels)], ids=[3, 1, 4, 1]))


@pytest.fixture(scope="module")
def every_kind():
    """Views of each preset, of one channel, with kornia's ops, and with a plugged op."""
    kinds = {name: TwoViews(name, crop_px=16) for name in PRESETS}
    kinds["grey channel"] = TwoViews("grey", crop_px=16, channels=["infrared"])
    kinds["extra"] = TwoViews("simclr", crop_px=16, extra=CUTOUT)
    before = list(OPS)
    register_op(Posterize(), before="blur")
    kinds["plugged"] = TwoViews("simclr", crop_px=16, posterize_prob=1.0)
    yield kinds
    OPS[:] = before


def test_pickles_and_copies_make_the_same_views(every_kind):
    for name, views in every_kind.items():
        for again in (pickle.loads(pickle.dumps(views)), copy.deepcopy(views), copy.copy(views)):
            assert again.views.specs == views.views.specs, name
            assert torch.equal(views_of(again), views_of(views)), name
    reference = AUGMENTS["kornia"].views("simclr", crop_px=16)
    assert pickle.loads(pickle.dumps(reference)).specs == reference.specs


def test_a_spec_stays_without_the_ops_that_are_registered_later(every_kind):
    """`every_kind` has registered one: a view of before has none of its settings."""
    spec = every_kind["simclr"].views.specs[0]
    assert not hasattr(spec, "posterize_prob")
    assert pickle.loads(pickle.dumps(spec)) == spec


def in_another_process(content):
    return [views_of(views).numpy() for views in pickle.loads(content)]


def test_a_spawned_process_makes_the_same_views_also_of_ops_that_it_has_not_registered(every_kind):
    content = pickle.dumps([*every_kind.values()])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows = pool.apply(in_another_process, (content,))
    for (name, views), made in zip(every_kind.items(), rows, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(made), views_of(views), rtol=0, atol=1e-6, msg=name
        )


REQUIRED = {
    "num_classes": 5,
    "dim": 8,
    "name": "SmoothAPLoss",
    "rows": 4,
    "teacher": TeacherFeatures(torch.eye(3), torch.arange(3)),
}


def made(kind):
    """One of a table, of the arguments that it cannot do without."""
    parameters = inspect.signature(kind).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty]
    return kind(**{name: REQUIRED[name] for name in needed if name in REQUIRED})


# objectives, and what satellites bring: metric losses, heads, miners
SECTIONS = sections()
TABLES = [
    table for name in ("loss", "miner") if name in SECTIONS for table in SECTIONS[name].tables
]


@pytest.mark.parametrize("table", TABLES, ids=lambda each: each.what)
def test_objectives_heads_and_miners_can_be_pickled_and_copied(table):
    for name in table:
        if name == "pml" and find_spec("pytorch_metric_learning") is None:
            continue
        part = made(table[name])
        for again in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
            assert type(again) is type(part)
            if isinstance(part, torch.nn.Module):
                assert str(again.state_dict()) == str(part.state_dict())


def test_the_view_of_an_evaluation_can_be_pickled():
    view = eval_view_for(16)
    again = pickle.loads(pickle.dumps(view))
    sizes = torch.tensor([[24, 24]] * 4)
    assert torch.equal(again(IMAGES, sizes), view(IMAGES, sizes))
