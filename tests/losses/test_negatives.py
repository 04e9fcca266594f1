"""A loss without negatives is an error, but where a batch has none by chance."""

from typing import Any

import pytest
import torch

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.losses import LOSSES
from tests.helpers.processes import run_processes
from tests.losses.loops import pair

IN_BATCH = ("nt_xent", "dcl", "dclw", "sup_con", "hard_negatives")
MASKED = ("nt_xent", "dcl", "dclw", "hard_negatives")


@pytest.mark.parametrize("kind", IN_BATCH)
def test_a_batch_of_one_image_is_refused(kind: str) -> None:
    objective = LOSSES[kind]()
    with pytest.raises(DataError, match=r"data.batch_size = 1.*use 2 or more"):
        objective(*pair(1, 4))
    objective(*pair(2, 4))
    with pytest.raises(DataError, match=r"data.batch_size = 1"):  # never by chance
        objective(*pair(1, 4))


def _alike(kind: str, how: str, images: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Settings of an objective and arguments of a call that leave no anchor a negative."""
    same = torch.full((images,), 3)
    match how:
        case "labels":
            return ({} if kind == "sup_con" else {"mask_labels": True}), {"labels": same}
        case "ids":
            return {}, {"ids": same}
        case "partners":
            return {}, {"ids": torch.tensor([[1, 2]] * images)}
    return {}, {"groups": same[:, None, None].expand(-1, 2, 1)}


@pytest.mark.parametrize("how", ["labels", "ids", "partners", "groups"])
@pytest.mark.parametrize("kind", IN_BATCH)
def test_a_first_batch_whose_images_are_all_alike_is_refused(kind: str, how: str) -> None:
    settings, known = _alike(kind, how, 5)
    objective = LOSSES[kind](**settings)
    with pytest.raises(DataError, match=r"batch of 5 has a negative.*use images of two classes"):
        objective(*pair(5, 4), **known)


@pytest.mark.parametrize("how", ["labels", "ids", "groups"])
@pytest.mark.parametrize("kind", IN_BATCH)
def test_such_a_batch_after_others_is_chance(kind: str, how: str) -> None:
    settings, known = _alike(kind, how, 5)
    objective = LOSSES[kind](**settings)
    mixed = {key: x + torch.arange(5).view(-1, *[1] * (x.dim() - 1)) for key, x in known.items()}
    objective(*pair(5, 4), **mixed)
    assert torch.isfinite(objective(*pair(5, 4), **known))
    assert objective.last_negatives == 0


def test_a_queue_of_the_querys_own_kind_is_refused_from_the_second_call_on() -> None:
    groups = torch.zeros(4, 2, 1, dtype=torch.int64)
    objective = LOSSES["moco"](dim=4, queue_rows=8, group_columns=1)
    assert objective(*pair(4, 4), groups=groups) == 0  # the queue was empty
    with pytest.raises(DataError, match="has a negative"):
        objective(*pair(4, 4), groups=groups)
    one_image = LOSSES["moco"](dim=4, queue_rows=8)
    one_image(*pair(1, 4), ids=torch.tensor([5]))
    with pytest.raises(DataError, match="has a negative"):
        one_image(*pair(1, 4), ids=torch.tensor([5]))
    one_by_one = LOSSES["moco"](dim=4, queue_rows=8)  # a queue makes do with one image a step
    for number in range(3):
        one_by_one(*pair(1, 4), ids=torch.tensor([number]))
    assert one_by_one.last_negatives == 2


def _spread(process: Rank) -> list[str]:
    """One image a rank: of two classes, of one, and none but one in the whole batch."""
    said = []
    cases = [(1, [process.rank]), (1, [7]), (int(process.rank == 0), [7])]
    for rows, labels in cases:
        z_a, z_b = pair(2, 4)
        part = slice(process.rank, process.rank + rows)
        try:
            known = torch.tensor(labels * rows, dtype=torch.int64)
            LOSSES["nt_xent"](mask_labels=True)(z_a[part], z_b[part], labels=known)
            said.append("")
        except DataError as error:
            said.append(str(error))
    return said


def test_the_count_is_over_all_processes_and_each_raises() -> None:
    for whole, alike, alone in run_processes(_spread, 2):
        assert whole == ""
        assert "batch of 2 has a negative" in alike
        assert "data.batch_size = 1" in alone
