"""Partners: whom a second view shows, against lists of all who may be it."""

from collections import Counter

import numpy as np
import pytest

from sslpipe.data.columns import MISSING_INTEGER
from sslpipe.data.order import Order
from sslpipe.data.pairing import Near, Partners
from sslpipe.errors import DataError
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset

SIZES = (40, 3, 60, 25)
COUNT = sum(SIZES)
GOLDEN = [[112, 1, 35, 4], [112, 1, 86, 4]]
WITHOUT = np.array([3, 30, 31, 90], np.int64)


def values(kinds, seed, *, text=""):
    """Values of some kinds, a tenth of them missing; the last are 12 of one kind."""
    rng = np.random.default_rng(seed)
    drawn = [int(k) for k in rng.integers(0, kinds, COUNT - 12)] + [kinds] * 12
    lost = rng.random(COUNT) < 0.1
    return [
        None if gone else f"{text}{k}" if text else k for k, gone in zip(drawn, lost, strict=True)
    ]


ICON, VENDOR, CAMERA = values(20, 0, text="icon"), values(4, 1, text="v"), values(5, 2)
SHOT_AT = values(2000, 3)
DEPTH = [None if k is None else k / 7 for k in SHOT_AT]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    manifest = write_dataset(tmp_path_factory.mktemp("data"), SIZES)
    index = add_columns(
        manifest, icon=ICON, vendor=VENDOR, camera=CAMERA, shot_at=SHOT_AT, depth=DEPTH
    )
    return index.split("train")


def order_of(split, window=32):
    sizes = {"batch_size": 16, "num_streams": 4, "window": window}
    return Order(split.starts, seed=3, without=WITHOUT, **sizes)


RULES = {
    "icon": ({"same": ["icon"]}, lambda a, b: same(ICON, a, b)),
    "different": (
        {"same": ["icon"], "different": ["vendor", "camera"]},
        lambda a, b: same(ICON, a, b) and differ(VENDOR, a, b) and differ(CAMERA, a, b),
    ),
    "both": (
        {"same": ["camera", "vendor"]},
        lambda a, b: same(CAMERA, a, b) and same(VENDOR, a, b),
    ),
    "near": (
        {"same": ["camera"], "near": ("shot_at", 200)},
        lambda a, b: same(CAMERA, a, b) and close(SHOT_AT, a, b, 200),
    ),
    "near alone": ({"same": [], "near": ("shot_at", 30)}, lambda a, b: close(SHOT_AT, a, b, 30)),
    "near in floats": (
        {"same": ["camera"], "near": ("depth", 20.5)},
        lambda a, b: same(CAMERA, a, b) and close(DEPTH, a, b, 20.5),
    ),
}


def same(column, a, b):
    return column[a] is not None and column[a] == column[b]


def differ(column, a, b):
    return column[a] is not None and column[b] is not None and column[a] != column[b]


def close(column, a, b, within):
    return None not in (column[a], column[b]) and abs(column[a] - column[b]) <= within


def partners_of(split, order, rule, **settings):
    columns = dict(RULES[rule][0])
    near = columns.pop("near", None)
    return Partners(
        order,
        same=[split.column(name) for name in columns["same"]],
        different=[split.column(name) for name in columns.get("different", [])],
        near=near and Near(split.column(near[0]), near[1]),
        **settings,
    )


@pytest.mark.parametrize("rule", list(RULES))
def test_a_partner_fits_and_only_who_fits_nobody_has_none(split, rule):
    order, fits = order_of(split), RULES[rule][1]
    partners, found = partners_of(split, order, rule), 0
    ids = np.setdiff1d(np.arange(COUNT), WITHOUT)
    for epoch in range(3):
        drawn = partners.of_samples(epoch, ids)
        for sample, partner, lonely in zip(ids, drawn.ids, drawn.lonely, strict=True):
            fitting = [c for c in ids if c != sample and fits(sample, c)]
            assert lonely == (not fitting) == (partner == sample)
            assert not fitting or partner in fitting
            found += bool(fitting)
    assert found > 50


@pytest.mark.parametrize("rule", list(RULES))
def test_in_the_window_who_fits_there_is_found(split, rule):
    order, fits = order_of(split), RULES[rule][1]
    partners, found = partners_of(split, order, rule, reach="window"), 0
    for step in range(order.steps_per_epoch + 3):
        epoch, ids = order.ids(step, range(4))
        drawn = partners.of_step(step, range(4))
        assert np.array_equal(partners.of_samples(epoch, ids).ids, drawn.ids)
        position = step % order.steps_per_epoch * 4
        for row, sample in enumerate(ids.tolist()):
            plan = order.epoch(epoch).stream(row // 4)
            at = position + row % 4
            window = plan.window_ids(next(plan.pieces(at, at + 1))[0]).tolist()
            assert sample in window
            fitting = [c for c in window if c != sample and fits(sample, c)]
            assert drawn.lonely[row] == (not fitting) == (drawn.ids[row] == sample)
            assert not fitting or drawn.ids[row] in fitting
            found += bool(fitting)
        assert partners.in_window(step, range(4), drawn.ids).all()
    assert found > 10


CHI_SQUARE = {48: 84.04, 8: 26.12}  # of so many degrees of freedom, 99.9 % are below


def chi_square(drawn, cells):
    expected = sum(drawn.values()) / len(cells)
    assert set(drawn) <= set(cells)
    return sum((drawn[cell] - expected) ** 2 / expected for cell in cells)


@pytest.mark.parametrize("reach", ["split", "window"])
def test_10_000_draws_are_uniform_over_the_group(tmp_path, reach):
    """8 samples of one value among others, 1,250 epochs: every other one is as likely.

    In the window where all of them are in it: each epoch cuts the shard in two, somewhere.
    """
    group = [5, 9, 12, 33, 34, 50, 51, 63] if reach == "split" else list(range(20, 28))
    thing = [1 if i in group else None if i % 7 == 0 else 2 for i in range(64)]
    split = add_columns(write_dataset(tmp_path, (64,), px=1), thing=thing).split("train")
    order = Order(split.starts, seed=0, batch_size=64, num_streams=1, window=64)
    partners = Partners(order, same=[split.column("thing")], reach=reach)
    drawn, whole = Counter(), 0
    for epoch in range(1250):  # of one step each
        if reach == "split":
            ids = np.array(group)
            found = partners.of_samples(epoch, ids).ids
        else:
            ids = order.ids(epoch, range(1))[1]
            found = partners.of_step(epoch, range(1)).ids
            stream = order.epoch(epoch).stream(0)
            windows = [set(stream.window_ids(k).tolist()) for k in range(len(stream.windows))]
            if not any(window.issuperset(group) for window in windows):
                continue
        whole += 1
        pairs = zip(ids.tolist(), found.tolist(), strict=True)
        drawn.update((a, b) for a, b in pairs if a in group)
    assert sum(drawn.values()) == 8 * whole > 8000
    cells = [(a, b) for a in group for b in group if a != b]
    assert chi_square(drawn, cells) < CHI_SQUARE[48]


def test_few_who_fit_among_many_are_drawn_uniformly_too(tmp_path):
    """9 of 600 with the same value are of another vendor: they are listed, 9,000 draws."""
    others = list(range(0, 600, 67))
    vendor = [1 if i in others else 0 for i in range(600)]
    manifest = write_dataset(tmp_path, (600,), px=1)
    split = add_columns(manifest, thing=[7] * 600, vendor=vendor).split("train")
    order = Order(split.starts, seed=0, batch_size=60, num_streams=1, window=64)
    columns = {"same": [split.column("thing")], "different": [split.column("vendor")]}
    partners = Partners(order, **columns)
    ids = np.setdiff1d(np.arange(600), others)[:450]
    drawn = Counter(i for epoch in range(20) for i in partners.of_samples(epoch, ids).ids.tolist())
    assert chi_square(drawn, others) < CHI_SQUARE[8]


@pytest.mark.parametrize("reach", ["split", "window"])
def test_a_draw_depends_on_seed_epoch_and_sample_alone(split, reach):
    """1, 2 and 4 processes, and one that resumes anywhere, draw the same; epochs differ."""
    order = order_of(split)
    whole = [
        partners_of(split, order, "icon", reach=reach).of_step(step, range(4)) for step in range(12)
    ]
    for world in (1, 2, 4):
        share = 4 // world
        parts = [range(rank * share, (rank + 1) * share) for rank in range(world)]
        fresh = partners_of(split, order_of(split), "icon", reach=reach)
        for step in (11, 3, 7):  # in any order
            joined = np.concatenate([fresh.of_step(step, part).ids for part in parts])
            assert np.array_equal(joined, whole[step].ids)
    if reach == "split":
        ids = np.array([50, 2, 77, 12])
        partners = partners_of(split, order, "icon")
        together = partners.of_samples(4, ids).ids
        alone = [partners.of_samples(4, ids[k : k + 1]).ids[0] for k in range(4)]
        assert together.tolist() == alone
        many = np.arange(COUNT)
        assert (partners.of_samples(4, many).ids != partners.of_samples(5, many).ids).mean() > 0.3


def test_the_draw_of_version_1_is_the_one_that_runs_were_made_with(split):
    """Golden: whoever changes the draw must raise PARTNERS_VERSION and this."""
    partners = partners_of(split, order_of(split), "icon")
    ids = np.array([0, 1, 2, 4])
    assert [partners.of_samples(epoch, ids).ids.tolist() for epoch in (0, 1)] == GOLDEN


def test_a_share_of_the_samples_keeps_the_partners_that_all_would_have(split):
    order, ids = order_of(split), np.setdiff1d(np.arange(COUNT), WITHOUT)
    everyone, half = (partners_of(split, order, "icon", share=share) for share in (1.0, 0.5))
    paired = total = 0
    for epoch in range(100):
        a, b = everyone.of_samples(epoch, ids), half.of_samples(epoch, ids)
        has = b.ids != ids
        assert np.array_equal(a.ids[has], b.ids[has])
        assert not (b.lonely & ~a.lonely).any()
        paired, total = paired + has.sum(), total + (a.ids != ids).sum()
    assert abs(paired / total - 0.5) < 4 * 0.5 / total**0.5


def test_values_at_the_ends_of_64_bits_are_near_only_what_is_near(tmp_path):
    ends = [2**63 - 1, 2**63 - 3, -(2**63) + 1, -(2**63) + 3, 0, 1, None, None]
    split = add_columns(write_dataset(tmp_path, (8,)), tick=ends).split("train")
    assert split.column("tick").values_of([6]).tolist() == [MISSING_INTEGER]
    order = Order(split.starts, seed=0, batch_size=8, num_streams=1, window=8)
    for within in (2, 2.9):
        partners = Partners(order, same=[], near=Near(split.column("tick"), within))
        assert partners.of_samples(0, np.arange(8)).ids.tolist() == [1, 0, 3, 2, 5, 4, 6, 7]
    wide = Partners(order, same=[], near=Near(split.column("tick"), 1e30))
    assert not wide.of_samples(0, np.arange(6)).lonely.any()


def test_floats_alone_are_searched_in_windows_only(split):
    near, order = Near(split.column("depth"), 1.0), order_of(split)
    with pytest.raises(DataError, match=r"pairs.time is a column of floats"):
        Partners(order, same=[], near=near)
    assert len(Partners(order, same=[], near=near, reach="window").of_step(0, range(4)).ids) == 16
