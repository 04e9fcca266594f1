"""The probe on augmented images: crops and flips only, new each epoch, the backbone frozen."""

import pytest
import torch

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import load_index
from sslpipe.data.pipeline import Batch
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.sgd_probe import TrainingView, augmented_sgd_probe, sgd_results
from sslpipe.models.state import module_sha256
from tests.evaluation.test_embed import VIEW, make_backbone
from tests.helpers.dataset import write_dataset


@pytest.fixture
def splits(tmp_path):
    data = write_dataset(tmp_path / "data", (20, 20))
    write_dataset(tmp_path / "data", (12,), split="test")
    index = load_index(data)
    return index.split("train"), index.split("test")


def test_the_probe_is_sgd_on_each_epochs_own_views(splits):
    backbone, view, (train, test) = make_backbone(), EvalView(**VIEW), splits
    before = module_sha256(backbone)
    said = []
    (actual,) = augmented_sgd_probe(backbone, view, train, test, epochs=3, seed=5, say=said.append)
    assert [text.split(", ")[1] for text in said] == ["epoch 1 and 2 of 3", "epoch 3 of 3"]
    assert module_sha256(backbone) == before
    passes = [embed(backbone, TrainingView(view, seed=5, epoch=e), train) for e in (0, 1)]
    halves = [rows.features.split(8, dim=1) for rows in passes]
    epochs = [halves[0][0], halves[0][1], halves[1][0]]
    assert all(f.shape == (40, 8) for f in epochs)
    assert not any(torch.equal(a, b) for a, b in ((epochs[0], epochs[1]), (epochs[0], epochs[2])))
    plain = embed(backbone, view, train)
    (expected,) = sgd_results(
        lambda epoch: plain._replace(features=epochs[epoch]),
        plain,
        embed(backbone, view, test),
        rates=(0.1,),
        epochs=3,
        batch_size=256,
        holdout=0.15,
        seed=5,
        name="augmented crop=0.08..1 flip=0.5",
    )
    assert actual == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_area": (7.0, 1.0)}, r"crop_area = \[7.0, 1.0\] is not \[low, high\]"),
        ({"flip_prob": 2.0}, "flip_prob = 2.0 is not a probability"),
    ],
)
def test_a_view_that_cannot_be_is_one_line(settings, message):
    with pytest.raises(DataError, match=message):
        TrainingView(EvalView(**VIEW), seed=0, epoch=0, **settings)


def test_a_training_view_crops_and_flips_and_changes_no_colour():
    images = torch.rand(6, 3, 1, 1).mul(255).to(torch.uint8).expand(6, 3, 20, 20).contiguous()
    images[5] = torch.arange(400).view(20, 20) % 251  # not constant: its crops differ
    ids, sizes = torch.arange(6), torch.full((6, 2), 20)
    batch = Batch(images, sizes, torch.full((6,), -1), ids, ids, 0)
    view = TrainingView(EvalView(16, 16), seed=0, epoch=0)
    crops = view.make_views(batch)
    assert crops.shape == (12, 3, 16, 16)
    for row in range(12):
        if row % 6 < 5:
            wanted = images[row % 6, :, :16, :16] / 255
            torch.testing.assert_close(crops[row], wanted, rtol=0, atol=1e-5)
    assert not torch.equal(crops[5], crops[11])
    again = TrainingView(EvalView(16, 16), seed=0, epoch=1).make_views(batch)
    assert not torch.equal(crops[5], again[5])
