"""Fine-tuning as the core finds it: how its recipe is planned, checked and carried out.

A finished run that is started again needs its plan alone: the rest is imported where it is used.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sslpipe.kinds import RunKind
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.metric_learning.fitting import plan_batches
from sslpipe.metric_learning.recipe import FinetuneRecipe

if TYPE_CHECKING:
    from sslpipe.check.outcome import Check


def _check(plan: Finetuning) -> "Check":
    from sslpipe.metric_learning.check import check_finetuning

    return check_finetuning(plan)


def _run(plan: Finetuning, run_dir: Path) -> int:
    from sslpipe.metric_learning.finetune import finetune

    return finetune(plan, run_dir)


RUNS = {FinetuneRecipe: RunKind(make=Finetuning.make, order=plan_batches, check=_check, run=_run)}
