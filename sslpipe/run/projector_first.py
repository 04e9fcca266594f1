"""tune.projector_first_steps: the backbone is frozen at first, while a run is carried out."""

from collections.abc import Sequence

from torch import nn


class ProjectorFirst:
    """Keeps networks out of training in the first steps of a run, and in eval mode.

    What is frozen for good, see `sslpipe.models.tuning.freeze_layers`, stays so.

    Args:
        networks: Those of the run's weights, and of a momentum encoder.
        steps: How many.
    """

    def __init__(self, networks: Sequence[nn.Module], steps: int) -> None:
        self._parameters = [p for net in networks for p in net.parameters() if p.requires_grad]
        self._modules = [m for net in networks for m in net.modules() if m.training]
        self._steps = steps
        self._frozen = False

    def begin(self, step: int) -> None:
        """Prepare a step; call it before the step's forward."""
        frozen = step < self._steps
        if frozen == self._frozen:
            return
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)
        for module in self._modules:
            module.training = not frozen
        self._frozen = frozen
