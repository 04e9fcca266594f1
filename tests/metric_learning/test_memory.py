"""The embedding queue: what it holds."""

from collections import deque

import pytest
import torch

from sslpipe.metric_learning.metric_task import EmbeddingQueue


@pytest.mark.parametrize("rows", [(4,), (3, 5, 0, 1), (7,), (9, 2)])  # also more than it holds
def test_the_queue_holds_the_last_rows_that_were_pushed(rows):
    queue, expected = EmbeddingQueue(7, 3), deque(maxlen=7)
    assert queue.references() is None
    for step in range(9):
        n = rows[step % len(rows)]
        embeddings, labels, ids = torch.randn(n, 3), torch.arange(n) % 4, torch.arange(n) + 9 * step
        queue.push(embeddings.requires_grad_(), labels, ids)
        expected.extend(zip(embeddings.tolist(), labels.tolist(), ids.tolist(), strict=True))
        actual = queue.references()
        assert not actual.embeddings.requires_grad
        held = list(zip(*(part.tolist() for part in actual), strict=True))
        assert sorted(held, key=lambda row: row[2]) == sorted(expected, key=lambda row: row[2])


def test_a_push_after_the_forward_leaves_the_references_of_that_step_alone():
    queue = EmbeddingQueue(4, 3)
    queue.push(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    x = torch.randn(2, 3, requires_grad=True)
    loss = (x @ queue.references().embeddings.T).square().sum()
    queue.push(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    loss.backward()  # raises if autograd's saved rows were written over
    assert bool(x.grad.any())
