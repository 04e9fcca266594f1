"""A split as a torch Dataset, against the pictures that its shards were written from."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import sslpipe
from sslpipe.errors import DataError
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


def test_a_longer_side_is_reduced_and_a_broken_image_is_an_error_with_its_key(tmp_path):
    path = write_dataset(tmp_path, (4,), px=32, broken={2: b"no picture"})
    images = sslpipe.ImageDataset(path, "train", most_px=8)
    assert images[0][0].shape == (3, 8, 8)
    with pytest.raises(DataError, match=r"sample 2 of split 'train'.*train000002"):
        images[2]
