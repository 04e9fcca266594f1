"""Batches with partners: the same whoever makes them, and masks by columns."""

import numpy as np
import pytest
import torch

from sslpipe.data import reader
from sslpipe.data.order import held_out
from sslpipe.data.pairing import joint_codes, plan_pairs, plan_version
from sslpipe.errors import DataError
from sslpipe.recipe.pairs import Pairs
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


def take(index, steps, *, pairs=Pairs(positive="icon", share=0.8), **settings):  # noqa: B008
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


@pytest.mark.parametrize("reach", ["split", "window"])
def test_the_second_view_shows_the_partner_and_masks_know_it(index, reach):
    pairs = Pairs(positive="icon", never_negative=["vendor"], reach=reach, share=0.8)
    without, paired = held_out(index.split("train").labels, 16).tolist(), 0
    for batch in take(index, 10, pairs=pairs):
        ids = batch.pairs.ids.tolist()
        assert batch.pairs.ids[:, 0].tolist() == batch.source_ids.tolist()
        for row, (own, partner) in enumerate(ids):
            px = 24 if partner == 70 else 16
            assert np.array_equal(shown(batch, row), picture(partner, px))
            assert partner not in without
            assert batch.pairs.labels[row].tolist() == [own % 4, partner % 4]
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
    Pairs(positive="icon", share=0.8),
    Pairs(positive="icon", different="vendor", reach="window"),
    Pairs(time="shot_at", within="1 s", never_negative="vendor"),
]


def test_digests_hold_the_versions_that_runs_were_made_with():
    """Golden: as ORDER_VERSION and PARTNERS_VERSION were when they were written."""
    assert (plan_version(None), plan_version(Pairs(positive="icon"))) == (1, 1001)


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
    settings = [{"num_workers": 3}, {"cache": "memory"}, {"window_bytes": 1}]
    for run in (*settings, {"num_workers": 9, "prefetch": 9}):
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
        monkeypatch.setattr(reader, "decode", lambda raw, *to: seen.append(1) or original(raw, *to))
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
    found = pairing.survey(list(range(order.steps_per_epoch)))
    assert found.partners > 0.99 * found.samples
    assert found.outside < 0.05 * found.partners
    assert pairing.warnings("none") == []


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


def test_the_survey_counts_who_finds_whom_where(index):
    split = index.split("train")
    order = order_of(split, window=16)
    pairing = plan_pairs(Pairs(positive="icon"), split, order)
    found, outside, partners = pairing.survey([0, 5]), 0, 0
    for step in (0, 5):
        epoch, ids = order.ids(step, range(4))
        for row, (own, other) in enumerate(
            zip(ids, pairing.drawn(step, range(4)).ids, strict=True)
        ):
            plan, position = order.epoch(epoch).stream(row // 4), step * 4 + row % 4
            partners += own != other
            outside += own != other and other not in plan.window_ids(
                next(plan.pieces(position, position + 1))[0]
            )
    assert (found.samples, found.partners, found.outside) == (32, partners, outside)
    assert found.partners + found.lonely == 32
    assert outside > 5
    [text] = pairing.warnings("none")
    assert "outside of the window that is read" in text
    assert pairing.warnings("memory") == []
    window = plan_pairs(Pairs(positive="icon", reach="window"), split, order)
    assert window.survey([0, 5]).outside == 0
    assert window.survey([0, 5], "split") == found


def test_columns_that_leave_few_negatives_are_a_warning(tmp_path):
    manifest = write_dataset(tmp_path, (64,))
    most = ["a" if i % 5 else f"b{i}" for i in range(64)]
    index = add_columns(manifest, all=["a"] * 64, most=most, half=[i % 2 for i in range(64)])
    split = index.split("train")
    order = order_of(split, num_streams=2, window=16, seed=0)
    pairs = Pairs(positive="most", never_negative=("all", "half"), reach="window")
    said = [text for text in plan_pairs(pairs, split, order).warnings("none") if "negat" in text]
    masked = []  # by loops over the pairs of each batch
    for step in range(order.steps_per_epoch):
        ids = order.ids(step, range(2))[1]
        masked.append(np.mean([most[i] == most[j] for i in ids for j in ids if i != j]))
    assert len(said) == 2
    assert said[0].startswith(f"[pairs]: {np.mean(masked):.0%} of the pairs of samples")
    assert "have the same most and are no negatives" in said[0]
    assert said[1].startswith("[pairs]: 100% of the pairs")
    assert "the same all and" in said[1]
