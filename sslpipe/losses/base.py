"""What an objective is, and what contrastive ones share: settings, checks, counts, `stats`.

Objective: any loss over two views. ContrastiveObjective: one with negatives. InBatchLoss: one whose
negatives are the other views of the global batch; it needs nothing but a `row_loss`.
LabelMaskingLoss: such a one that can keep images of one label from being negatives.
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch._compile import _disable_dynamo

from sslpipe.distributed import all_gather_rows
from sslpipe.errors import DataError, UserError
from sslpipe.losses.engine.anchors import Anchors, gather_anchors
from sslpipe.losses.engine.contrast import Engine, Sums, contrast, differentiate
from sslpipe.losses.engine.tiles import ONE_SUM, Term
from sslpipe.precision import cpu_by_default
from sslpipe.registry.part import Part

Scale = Annotated[float, Field(ge=1e-6, le=1e6)]  # beyond, cosines divided by it leave float32
TileRows = Annotated[int, Field(ge=1)]


class Objective(Part):
    """All that the training loop knows of a loss over two views; a subclass writes `forward`.

    Its fields are its settings: keys of a recipe's [loss]. State (a queue) lives in buffers, made
    in `setup`: it moves to the device, is saved, and is restored after a skipped step.

    Attributes:
        needs_momentum_encoder: z_b must be keys of a momentum encoder (section [momentum]).
        uses_labels: labels change the value.
        embeds: What it compares are embeddings, whose health the log shows.
        had_negatives: A call in which no anchor has a negative is an exception, not an error: an
            earlier one had some, or the run knows that others will. Objectives without negatives
            do not ask.
    """

    needs_momentum_encoder = False
    uses_labels = False
    embeds = True
    had_negatives = False

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of two views. Collective.

        With [pairs] the two views of a row may show two samples: `ids` and `labels` are (B, 2).

        Args:
            z_a: (B, D), embeddings of the first views of this rank's images.
            z_b: (B, D), of the second views.
            ids: (B,) or (B, 2) int64, the sample really read; None: all different.
            labels: (B,) or (B, 2) int64, -1 where unknown; None: all unknown.
            groups: (B, 2, K) int64 of the samples: views that share a number >= 0 in any of the K
                columns are no negatives of each other; None: no such columns.

        Returns:
            (), the global mean, equal on all ranks. Its gradient is W times that of this rank's
            rows, so that DDP's mean completes it.
        """
        raise NotImplementedError

    # inductor's code had wrong gradients (hard_negatives, torch 2.15), and no warning
    @_disable_dynamo
    def __call__(self, *views: Tensor, **known: Tensor | None) -> Any:
        """Call `forward`, uncompiled. Raises: UserError, where not two views are given by place."""
        if len(views) != 2 and not {"z_a", "z_b"} & {*known}:
            raise UserError(
                f"{type(self).__name__} takes two views by place and all else by its name; call "
                "loss(z_a, z_b, labels=labels)"
            )
        with cpu_by_default():  # ids, labels and masks are found on the host
            return super().__call__(*views, **known)

    def refuses(self, samples: int, *, paired: bool) -> str | None:
        """Return why a run cannot begin on a split of so many samples, with [pairs] or without."""
        return None

    def stats(self) -> dict[str, float]:
        """Return what the log shows of the last call, beside the loss."""
        return {}

    def negatives_per_anchor(self, batch_size: int) -> int:
        """Return how many negatives an anchor has at most; 0 for an objective without."""
        return 0


class ContrastiveObjective(Objective):
    """An objective that tells positives from negatives by cosines over a temperature.

    Its attributes and errors are those of `NTXentLoss`.
    """

    temperature: Scale = 0.1
    """What cosine similarities are divided by; no unit."""
    tile_rows: TileRows | None = None
    """Rows and columns of a tile of similarities; none: chosen for the device."""

    def setup(self) -> None:
        """Nothing is counted yet."""
        super().setup()
        self._masked_pairs: int | Tensor = 0
        self._last_negatives: float | Tensor = 0.0

    @property
    def masked_pairs(self) -> int:
        """Pairs of the last call that were masked; reading it may wait for the device."""
        return int(self._masked_pairs)

    @property
    def last_negatives(self) -> float:
        """Mean number of negatives of an anchor in the last call; may wait as well."""
        return float(self._last_negatives)

    def check_batch(self, z: Tensor, counts: tuple[int, ...], ids: Tensor | None) -> None:
        """Refuse a call in which no anchor of the global batch has a negative; see `had_negatives`.

        Waits for the device, if the count is there, only until a call had some. Until then the
        ranks' rows are compared, too, where no ids say what they show.

        Args:
            z: (B, D), embeddings of this rank.
            counts: of all ranks.
            ids: (B,) of the samples; None: each row shows another one.

        Raises:
            DataError: the loss would be 0, or pull all embeddings together.
        """
        if self.had_negatives:
            return
        if ids is None:
            check_shares(z, counts)
        images = sum(counts)
        self.had_negatives = self.last_negatives * images > 0.25
        if not self.had_negatives:
            raise DataError(
                f"no image of the global batch of {images} has a negative: sample ids, labels or "
                "[pairs] say that all of them are alike, and such a loss teaches nothing; use "
                "images of two classes or more, leave loss.mask_labels, pairs.positive or "
                "pairs.never_negative out, or use an objective without negatives "
                "(loss.kind = 'diet')"
            )

    def find_anchors(
        self, z: Tensor, ids: Tensor | None, labels: Tensor | None, groups: Tensor | None
    ) -> Anchors:
        """Decide who is whose negative. Collective. Shapes: z (B, D), others as in `forward`."""
        return gather_anchors(z, ids, groups)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The sums over an anchor's negatives that the loss needs."""
        return ONE_SUM

    @property
    def engine(self) -> Engine:
        """How the sums are made."""
        return Engine(self.temperature, self.tile_rows, self.terms)

    def stats(self) -> dict[str, float]:
        """Return the mean number of negatives of an anchor in the last call."""
        return {"negatives_per_anchor": self.last_negatives}


class InBatchLoss(ContrastiveObjective):
    """A contrastive loss whose negatives are the views of other images in the global batch.

    A subclass writes `row_loss`, the formula of its paper. Shapes, gradient, distribution and
    errors are those of `NTXentLoss`, unless it says otherwise.
    """

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Compute the global mean over all 2N anchors; see `Objective.forward`."""
        check_views(z_a=z_a, z_b=z_b, ids=ids, labels=labels, groups=groups)
        anchors = self.find_anchors(z_a, ids, labels, groups)
        if anchors.images == 1:
            raise DataError(
                "data.batch_size = 1: a single image has no negatives, and such a loss teaches "
                "nothing; use 2 or more"
            )
        self._masked_pairs = anchors.masked_pairs
        self._last_negatives = anchors.mean_negatives
        self.check_batch(z_a, anchors.counts, ids)
        return contrast(
            z_a=z_a,
            z_b=z_b,
            anchors=anchors,
            row_loss=self.row_loss,
            engine=self.engine,
            derivatives=self.derivatives,
        )

    def negatives_per_anchor(self, batch_size: int) -> int:
        """Return 2N - 2, which holds where nothing is masked."""
        return 2 * batch_size - 2

    def row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        """Compute the loss from each anchor's positive and sums: the paper's formula.

        Args:
            v: (N, 2, D), directions of both views of all images of all ranks, over
                sqrt(temperature), so that v . v is a similarity s in nats.
            sums: for each of `terms`, log sum_j exp(power * s_ij), (N, 2), over the negatives j of
                each anchor i; -inf where it has none.
            anchors: who is whose negative. `anchors.images` is N; `anchors.negatives`, how many an
                anchor has: None where it is 2N - 2 for each, or (N,) or (N, 2) where ids, labels or
                groups mask some.

        Returns:
            (), the mean over all anchors, in plain torch that autograd can follow.
        """
        raise NotImplementedError

    def derivatives(self, v: Tensor, sums: Sums, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `row_loss` and its gradient in v (N, 2, D) and in sums (terms, N, 2).

        By autograd; a subclass may write them by hand.
        """
        return differentiate(self.row_loss, v, sums, anchors)


class LabelMaskingLoss(InBatchLoss):
    """An `InBatchLoss` whose negatives may spare images of the anchor's label."""

    mask_labels: bool = False
    """Whether images of one label >= 0 are no negatives of each other either."""

    def setup(self) -> None:
        """Labels count where they mask."""
        super().setup()
        self.uses_labels = self.mask_labels

    def find_anchors(
        self, z: Tensor, ids: Tensor | None, labels: Tensor | None, groups: Tensor | None
    ) -> Anchors:
        """Decide who is whose negative; see `ContrastiveObjective.find_anchors`."""
        if self.mask_labels and labels is not None:
            column = labels if labels.dim() == 2 else labels[:, None].expand(-1, 2)  # (B, 2)
            groups = labels if groups is None else torch.cat([groups, column[:, :, None]], dim=2)
        return gather_anchors(z, ids, groups)


def positive_similarities(v: Tensor) -> Tensor:
    """Return (N, 1): the similarity of each image's two views, from v (N, 2, D)."""
    v_a, v_b = v.unbind(1)
    return (v_a * v_b).sum(1, keepdim=True)


def check_shares(z: Tensor, counts: tuple[int, ...]) -> None:
    """Refuse the same rows z (B, D) on two ranks, as of who has gathered them. Collective.

    Only where they are trained: a validation may have all ranks score the same batch.
    """
    if not z.requires_grad or len(counts) == 1 or counts[0] != counts[1]:
        return
    first, second = torch.split(all_gather_rows(z, counts), list(counts))[:2]
    if torch.equal(first, second) and not torch.equal(first, first[:1].expand_as(first)):
        raise DataError(
            "ranks 0 and 1 have the same embeddings, whose copies would be each other's negatives; "
            "give each rank's own rows (the loss gathers those of the others itself), of images "
            "that differ, as by a DistributedSampler"
        )


FEWEST_ONE_HOT = 32  # rows


def _is_one_hot(labels: Tensor) -> bool:
    """Return whether (B, 2) labels are one-hot: one 1 a row, in either place, in many rows.

    Those of two samples a row can be so, too, but hardly in FEWEST_ONE_HOT rows.
    """
    if len(labels) < FEWEST_ONE_HOT:
        return False
    is_one_hot = (labels.sort(dim=1).values == labels.new_tensor([0, 1])).all()
    return bool(is_one_hot & (labels[:, 0] != labels[0, 0]).any())


def check_views(
    z_a: Tensor,
    z_b: Tensor,
    ids: Tensor | None,
    labels: Tensor | None,
    groups: Tensor | None = None,
) -> None:
    """Refuse views that are not both (B, D), and ids and labels not (B,) or (B, 2) integers.

    Raises:
        ValueError: naming the shapes.
    """
    inputs = {"z_a": z_a, "z_b": z_b, "ids": ids, "labels": labels, "groups": groups}
    for name, value in inputs.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} must be a tensor, not a {type(value).__name__}; give torch.tensor({name})"
            )
        # numbers of images may stay on the host, where a loader has them
        elsewhere = value.device != z_a.device
        if elsewhere and (name == "z_b" or value.device.type != "cpu"):
            raise ValueError(
                f"{name} is on {value.device} and z_a on {z_a.device}; move both to one device"
            )
    if z_a.dim() != 2 or z_a.shape != z_b.shape:
        raise ValueError(
            f"z_a and z_b must be (B, D) both; got {tuple(z_a.shape)} and {tuple(z_b.shape)}; call "
            "loss(z_a, z_b, labels=labels), z_a of all first views, z_b of all second views"
        )
    for name, numbers in (("ids", ids), ("labels", labels)):
        rows = z_a.shape[0]
        if numbers is not None and numbers.shape not in ((rows,), (rows, 2)):
            raise ValueError(f"{name} must be ({rows},) or ({rows}, 2), got {tuple(numbers.shape)}")
        if numbers is not None and (numbers.is_floating_point() or numbers.dtype == torch.bool):
            raise ValueError(f"{name} must be integers, got {numbers.dtype}; number them, as int64")
    has_pairs = ids is not None and ids.dim() == 2  # rows of [pairs] name both samples
    if labels is not None and labels.dim() == 2 and not has_pairs and _is_one_hot(labels):
        raise ValueError(
            f"labels are {tuple(labels.shape)} with one 1 in each row, as one-hot labels are, and "
            "would be read as those of two samples a row: give labels.argmax(dim=1); where a row "
            "shows two samples, give their ids of the same shape, too"
        )
    if groups is not None and (groups.dim() != 3 or groups.shape[:2] != (z_a.shape[0], 2)):
        raise ValueError(f"groups must be ({z_a.shape[0]}, 2, K), got {tuple(groups.shape)}")
