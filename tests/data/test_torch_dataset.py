"""A split as a torch Dataset, against the pictures that its shards were written from."""

import pickle

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import sslpipe
from sslpipe.data.index import relabelled
from sslpipe.errors import DataError
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, write_dataset


def test_items_are_the_pictures_and_labels_in_the_order_of_their_ids(tmp_path):
    path = write_dataset(tmp_path, (5, 7), classes=3)
    images = sslpipe.ImageDataset(path, "train")
    assert len(images) == 12
    for number in (0, 4, 5, 11):
        image, label = images[number]
        np.testing.assert_array_equal(image.permute(1, 2, 0), picture(number))
        assert label == number % 3
    assert images.labels.tolist() == [number % 3 for number in range(12)]
    torch.testing.assert_close(images[-1][0], images[11][0])
    with pytest.raises(IndexError):
        images[12]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # of a single core
def test_a_loader_of_two_processes_reads_it_through_a_transform(tmp_path):
    path = write_dataset(tmp_path, (5, 7), classes=3)
    transform = v2.Compose([v2.Resize(8), v2.ToDtype(torch.float32, scale=True)])
    images = sslpipe.ImageDataset(sslpipe.load_index(str(path)), "train", transform)
    loader = torch.utils.data.DataLoader(images, batch_size=5, num_workers=2)
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [5, 5, 2]
    expected = transform(torch.from_numpy(picture(6)).permute(2, 0, 1))
    torch.testing.assert_close(batches[1][0][1], expected)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])  # macOS's default, and Python 3.14's
def test_a_loader_of_a_fresh_process_reads_the_same(tmp_path, start):
    images = sslpipe.ImageDataset(write_dataset(tmp_path, (5, 7), classes=3), "train")
    first = images[0]  # a sidecar is in memory now, and stays in this process
    loader = torch.utils.data.DataLoader(
        images, batch_size=12, num_workers=1, multiprocessing_context=start
    )
    ((pictures, labels),) = loader
    np.testing.assert_array_equal(pictures[11].permute(1, 2, 0), picture(11))
    assert labels.tolist() == [number % 3 for number in range(12)]
    assert torch.equal(pictures[0], first[0])


def test_a_split_is_pickled_with_its_labels_and_columns_and_without_its_files(tmp_path):
    sites = [str(number % 2) for number in range(12)]
    split = add_columns(write_dataset(tmp_path, (5, 7), classes=3), site=sites).split("train")
    size = len(pickle.dumps(split))
    by_site = relabelled(split, "site")
    again = pickle.loads(pickle.dumps(split))
    assert again.column("site").show(range(12)) == split.column("site").show(range(12))
    assert again.offsets(1).tolist() == split.offsets(1).tolist()
    assert pickle.loads(pickle.dumps(by_site)).labels.tolist() == list(map(int, sites))
    assert len(pickle.dumps(split)) == size  # though its table and sidecars are open now


def test_a_longer_side_is_reduced_and_a_broken_image_is_an_error_with_its_key(tmp_path):
    path = write_dataset(tmp_path, (4,), px=32, broken={2: b"no picture"})
    images = sslpipe.ImageDataset(path, "train", most_px=8)
    assert images[0][0].shape == (3, 8, 8)
    with pytest.raises(DataError, match=r"sample 2 of split 'train'.*train000002"):
        images[2]
