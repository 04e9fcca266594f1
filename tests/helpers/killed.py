"""A run that was killed, with all that tests of damaged or half-done runs start from."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from sslpipe.export.folder import sha256_sums
from sslpipe.export.formats import FORMATS
from sslpipe.export.load import load_run
from tests.helpers import finetunes
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import RECIPE, command_line, final_weights

CHANGES = {
    "steps = 12": "steps = 8",
    "batch_size = 16": "batch_size = 8",
    "holdout = 16": "holdout = 8",
    "widths = [8, 16, 16]": "widths = [8, 8]",
    "save_steps = 5": "save_steps = 4\nmonitor_steps = 4\nkeep_checkpoints = 2",
}


def make_killed_run(folder: Path) -> Path:
    """Fill a folder: data, pretrain.toml, finetune.toml, and what `sslpipe train` made of them.

    Returns:
        The folder. In it: `pretrain`, saved at step 4 and killed at step 5 of 8;
        `pretrain.final.safetensors`, the weights of the same run when nothing kills it;
        `backbone`, an export of the weights of step 4.
    """
    text = RECIPE
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "pretrain.toml").write_text(text)
    finetune = finetunes.RECIPE.replace("widths = [8, 16, 16]", "widths = [8, 8]")
    (folder / "finetune.toml").write_text(finetune)
    data = write_dataset(folder / "data", (24, 40))
    write_dataset(folder / "data", (16,), split="test")
    words = ("train", str(folder / "pretrain.toml"), "--data", str(data), "--run-dir")
    command_line(*words, str(folder / "whole"), status=0)
    save_file(final_weights(folder / "whole"), folder / "pretrain.final.safetensors")
    shutil.rmtree(folder / "whole")
    killed = command_line(*words, str(folder / "pretrain"), SSLPIPE_FAULT="train.step:5")
    assert killed.returncode == 9, killed.stderr
    (folder / "backbone").mkdir()
    FORMATS["safetensors"].write(load_run(folder / "pretrain"), folder / "backbone")
    (folder / "backbone" / "SHA256SUMS").write_text(sha256_sums(folder / "backbone"))
    return folder
