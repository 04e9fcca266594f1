"""Fine-tuning as the core finds it: how its recipe is planned, checked and carried out."""

from sslpipe.kinds import RunKind
from sslpipe.metric_learning.build import Finetuning
from sslpipe.metric_learning.check import check_finetuning
from sslpipe.metric_learning.finetune import finetune
from sslpipe.recipe.finetune import FinetuneRecipe

RUNS = {FinetuneRecipe: RunKind(make=Finetuning.make, check=check_finetuning, run=finetune)}
