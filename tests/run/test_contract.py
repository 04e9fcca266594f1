"""What a run asks of a plan and of its parts is stated in run/contract.py, and is enough."""

import json
import subprocess
import sys

from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT
from tests.helpers.toy_plan import STEPS
from tests.test_layers import EXECUTED, MAKERS


def test_a_plan_by_hand_is_executed_and_no_maker_of_plans_is_loaded(tmp_path):
    data = write_dataset(tmp_path / "data")
    words = [sys.executable, "-m", "tests.helpers.toy_plan", str(data), str(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert (tmp_path / "run" / "DONE").is_file()
    assert "warning: this is a toy" in done.stderr
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert len(losses) == STEPS
    assert losses == sorted(losses, reverse=True)
    assert [line["step"] for line in read_metrics(tmp_path / "run", "eval")] == [2, 4]
    for name in json.loads(done.stdout.splitlines()[-1]):
        _, package, *module = name.split(".")
        assert package not in MAKERS, name
        assert not module or module[0] in EXECUTED.get(package, module), name
