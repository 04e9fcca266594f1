"""The public names of the core, each with its module; those of satellites are in their `names.py`.

Type checkers and editors read this file, and `__init__.py` does to import a name at its first use.
"""

import typing

from .api import check_recipe as check_recipe
from .api import embed as embed
from .api import preview as preview
from .api import train as train
from .api import write_report as write_report
from .augment.two_views import TwoViews as TwoViews
from .data.index import load_index as load_index
from .data.torch_dataset import ImageDataset as ImageDataset
from .evaluation.arrays import clustering as clustering
from .evaluation.arrays import knn as knn
from .evaluation.arrays import linear_probe as linear_probe
from .evaluation.arrays import retrieval as retrieval
from .evaluation.arrays import verification as verification
from .export.load import load_backbone as load_backbone
from .export.whitening import whiten as whiten
from .export.write import export_backbone as export_backbone
from .losses import DCLLoss as DCLLoss
from .losses import HardNegativeLoss as HardNegativeLoss
from .losses import MoCoLoss as MoCoLoss
from .losses import NTXentLoss as NTXentLoss
from .losses import SupConLoss as SupConLoss
from .recipe.reading import load_recipe as load_recipe
from .registry.plugins import load_plugins as load_plugins
from .report.suite import suite as suite
from .run.status import list_runs as list_runs
from .run.status import status as status
from .sharding.dataset import build_dataset as build_dataset
from .sharding.dataset import describe_dataset as describe_dataset
from .sharding.dataset import show_samples as show_samples
from .sharding.dataset import verify_dataset as verify_dataset
from .sharding.index_tars import index_tars as index_tars

__version__: str

def __getattr__(name: str) -> typing.Any: ...  # the names of satellites, which may be deleted
