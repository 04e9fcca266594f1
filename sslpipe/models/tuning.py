"""What of a backbone that starts from weights is trained, when, and at which rate."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sslpipe.models.backbones import Backbone
from sslpipe.models.blocks import block_names, block_of, layer_numbers
from sslpipe.recipe.base import RunRecipe, Tune

PREFIX = "backbone.network."  # of the parameters of weights, in the models that runs train


def freeze_layers(
    backbone: Backbone, *, frozen: bool, last_blocks: int | None, batchnorm: bool
) -> None:
    """Freeze layers of the pretrained network, in place; the embedding stays in training.

    Frozen blocks are in eval mode: neither their statistics nor their dropout change.

    Args:
        backbone: Whose network.
        frozen: Freeze all of them.
        last_blocks: Freeze all but so many of the last; None: none.
        batchnorm: All BatchNorms are in eval mode.
    """
    network = backbone.network
    names = block_names(network)
    first_trained = len(names) if frozen else max(0, len(names) - (last_blocks or len(names)))
    for name, parameter in network.named_parameters():
        if block_of(name, names) < first_trained:
            parameter.requires_grad_(False)
    for name in names[:first_trained]:
        network.get_submodule(name).eval()
    for module in network.modules():
        if batchnorm and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def learning_rate_scale(
    backbone: Backbone,
    *,
    backbone_lr: float,
    layer_decay: float,
    loss_lr: float = 1.0,
    by_library: bool = False,
) -> Callable[[str], float]:
    """Return the function from a parameter's name in a run's model to its learning rate's factor.

    Args:
        backbone: The model's.
        backbone_lr: Factor of the network's last block.
        layer_decay: Each block before it gets so much of the next one's.
        loss_lr: Factor of a fine-tuning's losses' own weights. That of an embedding layer and a
            projector is 1.
        by_library: Count the layers of a timm network as timm does, else its blocks.
    """
    numbers = layer_numbers(backbone.network, by_library=by_library)
    last = max(numbers.values())

    def scale(name: str) -> float:
        if name.startswith("losses."):
            return loss_lr
        if not name.startswith(PREFIX):
            return 1.0
        return backbone_lr * layer_decay ** (last - numbers[name.removeprefix(PREFIX)])

    return scale


def pretrained_groups(tune: Tune) -> dict[str, Any]:
    """Return the arguments of `build_optimizer` that ramp_steps and l2_to_init need."""
    if not (tune.ramp_steps or tune.l2_to_init):
        return {}
    return {"pretrained": PREFIX, "l2_to_init": tune.l2_to_init}


def tune_warnings(recipe: RunRecipe) -> list[str]:
    """Say what of [tune] leaves nothing to the backbone."""
    tune, steps = recipe.tune, recipe.steps
    full = tune.projector_first_steps + tune.ramp_steps
    if not full or steps is None or full < steps:
        return []
    keys = "tune.projector_first_steps + tune.ramp_steps"
    return [f"{keys} = {full}, of {steps} steps: the backbone never has its full rate"]


class ProjectorFirst:
    """Keeps networks out of training in the first steps of a run, and in eval mode.

    What is frozen for good, see `freeze_layers`, stays so.

    Args:
        networks: Those of the run's weights, and of a momentum encoder.
        steps: How many.
    """

    def __init__(self, networks: Sequence[nn.Module], steps: int) -> None:
        self._parameters = [p for net in networks for p in net.parameters() if p.requires_grad]
        self._modules = [m for net in networks for m in net.modules() if m.training]
        self._steps, self._frozen = steps, False

    def over(self) -> bool:
        """Whether the step that has begun, and all after it, train the networks."""
        return not self._frozen

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
