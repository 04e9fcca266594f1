"""The command line as a user meets it: help with examples, one line for a mistake."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from sslpipe.__main__ import main
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT, command_line, write_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("command", ["check", "train", "preview", "export"])
def test_help_shows_an_example(command):
    result = command_line(command, "--help")
    assert result.returncode == 0
    assert f"sslpipe {command} " in result.stdout


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['sslpipe', '--help']; "
    code += "from sslpipe.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 0


MISTAKES = {
    "a key": (("loss.temprature=0.1",), "loss.temprature is not an argument"),
    "a section": (("optm.peak_lr=0.1",), "unknown key optm; did you mean 'optim'?"),
    "a type": (("optim.peak_lr=fast",), "optim.peak_lr = 'fast'"),
    "a kind": (("loss.kind=nt_xnet",), "did you mean 'nt_xent'?"),
    "a split": (("data.split=validation",), "has no split 'validation'; it has: train"),
    "a batch": (("data.batch_size=512",), "data.batch_size = 512 is more than the 112 samples"),
    "streams": (("data.num_streams=5",), "data.batch_size = 16 is not a multiple"),
    "a preset": (("augment.preset=simclr_smal",), "simclr_small"),
    "a backbone": (("backbone.kind=small_resnt",), "did you mean 'small_resnet'?"),
    "cuda": (("run.device=cuda",), "torch sees no CUDA device"),
}


@pytest.fixture
def run_main(monkeypatch, capsys):
    """The command line in this process: (exit status, what it wrote to stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sslpipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_recipe_is_one_line_before_the_first_step(data, tmp_path, run_main, mistake):
    overrides, message = MISTAKES[mistake]
    if mistake == "cuda" and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    recipe = write_recipe(tmp_path)
    code, said = run_main(
        "train", recipe, "--data", data, "--run-dir", tmp_path / "run", *overrides
    )
    assert code == 2
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_missing_recipe_names_those_there_are(run_main):
    code, said = run_main("check", ROOT / "recipes" / "dmeo.toml")
    assert code == 2
    assert "dmeo.toml; recipes in " in said
    assert "demo" in said


def test_missing_and_truncated_shards_are_one_error_before_the_first_step(tmp_path):
    data = write_dataset(tmp_path / "data")
    (tmp_path / "data" / "train-000002.tar").unlink()
    cut = tmp_path / "data" / "train-000005.tar"
    cut.write_bytes(cut.read_bytes()[:-1024])
    recipe = write_recipe(tmp_path)
    result = command_line(
        "train", str(recipe), "--data", str(data), "--run-dir", str(tmp_path / "run")
    )
    assert result.returncode == 2
    assert "train-000002.tar is missing; train-000005.tar has" in result.stderr
    assert "Traceback" not in result.stderr


def test_preview_writes_a_picture(data, tmp_path):
    out = tmp_path / "views.png"
    recipe = write_recipe(tmp_path)
    result = command_line(
        "preview", str(recipe), "--data", str(data), "--out", str(out), "--images", "3"
    )
    assert result.returncode == 0, result.stderr
    with Image.open(out) as image:
        assert image.width > 200
        assert image.height > 100


BLOCKED = """
import sys
sys.modules["faiss"] = sys.modules["wandb"] = None  # any import of them now fails
from sslpipe.__main__ import main
main()
"""


def test_without_faiss_and_wandb_everything_but_they_works(data, tmp_path):
    run_dir = tmp_path / "run"
    recipe = str(write_recipe(tmp_path))
    where = ("--data", str(data))
    train = ("train", recipe, *where, "--run-dir", str(run_dir), "steps=4", "run.monitor_steps=4")
    for arguments in (
        ("check", recipe, *where),
        (*train, 'run.trackers=["wandb"]'),  # named, left out, no reason to stop
        ("export", str(run_dir), "--out", str(tmp_path / "backbone")),
    ):
        result = subprocess.run(
            [sys.executable, "-c", BLOCKED, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert result.returncode == 0, result.stderr
        if "train" in arguments:
            assert "tracker 'wandb' did not start" in result.stderr
            assert "holdout_knn" in result.stderr
