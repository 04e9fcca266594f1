"""What a fine-tuning trains: a backbone and its losses, in one module and one forward."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sslpipe.errors import RecipeError
from sslpipe.metric_learning.memory import EmbeddingQueue
from sslpipe.models.backbones import Backbone
from sslpipe.models.blocks import block_names, block_of


class MetricTask(nn.Module):
    """Turn images and labels into the weighted sum of the losses, and the embeddings.

    Everything is in one module, so that DDP sees one forward.

    Args:
        backbone: Makes the embeddings.
        losses: Entries of METRIC_LOSSES and HEADS.
        weights: Of the losses, one each.
        miner: Goes to each of them.
        queue: Its rows are further references from the call on that says so.
    """

    def __init__(
        self,
        backbone: Backbone,
        losses: Sequence[nn.Module],
        weights: Sequence[float] = (1.0,),
        miner: nn.Module | None = None,
        queue: EmbeddingQueue | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.losses = backbone, nn.ModuleList(losses)
        self.weights, self.miner, self.queue = tuple(weights), miner, queue

    def forward(
        self, views: Tensor, labels: Tensor, ids: Tensor, use_queue: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the embeddings.

        Shape:
            views (B, 3, S, S), labels (B,), ids (B,) -> (), (B, D) not normalised.
        """
        embeddings = self.backbone.raw(views)  # (B, D)
        ref = self.queue.references() if self.queue is not None and use_queue else None
        terms = []
        for weight, loss in zip(self.weights, self.losses, strict=True):
            try:
                term = loss(embeddings, labels, ids=ids, ref=ref, miner=self.miner)
            except ValueError as error:  # sizes and settings that only rows and labels contradict
                raise RecipeError(f"[loss] {type(loss).__name__}: {error}") from error
            terms.append(weight * term)
        return torch.stack(terms).sum(), embeddings


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
    backbone: Backbone, *, backbone_lr: float, layer_decay: float, loss_lr: float
) -> Callable[[str], float]:
    """Return the function from a parameter's name in MetricTask to its learning rate's factor.

    Args:
        backbone: The task's.
        backbone_lr: Factor of the network's last block.
        layer_decay: Each block before it gets so much of the next one's.
        loss_lr: Factor of the losses' own weights. The embedding layer's is 1.
    """
    names, prefix = block_names(backbone.network), "backbone.network."

    def scale(name: str) -> float:
        if name.startswith("losses."):
            return loss_lr
        if not name.startswith(prefix):
            return 1.0
        number = block_of(name.removeprefix(prefix), names)
        return backbone_lr * layer_decay ** (len(names) - 1 - number)

    return scale
