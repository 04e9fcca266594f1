"""What a run will do and cost, worked out before it: nothing is trained, nothing is written.

For people about to start a run, and for scripts that refuse a bad one early. Start reading at
`check_recipe`; `pretraining` and `finetuning` build and measure each kind, `estimate` times a step,
`result` shows what was found.
"""

from rich.console import RenderableType

from sslpipe.check.finetuning import check_finetuning
from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import DatasetIndex
from sslpipe.export.load import FrozenBackbone
from sslpipe.recipe import FinetuneRecipe, Recipe


def check_recipe(
    recipe: Recipe | FinetuneRecipe,
    index: DatasetIndex | None = None,
    init_from: FrozenBackbone | None = None,
) -> RenderableType:
    """Build every part of the run and plan its batches; train nothing.

    Args:
        recipe: Of either kind.
        index: The data set; None skips what only the data can tell.
        init_from: The weights that the backbone starts from; None: random ones.

    Returns:
        Tables for a terminal: settings, views, sizes, estimates, warnings.

    Raises:
        UserError: The recipe, the data or the backbone cannot be trained on.
    """
    if isinstance(recipe, FinetuneRecipe):
        return check_finetuning(recipe, index, init_from).render()
    return check_pretraining(recipe, index, init_from).render()
