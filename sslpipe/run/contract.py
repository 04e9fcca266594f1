"""Plan: all that is known of a run before its first step; and the parts that it trains.

`sslpipe.plan.Pretraining` is one, a fine-tuning's plan another. A run needs no more than this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.augment.preview import DrawPartners
from sslpipe.augment.two_views import Views
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import RecipeError
from sslpipe.evaluation.monitor import Watched
from sslpipe.models.stems import stem_warning
from sslpipe.models.tuning import tune_warnings
from sslpipe.optim import rate_warning
from sslpipe.recipe.identity import run_identity
from sslpipe.recipe.sections import RunRecipe
from sslpipe.run.health import Alarms


class TrainingParts(ABC):
    """What is trained: built on the CPU by a plan, or handed in.

    Attributes:
        augment: Makes the views of a batch.
        model: What is optimised: views (B, C, S, S), and what else its forward takes, in one call.
            It has a `backbone`, and as `ema` its average, or None.
    """

    augment: Views
    model: Any

    @property
    def backbone(self) -> nn.Module:
        """The encoder, which evaluations embed by."""
        encoder: nn.Module = self.model.backbone
        return encoder

    @property
    def ema(self) -> nn.Module | None:
        """Its average, with optim.ema, which they embed by, too."""
        average: nn.Module | None = self.model.ema
        return average

    @property
    def encoder(self) -> nn.Module | None:
        """What takes views alone, where the model takes more."""
        return None

    @property
    def others(self) -> Sequence[nn.Module]:
        """What needs memory beside the model."""
        return []

    @abstractmethod
    def moved(self, model: Any, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the parts on a device, with this model, which is there already."""

    @abstractmethod
    def first_frozen(self) -> Sequence[nn.Module]:
        """Return the networks that tune.projector_first_steps keeps out of training."""

    @abstractmethod
    def saved(self) -> Mapping[str, Any]:
        """Return what a checkpoint holds beside the optimizer, by name; "model" is exported."""

    @abstractmethod
    def guarded(self) -> Sequence[nn.Module]:
        """Return the modules whose buffers a non-finite step must not change."""


PartsT = TypeVar("PartsT", bound=TrainingParts)


class RunOrder(Protocol):
    """What a run asks of its order of samples: see `sslpipe.data.order.Order`."""

    samples: int  # that an epoch draws from
    batch_size: int  # images of a global step
    steps_per_epoch: int


class StartingWeights(Protocol):
    """What a run asks of the weights that it starts from: see `sslpipe.export.start.Start`."""

    @property
    def kind(self) -> str:
        """Whether they are "random", "named" by the command, or "kept" by the run."""

    @property
    def weights(self) -> Any:
        """The backbone; None for random ones."""

    def keep(self, run_dir: Path) -> None:
        """Write named weights to the run directory; on rank 0."""

    def view(self, recipe: Any, index: DatasetIndex, crop_px: int) -> EvalView:
        """Return the view of the run's evaluations."""


class Plan(ABC, Generic[PartsT]):
    """All that is known of a run before its first step: a value; it opens no device.

    Attributes:
        order_version: Of the order's algorithm.
        recipe: Resolved: backbone, hashes, number of steps.
        index: The data set, of the channels that are read.
        split: What is trained on, and held out from.
        order: Which sample comes in which step.
        watched: Ids of the held-out samples that are scored during the run.
        bank: Ids of trained ones that these search, too; None: they search each other.
        start: The weights it starts from.
        not_used: What of the given recipe these replace, as a sentence; None: nothing.
    """

    order_version: ClassVar[int]

    recipe: RunRecipe
    index: DatasetIndex
    split: Split
    order: RunOrder
    watched: NDArray[np.int64]
    bank: NDArray[np.int64] | None
    start: StartingWeights
    not_used: str | None

    def identity(self) -> dict[str, Any]:
        """Return what decides the weights, with its digest; once parts of plug-ins are loaded."""
        return run_identity(self.recipe, self.index, self.order_version)

    def check_processes(self, world_size: int) -> None:
        """Refuse a number of processes that cannot share the batches. Raises: RecipeError."""

    @abstractmethod
    def build(self, *, compiled: bool = True) -> PartsT:
        """Build the parts on the CPU from recipe.seed, the same on every rank.

        Args:
            compiled: Compile the views where run.compile says so; False, to look at the parts.

        Raises:
            RecipeError: The recipe names what cannot be built.
        """

    @abstractmethod
    def remarks(self, parts: PartsT) -> list[str]:
        """List what a user should know before the first step. Raises: RecipeError: refused."""

    @abstractmethod
    def groups(self, parts: PartsT) -> list[dict[str, Any]]:
        """Take what [tune] freezes out of training; return the optimizer's parameter groups."""

    @property
    def draw_partners(self) -> DrawPartners | None:
        """What draws the partners that second views are of; None: each image makes its own."""
        return None

    def step_flops(self, parts: PartsT) -> float:
        """Count FLOPs of a step, forward and backward; 0: utilisation is not logged."""
        return 0.0

    def micro_batches(self, world_size: int) -> list[Tensor]:
        """Return the rows of this rank's micro-batches; one or none: the batch is not cut."""
        return []

    @abstractmethod
    def score(self, backbone: nn.Module, view: EvalView, watched: Watched) -> dict[str, float]:
        """Score the held-out samples: see `sslpipe.evaluation.monitor`. Collective."""

    @abstractmethod
    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        """Return the integers that decide dropout and the like."""

    @abstractmethod
    def alarms(self, parts: PartsT) -> Alarms:
        """Return what reads the numbers of each log line."""

    @abstractmethod
    def metadata(self, view: EvalView) -> dict[str, Any]:
        """Return plain values that are stored beside each checkpoint."""

    @abstractmethod
    def describe(self) -> str:
        """Describe data and start for the console."""


PlanT = TypeVar("PlanT")
Rule = Callable[[PlanT, PartsT], Iterable[str]]  # yields a text where it applies


def judge(
    plan: PlanT,
    parts: PartsT,
    *,
    refusals: Sequence[Rule[PlanT, PartsT]],
    remarks: Sequence[Rule[PlanT, PartsT]],
) -> list[str]:
    """Refuse a plan by the first rule of `refusals` that applies; list what `remarks` say.

    Args:
        plan: What is judged.
        parts: What it built.
        refusals: Rules that say why the plan cannot be carried out.
        remarks: Rules that say what the user should know.

    Raises:
        RecipeError: A refusal applies.
    """
    for rule in refusals:
        for reason in rule(plan, parts):
            raise RecipeError(reason)
    return [text for rule in remarks for text in rule(plan, parts)]


# what a user should know of any kind of plan


def stem_does_not_fit(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a backbone.stem that is for images of another size."""
    assert plan.recipe.backbone is not None
    if text := stem_warning(plan.recipe.backbone, parts.augment.crop_px):
        yield text


def rate_is_unusual(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention a learning rate far above what is usual."""
    if text := rate_warning(plan.recipe.optim, plan.order.batch_size):
        yield text


def backbone_is_slowed(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention settings of [tune] that leave nothing to the backbone."""
    yield from tune_warnings(plan.recipe)


def weights_replace_the_backbone(plan: Plan[PartsT], parts: PartsT) -> Iterator[str]:
    """Mention what of the given [backbone] is not used."""
    if plan.not_used:
        yield plan.not_used
