"""Batches with partners: the same whoever makes them, and masks by columns."""

from collections import Counter

import numpy as np
import pytest
import torch

from sslpipe.data import reader
from sslpipe.data.order import Order
from sslpipe.data.pairing import pairing_warnings, plan_pairs, survey
from sslpipe.data.partners import Near, Partners, joint_codes
from sslpipe.data.subsets import held_out
from sslpipe.errors import DataError
from sslpipe.recipe.pretrain import Pairs
from tests.helpers.batches import order_of
from tests.helpers.batches import take as take_batches
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, png, write_dataset

SIZES = (40, 3, 60, 25)
ICON = [None if i % 11 == 0 else f"icon{i // 2 % 20}" for i in range(128)]
VENDOR = [None if i % 13 == 0 else i % 3 for i in range(128)]
SHOT_AT = [1_000_000 * (i // 4) for i in range(128)]
CODES = sorted({icon for icon in ICON if icon})
DEVICE = {"cache": "device"}
BROKEN = {9: b"", 52: b"<html>", 100: b"\x89PNG\r\n\x1a\n"}


def make_index(folder, broken=()):
    manifest = write_dataset(folder, SIZES, broken={70: png(picture(70, 24)), **dict(broken)})
    return add_columns(manifest, times=("shot_at",), icon=ICON, vendor=VENDOR, shot_at=SHOT_AT)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("data"))


def take(index, steps, *, pairs=Pairs(positive="icon"), **settings):  # noqa: B008
    return take_batches(index, steps, pairs=pairs, window=16, holdout=16, **settings)


def shown(batch, row):
    """The pixels of a row's second view."""
    image = int(batch.pairs.image[row])
    height, width = batch.sizes[image].tolist()
    return batch.images[image, :, :height, :width].permute(1, 2, 0).numpy()


def same(a, b):
    return (
        all(torch.equal(x, y) for x, y in zip(a.pairs[1:], b.pairs[1:], strict=True))
        and torch.equal(a.source_ids, b.source_ids)
        and all(np.array_equal(shown(a, row), shown(b, row)) for row in range(len(a.ids)))
    )


@pytest.mark.promise(11)
def test_the_second_view_shows_the_partner_and_masks_know_it(index):
    pairs = Pairs(positive="icon", never_negative=["vendor"])
    without, paired = held_out(index.split("train").labels, 16).tolist(), 0
    for batch in take(index, 10, pairs=pairs):
        ids = batch.pairs.ids.tolist()
        assert batch.pairs.ids[:, 0].tolist() == batch.source_ids.tolist()
        for row, (own, partner) in enumerate(ids):
            px = 24 if partner == 70 else 16
            assert np.array_equal(shown(batch, row), picture(partner, px))
            assert partner not in without
            assert batch.pairs.labels[row].tolist() == [own % 4, partner % 4]
            assert bool(batch.pairs.lonely[row]) == (partner == own)
            if partner != own:
                assert ICON[own] == ICON[partner] is not None
                paired += 1
            for view, sample in enumerate((own, partner)):
                icon, vendor = batch.pairs.groups[row, view].tolist()
                assert icon == (-1 if ICON[sample] is None else CODES.index(ICON[sample]))
                assert vendor == (-1 if VENDOR[sample] is None else VENDOR[sample])
        assert batch.images.shape[0] == 16 + sum(own != partner for own, partner in ids)
        assert batch.loss_arguments.keys() == {"ids", "labels", "groups"}
    assert paired > 40


RULES = [
    Pairs(positive="icon"),
    Pairs(positive="icon", different="vendor"),
    Pairs(time="shot_at", within="1 s", never_negative="vendor"),
]


@pytest.mark.parametrize("pairs", RULES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_batches_put_together_are_the_one_process_batch(index, pairs, world):
    whole = take(index, 9, pairs=pairs, run={"num_workers": 0})
    parts = [take(index, 9, rank=rank, world=world, pairs=pairs) for rank in range(world)]
    assert any((batch.pairs.ids[:, 0] != batch.pairs.ids[:, 1]).any() for batch in whole)
    for step, batch in enumerate(whole):
        for field in ("ids", "labels", "groups", "lonely"):
            joined = torch.cat([getattr(part[step].pairs, field) for part in parts])
            assert torch.equal(joined, getattr(batch.pairs, field))
        views = [shown(part[step], row) for part in parts for row in range(16 // world)]
        assert all(np.array_equal(view, shown(batch, row)) for row, view in enumerate(views))


@pytest.mark.parametrize("pairs", RULES, ids=str)
def test_neither_run_nor_resuming_changes_a_pair(index, pairs):
    plain = take(index, 11, pairs=pairs, run={"num_workers": 0})
    settings = [{"num_workers": 3}, {"num_workers": 9}, {"cache": "memory"}]
    for run in settings:
        assert all(map(same, plain, take(index, 11, pairs=pairs, run=run)))
    assert all(map(same, plain, take(index, 11, pairs=pairs, run=DEVICE)))
    for first in (1, 6, 9):  # 7 steps are an epoch
        assert all(map(same, plain[first:], take(index, 11 - first, first=first, pairs=pairs)))


def test_micro_batches_select_rows_with_their_partners(index):
    batch = take(index, 1, pairs=Pairs(positive="icon"))[0]
    rows = torch.tensor([14, 3, 3, 8, 0])
    part = batch.rows(rows)
    assert torch.equal(part.ids, batch.ids[rows])
    assert torch.equal(part.pairs.ids, batch.pairs.ids[rows])
    for place, row in enumerate(rows.tolist()):
        assert np.array_equal(shown(part, place), shown(batch, row))
    assert len(part.images) <= 2 * len(rows)
    assert torch.equal(part.view_sizes, batch.view_sizes[:, rows])


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("run", [{}, DEVICE], ids=str)
def test_a_bad_partner_is_replaced_by_the_sample_itself(tmp_path, index, world, run):
    clean, bad, replaced = take(index, 12), [], 0
    settings = {"bad": bad, "run": run, "world": world}
    broken = make_index(tmp_path, BROKEN)
    parts = [take(broken, 12, rank=rank, **settings) for rank in range(world)]
    for step, batch in enumerate(clean):
        ids = torch.cat([part[step].pairs.ids for part in parts])
        rows = [(part[step], row) for part in parts for row in range(16 // world)]
        for (own, partner), (source, second), (part, row) in zip(
            batch.pairs.ids.tolist(), ids.tolist(), rows, strict=True
        ):
            if own in BROKEN:
                assert source == second  # a stand-in has no partner
            elif partner in BROKEN:
                assert (source, second) == (own, own)
                replaced += 1
            else:
                assert (source, second) == (own, partner)
            px = 24 if second == 70 else 16
            assert np.array_equal(shown(part, row), picture(second, px))
    assert replaced > 0
    assert {record.id for record in bad} == set(BROKEN)


def test_partners_that_are_soon_shown_again_are_decoded_once(index, monkeypatch):
    original, plain = reader.decode, take(index, 7)  # the steps of an epoch
    shown_images = torch.cat([batch.pairs.ids.flatten() for batch in plain]).unique().numel()

    def decodes(room):
        seen = []

        def counted(*arguments, **options):
            seen.append(1)
            return original(*arguments, **options)

        monkeypatch.setattr(reader, "decode", counted)
        monkeypatch.setattr("sslpipe.data.loader.RECENT_BYTES", room)
        assert all(map(same, plain, take(index, 7, run={"num_workers": 0})))
        return len(seen)

    assert decodes(2**29) == shown_images
    assert decodes(3 * 16 * 16 * 3) > shown_images  # three images: the oldest had to go
    assert decodes(0) > shown_images


def test_of_groups_side_by_side_95_percent_of_partners_are_in_the_window(tmp_path):
    """Groups of 2 to 6, written one after another; batches mix them as a full shuffle does."""
    sizes = np.random.default_rng(0).integers(2, 7, 1000)
    icon = np.repeat(np.arange(1000), sizes)[:1024].tolist()
    split = add_columns(write_dataset(tmp_path, (512, 512), px=1), icon=icon).split("train")
    order = order_of(split, batch_size=32, window=128)
    pairing = plan_pairs(Pairs(positive="icon"), split, order)
    found = survey(pairing, list(range(order.steps_per_epoch)))
    assert found.partners > 0.99 * found.samples
    assert found.outside < 0.05 * found.partners
    assert pairing_warnings(pairing, "none") == []


def test_without_partners_both_views_show_the_image(index):
    batch = take(index, 1, pairs=Pairs(never_negative=["vendor"], label="icon"))[0]
    assert torch.equal(batch.pairs.image, torch.arange(16))
    assert torch.equal(batch.pairs.ids[:, 0], batch.pairs.ids[:, 1])
    assert len(batch.images) == 16
    labels = [-1 if ICON[i] is None else CODES.index(ICON[i]) for i in batch.ids.tolist()]
    assert batch.labels.tolist() == labels
    assert batch.pairs.labels[:, 1].tolist() == labels


def test_combinations_of_values_are_numbered_apart(index):
    split = index.split("train")
    codes = joint_codes([split.column("icon"), split.column("vendor")], np.arange(128))
    for a in range(128):
        assert (codes[a] < 0) == (None in (ICON[a], VENDOR[a]))
        for b in range(a):
            equal = (ICON[a], VENDOR[a]) == (ICON[b], VENDOR[b]) and codes[a] >= 0
            assert (codes[a] == codes[b] >= 0) == equal


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positive": "icom"}, "^pairs.positive: .* no column 'icom'; did you mean 'icon'"),
        ({"label": "x"}, "^pairs.label: .* has no column 'x'"),
        ({"different": "x", "time": "shot_at", "within": 3}, "^pairs.different: .* no column 'x'"),
        ({"never_negative": "x"}, "^pairs.never_negative: .* has no column 'x'"),
        ({"time": "x", "within": 3}, "^pairs.time: .* has no column 'x'"),
        ({"time": "icon", "within": "60 s"}, "pairs.time = 'icon' is a column of texts"),
        ({"time": "shot_at", "within": 60}, "'shot_at' is a column of kind time; .* as '60 s'"),
        ({"time": "vendor", "within": "1 s"}, "'vendor' is a column of kind integer; .* as 60"),
    ],
)
def test_columns_that_cannot_serve_are_named_with_their_setting(index, settings, message):
    with pytest.raises(DataError, match=message):
        take(index, 1, pairs=Pairs(**settings))


def test_the_survey_counts_who_finds_whom_and_about_how_many_are_read_apart(index):
    split = index.split("train")
    order = order_of(split, window=16)
    pairing = plan_pairs(Pairs(positive="icon"), split, order)
    steps = list(range(6 * order.steps_per_epoch))
    found, outside, partners = survey(pairing, steps), 0, 0
    for step in steps:
        epoch, ids = order.ids(step, range(4))
        for row, (own, other) in enumerate(
            zip(ids, pairing.partners_of_step(step, range(4)), strict=True)
        ):
            plan = order.epoch(epoch).stream(row // 4)
            position = step % order.steps_per_epoch * 4 + row % 4
            partners += own != other
            outside += own != other and other not in plan.window_ids(
                next(plan.pieces(position, position + 1))[0]
            )
    assert (found.samples, found.partners) == (16 * len(steps), partners)
    assert abs(found.outside - outside) < 0.05 * partners
    assert outside > 0.5 * partners
    text = pairing_warnings(pairing, "none")[-1]
    assert "outside of the window that is read" in text
    assert text not in pairing_warnings(pairing, "memory")


def test_columns_that_leave_few_negatives_are_a_warning(tmp_path):
    manifest = write_dataset(tmp_path, (64,))
    most = ["a" if i % 5 else f"b{i}" for i in range(64)]
    index = add_columns(manifest, all=["a"] * 64, most=most, half=[i % 2 for i in range(64)])
    split = index.split("train")
    order = order_of(split, num_streams=2, window=16, seed=0)
    pairs = Pairs(positive="most", never_negative=("all", "half"))
    said = [
        text
        for text in pairing_warnings(plan_pairs(pairs, split, order), "none")
        if "negat" in text
    ]
    masked = []  # by loops over the pairs of each batch
    for step in range(order.steps_per_epoch):
        ids = order.ids(step, range(2))[1]
        masked.append(np.mean([most[i] == most[j] for i in ids for j in ids if i != j]))
    assert len(said) == 2
    assert said[0].startswith(f"[pairs]: {np.mean(masked):.0%} of the pairs of samples")
    assert "have the same most and are no negatives" in said[0]
    assert said[1].startswith("[pairs]: 100% of the pairs")
    assert "the same all and" in said[1]


COUNT = sum(SIZES)
WITHOUT = np.array([3, 30, 31, 90], np.int64)


def some_values(kinds, seed, *, text=""):
    """Values of some kinds, a tenth of them missing; the last are 12 of one kind."""
    rng = np.random.default_rng(seed)
    drawn = [int(k) for k in rng.integers(0, kinds, COUNT - 12)] + [kinds] * 12
    lost = rng.random(COUNT) < 0.1
    return [
        None if gone else f"{text}{k}" if text else k for k, gone in zip(drawn, lost, strict=True)
    ]


KINDS, MAKERS = some_values(20, 0, text="icon"), some_values(4, 1, text="v")
CAMERA = some_values(5, 2)
TIMES = some_values(2000, 3)
DEPTH = [None if k is None else k / 7 for k in TIMES]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    manifest = write_dataset(tmp_path_factory.mktemp("data"), SIZES)
    index = add_columns(
        manifest, icon=KINDS, vendor=MAKERS, camera=CAMERA, shot_at=TIMES, depth=DEPTH
    )
    return index.split("train")


def an_order(split, window=32):
    sizes = {"batch_size": 16, "num_streams": 4, "window": window}
    return Order(split.starts, seed=3, without=WITHOUT, **sizes)


FITS = {
    "icon": ({"same": ["icon"]}, lambda a, b: alike(KINDS, a, b)),
    "different": (
        {"same": ["icon"], "different": ["vendor", "camera"]},
        lambda a, b: alike(KINDS, a, b) and differ(MAKERS, a, b) and differ(CAMERA, a, b),
    ),
    "both": (
        {"same": ["camera", "vendor"]},
        lambda a, b: alike(CAMERA, a, b) and alike(MAKERS, a, b),
    ),
    "near": (
        {"same": ["camera"], "near": ("shot_at", 200)},
        lambda a, b: alike(CAMERA, a, b) and close(TIMES, a, b, 200),
    ),
    "near alone": ({"same": [], "near": ("shot_at", 30)}, lambda a, b: close(TIMES, a, b, 30)),
    "near in floats alone": (
        {"same": [], "near": ("depth", 4.25)},
        lambda a, b: close(DEPTH, a, b, 4.25),
    ),
    "near and different": (
        {"same": ["camera"], "near": ("shot_at", 300), "different": ["vendor"]},
        lambda a, b: alike(CAMERA, a, b) and close(TIMES, a, b, 300) and differ(MAKERS, a, b),
    ),
    "near in floats": (
        {"same": ["camera"], "near": ("depth", 20.5)},
        lambda a, b: alike(CAMERA, a, b) and close(DEPTH, a, b, 20.5),
    ),
}


def alike(column, a, b):
    return column[a] is not None and column[a] == column[b]


def differ(column, a, b):
    return column[a] is not None and column[b] is not None and column[a] != column[b]


def close(column, a, b, within):
    return None not in (column[a], column[b]) and abs(column[a] - column[b]) <= within


def partners_of(split, order, rule, **settings):
    columns = dict(FITS[rule][0])
    near = columns.pop("near", None)
    return Partners(
        order,
        same=[split.column(name) for name in columns["same"]],
        different=[split.column(name) for name in columns.get("different", [])],
        near=near and Near(split.column(near[0]), near[1]),
        **settings,
    )


@pytest.mark.parametrize("rule", list(FITS))
def test_a_partner_fits_and_only_who_fits_nobody_has_none(split, rule):
    order, fits = an_order(split), FITS[rule][1]
    partners, found = partners_of(split, order, rule), 0
    ids = np.setdiff1d(np.arange(COUNT), WITHOUT)
    for epoch in range(3):
        for sample, partner in zip(ids, partners.of_samples(epoch, ids), strict=True):
            fitting = [c for c in ids if c != sample and fits(sample, c)]
            assert (partner == sample) == (not fitting)
            assert not fitting or partner in fitting
            found += bool(fitting)
    assert found > 50


CHI_SQUARE = {48: 84.04, 8: 26.12}  # of so many degrees of freedom, 99.9 % are below


def chi_square(drawn, cells):
    expected = sum(drawn.values()) / len(cells)
    assert set(drawn) <= set(cells)
    return sum((drawn[cell] - expected) ** 2 / expected for cell in cells)


def test_10_000_draws_are_uniform_over_the_group(tmp_path):
    """8 samples of one value among others, 1,250 epochs: every other one is as likely."""
    group = [5, 9, 12, 33, 34, 50, 51, 63]
    thing = [1 if i in group else None if i % 7 == 0 else 2 for i in range(64)]
    split = add_columns(write_dataset(tmp_path, (64,), px=1), thing=thing).split("train")
    order = Order(split.starts, seed=0, batch_size=64, num_streams=1, window=64)
    partners, drawn, ids = Partners(order, same=[split.column("thing")]), Counter(), np.array(group)
    for epoch in range(1250):
        drawn.update(zip(group, partners.of_samples(epoch, ids).tolist(), strict=True))
    cells = [(a, b) for a in group for b in group if a != b]
    assert chi_square(drawn, cells) < CHI_SQUARE[48]


def test_draws_are_uniform_over_who_is_near(tmp_path):
    """Of two cameras; sample 40 has 10 others of its own within 25 of its time."""
    time = [None if i == 44 else 5 * (i // 2) for i in range(100)]
    manifest = write_dataset(tmp_path, (100,), px=1)
    split = add_columns(manifest, camera=[i % 2 for i in range(100)], tick=time).split("train")
    order = Order(split.starts, seed=0, batch_size=50, num_streams=1, window=64)
    near = Near(split.column("tick"), 25)
    partners = Partners(order, same=[split.column("camera")], near=near)
    others = [i for i in range(30, 51, 2) if i not in (40, 44)]
    drawn = Counter(int(partners.of_samples(e, np.array([40]))[0]) for e in range(4000))
    assert len(others) == 9
    assert chi_square(drawn, others) < CHI_SQUARE[8]


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
    drawn = Counter(i for epoch in range(20) for i in partners.of_samples(epoch, ids).tolist())
    assert chi_square(drawn, others) < CHI_SQUARE[8]


def test_a_draw_depends_on_seed_epoch_and_sample_alone(split):
    """Alone or together, in any order, by whoever asks; epochs and seeds differ."""
    order, everyone = an_order(split), np.arange(COUNT)
    whole = [partners_of(split, order, "different").of_samples(epoch, everyone) for epoch in (4, 5)]
    assert (whole[0] != whole[1]).mean() > 0.2
    fresh = partners_of(split, an_order(split), "different")
    for epoch in (5, 4):
        for part in (everyone[::-1], everyone[50:53], everyone[:1], everyone[3::7]):
            assert np.array_equal(fresh.of_samples(epoch, part), whole[epoch - 4][part])
    other = Order(split.starts, seed=4, without=WITHOUT, batch_size=16, num_streams=4, window=32)
    assert (partners_of(split, other, "different").of_samples(4, everyone) != whole[0]).mean() > 0.2
