"""Distillation: embeddings that are as near to each other as a teacher's features of them are."""

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from sslpipe.distributed import all_gather_rows, gather_with_grad, global_mean, to_device
from sslpipe.errors import DataError
from sslpipe.losses.base import Objective, Scale, check_views
from sslpipe.losses.nt_xent import NTXentLoss
from sslpipe.registry.part import Derived


class TeacherFeatures(NamedTuple):
    """A frozen teacher's features of a data set's samples, on the CPU.

    Args:
        features: (M, T), a row a sample, of any length.
        ids: (M,) int64, the samples, ascending.
    """

    features: Tensor
    ids: Tensor

    def of(self, ids: Tensor) -> Tensor:
        """Return the rows (..., T) of samples (...) int64. Raises: DataError."""
        rows = torch.searchsorted(self.ids, ids.contiguous()).clamp_max(len(self.ids) - 1)
        unknown = self.ids[rows] != ids
        if bool(unknown.any()):
            raise DataError(
                f"the teacher has no features of sample {int(ids[unknown][0])}; embed the split "
                "again (`sslpipe embed`) and name that file in teacher.features"
            )
        return self.features[rows]


class DistillLoss(Objective):
    """Cross entropy between a teacher's and the embeddings' similarities within the global batch.

    Each of the 2N views i is compared with the views j of all other samples:

        p_ij = softmax_j(t_i . t_j / teacher_temperature), q_ij = softmax_j(z_i . z_j / temperature)

    with unit rows t of the teacher and z of the student; the loss is the mean over i of
    -sum_j p_ij log q_ij. The embeddings may have another width than the teacher's features. With
    `match = "features"` it is the mean of 1 - z_i . t_i, which wants the teacher's width.

    Source:
        Fang et al. 2021 (SEED), arXiv:2101.04731, eq. 4 and 5, with the views of the batch where
        SEED has a queue; Romero et al. 2015, arXiv:1412.6550, for `features`.

    Raises:
        ValueError: A setting out of range; or match = "features", and widths differ.
        DataError: In a call: a sample that the teacher does not know.
    """

    match: Literal["cosines", "features"] = "cosines"
    """cosines or features."""
    temperature: Scale = 0.1
    """What the student's cosine similarities are divided by."""
    teacher_temperature: Scale = 0.05
    """The same of the teacher's cosine similarities; with little, only its nearest neighbours
    count."""
    nt_xent: Annotated[float, Field(ge=0)] = 0.0
    """Weight of NT-Xent at `temperature` beside it; 0: alone."""
    teacher: Annotated[TeacherFeatures, Field(repr=False), Derived()]
    """Features of every sample; the recipe's [teacher] names their file."""
    dim: Annotated[int | None, Derived()] = None
    """Numbers of an embedding, to be checked before a call; none: a call checks them."""

    def setup(self) -> None:
        """Check the widths."""
        super().setup()
        if self.match == "features" and self.dim is not None and len(self.teacher.ids):
            _check_width(self.dim, self.teacher.features.shape[1])
        self._contrast = NTXentLoss(temperature=self.temperature) if self.nt_xent else None
        self._agreement: Tensor = torch.zeros(())

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Compute the global mean over all 2N views; ids are needed. See `Objective.forward`."""
        check_views(z_a=z_a, z_b=z_b, ids=ids, labels=labels, groups=groups)
        if ids is None:
            raise ValueError("ids are needed: they say which rows of the teacher belong to z")
        names = ids if ids.dim() == 2 else ids[:, None].expand(-1, 2)  # (B, 2)
        z = torch.stack([z_a, z_b], dim=1)
        z = normalize(z if z.dtype == torch.float64 else z.float(), dim=2)  # (B, 2, D)
        rows = to_device(self.teacher.of(names.cpu()), z.device).to(z.dtype)
        t = normalize(rows, dim=2)  # (B, 2, T)
        terms = self._features(z, t) if self.match == "features" else self._cosines(z, t, names)
        total = terms.sum()  # of this rank
        loss = global_mean(total, torch.full_like(total, terms.numel()))
        if self._contrast is None:
            return loss
        contrast: Tensor = self._contrast(z_a, z_b, ids=ids, labels=labels, groups=groups)
        return loss + self.nt_xent * contrast

    def _features(self, z: Tensor, t: Tensor) -> Tensor:
        """Compute 1 - cosine of each view, (2B,)."""
        _check_width(z.shape[2], t.shape[2])
        agreement = (z * t).sum(2).flatten()
        self._agreement = agreement.detach().mean()  # a tensor: it is not waited for here
        return 1 - agreement

    def _cosines(self, z: Tensor, t: Tensor, names: Tensor) -> Tensor:
        """Compute the cross entropy of each view of this rank, (2B,); 0 without other samples."""
        # the views of all ranks are what this rank's are compared with
        all_z = gather_with_grad(z).flatten(0, 1)  # (2N, D)
        all_t = all_gather_rows(t).flatten(0, 1)  # (2N, T)
        all_names = to_device(all_gather_rows(names).flatten(), z.device)  # (2N,)
        same = to_device(names.flatten(), z.device)[:, None] == all_names  # (2B, 2N)
        least = torch.finfo(z.dtype).min / 2  # as -inf, of which products with 0 are NaN
        student = (z.flatten(0, 1) @ all_z.T / self.temperature).masked_fill(same, least)
        teacher = (t.flatten(0, 1) @ all_t.T / self.teacher_temperature).masked_fill(same, least)
        self._agreement = (student.argmax(1) == teacher.argmax(1)).double().mean()
        entropies = teacher.softmax(1) * student.log_softmax(1)
        return -entropies.masked_fill(same, 0).sum(1)

    def stats(self) -> dict[str, float]:
        """Return `teacher_agreement`, of this rank's views in the last call.

        The share whose nearest neighbour in the batch is the teacher's; with match = "features" the
        mean cosine with the teacher.
        """
        contrast = {} if self._contrast is None else self._contrast.stats()
        return {"teacher_agreement": float(self._agreement), **contrast}

    def negatives_per_anchor(self, batch_size: int) -> int:
        """Return NT-Xent's; 0 without it."""
        return 0 if self._contrast is None else self._contrast.negatives_per_anchor(batch_size)


def _check_width(dim: int, teachers: int) -> None:
    if dim != teachers:
        raise ValueError(
            f"match = 'features' compares embeddings of {dim} numbers with the teacher's "
            f"{teachers}; set projector.out_dim = {teachers}"
        )
