"""The encoder that a run trains, built of its recipe and of the weights that it starts from."""

import torch

from sslpipe.export.saved import SavedBackbone
from sslpipe.models.backbones import Backbone, build_backbone
from sslpipe.models.checkpointing import checkpoint_activations
from sslpipe.models.limits import within_memory
from sslpipe.models.transfer import copy_weights
from sslpipe.recipe.sections import RunRecipe


def build_encoder(recipe: RunRecipe, crop_px: int, init_from: SavedBackbone | None) -> Backbone:
    """Build the encoder of a run of any kind, the same on every rank.

    Args:
        recipe: With a [backbone].
        crop_px: Side of the square views.
        init_from: Whose weights it has; None: those of recipe.seed.

    Raises:
        RecipeError: The recipe names what cannot be built, or what memory cannot hold.
        WeightsError: The weights are of another network.
    """
    assert recipe.backbone is not None  # by `with_init`
    torch.manual_seed(recipe.seed)
    with within_memory("[backbone]"):
        backbone = build_backbone(recipe.backbone, crop_px=crop_px)
        if init_from is not None:
            copy_weights(init_from.backbone, backbone, recipe.backbone.kind)
        if recipe.run.activation_checkpointing:
            checkpoint_activations(backbone, recipe.backbone.kind)
    return backbone
