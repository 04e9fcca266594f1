"""An optimizer's step with a closure, as torch's optimizers have it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import overload

import torch
from torch.optim import Optimizer


class ClosureStep(Optimizer):
    """An optimizer that calls the closure, then moves the weights by its own `_update`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all groups; return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Move the weights of all groups, without a graph."""
