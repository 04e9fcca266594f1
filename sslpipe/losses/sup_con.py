"""Supervised contrastive loss: every view of the same label is a positive."""

import torch
from torch import Tensor

from sslpipe.distributed import all_gather_rows, to_device
from sslpipe.losses.base import InBatchLoss, positive_similarities
from sslpipe.losses.engine.anchors import Anchors, Classes, gather_anchors
from sslpipe.losses.engine.contrast import Sums


class SupConLoss(InBatchLoss):
    """Find the views of an anchor's class among all other views (supervised contrastive).

    Mean over an anchor's positives of -log of their share among all other views ("out" form).
    Positives of an anchor: its image's other view and, where its label is >= 0, all views of that
    label. Label -1 is "unlabelled": only its own other view is positive, and it is a negative of
    all others, except of unlabelled images with the same sample id. Without labels this is NT-Xent.
    The mean over 2N anchors, shapes, processes, gradient and errors are as in NTXentLoss;
    `last_negatives` does not count positives.

    Source:
        Khosla et al. 2020, arXiv:2004.11362, eq. 2 (their loss times 1: no tau / base_tau).
    """

    uses_labels = True

    def find_anchors(
        self, z: Tensor, ids: Tensor | None, labels: Tensor | None, groups: Tensor | None
    ) -> Anchors:
        """Mask equal ids of unlabelled images; note who shares a label. See `InBatchLoss`."""
        if labels is None:
            labels = torch.full((len(z),), -1)
        labels = labels.cpu()
        paired = labels.dim() == 2 or (ids is not None and ids.dim() == 2)
        if paired or groups is not None:  # what is known differs from view to view
            labels = labels if labels.dim() == 2 else labels[:, None].expand(-1, 2)
            classes = _classes(all_gather_rows(labels))
            return gather_anchors(z, ids, groups, classes=classes)
        anchors = gather_anchors(z, ids, without_id=labels >= 0)
        return anchors._replace(classes=_classes(all_gather_rows(labels, anchors.counts)))

    def row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        """Compute eq. 2: log of the sum over all other views, less the mean of the positives."""
        assert anchors.classes is not None
        if anchors.classes.class_index.dim() == 2:
            return self._row_loss_of_views(v, sums, anchors.classes)
        index, sizes = anchors.classes
        positives = to_device(2 * sizes[index] - 1, v.device)  # (N,) of an anchor
        index = to_device(index, v.device)
        v_a, v_b = v.unbind(1)
        positive = (v_a * v_b).sum(1, keepdim=True)  # (N, 1)
        total = torch.logaddexp(positive, sums[0])  # (N, 2), over all other views
        # the sum of an anchor's positives: all views of its class, without itself
        class_sums = v.new_zeros(len(sizes), v.shape[2]).index_add(0, index, v_a + v_b)
        others = class_sums[index][:, None] - v  # (N, 2, D)
        values: Tensor = total - (v * others).sum(2) / positives[:, None]  # (N, 2)
        return values.mean()

    def _row_loss_of_views(self, v: Tensor, sums: Sums, classes: Classes) -> Tensor:
        """Compute the same where the two views of a row may be of two classes."""
        index = to_device(classes.class_index, v.device)  # (N, 2)
        sizes = to_device(classes.sizes, v.device)
        apart = (index[:, :1] != index[:, 1:]).to(v.dtype)  # (N, 1), the own other view's class
        positives = sizes[index] - 1 + apart  # (N, 2) of an anchor
        positive = positive_similarities(v)  # (N, 1)
        total = torch.logaddexp(positive, sums[0])  # (N, 2), over all other views
        flat = v.flatten(0, 1)
        class_sums = v.new_zeros(len(sizes), v.shape[2]).index_add(0, index.flatten(), flat)
        others = class_sums[index] - v + apart[:, :, None] * v.flip(1)  # (N, 2, D)
        values: Tensor = total - (v * others).sum(2) / positives
        return values.mean()


def _classes(labels: Tensor) -> Classes:
    """Number the classes of images (N,) or views (N, 2); what has no label is a class of its own.

    The views of an unlabelled image are one class together.
    """
    row = torch.arange(len(labels))
    alone = labels.amax() + 1 + (row if labels.dim() == 1 else row[:, None].expand_as(labels))
    known = torch.where(labels >= 0, labels, alone)
    _, index, sizes = torch.unique(known, return_inverse=True, return_counts=True)
    return Classes(index, sizes)
