"""What a run will do and cost, worked out before it: nothing is trained, nothing is written.

For people about to start a run, and for scripts that refuse a bad one early. Start reading at
`check_plan`: the plan has resolved and refused; `pretraining` builds its parts and adds sizes,
memory and order, `estimate` times a step, `result` shows what was found.
"""

from typing import Any

from sslpipe.check.outcome import Check
from sslpipe.check.pretraining import check_pretraining
from sslpipe.kinds import is_pretraining, run_kind
from sslpipe.plan import Pretraining
from sslpipe.run.contract import Plan


def check_plan(plan: Plan[Any]) -> Check:
    """Build every part of a planned run and look at its batches; train nothing.

    Raises:
        UserError: The plan cannot be trained, or this machine cannot train it.
    """
    if isinstance(plan, Pretraining) and is_pretraining(plan.recipe):
        return check_pretraining(plan)
    result: Check = run_kind(plan.recipe).check(plan)
    return result
