"""What a fine-tuning trains: a backbone and its losses, in one module and one forward."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sslpipe.metric_learning.memory import EmbeddingQueue
from sslpipe.models.backbones import Backbone
from sslpipe.models.blocks import block_names, block_of


class MetricTask(nn.Module):
    """Images and labels -> the weighted sum of the losses, and the embeddings.

    losses: entries of METRIC_LOSSES, with their weights; the miner goes to each of them. queue: its
    rows are further references from the call on that says so.
    forward: views (B, 3, S, S), labels (B,), ids (B,) -> (), (B, D) not normalised.
    Everything is in one module, so that DDP sees one forward.
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
        embeddings = self.backbone.raw(views)  # (B, D)
        ref = self.queue.references() if self.queue is not None and use_queue else None
        terms = [
            weight * loss(embeddings, labels, ids=ids, ref=ref, miner=self.miner)
            for weight, loss in zip(self.weights, self.losses, strict=True)
        ]
        return torch.stack(terms).sum(), embeddings


def freeze_layers(
    backbone: Backbone, *, frozen: bool, last_blocks: int | None, batchnorm: bool
) -> None:
    """Take layers of the pretrained network out of training, in place; the embedding stays in.

    frozen: all of them. last_blocks: all but so many of the last. Frozen blocks are in eval mode:
    neither their statistics nor their dropout change. batchnorm: so are all BatchNorms.
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
    """A parameter's name in MetricTask -> its factor on the learning rate.

    The last block of the network gets backbone_lr, each one before it layer_decay times the next
    one's; the embedding layer 1; the losses' own weights loss_lr.
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
