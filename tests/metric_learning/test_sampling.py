"""PK batches: what a batch holds, that the plan is bounded and counted, and who reads what."""

from collections import Counter

import numpy as np
import pytest
import torch

from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.metric_learning import sampling
from sslpipe.metric_learning.classes import class_numbers
from sslpipe.metric_learning.near_classes import ClassNeighbours
from sslpipe.metric_learning.pk_loader import pk_batches
from sslpipe.metric_learning.sampling import MOST_PASSES, ClassBuffer, PKOrder
from sslpipe.recipe.sections import RunConfig
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.processes import run_processes

ONE, RUN = Rank(), RunConfig(num_workers=0)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return load_index(write_dataset(folder, (40, 3, 60, 25, 72), classes=8)).split("train")


def plan(split, **changes):
    arguments = {
        "seed": 3, "classes_per_batch": 4, "images_per_class": 3, "buffer": 60,
        "num_streams": 2, "window": 8,
    }  # fmt: skip
    return PKOrder(split, **{**arguments, **changes})


class FakeSplit:
    """Labels and shard sizes are all that a plan looks at."""

    def __init__(self, labels, process=1000):
        self.labels = np.asarray(labels, np.int64)
        self.starts = np.append(np.arange(0, len(self.labels), process), len(self.labels))


def test_pk_a_batch_is_p_classes_with_k_images_each(split):
    order = plan(split)
    for step in range(40):
        ids = order.ids(step)
        assert len(set(ids.tolist())) == 12
        labels = split.labels[ids].reshape(4, 3)
        assert (labels == labels[:, :1]).all()  # class by class
        assert len(set(labels[:, 0].tolist())) == 4


def test_numbers_of_products_are_classes_that_are_counted(split):
    numbers = np.array([0, 7, 10**9, 10**10, 10**12, 10**12 + 1, 2**60, 2**62])
    labels = split.labels.copy()
    labels[::9] = -1
    near = FakeSplit(labels)
    far = FakeSplit(np.where(labels < 0, -1, numbers[labels]))
    plans = [plan(own) for own in (near, far)]
    assert plans[1].classes.tolist() == numbers[plans[0].classes].tolist()
    for step in range(20):
        own = far.labels[plans[1].ids(step)].reshape(4, 3)
        assert (own == own[:, :1]).all()
        assert len(set(own[:, 0].tolist())) == 4
    for order, fake in zip(plans, (near, far), strict=True):
        found = class_numbers(torch.from_numpy(fake.labels), torch.from_numpy(order.classes))
        assert found.tolist() == labels.tolist()


def test_facenet_batches_hold_random_negatives_of_other_classes_too(split):
    order = plan(split, random_images=5)
    for step in range(20):
        ids = order.ids(step)
        labels = split.labels[ids]
        assert len(set(ids.tolist())) == len(ids) == 4 * 3 + 5
        assert not set(labels[12:].tolist()) & set(labels[:12].tolist())


def near_by_number(classes, size):
    """A table in which the nearest classes of one are those of the nearest numbers."""
    return np.array([sorted(range(classes), key=lambda d: (abs(d - c), d))[:size]
                     for c in range(classes)])  # fmt: skip


def with_neighbours(split, table, **changes):
    order = plan(split, neighbours=2, **changes)
    order = order.with_nearest(lambda epoch: None if epoch < 2 else table)
    return order


def groups_of(order, step):
    """The classes of a batch, in threes."""
    labels = order.labels[order.ids(step)].reshape(order.classes_per_batch, -1)
    assert (labels == labels[:, :1]).all()
    assert len(set(labels[:, 0].tolist())) == order.classes_per_batch
    return labels[:, 0].reshape(-1, 3).tolist()


def test_a_batch_holds_classes_with_the_ones_nearest_to_them():
    split = FakeSplit(np.arange(6000) % 20)
    table = near_by_number(20, 6)
    order = with_neighbours(split, table, classes_per_batch=6, images_per_class=4, buffer=2000)
    plain = plan(split, classes_per_batch=6, images_per_class=4, buffer=2000)
    steps = order.steps_per_epoch
    assert steps == plain.steps_per_epoch
    for step in range(2 * steps):  # nothing is known of the classes yet
        assert order.ids(step).tolist() == plain.ids(step).tolist()
    anchors = set()
    for step in range(2 * steps, 4 * steps):
        if (
            step % steps >= 0.9 * steps
        ):  # from a second pass: what waited for a whole one goes first
            continue
        taken = []
        for group in groups_of(order, step):
            free = [c for c in table[group[0]].tolist() if c not in taken]
            assert group == free[:3]
            taken += group
            anchors.add(group[0])
    assert len(anchors) > 15
    apart = [abs(c - a) for a, *others in groups_of(plain, 2 * steps) for c in others]
    assert max(apart) > 2  # by chance they lie anywhere


def test_a_full_buffer_does_with_those_of_the_nearest_that_are_ready():
    labels = np.random.default_rng(0).integers(300, size=20_000)
    table = near_by_number(300, 6)
    order = with_neighbours(FakeSplit(labels), table, classes_per_batch=6, images_per_class=3,
                            buffer=400)  # fmt: skip
    plain = plan(FakeSplit(labels), classes_per_batch=6, images_per_class=3, buffer=400)
    assert order.epoch(2).ids.shape == order.epoch(0).ids.shape

    def share_of_nearest(of):
        steps = range(2 * of.steps_per_epoch, 3 * of.steps_per_epoch)
        beside = [c in table[a] for s in steps for a, *near in groups_of(of, s) for c in near]
        return np.mean(beside)

    assert share_of_nearest(plain) < 0.05  # 5 of 299
    assert share_of_nearest(order) > 0.2


def test_nothing_waits_for_a_small_class_longer_than_a_pass():
    labels = np.append(np.repeat(np.arange(19), 50), [19] * 4)
    split = FakeSplit(np.random.default_rng(0).permutation(labels))
    order = plan(split, classes_per_batch=4, images_per_class=4, buffer=2000, neighbours=1)
    table = np.array([[c, 19, *(d for d in range(19) if d != c)][:4] for c in range(20)])
    table[19] = [19, 0, 1, 2]
    order = order.with_nearest(lambda epoch: None if epoch < 2 else table)
    assert order.steps_per_epoch > 50  # of 954 samples in 16s
    of_epoch = order.epoch(2)
    assert of_epoch.ids.shape == (order.steps_per_epoch, 16)
    passes = of_epoch.chunks // order.order.steps_per_epoch - 2 * MOST_PASSES
    assert passes.max() <= 1  # the second begins with a sample that still waits


def test_the_table_is_that_of_the_running_means_of_unit_rows():
    generator = torch.Generator().manual_seed(0)
    neighbours = ClassNeighbours(5, 3, 4, momentum=0.2).double()
    means = {}
    for _ in range(6):
        x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (12,), generator=generator)  # the fifth class never comes
        neighbours.follow(x, labels)
        for c in set(labels.tolist()):
            own = [row / row.norm() for row, y in zip(x, labels.tolist(), strict=True) if y == c]
            new = sum(own) / len(own)
            means[c] = means[c] + 0.2 * (new - means[c]) if c in means else new
    means[4] = torch.zeros(3, dtype=torch.float64)
    neighbours.begin(1)
    assert neighbours.nearest_classes(1) is None
    for c, row in enumerate(neighbours.nearest_classes(2).tolist()):
        others = [d for d in range(5) if d != c]
        assert row == [c, *sorted(others, key=lambda d: -float(means[c] @ means[d]))[:3]]
    before = neighbours.nearest_classes(2).tolist()
    neighbours.follow(torch.randn(9, 3).double(), torch.arange(9) % 5)
    neighbours.begin(2)
    assert neighbours.nearest_classes(2).tolist() == before  # what is being read stays
    assert neighbours.nearest_classes(3).tolist() != before


def planned_in_rank(process):
    """The means of the last rank are off by more than rounding, its plan still the first one's."""
    neighbours = ClassNeighbours(20, 3, 6)
    generator = torch.Generator().manual_seed(0)
    neighbours.follow(torch.randn(40, 3, generator=generator), torch.arange(40) % 20)
    if process.rank:
        neighbours.means += torch.randn(20, 3, generator=generator)
    neighbours.begin(1)
    order = plan(FakeSplit(np.arange(2000) % 20), neighbours=2, classes_per_batch=6, buffer=500)
    order = order.with_nearest(neighbours.nearest_classes)
    return order.epoch(2).ids.tolist(), neighbours.means.tolist()


def test_all_ranks_plan_by_the_first_ones_table():
    first, second = run_processes(planned_in_rank, 2)
    assert first == second
    assert first[0] == planned_in_rank(Rank())[0]


def test_an_epoch_serves_a_sample_at_most_once_a_pass_and_counts_what_it_does_not(split):
    order = plan(split)
    served = Counter(i for t in range(order.steps_per_epoch) for i in order.ids(t).tolist())
    assert max(served.values()) == 1  # the first epoch is one pass
    assert order.used == sum(served.values()) == 12 * order.steps_per_epoch
    line = order.order.steps_per_epoch * order.order.batch_size
    assert order.used + order.dropped <= line  # the rest still waited when the pass ended
    assert line - order.used - order.dropped <= order.buffer
    assert order.used > 0.7 * len(split)


@pytest.mark.parametrize("shares", [[1] * 30, [50, 30, 10, 5, 5], [1] * 4])
def test_the_buffer_is_bounded_and_every_later_epoch_has_the_same_length(shares):
    rng = np.random.default_rng(0)
    labels = rng.choice(len(shares), 4000, p=np.array(shares) / sum(shares))
    order = plan(FakeSplit(labels), classes_per_batch=4, images_per_class=4, buffer=200)
    waiting, most = ClassBuffer(4, 4, 0, 200), 0
    for chunk in range(order.order.steps_per_epoch):
        for sample in order.order.ids(chunk, range(2))[1].tolist():
            waiting.add(sample, int(labels[sample]), chunk)
            most = max(most, len(waiting._waiting))
    assert most <= 200
    assert order.dropped == waiting.dropped
    for epoch in (1, 2):
        assert order.epoch(epoch).ids.shape == (order.steps_per_epoch, 16)


def test_epochs_and_seeds_give_other_batches_and_the_same_arguments_the_same(split):
    first = plan(split).epoch(0).ids.tolist()
    assert plan(split).epoch(0).ids.tolist() == first
    assert plan(split).epoch(1).ids.tolist() != first
    assert plan(split, seed=4).epoch(0).ids.tolist() != first


def test_held_out_samples_small_classes_and_unlabelled_ones_are_never_served():
    labels = np.array([0] * 50 + [1] * 50 + [2] * 2 + [-1] * 30 + [3] * 50)
    without = np.flatnonzero(labels == 3)[:20]
    order = plan(FakeSplit(labels, 40), classes_per_batch=3, buffer=60, without=without)
    assert order.classes.tolist() == [0, 1, 3]
    assert order.small_classes == 1
    seen = {i for t in range(5 * order.steps_per_epoch) for i in order.ids(t).tolist()}
    assert seen <= set(np.flatnonzero(np.isin(labels, [0, 1, 3])).tolist()) - set(without.tolist())
    assert len(seen) > 100


def test_impossible_plans_are_one_error_with_what_to_do():
    labels = np.arange(400) % 4
    for changes, text in (
        ({"classes_per_batch": 5}, "but 4 classes .* set sampler.classes_per_batch=4$"),
        ({"buffer": 20}, "less than two batches of 12; use at least 24"),
        ({"images_per_class": 101, "buffer": 10**4}, "set sampler.images_per_class=100$"),
        ({"num_streams": 401}, "sampler.num_streams = 401 .* 400 to train .* sampler.num_streams"),
        ({"random_images": 389, "buffer": 10**4}, "400 to train on; .* sampler.random_images"),
    ):
        with pytest.raises(DataError, match=text):
            plan(FakeSplit(labels), **changes)
    many = FakeSplit(np.arange(4000) % 1000)  # nothing meets within 24 samples
    with pytest.raises(DataError, match=r"sampler.buffer = 24 samples; use a larger one, up to 4"):
        plan(many, buffer=24)


@pytest.mark.parametrize(
    ("classes", "samples", "streams"),
    [
        (16, 186, 1),
        (16, 187, 2),
        (19, 186, 1),
        (23, 253, 4),
    ],  # a pass of 64s alone gave no 16 of 16
)
def test_every_image_is_seen_and_those_of_a_class_about_equally_often(classes, samples, streams):
    split = FakeSplit(np.random.default_rng(0).integers(classes, size=samples))
    order = plan(split, classes_per_batch=16, images_per_class=4, buffer=4096, num_streams=streams)
    steps = 300 * order.steps_per_epoch
    seen = np.bincount(np.concatenate([order.ids(t) for t in range(steps)]), minlength=samples)
    for label in range(classes):
        of_class = seen[split.labels == label]
        if classes == 16:  # all are in each batch, so four of each class's images are drawn
            assert of_class.sum() == 4 * steps
            share = 4 / len(of_class)
            error = np.sqrt(steps * share * (1 - share))
            assert abs(of_class - steps * share).max() < 5 * error
        assert of_class.min() > of_class.mean() / 2
        assert of_class.max() < of_class.mean() * 2


def test_where_whole_batches_leave_too_few_a_pass_reads_all_and_resumes_exactly(split):
    changes = {"classes_per_batch": 8, "images_per_class": 20, "buffer": 400}  # of 25 each
    steps = 4
    whole = collected(split, plan(split, **changes), steps=steps)
    assert [batch.epoch for batch in whole] == [0, 1, 2, 3]
    resumed = collected(split, plan(split, **changes), first_step=2, steps=2)
    for a, b in zip(resumed, whole[2:], strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert torch.equal(a.images, b.images)
    ranks = [collected(split, plan(split, **changes), Rank(r, 3), steps=steps) for r in range(3)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([rank[step].images for rank in ranks]), batch.images)


def test_no_batch_at_all_names_its_own_cause():
    sizes = [40, 8, 8, 8]
    few_others = FakeSplit(np.random.default_rng(0).permutation(np.repeat(range(4), sizes)))
    with pytest.raises(DataError, match=r"sampler.random_images = 45 .* 64 to train on; use fewer"):
        plan(few_others, classes_per_batch=3, random_images=45, buffer=1000)
    odd = FakeSplit(np.random.default_rng(0).permutation(np.append(np.arange(64) % 16, [0, 1])))
    sizes = {"classes_per_batch": 16, "images_per_class": 4, "buffer": 1000}
    with pytest.raises(DataError, match=r"sampler.num_streams = 4 .* 66 samples .* one stream"):
        plan(odd, num_streams=4, **sizes)
    assert plan(odd, num_streams=1, **sizes).steps_per_epoch == 1


def test_a_later_epoch_that_finds_too_few_batches_says_what_to_change(monkeypatch):
    labels = np.random.default_rng(1).integers(8, size=800)
    order = plan(FakeSplit(labels), buffer=24)
    monkeypatch.setattr(sampling, "MOST_PASSES", 1)
    text = r"larger sampler.buffer, up to 800, or a smaller sampler.classes_per_batch"
    with pytest.raises(DataError, match=text):
        list(map(order.epoch, range(40)))


def collected(split, order, process=ONE, first_step=0, steps=None, **run):
    """The batches of a process, one epoch of them unless told."""
    changed = RUN.model_copy(update=run)
    stream = pk_batches(
        split, order, changed, process, canvas_px=16, first_step=first_step, on_bad=None
    )
    batches = [next(stream) for _ in range(steps or order.steps_per_epoch)]
    stream.close()
    return batches


def test_processes_workers_caches_and_resumes_see_the_planned_images(split):
    steps = plan(split).steps_per_epoch + 4  # into the second epoch
    whole = collected(split, plan(split), steps=steps)
    for step, batch in enumerate(whole):
        assert batch.ids.tolist() == batch.source_ids.tolist() == plan(split).ids(step).tolist()
        assert batch.labels.tolist() == split.labels[batch.ids].tolist()
        expected = np.stack([picture(i).transpose(2, 0, 1) for i in batch.ids.tolist()])
        assert torch.equal(batch.images, torch.from_numpy(expected))
    for world in (2, 3, 5):  # 12 rows: 5 processes have 2 or 3
        ranks = [collected(split, plan(split), Rank(r, world), steps=steps) for r in range(world)]
        for step, batch in enumerate(whole):
            parts = [rank[step] for rank in ranks]
            assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
            assert torch.equal(torch.cat([part.ids for part in parts]), batch.ids)
    for first in (1, 7, steps - 2):
        resumed = collected(split, plan(split), first_step=first, steps=steps - first)
        for a, b in zip(resumed, whole[first:], strict=True):
            assert torch.equal(a.images, b.images)
            assert a.epoch == b.epoch
    for run in ({"num_workers": 2}, {"cache": "memory"}):
        for a, b in zip(collected(split, plan(split), steps=steps, **run), whole, strict=True):
            assert torch.equal(a.images, b.images)


def test_a_window_is_read_once_a_pass(split, monkeypatch):
    read = Counter()
    original = Reader.rows

    def counting(self, process, rows):
        read.update((process, row) for row in rows.tolist())
        return original(self, process, rows)

    monkeypatch.setattr(Reader, "rows", counting)
    collected(split, plan(split))
    assert max(read.values()) == 1


def test_a_bad_image_is_replaced_by_its_own_class_and_reported_once(tmp_path):
    broken = dict.fromkeys((9, 17, 41), b"junk")
    split = load_index(write_dataset(tmp_path, (32, 32), classes=8, broken=broken)).split("train")
    order, bad = plan(split), []
    stream = pk_batches(split, order, RUN, Rank(), canvas_px=16, on_bad=bad.append)
    for step in range(12 * order.steps_per_epoch):
        batch = next(stream)
        assert batch.ids.tolist() == order.ids(step).tolist()
        assert split.labels[batch.ids].tolist() == batch.labels.tolist()
        moved = batch.ids != batch.source_ids
        assert set(batch.ids[moved].tolist()) <= set(broken)
        assert not set(batch.source_ids[moved].tolist()) & set(batch.ids.tolist())
        assert not set(batch.source_ids.tolist()) & set(broken)
    assert sorted(record.id for record in bad) == [9, 17, 41]
