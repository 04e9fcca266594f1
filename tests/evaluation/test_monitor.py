"""What the monitor says of held-out images, with labels and without, on any number of processes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sslpipe.augment.eval_view import EvalView, ProbeViews, by_view
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.distributed import Rank
from sslpipe.evaluation.embed import EmbedOptions, embed
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.label_free import NUMBERS, label_free_numbers
from sslpipe.evaluation.monitor import Watched, monitor, retrieval_monitor
from sslpipe.models.backbones import small_resnet
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.25, 0.3)
IDS = np.arange(3, 90, 2)
OPTIONS = EmbedOptions(canvas_px=16, num_workers=0)


def scored(process, data, ids=IDS):
    torch.manual_seed(0)
    view, split = seen(data)
    return monitor(
        small_resnet((8, 16)), view, Watched(split, ids, options=replace(OPTIONS, process=process))
    ).numbers


def seen(data):
    """How evaluation sees the images, and the split."""
    return EvalView(16, 16, MEAN, STD), load_index(str(data)).split("train")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


def test_the_numbers_are_those_of_features_and_of_two_fixed_views(data):
    found = scored(Rank(), data)
    labelled = ("knn", "recall_at_1", "map_at_r")
    assert set(found) == {f"holdout_{name}" for name in (*labelled, *NUMBERS)}
    torch.manual_seed(0)
    backbone, (view, split) = small_resnet((8, 16)), seen(data)
    rows = embed(backbone, view, split, OPTIONS, ids=IDS)
    views = embed(backbone, ProbeViews(16, MEAN, STD), split, OPTIONS, ids=IDS)
    (knn,) = knn_results(rows, rows, k=(20,), exclude_same_id=True)
    assert found["holdout_knn"] == knn.value
    expected = label_free_numbers(rows.features, by_view(views.features))
    assert {name: found[f"holdout_{name}"] for name in NUMBERS} == expected


def test_two_processes_say_what_one_says(data):
    alone = scored(Rank(), data)
    first, second = run_processes(scored, 2, data)
    assert second == {}
    assert first["holdout_knn"] == alone["holdout_knn"]
    for name, value in alone.items():  # views of another batch are equal to rounding
        assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    assert scored(Rank(), data, IDS[:1]) == {}


@pytest.mark.parametrize("images", [{"labelled": False}, {"classes": 128}])
def test_without_two_images_of_a_class_the_numbers_without_labels_are_there(tmp_path, images):
    data = write_dataset(tmp_path, **images)
    assert set(scored(Rank(), data)) == {f"holdout_{name}" for name in NUMBERS}


def test_of_small_classes_the_nearest_image_decides(data):
    """3 classes of 4: with all 11 others voting, the own class has 3 votes and each other 4."""
    view, split = seen(data)
    ids = np.arange(16)[np.arange(16) % 4 < 3]
    backbone = torch.nn.Flatten()
    found = monitor(backbone, view, Watched(split, ids, options=OPTIONS)).numbers
    rows = embed(backbone, view, split, OPTIONS, ids=ids)
    (nearest,) = knn_results(rows, rows, k=(1,), exclude_same_id=True)
    assert found["holdout_knn"] == nearest.value


def test_retrieval_is_scored_where_two_images_are_of_a_class(data):
    view, split = seen(data)
    for ids, scores in ((np.arange(4), 0), (np.arange(8), 2)):  # 4 classes
        found = retrieval_monitor(
            small_resnet((8, 16)), view, Watched(split, ids, options=OPTIONS)
        ).numbers
        assert len(found) == scores
        assert all(0 <= value <= 1 for value in found.values())


def test_held_out_images_are_searched_among_each_other_and_a_bank(data):
    """Against a loop over all rows, in float64."""
    view, split = seen(data)
    bank, backbone = np.arange(0, 60, 2), torch.nn.Flatten()
    measured = monitor(backbone, view, Watched(split, IDS, bank, options=OPTIONS))
    found = measured.numbers
    rows = embed(backbone, view, split, OPTIONS, ids=np.union1d(IDS, bank))
    units = torch.nn.functional.normalize(rows.features.double(), dim=1)
    first, mean = [], []
    for row in np.flatnonzero(np.isin(rows.ids.numpy(), IDS)):
        order = [i for i in torch.argsort(-(units @ units[row])).tolist() if i != row]
        hits = (rows.labels[order] == rows.labels[row]).double()
        r = int(hits.sum())
        first.append(hits[0])
        mean.append((hits[:r].cumsum(0) / torch.arange(1, r + 1) * hits[:r]).sum() / r)
    assert found["holdout_recall_at_1"] == pytest.approx(np.mean(first))
    assert found["holdout_map_at_r"] == pytest.approx(np.mean(mean))
    queries = [row for row in range(len(rows.ids)) if int(rows.ids[row]) in {*IDS.tolist()}]
    by_id = dict(zip(rows.ids[queries].tolist(), map(float, mean), strict=True))
    assert measured.by_sample == pytest.approx(by_id)
    without = monitor(backbone, view, Watched(split, IDS, options=OPTIONS)).numbers
    alone = retrieval_monitor(backbone, view, Watched(split, IDS, options=OPTIONS)).numbers
    searched = {k.replace("validation", "holdout"): v for k, v in alone.items()}
    assert without == found | searched
    assert searched.items().isdisjoint(found.items())


def test_views_of_an_image_depend_on_its_id_alone(data):
    split = load_index(str(data)).split("train")
    probe = ProbeViews(12, MEAN, STD)

    def views(ids, batch_size):
        batches = one_pass(
            split, ids=np.array(ids), batch_size=batch_size, canvas_px=16, num_workers=0
        )
        return torch.cat([probe.make_views(b).view(2, -1, 3, 12, 12) for b in batches], dim=1)

    together, alone = views(range(20), 20), views(range(20), 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(views([5, 7], 2), together[:, [5, 7]], rtol=1e-5, atol=1e-5)
    assert torch.equal(views(range(20), 20), together)
    apart = (together[0] - together[1]).abs().amax(dim=(1, 2, 3))
    assert bool((apart > 0.05).all())  # the two views of an image are two
    off = ("flip_prob", "hue", "saturation", "grayscale_prob", "blur_prob")
    assert all(getattr(spec, name) == 0 for spec in probe.views.specs for name in off)
